"""A build that was interrupted at any point goes on, and one process at a time builds an index."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from encoder_world import write_modules
from small_world import ROOT, wait_for

from ragr1_actors.core.errors import DataError
from retrieval.base import Passage
from retrieval.build import build_index, building_dir, index_info
from retrieval.corpora.corpus import Corpus
from retrieval.encoders.embedding import EmbeddingStore
from retrieval.encoders.encoder import Encoder, TokenizedTexts
from retrieval.encoders.families import make_static_encoder
from retrieval.indexes.manifest import Manifest
from retrieval.indexes.vector_index import VectorIndex
from retrieval.local import LocalRetriever

pytestmark = pytest.mark.engine

MANY = [Passage(str(i), f"Person{i}", f"Born in town{i % 97}.") for i in range(5000)]
"""More than one shard of the store."""


def build(out: Path, passages: Any = MANY, **arguments: Any) -> Path:
    return build_index(passages, out, **{"progress": False, **arguments})


def found(directory: Path, query: str) -> list[str]:
    return [passage.id for passage in LocalRetriever(directory).search_batch([query], 1)[0]]


class Counted:
    """Counts the passages that are encoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        embed = Encoder.embed

        def counted(encoder: Encoder, tokens: TokenizedTexts) -> Any:
            self.number += len(tokens.texts)
            return embed(encoder, tokens)

        monkeypatch.setattr(Encoder, "embed", counted)


def interrupt_at_call(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, number: int) -> None:
    """Have the method interrupt its ``number``-th call, counted from 1."""
    method, calls = getattr(owner, name), []

    def interrupted(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            raise KeyboardInterrupt
        return method(*arguments, **named)

    monkeypatch.setattr(owner, name, interrupted)


@pytest.mark.parametrize(
    ("owner", "name", "call", "to_encode"),
    [
        (EmbeddingStore, "write", 1, 5000),
        (EmbeddingStore, "write", 2, 904),
        (VectorIndex, "save", 1, 0),
        (VectorIndex, "save", 2, 0),
        (Manifest, "write", 1, 0),
    ],
)
def test_an_interrupted_build_goes_on_with_what_is_missing(
    tmp_path: Path, owner: Any, name: str, call: int, to_encode: int
) -> None:
    arguments = {"num_shards": 2, "index_type": "hybrid", "vector_type": "sq8"}
    with pytest.MonkeyPatch.context() as monkeypatch:
        interrupt_at_call(monkeypatch, owner, name, call)
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path / "index", MANY, **arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["index.building"]
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "index.building").glob("shard-*.faiss")}
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = Counted(monkeypatch)
        build(tmp_path / "index", iter(MANY), **arguments)
    assert counted.number == to_encode
    assert all((tmp_path / "index" / path.name).stat().st_mtime_ns == written for path, written in kept.items())
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
    assert {path.name for path in (tmp_path / "index").iterdir()} == {
        "manifest.json", "corpus.arrow", "titles.npy", "encoder", "shard-0000.faiss", "shard-0001.faiss", "bm25",
    }  # fmt: skip
    assert index_info(tmp_path / "index") == index_info(build(tmp_path / "at once", MANY, **arguments))


