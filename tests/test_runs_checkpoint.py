from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ragr1_actors.core.disk.folders import AnyFolder, FolderWriter, SharedFolderWriter
from ragr1_actors.core.disk.json_files import read_json, write_json
from ragr1_actors.core.disk.learner_state import TensorPart, learner_files, read_learner, read_tensors, write_parts
from ragr1_actors.core.errors import DataError, UserError
from ragr1_actors.runs.checkpoint import Checkpoints
from ragr1_actors.runs.storage.store import RunStore

ROOT = Path(__file__).resolve().parent.parent


def whole(tensor: np.ndarray) -> TensorPart:
    return TensorPart(tensor.ravel(), 0, tensor.shape)


def writer(value: int) -> Callable[[Path], None]:
    def write(directory: Path) -> None:
        write_json(directory / "state.json", {"value": value})
        (directory / "policy").mkdir()
        write_parts(directory / "policy" / "model.safetensors", {"w": whole(np.full(1000, value, np.float32))})

    return write


def save(store: Checkpoints, step: int, write: Callable[[Path], None], score: float | None = None) -> Path:
    store.begin(step, write, score)
    return path_of(store.commit(step))


def path_of(folder: AnyFolder | FolderWriter) -> Path:
    """Return the path of a folder on this machine, or of that into which one is written."""
    found = folder.path if isinstance(folder, SharedFolderWriter) else folder
    assert isinstance(found, Path)
    return found


def check(folder: AnyFolder | None, value: int) -> None:
    assert folder is not None
    path = path_of(folder)
    assert read_json(path / "state.json") == {"value": value}
    assert read_tensors(path / "policy" / "model.safetensors")["w"].tolist() == [value] * 1000


@pytest.fixture
def store(tmp_path: Path) -> Checkpoints:
    return Checkpoints(RunStore(tmp_path / "run"), num_to_keep=2)


def names(tmp_path: Path) -> list[str]:
    return sorted(entry.name for entry in (tmp_path / "run" / "checkpoints").iterdir())


def test_keeps_the_newest(store: Checkpoints, tmp_path: Path) -> None:
    assert store.latest() is None
    for step in (8, 9, 10):
        check(save(store, step, writer(step)), step)
    assert names(tmp_path) == ["step_10", "step_9"]
    check(store.latest(), 10)


def test_the_best_is_kept_whatever_its_age(tmp_path: Path) -> None:
    store = Checkpoints(RunStore(tmp_path / "run"), num_to_keep=1, best_metric="em")
    link = tmp_path / "run" / "checkpoints" / "best"
    assert store.is_best(0.0)
    for step, score in ((1, 0.5), (2, 0.9), (3, None), (4, 0.7)):
        save(store, step, writer(step), score)
    assert names(tmp_path) == ["best", "step_2", "step_4"]
    check(store.latest(), 4)
    check(link, 2)
    assert (store.is_best(0.9), store.is_best(0.91)) == (False, True)
    save(store, 5, writer(5), 0.9)  # of equal ones the newest
    save(store, 5, writer(50))  # again, and not evaluated again
    assert names(tmp_path) == ["best", "step_5"]
    check(link, 50)
    save(store, 6, writer(6), 0.1)
    check(link, 50)
    other = Checkpoints(RunStore(tmp_path / "run"), best_metric="f1")
    check(other.latest(), 6)
    assert other.is_best(0.0)  # nothing scored by it
    save(store, 1, writer(10))  # resumed from before all of them
    assert names(tmp_path) == ["step_1"]


def test_a_damaged_score_ends_no_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Checkpoints(RunStore(tmp_path / "run"), num_to_keep=1, best_metric="em")
    (save(store, 1, writer(1), 0.9) / "score.json").write_text('{"value": 1}')
    check(save(store, 2, writer(2), 0.1), 2)
    assert names(tmp_path) == ["best", "step_2"]
    check(tmp_path / "run" / "checkpoints" / "best", 2)
    assert "step_1 does not count" in caplog.text


