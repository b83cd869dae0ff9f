"""Building an index: all types, whole or absent, continued after an interruption, by one process at a time."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from encoder_world import change_json, write_modules, write_plain

from ragr1_actors.errors import ConfigError, DataError, UserError
from retrieval.base import Passage
from retrieval.build import build_index, index_info
from retrieval.build_directory import building_dir
from retrieval.corpus import Corpus
from retrieval.embeddings import EmbeddingStore
from retrieval.encoder import Encoder
from retrieval.index import VectorIndex
from retrieval.manifest import Manifest
from retrieval.retriever import LocalRetriever
from retrieval.static_encoder import make_static_encoder

NAMES = ["Ana Bell", "Bo Cole", "Çelik Öz", "Dana Fox 1902", "李 明"]
PASSAGES = [Passage(f"p{i}", name, f"{name} was born in town{i}.") for i, name in enumerate(NAMES)]
MANY = [Passage(str(i), f"Person{i}", f"Born in town{i % 97}.") for i in range(5000)]
"""More than one shard of the store."""
ROOT = Path(__file__).resolve().parents[1]


def build(out: Path, passages: Any = PASSAGES, **arguments: Any) -> Path:
    return build_index(passages, out, **{"progress": False, **arguments})


def found(directory: Path, query: str, k: int = 1) -> list[str]:
    return [passage.id for passage in LocalRetriever(directory).search_batch([query], k)[0]]


@pytest.fixture(scope="module")
def index_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("index") / "index")


def test_what_an_index_holds(index_dir: Path) -> None:
    files = {path.relative_to(index_dir).as_posix() for path in index_dir.rglob("*") if path.is_file()}
    assert {name for name in files if not name.startswith("encoder/")} == {
        "manifest.json", "corpus.arrow", "corpus.ids", "shard-0000.faiss",
    }  # fmt: skip
    assert [path.name for path in index_dir.parent.iterdir()] == ["index"]
    info = index_info(index_dir)
    assert (info["count"], info["dimension"], info["index_type"], info["encoder"]) == (5, 512, "flat", "encoder")
    assert (info["metric"], info["vector_type"], info["pooling"]) == ("inner_product", "flat", "static")
    assert info["bytes"] == sum((index_dir / name).stat().st_size for name in files)
    assert info["version"] == Manifest.read(index_dir).version
    assert found(index_dir, "ana bell") == ["p0"]
    with pytest.raises(DataError, match="no index in"):
        index_info(index_dir / "encoder")


@pytest.mark.parametrize(
    ("index_type", "arguments"),
    [
        ("flat", {"num_shards": 3}),
        ("fp16", {}),
        ("sq8", {}),
        ("pq", {"num_shards": 2, "options": {"refine_factor": 8, "rerank_candidates": 5}}),
        ("ivf", {"options": {"num_lists": 4}}),
        ("ivf_pq", {}),
        ("hnsw", {"options": {"m": 8, "ef_construction": 40}}),
        ("bm25", {}),
        ("hybrid", {"vector_type": "sq8"}),
    ],
)
def test_every_type_is_built_and_searched(tmp_path: Path, index_type: str, arguments: dict[str, Any]) -> None:
    out = build(tmp_path / "index", MANY[:200], index_type=index_type, **arguments)
    assert found(out, "Person77 of town77") == ["77"]
    manifest = Manifest.read(out)
    num_shards = 0 if index_type == "bm25" else arguments.get("num_shards", 1)
    assert (manifest.index_type, len(manifest.shards), manifest.has_bm25) == (
        index_type, num_shards, index_type in ("bm25", "hybrid"),
    )  # fmt: skip
    if index_type == "bm25":
        assert (manifest.vector_type, manifest.encoder, manifest.dimension, manifest.pooling) == ("", "", 0, "")
        assert not (out / "encoder").exists()
    else:
        assert manifest.vector_type == arguments.get("vector_type", index_type)
    assert [(shard.start, shard.count) for shard in manifest.shards] == {
        0: [], 1: [(0, 200)], 2: [(0, 100), (100, 100)], 3: [(0, 66), (66, 67), (133, 67)],
    }[num_shards]  # fmt: skip
    names = {file.name for file in manifest.files}
    assert {"corpus.ids"} | {path.relative_to(out).as_posix() for path in (out / "bm25").glob("*")} == names


def test_shards_answer_as_one_index_does(tmp_path: Path) -> None:
    one, three = build(tmp_path / "1", MANY[:100]), build(tmp_path / "3", MANY[:100], num_shards=3)
    for query in ("town5", "Person7 town8 born", "nothing known"):
        assert found(one, query, 10) == found(three, query, 10)


def test_an_existing_index_is_never_overwritten(index_dir: Path, tmp_path: Path) -> None:
    before = index_info(index_dir)
    with pytest.raises(DataError, match="exists already"):
        build(index_dir, PASSAGES[:1])
    assert index_info(index_dir) == before
    (tmp_path / "empty").mkdir()
    assert build(tmp_path / "empty") == tmp_path / "empty"
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_same_passages_same_index(index_dir: Path, tmp_path: Path) -> None:
    again = build(tmp_path / "deep" / "again", iter(PASSAGES))
    assert index_info(again) == index_info(index_dir)
    other = build(tmp_path / "other", iter(PASSAGES), seed=1)
    assert index_info(other)["shards"] != index_info(index_dir)["shards"]


def test_encoder_folder_is_used_from_where_it_is_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_static_encoder("model", [passage.text for passage in PASSAGES], seed=8)
    build(Path("index"), encoder="model")
    monkeypatch.chdir("/")
    assert found(tmp_path / "index", "Ana Bell") == ["p0"]
    shutil.rmtree(tmp_path / "model")
    make_static_encoder(tmp_path / "model", [passage.text for passage in PASSAGES], seed=9)
    with pytest.raises(DataError, match=r"fingerprint .* was built with .* use that encoder or build"):
        LocalRetriever(tmp_path / "index")


def test_pooling_and_prompts_are_kept_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_plain(tmp_path / "e5-base-v2")
    build(tmp_path / "index", encoder=str(folder), progress=True)
    manifest = Manifest.read(tmp_path / "index")
    assert (manifest.pooling, manifest.query_prompt, manifest.passage_prompt) == ("mean", "query: ", "passage: ")
    assert "pooling 'mean' and prompts of the e5 family" in capsys.readouterr().out.replace("\n", " ")
    assert found(tmp_path / "index", "Ana Bell")
    shutil.rmtree(folder)  # the same weights, pooled in another way
    write_modules(folder.with_name("bge"), "cls").rename(folder.with_name("model"))
    change_json(tmp_path / "index/manifest.json", encoder=str(folder.with_name("model")))
    with pytest.raises(DataError, match=r"fingerprint .* use that encoder or build the index again"):
        LocalRetriever(tmp_path / "index")


def test_arguments_are_checked_before_anything_is_made(tmp_path: Path) -> None:
    for arguments, error, said in [
        ({"index_type": "cube"}, ConfigError, "unknown index type 'cube'; expected one of: flat, .*, bm25, hybrid"),
        ({"index_type": "hybird"}, ConfigError, "did you mean 'hybrid'"),
        ({"index_type": "hybrid", "vector_type": "bm25"}, ConfigError, "unknown vector type 'bm25' of a hybrid index"),
        ({"options": {"num_list": 3}, "index_type": "ivf"}, ConfigError, "did you mean 'num_lists'"),
        ({"options": {"m": 3}}, ConfigError, "unknown option 'm' of index type 'flat'"),
        ({"num_shards": 0}, ConfigError, "got 0 shards .* expected at least 1"),
        ({"num_shards": 2, "index_type": "bm25"}, ConfigError, "got 2 shards .* expected 1, as it has no vectors"),
        ({"num_shards": 6}, ConfigError, "got 6 shards for 5 passages; ask for fewer"),
        ({"device": "tpu5"}, ConfigError, "unknown device 'tpu5'"),
        ({"encoder": "./nowhere"}, DataError, "no encoder folder"),
        ({"encoder": ""}, DataError, "the encoder's name is empty"),
    ]:
        with pytest.raises(error, match=said):
            build(tmp_path / "a", **arguments)
        assert list(tmp_path.iterdir()) == []


def test_passages_that_cannot_be_indexed_leave_nothing(tmp_path: Path) -> None:
    def broken() -> Iterator[Passage]:
        yield PASSAGES[0]
        raise DataError("corpus.jsonl, line 2: not valid JSON")

    for passages, said in [
        ([PASSAGES[0], PASSAGES[0]], "used twice"),
        ([], "no passages"),
        ([Passage("a", "", "?!")], "texts with words in them"),
        (broken(), "line 2"),
    ]:
        with pytest.raises(DataError, match=said):
            build(tmp_path / "a", passages)
        assert list(tmp_path.iterdir()) == []


class Counted:
    """Counts the passages that are encoded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.number = 0
        encode = Encoder.encode_passages

        def counted(encoder: Encoder, passages: list[Passage]) -> Any:
            self.number += len(passages)
            return encode(encoder, passages)

        monkeypatch.setattr(Encoder, "encode_passages", counted)


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
        "manifest.json", "corpus.arrow", "corpus.ids", "encoder", "shard-0000.faiss", "shard-0001.faiss", "bm25",
    }  # fmt: skip
    assert index_info(tmp_path / "index") == index_info(build(tmp_path / "at once", MANY, **arguments))


