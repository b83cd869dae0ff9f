"""Folders that another node writes or reads: whole or absent, and seen or named in one sentence."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from small_world import make_config, make_files

from learners.ranks.learner_group import LearnerGroup
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.disk.files import write_folder
from ragr1_actors.core.disk.folders import answer_probe, reply_to
from ragr1_actors.core.errors import DataError, UserError
from ragr1_actors.planning.prepare import prepare, prepare_policy
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.training.algorithm import Algorithm

HERE = socket.gethostname()


def small_run(directory: Path, sft: dict[str, Any] | None = None) -> RunConfig:
    """A run that holds a task out."""
    config = make_config(make_files(directory), sft)
    return config.model_copy(update={"environment": config.environment.model_copy(update={"eval_tasks": ""})})


def test_a_folder_that_another_node_wrote_elsewhere_gets_no_name(tmp_path: Path) -> None:
    write_folder(tmp_path / "policy", lambda folder: (folder / "weights").write_bytes(b"old"), ["weights"])
    with pytest.raises(DataError, match="policy was written without weights, config; if another node wrote it"):
        write_folder(tmp_path / "policy", lambda folder: None, ["weights", "config"])
    assert (tmp_path / "policy" / "weights").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]


def test_a_probe_is_answered_where_it_is_seen(tmp_path: Path) -> None:
    probe = tmp_path / "probe"
    assert answer_probe(probe, replies=True) == HERE
    assert not reply_to(probe).exists()
    probe.touch()
    assert answer_probe(probe, replies=True) == ""
    assert reply_to(probe).is_file()


def test_a_folder_of_another_node_is_no_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tmp_path)
    sentence = f"node {HERE} does not see the folder {tmp_path / 'model'}; put it on a file system that all nodes share"
    with pytest.raises(DataError, match=sentence):
        LearnerGroup(config).build("grpo", tmp_path / "model")
    with pytest.raises(DataError, match=sentence):
        EnvRunner.load(config, tmp_path / "model", None)  # type: ignore[arg-type] # it is not searched with
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    policy = config.policy.model_copy(update={"model": "model"})
    assert prepare_policy(config.model_copy(update={"policy": policy}), tmp_path, (), None) == str(tmp_path / "model")


@pytest.mark.engine
def test_a_run_directory_that_not_all_nodes_see_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_run(tmp_path)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    workspace = prepare(config, run_dir)
    for nodes, message in (
        (
            ["", "gpu-2"],
            f"node gpu-2 does not see the run directory {run_dir}, or cannot write to it; put --run-dir on",
        ),
        ([""], f"this node does not see what learner rank 0 writes into the run directory {run_dir}; put --run-dir on"),
    ):
        monkeypatch.setattr(LearnerGroup, "answer_probe", lambda self, probe, nodes=nodes: nodes)
        with pytest.raises(UserError, match=message):
            Algorithm.start(config, run_dir, workspace)
    assert not list(run_dir.glob(".writing_*"))


@pytest.mark.engine
def test_a_policy_of_sft_that_was_written_on_another_node_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_run(tmp_path, {"num_steps": 1, "num_demonstrations": 16})
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    algorithm = Algorithm.start(config, run_dir, prepare(config, run_dir))
    monkeypatch.setattr(LearnerGroup, "save_policy", lambda self, directory: (tmp_path / "elsewhere").mkdir())
    try:
        with pytest.raises(
            UserError, match=r"policy_sft was written without config\.json, model\.safetensors; if another node"
        ):
            algorithm.pretrain(lambda step, metrics: None)
    finally:
        algorithm.stop()
    assert not (run_dir / "policy_sft").exists()
