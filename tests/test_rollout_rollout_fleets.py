"""The line that a run prints while its actors load."""

from __future__ import annotations

import pytest

from ragr1_actors.evaluation.evaluated_policy import sampler_config
from ragr1_actors.rollout.runners.rollout_fleets import describe_loading
from ragr1_actors.training.algorithm_config import AlgorithmConfig

TWO = ["env_runners.num_env_runners=2"]
HERE = ["env_runners.num_env_runners=0", "learners.num_learners=0"]


@pytest.mark.parametrize(
    ("overrides", "told", "without_learners"),
    [
        (TWO, "2 env runners, 1 retriever and 1 learner rank", "2 env runners and 1 retriever"),
        (
            ["retrieval.num_shards=2", "retrieval.encoders.num_encoders=3", "learners.num_learners=4"],
            "1 env runner, 2 index shards, 3 encoders and 4 learner ranks",
            "1 env runner, 2 index shards and 3 encoders",
        ),
        ([*HERE, "retrieval.num_retrievers=0"], "the policy, the index and the learner", "the policy and the index"),
        ([*HERE, "retrieval.type=replay"], "the policy and the learner", "the policy"),
    ],
)
def test_what_loads_is_counted(overrides: list[str], told: str, without_learners: str) -> None:
    config = AlgorithmConfig().override(overrides).freeze()
    assert describe_loading(config) == f"loading {told}"
    assert describe_loading(sampler_config(config)) == f"loading {without_learners}"
