"""The configuration of a run of the last release is read in this release's keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from small_world import invoke

from envs.base import search_options
from envs.sources import TaskSources
from envs.tasks.world import make_world
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import RunDirectoryError
from ragr1_actors.core.resolve import RENAMED
from ragr1_actors.runs.run_directory import as_this_release, open_run_directory

OLD: dict[str, Any] = {
    "max_queries_per_turn": 1,
    "query_format": "single",
    "observation_format": "searchr1",
    "top_k": 5,
    "max_observation_tokens_per_query": 300,
    "max_observation_tokens": 900,
}


def old_config(world_seed: int) -> dict[str, Any]:
    """Return the sections that the last release wrote."""
    sections = RunConfig().model_dump()
    environment = sections["environment"]
    del environment["options"], sections["policy"]["options"]
    environment |= {**OLD, "tasks": "world", "world_seed": world_seed}
    sections["policy"]["tiny"] = {"hidden_size": 64}
    sections["training"] |= {"guard": {}, "clip_low": None, "clip_high": 0.3, "tis_clip": 0.0}
    sections["learners"]["lora"] = {}
    del sections["retrieval"]["encoders"]
    encoders = {"num_encoders": 3, "num_cpus_per_encoder": 2, "num_gpus_per_encoder": 0, "encoder_autoscaling": {}}
    requests = sections["retrieval"].pop("requests")
    sections["retrieval"] |= {"corpus": "world", "autoscaling": {}, **encoders, **requests, "timeout_s": 7.0}
    return sections


@pytest.mark.parametrize("world_seed", [0, 4])
def test_its_keys_have_their_new_names(tmp_path: Path, world_seed: int) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old_config(world_seed)))
    config = open_run_directory(tmp_path)
    assert search_options(config.environment).model_dump(exclude={"mode"}) == OLD
    assert config.policy.options == {"hidden_size": 64}
    assert config.training.options == {"clip_high": 0.3}
    assert config.retrieval.encoders.num_encoders == 3
    assert (config.retrieval.encoders.num_cpus, config.retrieval.encoders.autoscaling) == (2, None)
    assert (config.retrieval.requests.timeout_s, config.retrieval.requests.max_retries) == (7, 2)
    sources = TaskSources.open(config.environment.tasks, config.environment)
    assert sources.tasks("eval", 0) == make_world(world_seed).eval_tasks
    assert (config.training.guard.patience, config.learners.lora) == (2, None)


@pytest.mark.parametrize("option", ["--resume", "--auto-resume"])
def test_it_is_not_resumed(tmp_path: Path, option: str) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old_config(0)))
    said = invoke("train", "quickstart", "--run-dir", str(tmp_path), option)
    assert said.startswith(f"error: {tmp_path} is a run of the last release, which this one reads but does not resume")
    assert len(said.splitlines()) == 1
    assert not (tmp_path / "trajectories").exists()
    (tmp_path / "report.json").write_text("{}")
    assert "is finished; see it with" in invoke("train", "quickstart", "--run-dir", str(tmp_path), option)


@pytest.mark.parametrize("env", ["direct", "rag"])
def test_a_baseline_is_a_mode(env: str) -> None:
    old = old_config(0)
    old["environment"]["env"] = env
    now = as_this_release(old)["environment"]
    assert (now["env"], now["options"]["mode"]) == ("search", env)


def test_every_key_that_was_renamed_was_a_key_of_the_last_release() -> None:
    old = old_config(0)
    assert all(name.partition(".")[2] in old[name.partition(".")[0]] for name in RENAMED)


def test_a_file_of_this_release_is_unchanged() -> None:
    sections = RunConfig().model_dump()
    assert as_this_release(sections) is sections


@pytest.mark.parametrize("damaged", [None, [], {"environment": 3}, {"environment": {"world_seed": 0}, "policy": []}])
def test_a_damaged_file_is_left_to_the_reader(tmp_path: Path, damaged: Any) -> None:
    assert as_this_release(damaged) is damaged
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(damaged))
    with pytest.raises(RunDirectoryError, match="has other sections or keys"):
        open_run_directory(tmp_path)