def test_what_is_begun_counts_once_it_is_committed(store: Checkpoints, tmp_path: Path) -> None:
    save(store, 1, writer(1))
    writing = path_of(store.begin(2, lambda directory: None))
    check(store.latest(), 1)
    check(store.commit(2, lambda: writer(2)(writing) or {}), 2)
    store.begin(3, writer(3))

    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="no room to write a checkpoint"):
        store.commit(3, fail)
    assert names(tmp_path) == ["step_1", "step_2"]
    check(store.latest(), 2)


def test_a_replaced_step_and_an_earlier_life(store: Checkpoints, tmp_path: Path) -> None:
    for step in (1, 2):
        save(store, step, writer(step))
    save(store, 2, writer(20))
    check(store.latest(), 20)
    save(store, 1, writer(10))  # resumed from before step 2
    assert names(tmp_path) == ["step_1"]
    check(store.latest(), 10)


@pytest.mark.parametrize("error", [RuntimeError("crash"), KeyboardInterrupt(), UserError("no")])
def test_a_failing_write_leaves_the_previous(store: Checkpoints, tmp_path: Path, error: BaseException) -> None:
    def crash(directory: Path) -> None:
        writer(2)(directory)
        raise error

    save(store, 1, writer(1))
    with pytest.raises(type(error)):
        save(store, 2, crash)
    assert names(tmp_path) == ["step_1"]
    check(store.latest(), 1)
    with pytest.raises(type(error)):
        save(store, 1, crash)
    check(store.latest(), 1)


@pytest.mark.parametrize("call", ["begin(2, die)", "begin(2, write), store.commit(2, lambda: die(Path()))"])
def test_a_killed_process_leaves_the_previous(store: Checkpoints, tmp_path: Path, call: str) -> None:
    save(store, 1, writer(1))
    script = f"""
import os, signal
from pathlib import Path
from ragr1_actors.core.disk.json_files import write_json
from ragr1_actors.runs.checkpoint import Checkpoints
from ragr1_actors.runs.storage.store import RunStore

def write(directory):
    write_json(directory / "state.json", {{"value": 2}})

def die(directory):  # without any clean-up, as by the out-of-memory killer
    write(directory) if directory.name else None
    os.kill(os.getpid(), signal.SIGKILL)

store = Checkpoints(RunStore({str(tmp_path / "run")!r}))
store.{call}
"""
    child = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
    assert child.returncode == -signal.SIGKILL
    assert names(tmp_path) == [".writing_step_2", "step_1"]
    check(store.latest(), 1)
    assert names(tmp_path) == [".writing_step_2", "step_1"]  # reading changes nothing: a trainer may be writing
    save(store, 2, writer(2))
    assert names(tmp_path) == ["step_1", "step_2"]


