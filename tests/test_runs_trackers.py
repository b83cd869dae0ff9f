"""Weights & Biases and MLflow get what the run logs. Both are real: W&B writes its files, MLflow a folder."""

from __future__ import annotations

import json
import struct
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from small_world import SHORT, make_config, make_files, wait_for

from benchmarks.scale.clusters import free_port
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.runs.run_directory import create_run_directory
from ragr1_actors.runs.telemetry.metrics import read_metrics
from ragr1_actors.runs.telemetry.trackers import trackers
from ragr1_actors.training.training_run import TrainingRun

pytestmark = pytest.mark.integration
SETTINGS = {"training.lr": 0.001, "retrieval.options": {"nprobe": 8}}


@pytest.fixture
def mlflow_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    from mlflow import MlflowClient, set_tracking_uri

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    set_tracking_uri(f"file://{tmp_path}/mlruns")
    yield MlflowClient()
    set_tracking_uri("")


def the_run(client: Any) -> Any:
    [run] = client.search_runs([client.get_experiment_by_name("ragr1").experiment_id])
    return run


def history(client: Any, name: str) -> list[tuple[int, float]]:
    points = client.get_metric_history(the_run(client).info.run_id, name)
    return sorted((point.step, point.value) for point in points)  # which several threads sent


def test_mlflow_goes_on_in_the_same_run(tmp_path: Path, mlflow_client: Any) -> None:
    run_dir = tmp_path / "first"
    run_dir.mkdir()
    with pytest.raises(KeyboardInterrupt), trackers(("mlflow",), run_dir, SETTINGS) as log:
        log("sft", 5, {"learner/loss": 2.0})
        log("rl", 1, {"rollout/reward": 0.25})
        raise KeyboardInterrupt
    run = the_run(mlflow_client)
    assert (run.info.run_name, run.info.status) == ("first", "KILLED")
    assert run.data.params == {"training.lr": "0.001", "retrieval.options": "{'nprobe': 8}"}
    with trackers(("mlflow",), run_dir, SETTINGS | {"learners.num_learners": 2}) as log:
        assert the_run(mlflow_client).info.status == "RUNNING"
        log("rl", 2, {"rollout/reward": 0.5})
    assert the_run(mlflow_client).info.status == "FINISHED"
    assert history(mlflow_client, "sft/learner/loss") == [(5, 2.0)]
    assert history(mlflow_client, "rollout/reward") == [(1, 0.25), (2, 0.5)]


class Answers(BaseHTTPRequestHandler):
    """What MLflow's server says to a new run in a known experiment."""

    def do_GET(self) -> None:
        self.answer({"experiment": {"experiment_id": "1", "name": "ragr1"}})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        info = {"run_id": "r", "experiment_id": "1", "status": "RUNNING", "lifecycle_stage": "active"}
        self.answer({"run": {"info": info, "data": {}}} if self.path.endswith("runs/create") else {})

    def answer(self, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: Any) -> None: ...


def test_a_server_that_goes_away_costs_metrics_only(
    tmp_path: Path, mlflow_client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    server = HTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    mlflow.set_tracking_uri(f"http://127.0.0.1:{server.server_port}")
    with trackers(("mlflow",), tmp_path, {}) as log:
        server.shutdown()
        thread.join()
        server.server_close()
        log("rl", 1, {"rollout/reward": 0.25})
        log("rl", 2, {"rollout/reward": 0.5})
    assert "MLflow did not get 2 of 2 lines of metrics: " in caplog.text


def test_a_server_that_is_not_there_is_an_error_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    mlflow.set_tracking_uri(f"http://127.0.0.1:{free_port()}")
    try:
        with pytest.raises(ConfigError, match=r"MLflow did not accept the run: .* set MLFLOW_TRACKING_URI"):
            trackers(("mlflow",), tmp_path, {}).__enter__()
    finally:
        mlflow.set_tracking_uri("")
    assert not (tmp_path / "trackers.json").exists()


def wandb_records(run_dir: Path) -> list[tuple[str, Any]]:
    """Return id and protobuf record of all that W&B wrote, in the order of its processes."""
    from wandb.proto.wandb_internal_pb2 import Record

    paths = sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"), key=lambda path: path.parent.name)
    return [
        (path.stem.removeprefix("run-"), Record.FromString(data))
        for path in paths
        for data in log_records(path.read_bytes())
    ]


def log_records(content: bytes) -> Iterator[bytes]:
    """Read LevelDB's log format: blocks of 32 KiB, in which every piece has a checksum, its length and its kind."""
    at, record = 7, b""  # behind W&B's header
    while at + 7 <= len(content):
        if 2**15 - at % 2**15 < 7:  # no room for another piece in this block
            at += 2**15 - at % 2**15
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        if at + 7 + length > len(content):  # it is being written
            return
        record += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or its last piece
            yield record
            record = b""


def test_wandb_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run_dir = tmp_path / "first"
    run_dir.mkdir()
    with pytest.raises(RuntimeError, match="full"), trackers(("wandb",), run_dir, SETTINGS) as log:
        log("sft", 5, {"learner/loss": 2.0})
        log("rl", 1, {"rollout/reward": 0.25})
        raise RuntimeError("disk full")
    with trackers(("wandb",), run_dir, SETTINGS) as log:
        log("rl", 2, {"rollout/reward": 0.5})

    def num_ends() -> int:
        return sum(record.WhichOneof("record_type") == "exit" for _, record in wandb_records(run_dir))

    assert wait_for(lambda: num_ends() == 2, 120), "W&B's process writes the end of a run after it has answered"
    records = wandb_records(run_dir)
    assert len({run_id for run_id, _ in records}) == 1
    lines = [
        {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
        for _, record in records
        if record.WhichOneof("record_type") == "history"
    ]
    named = [{key: value for key, value in line.items() if not key.startswith("_")} for line in lines]
    assert named == [
        {"sft/learner/loss": "2", "sft/step": "5"},
        {"rollout/reward": "0.25", "iteration": "1"},
        {"rollout/reward": "0.5", "iteration": "2"},
    ]
    exits = [record.exit.exit_code for _, record in records if record.WhichOneof("record_type") == "exit"]
    assert exits == [1, 0]


@pytest.mark.parametrize(("name", "package"), [("wandb", "wandb"), ("mlflow", "mlflow-skinny")])
def test_a_tracker_that_is_not_installed_is_named(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"debugging.trackers: .*{name}.*; run `pip install {package}`"):
        trackers((name,), tmp_path, {}).__enter__()


@pytest.mark.engine
@pytest.mark.slow
def test_a_run_sends_what_it_logs(tmp_path: Path, mlflow_client: Any) -> None:
    config = make_config(make_files(tmp_path), SHORT | {"num_steps": 2}, num_iterations=2)
    config = config.model_copy(update={"debugging": config.debugging.model_copy(update={"trackers": ["mlflow"]})})
    create_run_directory(config, tmp_path / "run")
    TrainingRun(config, tmp_path / "run", Console(quiet=True)).execute()
    logged = [row for row in read_metrics(tmp_path / "run") if "rollout/tokens" in row]
    assert history(mlflow_client, "rollout/tokens") == [(row["iteration"], row["rollout/tokens"]) for row in logged]
    assert [step for step, _ in history(mlflow_client, "sft/learner/loss")] == [1, 2]
    assert the_run(mlflow_client).data.params["debugging.trackers"] == "['mlflow']"
