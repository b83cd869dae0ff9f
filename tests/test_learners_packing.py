"""Plans are complete, balanced and within budget; packed rows hold what the trajectories held."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learners_common import make_branches, make_config, make_groups, make_policy, make_trajectory, segments

from learners.algorithms.grpo import GRPOLearner
from learners.models.scoring import PolicyModel, pair_cost
from learners.packing import Bundle, FlatTrajectories, assign_micro_batches, bundle, flatten, pack
from ragr1_actors.core.types import TokenKind, TrajectoryGroup


def alone(lengths: list[int]) -> list[Bundle]:
    """Every trajectory a bundle: none begins like another."""
    return [{index: 0} for index in range(len(lengths))]


def rank_costs(lengths: list[int], shares: list[list[list[int]]], pair_cost: float) -> list[float]:
    """Cost of every rank's share, in tokens."""
    return [
        sum(lengths[i] + pair_cost * lengths[i] ** 2 for micro_batch in share for i in micro_batch) for share in shares
    ]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=60),
    num_ranks=st.integers(1, 5),
    max_tokens=st.integers(32, 200),
    pair_cost=st.sampled_from([0.0, 0.001, 0.1]),
)
def test_a_plan_holds_every_sequence_once(
    lengths: list[int], num_ranks: int, max_tokens: int, pair_cost: float
) -> None:
    shares = assign_micro_batches(lengths, alone(lengths), num_ranks, max_tokens, pair_cost)
    assert len(shares) == num_ranks
    assert len({len(share) for share in shares}) == 1, "every rank runs as many passes"
    placed = [index for share in shares for micro_batch in share for index in micro_batch]
    assert sorted(placed) == list(range(len(lengths)))
    for share in shares:
        for micro_batch in share:
            assert len(micro_batch) == 1 or sum(lengths[index] for index in micro_batch) <= max_tokens
            assert [lengths[index] for index in micro_batch] == sorted((lengths[i] for i in micro_batch), reverse=True)
        if [] in share:
            assert all(len(micro_batch) < 2 for micro_batch in share), "a dummy only where nothing can be split"
    loads = rank_costs(lengths, shares, pair_cost)
    assert max(loads) - min(loads) <= max(lengths) + pair_cost * max(lengths) ** 2 + 1e-6


def test_ranks_without_trajectories_get_dummies() -> None:
    assert assign_micro_batches([7], alone([7]), 3, 32, 0.001) == [[[0]], [[]], [[]]]


