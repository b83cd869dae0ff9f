"""Advantages of turns against GiGPO's formulas, written plainly in loops."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from learners_common import make_trajectory
from references_common import BASELINES, expected_advantages, make_batch, make_learner, rows

from learners.advantages import discounted_returns, states_before
from learners.algorithms.grpo import DrGRPOLearner, GRPOLearner
from learners.learner import Learner
from ragr1_actors.core.types import Record, ToolCall, Trajectory

GAMMA, WEIGHT = 0.9, 0.5


def with_evidence(trajectory: Trajectory, rng: np.random.Generator) -> Trajectory:
    """Each search finds one of two records, so that attempts meet in some states and part in others."""
    turns = []
    for turn in trajectory.turns:
        records = (Record(f"p{rng.integers(2)}", "", ""),) if turn.action == "search" else ()
        call = ToolCall("search", {"query": "?", "k": 1}, records=records)
        turns.append(replace(turn, calls=(call,) if records else (), reward=float(rng.integers(2)) / 8))
    return replace(trajectory, turns=tuple(turns))


def with_observations(trajectory: Trajectory) -> Trajectory:
    """Each turn shows something else."""
    return replace(
        trajectory, turns=tuple(replace(turn, observation=f"seen {at}") for at, turn in enumerate(trajectory.turns))
    )


@pytest.mark.parametrize("learner_class", [GRPOLearner, DrGRPOLearner])
@pytest.mark.parametrize("seed", range(3))
def test_advantages_of_turns(learner_class: type[Learner], seed: int) -> None:
    rng = np.random.default_rng(seed)
    learner: Any = make_learner(learner_class, {"turn_credit": {"weight": WEIGHT, "gamma": GAMMA}})
    batch, *_ = make_batch(make_learner(learner_class), seed)
    batch.trajectories[:] = [with_evidence(one, rng) for one in batch.trajectories]
    found = learner.compute_advantages(replace(batch, columns=replace(batch.columns, advantages=None)))["advantages"]
    # the return of every turn, by its state within its group
    by_state: dict[Any, list[float]] = defaultdict(list)
    turns: list[list[tuple[Any, float]]] = []
    for one, group in zip(batch.trajectories, batch.group_ids, strict=True):
        rest = one.reward - sum(turn.reward for turn in one.turns)
        earned = [turn.reward for turn in one.turns]
        earned[-1] += rest
        known: set[str] = set()
        mine = []
        for at, turn in enumerate(one.turns):
            value = sum(GAMMA ** (later - at) * earned[later] for later in range(at, len(earned)))
            state = (group, frozenset(known))
            by_state[state].append(value)
            mine.append((state, value))
            known |= {record.id for call in turn.calls for record in call.records}
        turns.append(mine)
    assert any(len(values) == 1 for values in by_state.values())
    assert sum(len(values) > 1 for values in by_state.values()) > 4
    plain = expected_advantages(learner_class, batch)
    for one, mine, whole, ours in zip(batch.trajectories, turns, plain, rows(found, batch), strict=True):
        expected = []
        for turn, (state, value) in zip(one.turns, mine, strict=True):
            others = by_state[state]
            own = BASELINES[learner_class](value, others) if len(others) > 1 else 0.0
            expected += [whole + WEIGHT * own] * turn.num_model_tokens
        np.testing.assert_allclose(ours, expected, atol=1e-5)


def test_the_rest_of_a_reward_is_the_last_turns() -> None:
    assert discounted_returns([0.0, 0.0], 1.0, 0.5) == [0.5, 1.0]
    assert discounted_returns([0.5, 0.25], 1.0, 0.5) == [0.75, 0.5]
    assert discounted_returns([], 1.0, 0.5) == []
    assert statistics.fmean(discounted_returns([0.0] * 3, 1.0, 1.0)) == 1.0


def test_without_calls_a_state_is_the_last_observation() -> None:
    batch, *_ = make_batch(make_learner(GRPOLearner), 0)
    one = max(batch.trajectories, key=lambda t: len(t.turns))
    shown = with_observations(one)
    assert states_before(shown) == ["", *(f"seen {at}" for at in range(len(one.turns) - 1))]


@pytest.mark.parametrize(
    ("options", "num_turns", "is_kept"),
    [
        ({"turn_credit": {"gamma": GAMMA}}, (1, 2), True),  # the first turns have returns of 1 and .9
        ({"turn_credit": {"gamma": GAMMA}}, (2, 2), False),
        ({"turn_credit": {"gamma": 1}}, (1, 2), False),
        ({"turn_credit": {"gamma": GAMMA}, "drop_zero_variance": True}, (1, 2), False),
        ({}, (1, 2), False),
    ],
)
def test_equal_rewards_after_unequal_numbers_of_turns_are_learned_from(
    options: dict[str, Any], num_turns: tuple[int, ...], is_kept: bool
) -> None:
    rng = np.random.default_rng(0)
    made = [make_trajectory(rng, turns=("search",) * (count - 1) + ("answer",), reward=1.0) for count in num_turns]
    members = [with_observations(one) for one in made]
    learner: Any = make_learner(GRPOLearner, options)
    assert learner.select_members(members) == (members if is_kept else [])


@pytest.mark.parametrize(("share", "is_kept"), [(0.9, True), (0.0, False)])
def test_equal_rewards_after_unequal_lengths_are_learned_from_with_overlong_share(share: float, is_kept: bool) -> None:
    rng = np.random.default_rng(0)
    members = [make_trajectory(rng, turns=("search",) * count + ("answer",)) for count in (0, 3)]
    learner: Any = make_learner(GRPOLearner, {"overlong_share": share, "max_model_tokens": 20})
    assert learner.select_members(members) == (members if is_kept else [])
