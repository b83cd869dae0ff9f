"""A fleet of vLLM EnvRunners, one of which loses its engine; and a whole run with it: `make test-vllm`."""

import json
import os
import signal
import time
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from fakes import OnePassage
from fleet_world import collect, drain, request, submit, wait_until_healed
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm")

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.schema import groups_from_record_batch
from ragr1_actors.core.types import TokenKind
from ragr1_actors.planning.tiny_policy import make_tiny_policy
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.groups import FinishedGroup
from ragr1_actors.rollout.runners.env_runner_group import EnvRunnerGroup
from ragr1_actors.training.algorithm import Algorithm
from ragr1_actors.training.algorithm_config import AlgorithmConfig

pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(900)]


def make_config() -> RunConfig:
    config = AlgorithmConfig().env_runners(
        num_env_runners=2,
        engine="vllm",
        engine_options={"block_size": 32},
        max_context_tokens=400,
        max_new_tokens_per_turn=40,
        max_concurrent_trajectories=16,
    )
    return (
        config.debugging(fault_tolerance={"hang_timeout_s": 300})
        .training(group_size=2)
        .environment(prompt="{question}", max_turns=3)
        .freeze()
    )


def engine_pids(runner: EnvRunner) -> list[int]:
    children = psutil.Process().children(recursive=True)
    return [p.pid for p in children if "EngineCore" in p.name() or "EngineCore" in " ".join(p.cmdline())]


def test_a_runner_whose_engine_is_killed_loses_and_doubles_nothing(ray_local: ModuleType, tmp_path: Path) -> None:
    make_tiny_policy(tmp_path, [" Riga is a city"], seed=0, vocab_size=400, hidden_size=64, num_layers=2, num_heads=2)
    fleet = EnvRunnerGroup(make_config(), tmp_path, OnePassage(), version=1)
    fleet.wait_until_ready()
    state = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    fleet.update_weights(ray_local.put({name: tensor.numpy() for name, tensor in state.items()}), version=5)
    victims = fleet.foreach_env_runner(engine_pids)
    assert [len(pids) for pids in victims] == [1, 1]
    for index in range(300):
        submit(fleet, request(index))
    finished: list[FinishedGroup] = collect(fleet)
    os.kill(victims[0][0], signal.SIGKILL)
    finished += drain(fleet)
    ids = [one.request.issue_id for one in finished]
    assert sorted(ids) == sorted(f"t/{index}#0" for index in range(300))
    assert fleet.fleet.num_restarts == 1
    assert all(one.summary.oldest_version == 5 and not one.summary.num_failed for one in finished)
    wait_until_healed(fleet, timeout_s=300)
    for index in range(8):
        submit(fleet, request(index))
    for one in drain(fleet):
        for trajectory in groups_from_record_batch(ray_local.get(one.batch))[0].trajectories:
            assert set(trajectory.policy_versions[trajectory.kinds == TokenKind.MODEL]) == {5}
    survivors = [pid for pids in fleet.foreach_env_runner(engine_pids) for pid in pids]
    fleet.stop()
    deadline = time.monotonic() + 300
    while any(psutil.pid_exists(pid) for pid in survivors):
        assert time.monotonic() < deadline, "an engine outlived its runner"
        time.sleep(0.5)


def test_a_run_with_vllm_in_the_driver_samples_what_the_learner_computes(tmp_path: Path) -> None:
    from retrieval.build import build_index
    from retrieval.corpora.readers import read_passages

    (tmp_path / "corpus.json").write_text(json.dumps([{"id": "a", "title": "a", "text": "The a lies in Riga."}]))
    tasks = [{"id": str(i), "question": f"Where is the a {i} ?", "answer": "Riga"} for i in range(20)]
    (tmp_path / "tasks.json").write_text(json.dumps(tasks))
    build_index(read_passages(tmp_path / "corpus.json"), tmp_path / "index", progress=False)
    file = str(tmp_path / "tasks.json")
    config = (
        AlgorithmConfig()
        .environment(tasks=file, prompt="{question}", max_turns=3)
        .policy(options={"vocab_size": 400, "hidden_size": 64, "num_layers": 2, "num_heads": 2})
        .env_runners(num_env_runners=0, engine="vllm", max_context_tokens=300, max_new_tokens_per_turn=24)
        .env_runners(max_concurrent_trajectories=16)
        .retrieval(index=str(tmp_path / "index"), num_retrievers=0)
        .training(num_iterations=2, train_batch_size=4, group_size=4, lr=0.01, options={"drop_zero_variance": False})
        .learners(num_learners=0, zero_stage=0)
        .evaluation(num_tasks=4)
        .freeze()
    )
    algorithm = Algorithm.create(config, tmp_path / "run")
    for version in range(2):
        metrics = algorithm.train()
        assert metrics["learner/logprob_gap_max"] < 1e-4, metrics
        assert metrics["learner/ratio_outliers"] == 0
        assert metrics["loop/policy_version"] == version + 1
    assert algorithm.evaluate().num_tasks > 0
    algorithm.stop()