def test_first_fit_fills_the_gaps() -> None:
    assert assign_micro_batches([10, 9, 7, 4, 1], alone([10, 9, 7, 4, 1]), 1, 16, 0.0) == [[[1, 2], [0, 3, 4]]]
    assert assign_micro_batches([90, 9, 7], alone([90, 9, 7]), 1, 16, 0.0) == [[[0], [1, 2]]], (
        "longer than the budget: alone"
    )


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_ranks_are_balanced_by_cost_and_micro_batches_are_full(num_ranks: int) -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(7.14, 0.8, 32 * num_ranks)), 200, 8000).astype(int).tolist()
    by_cost = assign_micro_batches(lengths, alone(lengths), num_ranks, 16384, 1 / 30_500)
    by_tokens = assign_micro_batches(lengths, alone(lengths), num_ranks, 16384, 0.0)
    costs, others = (rank_costs(lengths, shares, 1 / 30_500) for shares in (by_cost, by_tokens))
    assert max(costs) / np.mean(costs) < 1.005
    assert max(costs) / np.mean(costs) < max(others) / np.mean(others)
    assert [] not in [micro_batch for share in by_cost for micro_batch in share]
    assert len(by_cost[0]) == -(-sum(lengths) // (num_ranks * 16384)), "as few as the tokens allow"


def test_a_pair_costs_what_the_flops_say(tmp_path: Path) -> None:
    model = PolicyModel(make_policy(tmp_path), torch.float32, 1.0, False).model
    hidden, intermediate, layers = 32, 64, 2
    attention = 2 * hidden * hidden + 2 * hidden * hidden // 2  # queries and output; keys and values of half the heads
    linear = layers * (attention + 3 * hidden * intermediate)
    small = 0.02 * linear  # biases and norms
    assert linear <= layers * hidden / pair_cost(model) <= linear + small


def test_turns_that_extend_one_another_are_computed_once(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    trajectories = [make_trajectory(rng, turns=("search", "search", "answer"), reward=float(n % 2)) for n in range(6)]
    tokens = sum(trajectory.num_tokens for trajectory in trajectories)
    by_turn = sum(s.num_tokens for trajectory in trajectories for s in segments(trajectory))
    learner = GRPOLearner(make_config(), make_policy(tmp_path))
    learner.build()
    computed = learner.update([TrajectoryGroup(trajectories[0].task, tuple(trajectories))])["computed_tokens"]
    learner.close()
    assert computed == tokens < 0.7 * by_turn


def test_a_packed_row_holds_what_the_trajectories_hold() -> None:
    trajectories = [t for group in make_groups(0) for t in group.trajectories]
    flat = flatten(trajectories)
    chosen = [5, 2, 11]
    micro_batch = pack(flat, chosen)
    row = np.concatenate([trajectories[index].token_ids for index in chosen])
    kinds = np.concatenate([trajectories[index].kinds for index in chosen])
    logprobs = np.concatenate([trajectories[index].logprobs for index in chosen])
    positions = np.concatenate([np.arange(trajectories[index].num_tokens) for index in chosen])
    is_model = np.flatnonzero(kinds == TokenKind.MODEL)
    np.testing.assert_array_equal(micro_batch.token_ids, row)
    np.testing.assert_array_equal(micro_batch.position_ids, positions)
    np.testing.assert_array_equal(micro_batch.predict_positions, is_model - 1)
    np.testing.assert_array_equal(micro_batch.target_ids, row[is_model])
    np.testing.assert_array_equal(flat.rollout_logprobs[micro_batch.column_index], logprobs[is_model])
    assert micro_batch.weight == 1.0
    assert pack(flat, []).weight == 0.0


def make_flat(sequences: list[list[int]], is_model: list[list[bool]] | None = None) -> FlatTrajectories:
    """Trajectories of which ``is_model`` says what is MODEL; by default all but the first token, the prompt."""
    offsets = np.cumsum([0, *map(len, sequences)])
    marks = is_model or [[at > 0 for at in range(len(sequence))] for sequence in sequences]
    num_model = sum(map(sum, marks))
    return FlatTrajectories(
        token_ids=np.concatenate([np.array(sequence, np.int64) for sequence in sequences]),
        offsets=offsets,
        response_mask=np.concatenate([np.array(mark, np.bool_) for mark in marks]),
        model_offsets=np.cumsum([0, *map(sum, marks)]),
        first_sequences=np.arange(len(sequences) + 1),
        rollout_logprobs=np.zeros(num_model, np.float32),
        policy_versions=np.zeros(num_model, np.int32),
    )


SEQUENCES = st.lists(st.lists(st.integers(0, 1) | st.just(300), min_size=1, max_size=12), min_size=1, max_size=12)
"""Three different tokens, so that many sequences begin alike. 300 needs two bytes: its order depends on theirs."""


@given(sequences=SEQUENCES, data=st.data())
def test_a_row_has_a_token_once_for_all_trajectories_that_begin_alike(
    sequences: list[list[int]], data: st.DataObject
) -> None:
    chosen = data.draw(st.permutations(range(len(sequences))))
    is_model = [
        [False, *data.draw(st.lists(st.booleans(), min_size=len(sequence) - 1, max_size=len(sequence) - 1))]
        for sequence in sequences
    ]
    flat = make_flat(sequences, is_model)
    micro_batch = pack(flat, chosen)
    layout = micro_batch.layout
    beginnings = [tuple(sequence[: at + 1]) for sequence in sequences for at in range(len(sequence))]
    num_distinct = len(set(beginnings))
    assert layout.num_tokens == len(beginnings)
    if num_distinct > 0.875 * len(beginnings):
        assert layout.shared is None
        spread = origin = np.arange(len(beginnings))
    else:
        assert layout.shared is not None
        spread, origin = layout.shared.spread.numpy(), layout.shared.origin.numpy()
    assert len(micro_batch.token_ids) == len(set(spread.tolist())) == micro_batch.num_tokens
    np.testing.assert_array_equal(spread[origin], np.arange(micro_batch.num_tokens))
    begins: dict[int, set[tuple[int, ...]]] = {place: set() for place in spread.tolist()}
    read = []
    for start, stop in pairwise(layout.boundaries.tolist()):
        places = spread[start:stop].tolist()
        read.append(micro_batch.token_ids[places].tolist())
        assert micro_batch.position_ids[places].tolist() == list(range(stop - start))
        for at, place in enumerate(places):
            begins[place].add(tuple(read[-1][: at + 1]))
    assert sorted(read) == sorted(sequences)
    assert all(len(found) == 1 for found in begins.values()), "a token has one past"
    if layout.shared is not None:
        assert micro_batch.num_tokens == num_distinct
    model = [(one, at) for one, marks in zip(sequences, is_model, strict=True) for at, mark in enumerate(marks) if mark]
    assert sorted(micro_batch.column_index.tolist()) == list(range(len(model)))
    predictions = (micro_batch.per_model_token(x) for x in (micro_batch.predict_positions, micro_batch.target_ids))
    tensors = (micro_batch.column_index, *predictions)
    for column, place, target in zip(*(tensor.tolist() for tensor in tensors), strict=True):
        sequence, at = model[column]
        assert (begins[place], target) == ({tuple(sequence[:at])}, sequence[at])
    if layout.shared is not None:
        assert len(micro_batch.target_ids) == len({tuple(sequence[: at + 1]) for sequence, at in model})


@given(sequences=SEQUENCES, num_ranks=st.integers(1, 3), max_tokens=st.integers(4, 60), data=st.data())
def test_bundles_hold_every_trajectory_once_and_count_what_a_row_computes(
    sequences: list[list[int]], num_ranks: int, max_tokens: int, data: st.DataObject
) -> None:
    flat = make_flat(sequences)
    indices = data.draw(st.lists(st.sampled_from(range(len(sequences))), min_size=1, unique=True))
    bundles = bundle(flat, indices, num_ranks, max_tokens)
    assert sorted(index for one in bundles for index in one) == sorted(indices)
    total = sum(flat.lengths[index] for index in indices)
    for one in bundles:
        tokens = {tuple(sequences[index][: at + 1]) for index in one for at in range(len(sequences[index]))}
        num_copied = sum(flat.lengths[index] for index in one) - len(tokens)
        assert sum(one.values()) == num_copied
        if len(one) > 1:
            size = len(tokens) + num_copied / 8
            assert size <= (max_tokens if num_ranks == 1 else min(max_tokens, total / (4 * num_ranks)))


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_no_row_is_larger_than_the_budget(num_ranks: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):  # a trajectory has up to 15 tokens of a trunk, then its own
        forks = zip(rng.integers(0, 16, 12), rng.integers(20, 60, 12), strict=True)
        flat = make_flat([[*range(cut), *range(100 * n, 100 * n + own)] for n, (cut, own) in enumerate(forks, start=1)])
        max_tokens = int(rng.integers(60, 400))
        bundles = bundle(flat, range(12), num_ranks, max_tokens)
        for chosen in (
            row for share in assign_micro_batches(flat.lengths, bundles, num_ranks, max_tokens, 0.001) for row in share
        ):
            micro_batch = pack(flat, chosen, max_tokens)
            num_copied = micro_batch.layout.num_tokens - micro_batch.num_tokens
            assert len(chosen) < 2 or micro_batch.num_tokens + num_copied / 8 <= max_tokens


def test_a_row_for_which_the_budget_is_too_small_shares_what_little_there_is() -> None:
    flat = make_flat([list(range(100)), [*range(13), *range(200, 287)]])
    assert bundle(flat, range(2), 1, 190) == [{0: 0, 1: 13}]
    rows = {max_tokens: pack(flat, range(2), max_tokens).num_tokens for max_tokens in (190, 199, 200)}
    assert rows == {190: 187, 199: 187, 200: 200}, "13 of 200 are not worth the copies where there is room for all"
    assert pack(make_flat([list(range(100))]), [0], 50).layout.shared is None, "longer than the budget, and alone"


def test_a_learner_keeps_its_rows_within_its_budget(tmp_path: Path) -> None:
    learner = GRPOLearner(make_config(learners={"num_learners": 0, "micro_batch_tokens": 62}), make_policy(tmp_path))
    learner.build()
    flat = make_flat([list(range(32)), [*range(4), *range(32, 60)]])
    assert [row.num_tokens for row in learner.local_micro_batches(flat, range(2))] == [60]
    learner.close()


def test_trajectories_that_begin_alike_stay_together() -> None:
    flat = make_flat([[7] * 20 + [number] for number in (1, 2, 3)] + [[8] * 20 + [number] for number in (1, 2, 3)])
    bundles = bundle(flat, range(6), 1, 32)
    assert bundles == [{0: 0, 1: 20, 2: 20}, {3: 0, 4: 20, 5: 20}]
    assert sorted(assign_micro_batches(flat.lengths, bundles, 1, 32, 0.0)[0]) == [[0, 1, 2], [3, 4, 5]]
    assert [[*one] for one in bundle(flat, range(6), 1, 27)] == [[0, 1], [2], [3, 4], [5]], "28 are too many"
    assert {len(one) for one in bundle(flat, range(6), 2, 32)} == {1}, "each rank gets several bundles"
    barely = make_flat([[7, *range(10, 17)], [7, *range(20, 27)], [7, *range(30, 38)]])
    assert [[*one] for one in bundle(barely, range(3), 1, 32)] == [[0, 1], [2]], "an eighth is enough, a ninth not"


def test_ranks_that_share_a_group_are_balanced_by_what_they_compute() -> None:
    one = {0: 0, 1: 97, 2: 97, 3: 96}  # 110 tokens are computed
    shares = assign_micro_batches([100] * 6, [one, {4: 0}, {5: 0}], 2, 300, 0.0)
    assert shares == [[[0, 1, 2, 3]], [[4, 5]]], "by tokens of trajectories it would be 400 against 200"
    costly = assign_micro_batches([100] * 7, [one, {4: 0}, {5: 0}, {6: 0}], 2, 400, 0.01)
    assert costly == [[[0, 1, 2, 3]], [[4, 5, 6]]], "pairs are those of whole trajectories: 510 against 600"


def test_a_row_on_a_device_selects_columns_of_the_host() -> None:
    """A tensor of the host takes no index on a GPU: the first micro-batch of each update would fail there."""
    moved = pack(flatten([t for group in make_groups(0) for t in group.trajectories]), [0, 1]).to(torch.device("meta"))
    assert moved.token_ids.device.type == moved.layout.boundaries.device.type == "meta"
    assert moved.column_index.device.type == "cpu"
    shared = pack(flatten(make_branches(0)), range(6)).to(torch.device("meta"))
    assert shared.layout.shared is not None and shared.predicted_by is not None
    parts = [
        {**vars(shared), "column_index": None},
        *map(vars, (shared.layout, shared.layout.shared, *shared.layout.blocks)),
    ]
    tensors = [value for part in parts for value in part.values() if isinstance(value, torch.Tensor)]
    assert len(tensors) > 10 and {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize(("window", "num_sinks"), [(None, 0), (5, 0), (1, 1), (100, 1)])
def test_a_query_of_a_block_attends_to_the_keys_up_to_its_own(window: int | None, num_sinks: int) -> None:
    layout = pack(flatten(make_branches(0)), range(6)).layout
    (block, *_) = [block for block in layout.blocks if block.keys is not None]
    like = torch.zeros(1, dtype=torch.bfloat16)
    bias = block.bias(like, window, num_sinks)
    assert bias is not None and bias is block.bias(like, window, num_sinks), "made once for all layers"
    assert bias.dtype == torch.bfloat16 and set(bias.flatten().tolist()) <= {0.0, -math.inf}
    assert block.num_common is not None
    for row, num_common in enumerate(block.num_common.tolist()):
        num_before = [min(num_common + at + 1, block.num_keys) for at in range(block.num_queries)]
        num_seen = [min(window or count, count) + num_sinks for count in num_before]
        assert (bias[row, 0] == 0).sum(-1).tolist() == num_seen
    assert layout.blocks[0].bias(like) is None, "the first one is whole, and attention causal"


def test_a_trajectory_without_prompt_is_refused() -> None:
    trajectory = make_trajectory(np.random.default_rng(0))
    trajectory.kinds[0] = TokenKind.MODEL
    with pytest.raises(ValueError, match="prompt"):
        flatten([trajectory])
