"""A run at a URI: the same run as in a folder, whole checkpoints through a cut connection, and no secret anywhere."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recorded_run import PASSAGES, record
from rich.console import Console
from small_world import ROOT, SHORT, deterministic, invoke, make_config, make_files, wait_for
from storage_world import KEY, SECRET, CutConnection, Mender, give_up_soon, s3_server, s3_uri
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from cluster.session import leftovers
from cluster.storage import Storage, share
from ragr1_actors.core.config import FaultToleranceSettings, RetrievalSettings, RunConfig, SamplerConfig
from ragr1_actors.core.disk.json_files import write_json
from ragr1_actors.core.errors import ConfigError, DataError, FleetError, RunDirectoryError, UserError
from ragr1_actors.planning.preflight import check_sampler
from ragr1_actors.runs.report import EvalResult, RunReport
from ragr1_actors.runs.run_directory import (
    create_run_directory,
    find_checkpoint,
    holds_run,
    open_run_directory,
    removed_if_unused,
    steps_in_sft,
)
from ragr1_actors.runs.storage.store import RunStore, _place, find_store, split_checkpoint
from ragr1_actors.runs.storage.uploads import LEASE_FILE, Lease, Uploads
from ragr1_actors.runs.telemetry.metrics import MetricsLogger, read_metrics
from ragr1_actors.training.training_run import TrainingRun
from retrieval.replicas.retriever_group import RetrieverGroup

NUM_ITERATIONS = 5


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_files(tmp_path_factory.mktemp("files"))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAGR1_CACHE", str(tmp_path / "cache"))


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.integration)])
def uri(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return f"file://{tmp_path / 'stored' / 'run'}"
    return s3_uri(request.getfixturevalue("port"), f"{tmp_path.name}/run")


def test_the_directory_of_a_run_that_cannot_begin_is_removed(uri: str, tmp_path: Path) -> None:
    for run_dir in (uri, tmp_path / "run"):
        store = find_store(run_dir)
        create_run_directory(RunConfig(), store)
        with pytest.raises(FleetError), removed_if_unused(store):  # the configuration is not to blame
            raise FleetError
        assert holds_run(find_store(run_dir))
        with pytest.raises(DataError), removed_if_unused(store):
            raise DataError
        assert not holds_run(find_store(run_dir))
        create_run_directory(RunConfig(), store)
        for made in ("index", "policy"):  # the run fails after it has made them
            (store.path / made).mkdir()
            (store.path / made / "file").write_text("content")
        (store.path / "metrics.jsonl").touch()
        store.upload()
        with pytest.raises(DataError), removed_if_unused(store):
            raise DataError
        assert not store.path.exists()
        again = find_store(run_dir)
        assert not holds_run(again) and again.find("index") is again.find("policy") is None
        assert store.remote is None or store.remote.names() == []
        store.path.parent.mkdir(exist_ok=True)
        create_run_directory(RunConfig(), store)
        (store.path / "metrics.jsonl").write_text("{}\n")
        with pytest.raises(DataError), removed_if_unused(store):
            raise DataError
        assert holds_run(find_store(run_dir))


def run_config(files: Path, storage_retry_s: float = 0.0, **checkpointing: Any) -> RunConfig:
    """A run that makes its index and its policy, holds tasks out and saves after every second iteration."""
    config = make_config(files, SHORT, num_iterations=NUM_ITERATIONS)
    sections = {
        "environment": {"eval_tasks": ""},
        "retrieval": {"index": "", "corpus": str(files / "corpus.json")},
        "checkpointing": {"interval": 2, "num_to_keep": 2, **checkpointing},
        "debugging": {"fault_tolerance": FaultToleranceSettings(storage_retry_s=storage_retry_s)},
    }
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=keys) for name, keys in sections.items()}
    )


def start(config: RunConfig, run_dir: str | Path) -> RunReport:
    store = find_store(run_dir)
    create_run_directory(config, store)
    return TrainingRun(config, store, Console(quiet=True)).execute()


def resume(run_dir: str) -> RunReport:
    store = find_store(run_dir)
    return TrainingRun(open_run_directory(store), store, Console(quiet=True)).execute()


def metrics(uri: str) -> list[dict[str, Any]]:
    store = find_store(uri)
    open_run_directory(store)
    return [deterministic(row) for row in read_metrics(store.path)]


def steps(uri: str) -> list[str]:
    names = Storage(uri).names("checkpoints")
    return sorted(name for name in names if re.fullmatch(r"checkpoints/step_\d+\.json", name))


@pytest.fixture(scope="module")
def whole(files: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The metrics of the same run in a folder."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    start(run_config(files), run_dir)
    return [deterministic(row) for row in read_metrics(run_dir)]


def test_trajectories_of_a_roll_back_are_uploaded_before_they_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, folder = Storage(f"file://{tmp_path / 'stored'}"), tmp_path / "run" / "trajectories"
    folder.mkdir(parents=True)
    uploads, first = Uploads(tmp_path / "run", storage), folder / "iteration_00001.arrow"
    for number in range(1, 4):
        (folder / f"iteration_0000{number}.arrow").write_bytes(b"before")
        uploads.upload(storage)
    assert [path.name for path in folder.iterdir()] == ["iteration_00003.arrow"]
    upload = Storage.upload

    def written_meanwhile(self: Storage, name: str, path: Path) -> None:
        upload(self, name, path)
        if name == "metrics.jsonl":
            first.write_bytes(b"after a roll-back")

    (tmp_path / "run" / "metrics.jsonl").write_text("{}")
    with monkeypatch.context() as patched:
        patched.setattr(Storage, "upload", written_meanwhile)
        uploads.upload(storage)
    uploads.upload(storage)
    assert storage.read("trajectories/iteration_00001.arrow") == b"after a roll-back"
    assert not first.exists()


@pytest.mark.engine
def test_a_run_at_a_uri_is_the_run_in_a_folder(
    uri: str, files: Path, whole: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    report = start(run_config(files, best_metric="f1"), uri)
    assert metrics(uri) == whole
    assert (report.tasks.issued, report.tasks.lost, report.tasks.doubled) == (NUM_ITERATIONS * 8, 0, 0)
    storage = Storage(uri)
    names = storage.names()
    assert {"config.yaml", "metrics.jsonl", "report.json", "report.html", "index.json", "policy.json"} <= set(names)
    assert "trajectories/iteration_00005.arrow" in names and "trajectories/eval_rl.arrow" in names
    assert any(name.startswith("tensorboard/events") for name in names)
    assert "checkpoints/step_5.json" in steps(uri) and len(steps(uri)) <= 3
    kept = {(storage.find(name.removesuffix(".json")) or pytest.fail(name)).prefix for name in steps(uri)}
    stored = {name.split("/")[1] for name in names if name.startswith("checkpoints/step_") and name.count("/") > 1}
    assert {f"checkpoints/{name}" for name in stored} == kept, "nothing is left of what is not kept"

    reported = EvalResult(**json.loads(invoke("report", uri, "--json"))["stages"][-1]["eval"]).by_name()
    evaluated = json.loads(invoke("evaluate", uri, "--json"))
    assert {name: evaluated[name] for name in reported} == reported
    best = uri.replace("/run", "/run/checkpoints/best")
    for policy in (best.replace("best", "best/policy"), uri.replace("/run", "/run/policy_sft")):
        store, folder = find_checkpoint(policy)
        assert str(store) == str(find_store(uri))
        assert (folder / "model.safetensors").is_file()
        assert steps_in_sft(policy) is None
    assert split_checkpoint(best) == (uri, "checkpoints/best")
    assert "Where is the lamp ?" in invoke("ask", best, "Where is the lamp ?")
    assert "has no checkpoint step_77; leave its name out" in invoke("ask", best.replace("best", "step_77"), "Why?")
    assert "is finished; see it with: ragr1 report" in invoke("train", "x", "--run-dir", uri, "--resume")
    output = "".join(capfd.readouterr())
    for secret in (KEY, SECRET):
        assert secret not in output
        assert not [name for name in names if secret.encode() in (storage.read(name) or b"")]


IN_STEP_4 = re.compile(rb"checkpoints/step_4-\w+/policy/model")
"""A request that uploads a policy, after the other files of the checkpoint."""


@pytest.mark.engine
def test_a_connection_that_is_cut_in_a_checkpoint_ends_the_run_and_resume_continues(
    port: int, files: Path, tmp_path: Path, whole: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up_soon(monkeypatch)
    connection = CutConnection(port)
    connection.cut_at = IN_STEP_4
    uri = s3_uri(connection.port, f"{tmp_path.name}/run")
    with pytest.raises(
        UserError, match=r"^cannot write s3://bucket/.*model\.safetensors: .*; look at the netw"
    ) as error:
        start(run_config(files), uri)
    assert connection.num_cuts == 1 and "\n" not in str(error.value) and SECRET not in str(error.value)
    connection.mend()
    storage = Storage(uri)
    assert [name for name in storage.names("checkpoints") if "/step_4-" in name], "some of its files are there"
    assert steps(uri)[-1] == "checkpoints/step_2.json", "but it does not count"
    report = resume(uri)
    assert report.tasks.issued == report.tasks.trained == NUM_ITERATIONS * 8
    assert (report.tasks.lost, report.tasks.doubled) == (0, 0)
    assert metrics(uri) == whole
    prefixes = {name.split("/")[1] for name in storage.names("checkpoints") if name.count("/") > 1}
    assert len(prefixes) == len(steps(uri)) == 2, "the files of the cut checkpoint are removed"


@pytest.mark.engine
def test_a_run_with_patience_goes_on_after_the_cut(
    port: int,
    files: Path,
    tmp_path: Path,
    whole: list[dict[str, Any]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    give_up_soon(monkeypatch)
    connection = CutConnection(port)
    connection.cut_at = IN_STEP_4
    uri = s3_uri(connection.port, f"{tmp_path.name}/run")
    mender = Mender(connection)
    caplog.handler.addFilter(mender)
    start(run_config(files, storage_retry_s=120.0), uri)
    assert connection.num_cuts == mender.num_mended == 1
    assert "it is tried again for 120 s" in caplog.text and SECRET not in caplog.text
    assert metrics(uri) == whole


def test_a_run_is_in_a_folder_or_at_a_uri(uri: str, tmp_path: Path, files: Path) -> None:
    assert str(find_store(tmp_path / "run")) == str(find_store(f"{tmp_path}/run")) == f"{tmp_path}/run"
    store = find_store(uri)
    assert SECRET not in str(store) and store.path.name == "run"
    assert find_store("s3://bucket/..").path.name == "run", "a name from a URI stays inside the folder"
    with pytest.raises(RunDirectoryError, match=r"/run.* holds no run \(no config\.yaml\); give the directory"):
        open_run_directory(store)
    create_run_directory(run_config(files), store)
    assert open_run_directory(find_store(uri)) == run_config(files)
    Storage(uri).write("trajectories.json", b"{")
    with pytest.raises(DataError, match=r"/run/trajectories\.json is damaged"):
        open_run_directory(find_store(uri))
    Storage(uri).remove(["trajectories.json"])
    with pytest.raises(RunDirectoryError, match="holds a run already; continue it with --resume, or choose another"):
        create_run_directory(run_config(files), find_store(uri))
    with pytest.raises(RunDirectoryError, match="has no checkpoint yet; let the run continue until it has written one"):
        find_checkpoint(uri)


def test_a_run_in_a_folder_named_checkpoints_is_found(files: Path, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/checkpoints/mine"
    with RunStore(uri) as store:
        create_run_directory(run_config(files), store)
    with pytest.raises(RunDirectoryError, match=r"checkpoints/mine has no checkpoint yet"):
        find_checkpoint(uri)


def test_files_are_uploaded_as_they_change(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragr1_actors.runs.storage.uploads.INTERVAL_S", 0.05)
    store = RunStore(uri)
    with store:
        (store.path / "metrics.jsonl").write_text("one\n")
        (store.path / "tensorboard").mkdir()
        (store.path / "tensorboard" / "events").write_text("1")
        (store.path / ".writing_report.json").write_text("half")
        (store.path / "index").mkdir()
        (store.path / "index" / "vectors").write_text("0")
        wait_for_content(Storage(uri), "tensorboard/events", b"1")
        with (store.path / "metrics.jsonl").open("a") as file:
            file.write("two\n")
        wait_for_content(Storage(uri), "metrics.jsonl", b"one\ntwo\n")
        (store.path / "report.html").write_text("<p>")
    assert Storage(uri).find("index") is not None, "a folder is stored whole"
    names = [name for name in Storage(uri).names() if not name.startswith("index")]
    assert names == ["metrics.jsonl", "report.html", "tensorboard/events"]


def test_a_resumed_run_keeps_its_curves(uri: str) -> None:
    for first, last in ((1, 5), (4, 7)):
        store = RunStore(uri)
        store.load()
        with store:
            logger = MetricsLogger(store.path)
            for iteration in range(first, last + 1):
                logger.log("rl", iteration, {"rollout/reward": float(10 * first + iteration), "learner/tokens": 2.0})
            logger.close()
    files = [name for name in Storage(uri).names("tensorboard") if "tfevents" in name]
    assert len(files) == 2
    events = EventAccumulator(str(store.path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value) for event in events.Scalars("rollout/reward")]
    assert found == [(1, 11), (2, 12), (3, 13), (4, 44), (5, 45), (6, 46), (7, 47)]
    assert [event.step for event in events.Scalars("by_tokens/rollout/reward")] == [2, 4, 6, 8, 10, 12, 14]
    reader = RunStore(uri)
    reader.load()
    assert not (reader.path / "tensorboard").exists(), "who only reads the run needs no curves"


def test_a_run_whose_curves_cannot_be_read_does_not_stay_in_use(tmp_path: Path) -> None:
    (tmp_path / "run" / "tensorboard").mkdir(parents=True)
    (tmp_path / "run" / "tensorboard" / "events").write_text("1")
    store = RunStore(uri := f"file://{tmp_path / 'run'}")
    store.retry_for(0)
    (store.path / "tensorboard").touch()  # a file where the folder should be
    with pytest.raises(UserError, match=r"cannot read .*/tensorboard/events"), store:
        pass
    assert LEASE_FILE not in Storage(uri).names()


def test_a_run_that_another_machine_works_in_is_refused(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as other:
        other.setattr("ragr1_actors.runs.storage.uploads.this_machine", lambda: "elsewhere 1")
        there = RunStore(uri)
    here = RunStore(uri)
    monkeypatch.setattr("ragr1_actors.runs.storage.uploads.INTERVAL_S", 0.05)  # how often the other process renews it
    refused = pytest.raises(RunDirectoryError, match=r"a process on elsewhere works in .*/run.*; wait until it ends")
    with there, refused, here:
        pass
    with RunStore(uri):  # it was given back
        pass
    assert LEASE_FILE not in Storage(uri).names()


def test_a_lease_is_renewed_during_a_long_upload(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragr1_actors.runs.storage.uploads.INTERVAL_S", 0.02)
    began, was_renewed, upload = threading.Event(), list[bool](), Storage.upload

    def slow(self: Storage, name: str, path: Path) -> None:
        if not began.is_set():
            began.set()
            before = Storage(uri).read(LEASE_FILE)
            was_renewed.append(wait_for(lambda: Storage(uri).read(LEASE_FILE) != before, 20))
        upload(self, name, path)

    monkeypatch.setattr(Storage, "upload", slow)
    with RunStore(uri) as store:
        (store.path / "metrics.jsonl").write_text("one\n")
        assert began.wait(20)
        wait_for_content(Storage(uri), "metrics.jsonl", b"one\n")
    assert was_renewed == [True]


def test_a_run_that_another_machine_has_taken_ends(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ragr1_actors.runs.storage.uploads.INTERVAL_S", 0.02)
    theirs = b'{"machine": "elsewhere 1", "renewals": 7}'
    taken = pytest.raises(UserError, match=r"a process on elsewhere has taken .* meanwhile")
    with taken, RunStore(uri) as store:
        Storage(uri).write(LEASE_FILE, theirs)
        for _ in range(2000):  # a checkpoint, until the lease was looked at
            store.upload()
            time.sleep(0.01)
    assert Storage(uri).read(LEASE_FILE) == theirs


def test_one_place_has_one_lock_however_its_uri_is_written(tmp_path: Path) -> None:
    first = f"file://{tmp_path}/run"
    others = [f"file://{tmp_path}//run", f"{first}/", f"file://{tmp_path}/./run"]
    with RunStore(first).held():
        for other in others:
            with pytest.raises(RunDirectoryError, match="another process works in"), RunStore(other).held():
                pass
        with RunStore(f"{first}2").held():
            pass
    assert _place("s3://K:S@b/a/r?region=eu") == _place("s3://b//a/r") != _place("s3://b/a/r?endpoint_override=host")


def test_a_folder_that_vanishes_is_passed_over(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def vanishing(path: str) -> Any:
        if Path(path).name == "wandb":
            raise FileNotFoundError(path)
        return scan(path)

    with RunStore(uri) as store:
        (store.path / "wandb").mkdir()
        (store.path / "metrics.jsonl").write_text("one\n")
        monkeypatch.setattr(os, "scandir", vanishing)
        store.upload()
        monkeypatch.undo()
    assert Storage(uri).read("metrics.jsonl") == b"one\n"


@pytest.mark.parametrize("content", [b'{"machine": "elsewhere 1", "renewals": 1}', b'{"mach', b""])
def test_a_storage_that_does_not_answer_is_not_a_run_that_was_given_back(
    uri: str, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    storage, num_reads = Storage(uri), 0
    storage.write(LEASE_FILE, content)
    read = Storage.read

    def answers_at_times(self: Storage, name: str) -> bytes | None:
        nonlocal num_reads
        num_reads += 1
        if num_reads % 2 == 0:
            raise UserError("timeout")
        if num_reads == 5:
            storage.write(LEASE_FILE, b'{"machine": "elsewhere 1", "renewals": 2}')
        return read(self, name)

    monkeypatch.setattr(Storage, "read", answers_at_times)
    with pytest.raises(RunDirectoryError, match="a process on elsewhere works in"):
        Lease(storage, 0.5).take()


def test_a_run_whose_machine_was_lost_goes_on_elsewhere(
    uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("ragr1_actors.runs.storage.uploads.INTERVAL_S", 0.2)
    with monkeypatch.context() as other:
        other.setattr("ragr1_actors.runs.storage.uploads.this_machine", lambda: "elsewhere 1")
        Lease(Storage(uri), 0.2).take()  # and it is killed
    with RunStore(uri):
        content = Storage(uri).read(LEASE_FILE)
        assert content is not None
        assert "elsewhere" not in content.decode()
    assert "was used from elsewhere, and was not given back: waiting up to" in caplog.text


def test_a_process_of_the_same_machine_does_not_wait(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its lock says that the one before has ended."""
    Lease(Storage(uri), 1000).take()
    with RunStore(uri):
        pass
    assert "waiting" not in caplog.text


