"""Plans are complete, balanced and within budget; packed rows hold what the trajectories held."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learners_common import make_groups, make_trajectory

from learners.batching import flatten, pack, plan
from ragr1_actors.types import TokenKind


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=60),
    num_ranks=st.integers(1, 5),
    max_tokens=st.integers(32, 200),
)
def test_a_plan_holds_every_sequence_once(lengths: list[int], num_ranks: int, max_tokens: int) -> None:
    shares = plan(lengths, range(len(lengths)), num_ranks, max_tokens)
    assert len(shares) == num_ranks
    assert len({len(share) for share in shares}) == 1, "every rank runs as many passes"
    placed = [index for share in shares for micro_batch in share for index in micro_batch]
    assert sorted(placed) == list(range(len(lengths)))
    for share in shares:
        for micro_batch in share:
            assert len(micro_batch) == 1 or sum(lengths[index] for index in micro_batch) <= max_tokens
    loads = [sum(lengths[index] for micro_batch in share for index in micro_batch) for share in shares]
    assert max(loads) - min(loads) <= max(lengths)


def test_ranks_without_trajectories_get_dummies() -> None:
    assert plan([7], [0], 3, 32) == [[[0]], [[]], [[]]]


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
    np.testing.assert_array_equal(flat.old_logprobs[micro_batch.columns], logprobs[is_model])
    assert micro_batch.weight == 1.0
    assert pack(flat, []).weight == 0.0


def test_a_trajectory_without_prompt_is_refused() -> None:
    trajectory = make_trajectory(np.random.default_rng(0))
    trajectory.kinds[0] = TokenKind.MODEL
    with pytest.raises(ValueError, match="prompt"):
        flatten([trajectory])