def test_a_crash_between_the_renames_of_a_replacement(store: Checkpoints, tmp_path: Path) -> None:
    directory = tmp_path / "run" / "checkpoints"
    save(store, 3, writer(3)).rename(directory / ".replaced_step_3")
    check(store.latest(), 3)
    save(store, 4, writer(4))
    assert names(tmp_path) == ["step_3", "step_4"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_no_room(store: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    save(store, 1, writer(1))

    def full(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"no room to write a checkpoint into .*; free some space"):
            save(store, 2, writer(2))
    assert names(tmp_path) == ["step_1"]
    check(store.latest(), 1)


def test_no_room_for_real(store: Checkpoints, tmp_path: Path) -> None:
    """In a separate process, as the limit would hold for pytest's output too."""
    save(store, 1, writer(1))
    script = f"""
import errno, resource, signal
from pathlib import Path
import numpy as np
import pytest
from ragr1_actors.core.disk.learner_state import TensorPart, write_parts
from ragr1_actors.core.disk.json_files import write_json
from ragr1_actors.runs.checkpoint import Checkpoints
from ragr1_actors.runs.storage.store import RunStore
from ragr1_actors.core.errors import UserError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
store = Checkpoints(RunStore({str(tmp_path / "run")!r}))
parts = {{"w": TensorPart(np.zeros(1000), 0, (1000,))}}
for write in (
    lambda directory: write_parts(directory / "w.safetensors", parts),
    lambda directory: write_json(directory / "big.json", list(range(1000))),
):
    with pytest.raises(UserError, match="no room"):
        store.commit(2, lambda: write(store.begin(2, lambda directory: None).path))
with pytest.raises(OSError, match="File too large") as error:
    write_parts(Path({str(tmp_path)!r}) / "w.safetensors", parts)
assert error.value.errno == errno.EFBIG
"""
    child = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    assert names(tmp_path) == ["step_1"]
    check(store.latest(), 1)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write a checkpoint"):
        save(Checkpoints(RunStore(tmp_path / "file")), 1, writer(1))


def test_tensors_and_json_round_trip(tmp_path: Path) -> None:
    tensors = {
        "scalar": np.array(3, np.int64),
        "empty": np.zeros((0, 3), np.float32),
        "fortran": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "bytes": np.arange(5, dtype=np.uint8),
    }
    write_parts(tmp_path / "t.safetensors", {name: whole(tensor) for name, tensor in tensors.items()})
    for name, tensor in read_tensors(tmp_path / "t.safetensors").items():
        assert tensor.dtype == tensors[name].dtype
        np.testing.assert_array_equal(tensor, tensors[name])
    write_json(tmp_path / "s.json", {"b": [1, 2.5], "a": "Ā"})
    assert read_json(tmp_path / "s.json") == {"a": "Ā", "b": [1, 2.5]}


def test_tensors_in_the_files_of_several_ranks(tmp_path: Path) -> None:
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    owned = [
        {"a": TensorPart(matrix.ravel()[:5], 0, (3, 4)), "n": whole(np.array(7))},
        {"b": whole(matrix)},
        {"a": TensorPart(matrix.ravel()[5:], 5, (3, 4))},
    ]
    names = learner_files(3)
    assert names == ["learner.safetensors", "learner_1.safetensors", "learner_2.safetensors"]
    for name, parts in zip(names, owned, strict=True):
        write_parts(tmp_path / name, parts)
    found = read_learner(tmp_path / names[0])
    assert sorted(found) == ["a", "b", "n"]
    for name, expected in (("a", matrix), ("b", matrix), ("n", np.array(7))):
        assert found[name].dtype == expected.dtype
        np.testing.assert_array_equal(found[name], expected)
    (tmp_path / names[2]).unlink()
    with pytest.raises(DataError, match=r"there are 5 of 12 elements of a; the file of a rank is missing"):
        read_learner(tmp_path / names[0])


def test_files_of_two_checkpoints_and_foreign_ones(tmp_path: Path) -> None:
    halves = [{"w": TensorPart(np.full(2, rank, np.float32), 2 * rank, (4,))} for rank in range(2)]
    first, second = (tmp_path / name for name in learner_files(2))
    write_parts(first, halves[0], "update 10")
    write_parts(second, halves[1], "update 10")
    write_parts(tmp_path / "learner_backup.safetensors", halves[1], "update 10")
    np.testing.assert_array_equal(read_learner(first)["w"], [0, 0, 1, 1])
    write_parts(second, halves[1], "update 20")
    with pytest.raises(DataError, match=r"learner.safetensors and learner_1.safetensors are of different checkpoints"):
        read_learner(first)


def test_broken_files(tmp_path: Path) -> None:
    (tmp_path / "broken").write_bytes(b"\x00\x01")
    for read in (read_tensors, read_json):
        for name in ("broken", "absent"):
            with pytest.raises(DataError, match=name):
                read(tmp_path / name)
