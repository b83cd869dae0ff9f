"""What limits a run, by its loads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ragr1_actors.runs.telemetry.metrics import Limit, Load, find_bottleneck

BALANCED = Load(
    learner_wait=0.3,
    search_wait=0.05,
    retriever_busy=0.4,
    runner_load=1.2,
    num_runners=8,
    num_retrievers=4,
    max_policy_lag=1,
)


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        ({"learner_wait": 0.02}, "learner"),
        ({"learner_wait": 0.02, "search_wait": 0.9, "retriever_busy": 1.0}, "learner"),
        ({"learner_wait": 0.4, "max_policy_lag": 0}, "learner"),  # in turns with it, the learner works most of the time
        ({"search_wait": 0.5, "retriever_busy": 0.95}, "retrieval"),
        ({"search_wait": 0.5, "runner_load": 0.1}, "retrieval"),
        ({"runner_load": 0.1}, "batch"),
        ({}, "rollout"),
        ({"retriever_busy": 1.0}, "rollout"),  # busy, but hidden behind generation
    ],
)
def test_the_limit_that_hides_the_others_is_named(changes: dict[str, float], limit: Limit) -> None:
    assert find_bottleneck(replace(BALANCED, **changes)).limit == limit


def test_the_advice_counts_what_is_missing() -> None:
    # with a lag, 8 runners let the learner work 60 % of the time; 12 let it work 90 %
    assert "add 4 to the 8 runners" in find_bottleneck(replace(BALANCED, learner_wait=0.4)).advice
    # in turns, sampling takes three times as long as learning: three times the runners make them equal
    in_turns = replace(BALANCED, learner_wait=0.75, max_policy_lag=0)
    assert "add 16 to the 8 runners" in find_bottleneck(in_turns).advice
    # retrievers that work 95 % of their time, 6 of them would work 63 %
    busy = replace(BALANCED, search_wait=0.5, retriever_busy=0.95)
    assert "add at least 2 to the 4" in find_bottleneck(busy).advice
    idle = replace(BALANCED, search_wait=0.5, retriever_busy=0.2)
    assert "make a search faster" in find_bottleneck(idle).advice


def test_a_learner_that_never_works_is_no_division_by_zero() -> None:
    assert find_bottleneck(replace(BALANCED, learner_wait=1.0)).limit == "rollout"