async def test_the_recorded_searches_of_a_run_at_a_uri_are_replayed(uri: str, tmp_path: Path) -> None:
    with RunStore(uri) as store:
        await record(store.path, ["Riga", "Oslo"])
    for run in (uri, str(store.path)):
        retrieval = RetrievalSettings(type="replay", options={"run": run})
        replay = pickle.loads(pickle.dumps(RetrieverGroup(None, retrieval, share).retriever()))
        assert await replay.search(["Oslo"], 2) == [[PASSAGES[1]]]
    retrieval = RetrievalSettings(type="replay", options={"run": f"{uri.replace('/run', '/other')}"})
    with pytest.raises(DataError, match=r"no recorded searches in .*/other.*; give the URI of a run that kept them"):
        RetrieverGroup(None, retrieval)
    secret = RetrievalSettings(type="replay", options={"run": f"s3://{KEY}:{SECRET}@bucket/run"})
    with pytest.raises(ConfigError, match=r"the URI s3://bucket/run has credentials, which would be stored with the"):
        check_sampler(SamplerConfig(retrieval=secret))


def wait_for_content(storage: Storage, name: str, content: bytes) -> None:
    assert wait_for(lambda: storage.read(name) == content, 60)


def test_what_cannot_be_uploaded_at_the_end_stays_on_this_machine(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    store, other = (RunStore(f"file://{tmp_path / 'file'}") for _ in range(2))
    store.retry_for(0)
    with pytest.raises(UserError) as error, store:
        write_json(store.path / "report.json", {})
    kept = Path(str(error.value).partition("what was not uploaded is in ")[2])
    assert kept.parent.name.startswith(leftovers.KEPT)
    assert (kept / "report.json").is_file()
    with pytest.raises(ZeroDivisionError), other:
        write_json(other.path / "report.json", {})
        raise ZeroDivisionError


def test_the_folder_of_a_killed_run_at_a_uri_is_removed_and_that_of_a_living_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "TEMP", tmp_path)
    monkeypatch.setattr(leftovers.tempfile, "tempdir", str(tmp_path))
    make = (
        "from ragr1_actors.runs.storage import store; print(store.find_store('file:///nowhere/run').path, flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", f"{make}; input()"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip()).parent
        assert folder.parent == tmp_path
        assert list(leftovers.remove_leftovers()) == []
        assert folder.is_dir()
        process.kill()
    assert [left.folder for left in leftovers.remove_leftovers()] == [folder]
    assert not folder.exists()


def test_the_error_of_a_run_whose_directory_is_gone_is_kept(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    with pytest.raises(UserError, match="of the run"), removed_if_unused(run_dir):
        run_dir.rmdir()
        raise UserError("of the run")