def test_an_interruption_while_passages_are_read_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> Iterator[Passage]:
        yield MANY[0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "index", interrupted())
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """Where an index of ``MANY`` was begun."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        interrupt_at_call(monkeypatch, EmbeddingStore, "write", 2)
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path / "index", MANY)
    return tmp_path / "index"


def files(directory: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in directory.rglob("*") if path.name != "lock"}


@pytest.mark.parametrize(
    ("passages", "arguments", "said"),
    [
        (MANY, {"index_type": "pq"}, r"with other arguments \(index_type 'flat', now 'pq'; vector_type 'flat', now"),
        (
            MANY,
            {"seed": 4},
            r"with other arguments \(seed 0, now 4\); give those to go on, or remove it, or use restart",
        ),
        (MANY[:-1], {}, "of other passages: number 5000 differs"),
        ([*MANY, Passage("x", "", "x")], {}, "of other passages: number 5001 differs"),
        ([*MANY[:9], Passage("9", "Person9", "Born."), *MANY[10:]], {}, "of other passages: number 10 differs"),
        ([*MANY[:9], Passage("x", "Person9", MANY[9].text), *MANY[10:]], {}, "of other passages: number 10 differs"),
    ],
)
def test_an_unfinished_build_of_something_else_stays_until_told(
    unfinished: Path, passages: list[Passage], arguments: dict[str, Any], said: str
) -> None:
    before = files(building_dir(unfinished))
    with pytest.raises(DataError, match=said) as caught:
        build(unfinished, passages, **arguments)
    assert str(building_dir(unfinished)) in str(caught.value)
    assert files(building_dir(unfinished)) == before
    build(unfinished, passages[:50], restart=True, **arguments)
    assert Manifest.read(unfinished).count == 50
    assert [path.name for path in unfinished.parent.iterdir()] == ["index"]


@pytest.mark.parametrize(("owner", "call"), [(EmbeddingStore, 2), (Manifest, 1)])
def test_vectors_of_an_encoder_that_changed_are_refused(tmp_path: Path, owner: Any, call: int) -> None:
    folder = make_static_encoder(tmp_path / "model", ["born in town"], dimension=8)
    with pytest.MonkeyPatch.context() as monkeypatch:
        interrupt_at_call(monkeypatch, owner, "write", call)
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path / "index", MANY, encoder=str(folder))
    shutil.rmtree(folder)
    make_static_encoder(folder, ["born in town"], dimension=8, seed=2)
    with pytest.raises(DataError, match=r"holds vectors of another corpus or encoder \(encoder_fingerprint"):
        build(tmp_path / "index", MANY, encoder=str(folder))


@pytest.mark.parametrize("damage", ["nothing written", "half an argument", "a truncated shard", "half a step"])
def test_what_a_crash_left_is_no_obstacle(unfinished: Path, damage: str) -> None:
    directory = building_dir(unfinished)
    if damage == "nothing written":
        (directory / "arguments.json").unlink()
    elif damage == "half an argument":
        (directory / "arguments.json").rename(directory / "arguments.json.partial")
    elif damage == "a truncated shard":
        path = directory / "embeddings/shard-000000.npy"
        path.write_bytes(path.read_bytes()[:1000])
    else:
        (directory / "shard-0000.faiss.partial").write_bytes(b"half")
        (directory / "encoder.partial").mkdir()
        (directory / "encoder.partial/model.safetensors").write_bytes(b"half")
        shutil.rmtree(directory / "encoder")
    build(unfinished, MANY)
    assert found(unfinished, "Person4999") == ["4999"]
    assert not list(unfinished.glob("*.partial"))


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    directory = building_dir(tmp_path / "index")
    directory.mkdir()
    with (directory / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match=r"another process builds .*index; wait for it or choose another directory"):
            build(tmp_path / "index")
        with pytest.raises(DataError, match="another process builds"):
            build(tmp_path / "index", restart=True)
    assert found(build(tmp_path / "index", MANY[:9]), "Person7") == ["7"]


def _run(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_is_ended_in_the_middle_is_continued(tmp_path: Path, number: signal.Signals) -> None:
    process = _run(
        """
        import sys
        from pathlib import Path
        from retrieval.base import Passage
        from retrieval.build import build_index
        passages = [Passage(str(i), f"Person{i}", f"Born in town{i % 97}.") for i in range(40_000)]
        build_index(passages, Path(sys.argv[1]), encoder=sys.argv[2])
        """,
        str(tmp_path / "index"),
        str(write_modules(tmp_path / "model", "mean")),
    )
    store = building_dir(tmp_path / "index") / "embeddings"
    assert wait_for(lambda: any(store.glob("shard-??????.npy")), 600, process), process.communicate()
    process.send_signal(number)
    process.communicate(timeout=300)
    assert process.returncode != 0
    assert not (tmp_path / "index").exists()
    done = len(list(store.glob("shard-??????.npy")))
    assert 0 < done < 10
    passages = list(Corpus.open(building_dir(tmp_path / "index")))
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = Counted(monkeypatch)
        build(tmp_path / "index", passages, encoder=str(tmp_path / "model"))
    assert counted.number == 40_000 - 4096 * done
    assert Manifest.read(tmp_path / "index").count == 40_000


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_the_same_build_goes_on(tmp_path: Path) -> None:
    """A limit on file sizes fails each writer in turn, as a full disk does: corpus, encoder, vectors, index."""
    process = _run(
        """
        import os, resource, sys
        from ragr1_actors.core.errors import UserError
        from retrieval.base import Passage
        from retrieval.build import build_index
        # Most bytes in the index, fewer in the vectors, in the encoder and in the corpus.
        passages = [Passage(str(i), f"word{i % 1000}", "a b c " * 4) for i in range(4500)]
        for limit in (8_000, 300, 1_000_000, 8_000_000, 9_000_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                build_index(passages, sys.argv[1], progress=False, num_shards=1)
            except UserError as error:
                print(sorted(os.listdir(os.path.dirname(sys.argv[1]))), error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        build_index(passages, sys.argv[1], progress=False, num_shards=1)
        """,
        str(tmp_path / "index"),
    )
    stdout, stderr = process.communicate(timeout=600)
    lines = stdout.splitlines()
    assert len(lines) == 5, stdout + stderr
    sentence = f"the index could not be written to {tmp_path / 'index'} ("
    advice = "; free some room or choose another disk"
    kept = f"; what is done stays in {building_dir(tmp_path / 'index')}, and the same build goes on with it"
    for line in lines:
        assert sentence in line
        assert advice in line
    assert [line.startswith("[] ") for line in lines] == [True, True, False, False, False]
    assert [line.endswith(kept) for line in lines] == [False, False, False, False, True]
    assert Manifest.read(tmp_path / "index").count == 4500
    assert [path.name for path in tmp_path.iterdir()] == ["index"]
