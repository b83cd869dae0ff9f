"""A run whose learner and vLLM engine take turns, as on one GPU: `make test-vllm`."""

from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("vllm")

from small_world import make_config, make_files

from ragr1_actors.training.algorithm import Algorithm
from ragr1_actors.training.algorithm_config import AlgorithmConfig

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(900)]


def test_a_run_of_turns_samples_what_the_learner_computes(ray_local: ModuleType, tmp_path: Path) -> None:
    sections = make_config(make_files(tmp_path), {"num_steps": 2, "num_demonstrations": 32}).model_dump()
    sections["env_runners"] |= {"num_env_runners": 1, "engine": "vllm", "weight_transport": "ipc"}
    sections["env_runners"]["max_concurrent_trajectories"] = 16
    sections["learners"] |= {"num_learners": 1, "zero_stage": 1}
    sections["training"] |= {"lr": 0.01, "options": {"drop_zero_variance": False}}
    algorithm = Algorithm.create(AlgorithmConfig(sections).freeze(), tmp_path / "run")
    try:
        assert algorithm.evaluate().num_tasks == 8
        algorithm.pretrain(lambda step, metrics: None)
        for version in (2, 3):
            metrics = algorithm.train()
            assert metrics["learner/logprob_gap_max"] < 1e-4, metrics
            assert metrics["learner/ratio_outliers"] == 0
            assert (metrics["loop/policy_version"], metrics["loop/weight_fallbacks"]) == (version, 0)
            algorithm.save()
        assert algorithm.evaluate().num_tasks == 8
    finally:
        algorithm.stop()
