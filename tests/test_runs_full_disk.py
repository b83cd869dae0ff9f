"""A full disk, a small tmpfs: the run ends with one sentence and can be resumed once there is room."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import ray
import yaml
from small_world import descendants, ended, make_config, make_files, make_recipe, started, wait_for

from cluster.node_cache import NodeCache
from cluster.storage import Storage, StoredFolder, read_contents
from ragr1_actors.core.disk.files import is_no_room, write_folder
from ragr1_actors.core.disk.json_files import read_json
from ragr1_actors.core.errors import DataError, RunDirectoryError
from ragr1_actors.core.schema import read_trajectories
from ragr1_actors.runs.checkpoint import Checkpoints
from ragr1_actors.runs.run_directory import create_run_directory, open_run_directory
from ragr1_actors.runs.storage.store import RunStore
from ragr1_actors.runs.telemetry.metrics import read_metrics

pytestmark = pytest.mark.engine

FILLER = "filler"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs", str(path)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("needs the right to mount a tmpfs")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(disk: Path) -> None:
    with (disk / FILLER).open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert is_no_room(error)


def digests(directory: Path) -> dict[str, str]:
    files = [path for path in directory.rglob("*") if path.is_file()]
    return {str(path.relative_to(directory)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_half_a_configuration_is_never_resumed_from(disk: Path, tmp_path: Path) -> None:
    config = make_config(tmp_path)
    fill(disk)
    with pytest.raises(RunDirectoryError, match=r"cannot write to .*: No space left on device; choose another"):
        create_run_directory(config, disk / "run")
    with pytest.raises(RunDirectoryError, match="holds no run"):
        open_run_directory(disk / "run")
    (disk / FILLER).unlink()
    create_run_directory(config, disk / "run")
    assert open_run_directory(disk / "run") == config
    assert [path.name for path in (disk / "run").iterdir()] == ["config.yaml"]


@pytest.mark.parametrize("is_on_storage", [True, False])
def test_a_full_cache_is_named_and_not_the_network(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, is_on_storage: bool
) -> None:
    monkeypatch.setenv("RAGR1_CACHE", str(disk / "cache"))
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "weights").write_bytes(bytes(100_000))
    if is_on_storage:
        put = Storage(f"file://{tmp_path / 'stored'}", retry_s=60).put(tmp_path / "policy")
    else:
        request.getfixturevalue("ray_local")
        blobs = ray.put({"weights": np.zeros(100_000, np.uint8)})
        put = StoredFolder(read_contents(tmp_path / "policy"), "policy", blobs=blobs)
    away = replace(put, path="")
    NodeCache.of_this_node()
    fill(disk)
    with pytest.raises(
        DataError,
        match=rf"^the disk of the cache {disk}/cache of node .* has no room to fetch 100,000 bytes \(No space left on "
        r"device\); free some, or set RAGR1_CACHE to a larger disk$",
    ):
        away.fetch()
    (disk / FILLER).unlink()
    assert (away.fetch() / "weights").read_bytes() == bytes(100_000)


def test_a_folder_is_whole_or_as_it_was(disk: Path) -> None:
    write_folder(disk / "policy", lambda folder: (folder / "weights").write_bytes(b"old"), ["weights"])
    fill(disk)
    with pytest.raises(OSError, match="No space left") as caught:
        write_folder(disk / "policy", lambda folder: (folder / "weights").write_bytes(bytes(100_000)), ["weights"])
    assert is_no_room(caught.value)
    assert digests(disk / "policy") == {"weights": hashlib.sha256(b"old").hexdigest()}
    (disk / FILLER).unlink()
    write_folder(disk / "policy", lambda folder: (folder / "weights").write_bytes(b"new"), ["weights"])
    assert (disk / "policy" / "weights").read_bytes() == b"new"
    assert [path.name for path in disk.iterdir()] == ["policy"]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("place", ["metrics.jsonl", "trajectories", "tensorboard", "checkpoints"])
def test_a_disk_that_fills_up_in_the_middle_ends_the_run_and_resume_goes_on(
    disk: Path, tmp_path: Path, place: str
) -> None:
    num_iterations, interval = 10, 3
    recipe = make_recipe(tmp_path / "recipe.yaml", make_files(tmp_path), num_iterations=num_iterations)
    settings = yaml.safe_load(recipe.read_text())
    settings["checkpointing"] |= {"interval": interval, "keep_trajectories": place != "metrics.jsonl"}
    if place != "checkpoints":  # one run with actors is enough, the others start sooner
        settings["env_runners"]["num_env_runners"] = 0
        settings["learners"]["num_learners"] = settings["retrieval"]["num_retrievers"] = 0
    recipe.write_text(yaml.safe_dump(settings))
    run_dir = disk / "run" if place == "metrics.jsonl" else tmp_path / "run"
    run_dir.mkdir()
    if place != "metrics.jsonl":  # nothing else of the run is on the full disk
        (run_dir / place).symlink_to(disk, target_is_directory=True)
    checkpoint = run_dir / "checkpoints" / f"step_{interval}"

    with started(str(recipe), "--run-dir", str(run_dir), cwd=tmp_path) as process:
        assert wait_for(checkpoint.exists, 600, process)
        fill(disk)
        before = digests(checkpoint)
        children = descendants(process.pid)
        _, stderr = process.communicate(timeout=600)
    assert process.returncode == 2
    assert stderr.startswith("error: no room "), stderr
    assert stderr.count("\n") == 1  # one sentence, however long
    assert "--resume" in stderr
    assert wait_for(lambda: ended(children), 120)
    assert Checkpoints(RunStore(run_dir)).latest() == checkpoint
    assert digests(checkpoint) == before

    (disk / FILLER).unlink()
    with started(str(recipe), "--run-dir", str(run_dir), "--resume", cwd=tmp_path) as process:
        stdout, stderr = process.communicate(timeout=600)
    assert (process.returncode, stderr) == (0, "")
    assert f"RL iteration {interval}" in stdout
    check_whole(run_dir, num_iterations)


def check_whole(run_dir: Path, num_iterations: int) -> None:
    """Nothing of a finished run is lost, doubled or cut off."""
    tasks = 8 * num_iterations
    assert read_json(run_dir / "report.json")["tasks"] == {
        "issued": tasks,
        "trained": tasks,
        "failed": 0,
        "skipped": 0,
        "lost": 0,
        "doubled": 0,
    }
    iterations = list(range(1, num_iterations + 1))
    assert [row["iteration"] for row in read_metrics(run_dir) if row["stage"] == "rl"] == iterations
    files = sorted((run_dir / "trajectories").glob("iteration_*"))
    assert sum(len(read_trajectories(file)) for file in files) == (tasks if files else 0)
    assert curve(run_dir / "tensorboard") == iterations


def curve(directory: Path) -> list[int]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    return [event.step for event in events.Scalars("rollout/reward")]
