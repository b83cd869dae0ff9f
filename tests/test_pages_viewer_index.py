"""The viewer's cache, and what else may lie among the files of a run: damage is mended, or named once."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from test_pages_viewer_queries import index_of, names
from view_world import attempt, every_outcome, keep

from ragr1_actors.core import schema
from ragr1_actors.core.errors import DataError
from ragr1_actors.pages.viewer import parts
from ragr1_actors.pages.viewer.parts import PART_SCHEMA, Index, Source, make_part
from ragr1_actors.pages.viewer.payloads import Query, Scope, TokenPieces, trajectory_payload

pytestmark = pytest.mark.timeout(120)  # nothing may wait for the writer of a FIFO


def a_socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # an address has at most 108 bytes
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(here)


def a_folder(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_bytes(b"x")


def a_part(path: Path, schema: pa.Schema) -> None:
    """Write rows as the viewer did before parts had a digest."""
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(schema.empty_table())


def replaced(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "one byte": lambda path: path.write_bytes(b"A"),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "without a digest": lambda path: path.write_bytes(path.read_bytes()[:-16]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a folder": lambda path: replaced(path, a_folder),
    "a FIFO": lambda path: replaced(path, os.mkfifo),
    "a socket": lambda path: replaced(path, a_socket),
    "a link to nothing": lambda path: replaced(path, lambda at: at.symlink_to("nothing")),
    "a link to itself": lambda path: replaced(path, lambda at: at.symlink_to(at.name)),
    "a link to a folder": lambda path: replaced(path, lambda at: at.symlink_to(".")),
    "a device": lambda path: replaced(path, lambda at: at.symlink_to("/dev/zero")),
    "of another file": lambda path: shutil.copy(path.with_name("iteration_00002.arrow"), path),
    "an older format": lambda path: a_part(path, PART_SCHEMA.with_metadata({"ragr1_actors.pages.viewer": "2"})),
    "another schema": lambda path: a_part(path, pa.schema({"reward": pa.string()})),
    "no Arrow": lambda path: path.write_text("{}"),
}


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_part_is_made_again(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    keep(tmp_path, "iteration_00001", every_outcome())
    keep(tmp_path, "iteration_00002", [attempt("b")])
    index_of(tmp_path)
    whole = files_of(tmp_path / "view")
    DAMAGES[name](tmp_path / "view" / "iteration_00001.arrow")
    index = index_of(tmp_path)
    assert index.snapshot.num_rows == 8 and index.snapshot.problems == ()
    assert names(index.snapshot, Query(Scope("Ünïque"))) == ["unsearched"]
    assert files_of(tmp_path / "view") == whole
    assert caplog.records == [] and not index.refresh()


def test_no_flipped_byte_of_a_part_is_shown(tmp_path: Path) -> None:
    keep(tmp_path, "iteration_00001", every_outcome())
    index_of(tmp_path)
    part = tmp_path / "view" / "iteration_00001.arrow"
    whole = part.read_bytes()
    for place in [*range(0, len(whole), 97), *range(len(whole) - 16, len(whole))]:
        damaged = bytearray(whole)
        damaged[place] ^= 0x80
        part.write_bytes(damaged)
        snapshot = index_of(tmp_path).snapshot
        assert snapshot.num_rows == 7 and snapshot.problems == () and part.read_bytes() == whole, place


@pytest.mark.parametrize("name", ["missing", "zeros", "longer", "a folder"])
def test_a_part_that_is_damaged_while_it_is_shown_is_made_again(tmp_path: Path, name: str) -> None:
    keep(tmp_path, "iteration_00001", every_outcome())
    keep(tmp_path, "iteration_00002", [attempt("b")])
    index = index_of(tmp_path)
    whole = files_of(tmp_path / "view")
    DAMAGES[name](tmp_path / "view" / "iteration_00001.arrow")
    assert index.refresh() and not index.refresh()
    assert names(index.snapshot, Query(Scope("Ünïque"))) == ["unsearched"]
    assert files_of(tmp_path / "view") == whole


@pytest.mark.parametrize("make", [Path.touch, os.mkfifo, lambda path: path.symlink_to("nothing")])
def test_parts_that_cannot_be_written_are_in_memory_and_one_problem(
    tmp_path: Path, make: Callable[[Path], object], caplog: pytest.LogCaptureFixture
) -> None:
    for iteration in (1, 2, 3):
        keep(tmp_path, f"iteration_{iteration:05d}", every_outcome())
    make(tmp_path / "view")
    index = index_of(tmp_path)
    assert index.snapshot.num_rows == 21 and len(index.snapshot.problems) == 1
    assert str(tmp_path / "view") in index.snapshot.problems[0]
    assert not index.refresh()
    keep(tmp_path, "iteration_00004", every_outcome())
    assert index.refresh() and index.snapshot.num_rows == 28 and len(index.snapshot.problems) == 1
    assert len(caplog.records) == 1


ODD: dict[str, Callable[[Path], object]] = {
    "a FIFO": os.mkfifo,
    "a socket": a_socket,
    "a folder": a_folder,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("nothing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "empty": Path.touch,
}


@pytest.mark.parametrize("name", ODD)
def test_only_regular_files_are_read_and_others_are_named(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path] = []
    map_file = parts.map_file
    monkeypatch.setattr(parts, "map_file", lambda path: (opened.append(path), map_file(path))[1])
    keep(tmp_path, "iteration_00001", every_outcome())
    odd = tmp_path / "trajectories" / "iteration_00002.arrow"
    ODD[name](odd)
    index = index_of(tmp_path)
    assert index.snapshot.num_rows == 7 and index.snapshot.num_files == 2
    (problem,) = index.snapshot.problems
    assert problem.startswith(f"{odd} ") and problem.endswith("remove it from the run")
    assert not index.refresh()
    odd = odd.rename(odd.with_name("iteration_00003.arrow"))
    assert index.refresh() and str(odd) in index.snapshot.problems[0]
    assert name == "empty" or not [path for path in opened if path.name != "iteration_00001.arrow"]
    shutil.rmtree(odd) if odd.is_dir() else odd.unlink()
    assert index.refresh() and index.snapshot.problems == () and index.snapshot.num_files == 1


def test_a_name_that_the_page_cannot_show_is_said(tmp_path: Path) -> None:
    keep(tmp_path, "iteration_00001", every_outcome())
    (tmp_path / "trajectories" / "\x1b[31m.arrow").touch()
    assert [p for p in index_of(tmp_path).snapshot.problems if r"'\x1b[31m.arrow' has characters" in p]


def test_a_file_that_is_replaced_by_a_fifo_or_damaged_is_an_error_of_one_trajectory(tmp_path: Path) -> None:
    keep(tmp_path, "iteration_00001", every_outcome())
    path = tmp_path / "trajectories" / "iteration_00001.arrow"
    snapshot = index_of(tmp_path).snapshot
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    num_refused = 0
    for _ in range(250):  # damaged offsets would end the process
        damaged = bytearray(whole)
        for place in rng.integers(len(whole), size=rng.integers(1, 9)):
            damaged[place] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            trajectory_payload(snapshot, 0, TokenPieces([]))
        except DataError as error:
            num_refused += str(path) in str(error)
    assert num_refused > 100
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match=r"iteration_00001\.arrow cannot be read: it is no regular file"):
        trajectory_payload(snapshot, 0, TokenPieces([]))


def test_a_stopped_index_ends_within_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "WRITTEN_BYTES", 1)  # a batch for each group
    keep(tmp_path, "iteration_00001", [attempt("a")], [attempt("b"), attempt("c")], [attempt("d")])
    source = Source.of(tmp_path / "trajectories" / "iteration_00001.arrow")
    at_once = make_part(source, lambda: False)
    monkeypatch.setattr(parts, "_ROWS_AT_ONCE", 1)
    in_pieces = make_part(source, lambda: False)
    assert at_once is not None and in_pieces is not None and in_pieces.table.equals(at_once.table)
    assert at_once.table.column("batch").to_pylist() == [0, 1, 1, 2]
    asked = iter([False, True])
    assert make_part(source, lambda: next(asked)) is None
    index = Index(tmp_path / "trajectories", tmp_path / "view")
    index.stop()
    index.refresh()
    assert index.snapshot.num_rows == 0