def test_an_interruption_while_passages_are_read_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> Iterator[Passage]:
        yield PASSAGES[0]
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
        (MANY, {"seed": 4}, r"with other arguments \(seed 0, now 4\); give those to go on, or start anew by removing"),
        (MANY[:-1], {}, "of other passages: number 5000 differs"),
        ([*MANY, PASSAGES[0]], {}, "of other passages: number 5001 differs"),
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


def test_vectors_of_an_encoder_that_changed_are_refused(tmp_path: Path) -> None:
    folder = make_static_encoder(tmp_path / "model", ["born in town"], dimension=8)
    with pytest.MonkeyPatch.context() as monkeypatch:
        interrupt_at_call(monkeypatch, EmbeddingStore, "write", 2)
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
    assert found(build(tmp_path / "index"), "Ana Bell") == ["p0"]


def _run(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_process_that_is_ended_in_the_middle_is_continued(tmp_path: Path, number: signal.Signals) -> None:
    from small_world import wait_for

    process = _run(
        """
        import sys
        from pathlib import Path
        from retrieval.base import Passage
        from test_retrieval_build import build
        passages = [Passage(str(i), f"Person{i}", f"Born in town{i % 97}.") for i in range(40_000)]
        build(Path(sys.argv[1]), passages, encoder=sys.argv[2])
        """,
        str(tmp_path / "index"),
        str(write_modules(tmp_path / "model", "mean")),
    )
    store = building_dir(tmp_path / "index") / "embeddings"
    assert wait_for(lambda: any(store.glob("*.npy")), 200, process), process.communicate()
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert not (tmp_path / "index").exists()
    done = len(list(store.glob("shard-??????.npy")))
    assert 0 < done < 10
    (passages,) = [list(Corpus.open(building_dir(tmp_path / "index")))]
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted = Counted(monkeypatch)
        build(tmp_path / "index", passages, encoder=str(tmp_path / "model"))
    assert counted.number == 40_000 - 4096 * done
    assert Manifest.read(tmp_path / "index").count == 40_000


def test_a_full_disk_is_one_sentence_and_the_same_build_goes_on(tmp_path: Path) -> None:
    """A limit on file sizes fails each writer in turn, as a full disk does: corpus, encoder, vectors, index."""
    process = _run(
        """
        import os, resource, sys
        from ragr1_actors.errors import UserError
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
    stdout, stderr = process.communicate(timeout=200)
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


def test_arguments_of_a_finished_build_are_not_kept(index_dir: Path, tmp_path: Path) -> None:
    """Nor the lock: what is left is the index alone, which may be copied."""
    copy = shutil.copytree(index_dir, tmp_path / "copy")
    assert json.loads((copy / "manifest.json").read_text())["version"] == index_info(copy)["version"]
    assert not any((index_dir / name).exists() for name in ("arguments.json", "lock", "embeddings"))


def test_errors_are_user_errors() -> None:
    damage: Callable[[str], UserError] = DataError
    assert isinstance(damage("x"), UserError)
