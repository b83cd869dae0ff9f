"""Plans are complete, balanced and within budget; packed rows hold what the trajectories held."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learners_common import make_config, make_groups, make_policy, make_trajectory

from learners.algorithms.grpo import GRPOLearner
from learners.algorithms.segments import segment
from learners.models.scoring import PolicyModel, pair_cost
from learners.packing import flatten, pack, plan
from ragr1_actors.core.types import TokenKind, TrajectoryGroup


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
    shares = plan(lengths, range(len(lengths)), num_ranks, max_tokens, pair_cost)
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
    assert plan([7], [0], 3, 32, 0.001) == [[[0]], [[]], [[]]]


def test_first_fit_fills_the_gaps() -> None:
    assert plan([10, 9, 7, 4, 1], range(5), 1, 16, 0.0) == [[[1, 2], [0, 3, 4]]]
    assert plan([90, 9, 7], range(3), 1, 16, 0.0) == [[[0], [1, 2]]], "longer than the budget: alone"


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_ranks_are_balanced_by_cost_and_micro_batches_are_full(num_ranks: int) -> None:
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(7.14, 0.8, 32 * num_ranks)), 200, 8000).astype(int).tolist()
    by_cost = plan(lengths, range(len(lengths)), num_ranks, 16384, 1 / 30_500)
    by_tokens = plan(lengths, range(len(lengths)), num_ranks, 16384, 0.0)
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
    by_turn = sum(s.trajectory.num_tokens for trajectory in trajectories for s in segment(trajectory))
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


def test_a_row_on_a_device_selects_columns_of_the_host() -> None:
    """A tensor of the host takes no index on a GPU: the first micro-batch of each update would fail there."""
    moved = pack(flatten([t for group in make_groups(0) for t in group.trajectories]), [0, 1]).to(torch.device("meta"))
    assert moved.token_ids.device.type == moved.layout.boundaries.device.type == "meta"
    assert moved.column_index.device.type == "cpu"


def test_a_trajectory_without_prompt_is_refused() -> None:
    trajectory = make_trajectory(np.random.default_rng(0))
    trajectory.kinds[0] = TokenKind.MODEL
    with pytest.raises(ValueError, match="prompt"):
        flatten([trajectory])
