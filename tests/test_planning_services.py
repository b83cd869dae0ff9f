"""Services that searches need are asked before anything is loaded: a dead address is one sentence, within seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from http_stub import always, free_port, served
from small_world import invoke, make_config, make_files

from ragr1_actors.core.config import SamplerConfig
from ragr1_actors.core.errors import ConfigError, RetrievalError
from ragr1_actors.planning.preflight import check_services
from ragr1_actors.runs.run_directory import create_run_directory
from ragr1_actors.training.algorithm import Algorithm
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from retrieval.base import Passage

HERE = __name__


class Away:
    """A retriever of a user that knows when its service is away."""

    def __init__(self, options: dict[str, str]) -> None:
        self._options = options

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        raise RetrievalError("never asked")

    async def probe(self) -> None:
        if self._options.get("bug"):
            raise KeyError("bug")
        raise RetrievalError("the service at 10.0.0.2 is away")


class Unprobed:
    """A retriever that cannot be asked, and takes long to make."""

    def __init__(self, options: dict[str, str]) -> None:
        raise AssertionError("made before the fleets start")

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]: ...


def sampled_with(**retrieval: object) -> SamplerConfig:
    return AlgorithmConfig().retrieval(**retrieval).freeze()


def test_a_retriever_of_a_user_may_be_asked_too() -> None:
    with pytest.raises(ConfigError) as caught:
        check_services(sampled_with(type=f"{HERE}:Away"))
    assert str(caught.value) == (
        f"retrieval.type={HERE}:Away: the service at 10.0.0.2 is away; start the service, or correct retrieval.options"
    )
    with pytest.raises(ConfigError, match=r"retrieval\.type=.*:Away: 'bug'; start"):
        check_services(sampled_with(type=f"{HERE}:Away", options={"bug": "yes"}))
    check_services(sampled_with(type=f"{HERE}:Unprobed"))
    check_services(sampled_with(type="bm25"))


@pytest.mark.integration
def test_a_dead_search_server_ends_every_command_before_anything_is_loaded(tmp_path: Path) -> None:
    files = make_files(tmp_path)
    url = f"http://127.0.0.1:{free_port()}"
    options = json.dumps({"url": url})
    away = ["retrieval.type=http", f"retrieval.options={options}"]
    said = f"error: retrieval.type=http: {url}/retrieve: ClientConnectorError: Cannot connect to host 127.0.0.1"
    config = make_config(files, num_iterations=1)
    retrieval = config.retrieval.model_copy(update={"type": "http", "options": {"url": url}, "index": ""})
    stored = config.model_copy(update={"retrieval": retrieval})
    (tmp_path / "recipe.yaml").write_text(json.dumps(stored.model_dump()))
    create_run_directory(stored, tmp_path / "begun")
    tasks = ["--tasks", str(files / "tasks.json")]
    endpoint = ["--endpoint", "http://127.0.0.1:1/v1", "--model", "big"]
    for command in (
        ["train", "quickstart", *away, "--run-dir", str(tmp_path / "run")],
        ["train", str(tmp_path / "recipe.yaml"), "--resume", "--run-dir", str(tmp_path / "begun")],
        ["select", str(tmp_path / "recipe.yaml"), *tasks, "--out", str(tmp_path / "kept.jsonl")],
        ["evaluate", "--recipe", str(tmp_path / "recipe.yaml"), *endpoint, *tasks],
    ):
        printed = invoke(*command)
        assert printed.startswith(said), printed
        assert printed.rstrip().endswith("; start the service, or correct retrieval.options")
    with pytest.raises(ConfigError, match=f"retrieval.type=http: {url}/retrieve: ClientConnectorError"):
        Algorithm.create(stored, tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.integration
def test_a_server_that_fails_is_refused_with_its_own_words(tmp_path: Path) -> None:
    with served(always({"detail": "CUDA out of memory"}, 500)) as url:
        options = json.dumps({"url": url})
        printed = invoke("train", "quickstart", "retrieval.type=http", f"retrieval.options={options}")
    assert printed == (
        f'error: retrieval.type=http: {url}/retrieve answered 500: "CUDA out of memory"; start the service, or correct '
        "retrieval.options"
    )
