"""`ragr1 index adopt`: damaged and other files, links and copies, empty passages, and the use of an adopted index."""

from __future__ import annotations

import errno
import json
import os
import pickle
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from adopt_world import COUNT, DIMENSION, LINE, TOWNS, adopt, encoded, make_encoder, make_index, write
from encoder_world import change_json
from numpy.typing import NDArray
from typer.testing import CliRunner

from ragr1_actors.cli.main import app
from ragr1_actors.core.config import RetrievalSettings
from ragr1_actors.core.errors import ConfigError, DataError, UserError
from ragr1_actors.core.types import Task
from retrieval.adopt import adopt_index
from retrieval.base import Passage
from retrieval.build import ARGUMENTS_FILE, as_user_error, build_index, building_dir, index_info
from retrieval.corpora.corpus import Corpus
from retrieval.evaluation import evaluate_index
from retrieval.indexes.faiss_file import FaissFile
from retrieval.indexes.manifest import Manifest
from retrieval.local import LocalRetriever, named_index
from retrieval.replicas.retriever_group import RetrieverGroup

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder") / "model")


@pytest.fixture(scope="module")
def vectors(encoder: Path) -> NDArray[np.float32]:
    return encoded(encoder)


@pytest.fixture
def flat(vectors: NDArray[np.float32], tmp_path: Path) -> Path:
    return write(make_index(vectors), tmp_path / "e5_Flat.index")


# Files that are no whole index

KEYS = ["Flat", "IDMap,SQ8", "IVF8,PQ16x4fs", "HNSW8_SQ8", "RR32,PQ16x4np", "PQ16x4fs,RFlat"]


@pytest.mark.parametrize("key", KEYS)
def test_a_file_that_is_cut_off_or_too_long_is_refused(key: str, vectors: NDArray[np.float32], tmp_path: Path) -> None:
    whole = write(make_index(vectors, key), tmp_path / "whole.index").read_bytes()
    file = tmp_path / "made.index"
    sizes = {
        *range(1, 120),
        *range(len(whole) - 40, len(whole)),
        *np.linspace(1, len(whole) - 1, 60).astype(int).tolist(),
    }
    for size in sorted(sizes):
        file.write_bytes(whole[:size])
        with pytest.raises(
            DataError, match=r"made\.index: (no whole FAISS index|got [\d,]+ bytes, but the FAISS index in)"
        ):
            FaissFile.open(file)
    file.write_bytes(whole + b"\0")
    with pytest.raises(DataError, match="join all of its parts in order"):
        FaissFile.open(file)
    file.write_bytes(whole)
    assert FaissFile.open(file).count == COUNT


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_a_pickle_is_never_opened(encoder: Path, tmp_path: Path) -> None:
    file = tmp_path / "split_0.pickle"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        file.write_bytes(pickle.dumps(Bomb(str(tmp_path / "bomb")), protocol=protocol))
        with pytest.raises(
            DataError, match="a pickle, which is never opened" if protocol > 1 else "no whole FAISS index"
        ):
            adopt(file, tmp_path / "index", encoder)
    assert not (tmp_path / "bomb").exists()


@pytest.mark.parametrize(
    ("start", "problem"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 64558311469\n",
            "a Git LFS pointer .* `git lfs pull`",
        ),
        (b"", "an empty file"),
        (b"\x1f\x8b\x08\0\0\0", "compressed with gzip"),
        (b"BZh91AY", "compressed with bzip2"),
        (b"\xfd7zXZ\0", "compressed with xz"),
        (b"\x28\xb5\x2f\xfd\0", "compressed with zstd"),
        (b"PK\x03\x04\x14", "a zip archive"),
        (b"\x93NUMPY\x01", "an array of NumPy"),
        (b"<!DOCTYPE html><html>" * 20, r"no whole FAISS index \(Index type .* not recognized\)"),
    ],
)
def test_what_is_no_index_is_named(start: bytes, problem: str, encoder: Path, tmp_path: Path) -> None:
    file = tmp_path / "e5_Flat.index"
    file.write_bytes(start)
    with pytest.raises(DataError, match=problem) as caught:
        adopt(file, tmp_path / "index", encoder)
    assert len(str(caught.value)) < 400


def test_a_missing_file_and_an_index_directory_are_refused(encoder: Path, flat: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(DataError, match="no index file"):
            adopt(path, tmp_path / "index", encoder)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").touch()
    with pytest.raises(DataError, match="is not overwritten"):
        adopt(flat, tmp_path / "full", encoder)


@pytest.mark.parametrize("metric", [faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2])
def test_an_index_without_vectors_is_refused(metric: int, encoder: Path, tmp_path: Path) -> None:
    file = write(faiss.index_factory(DIMENSION, "Flat", metric), tmp_path / "made.index")
    with pytest.raises(DataError, match=r"IndexFlat\w* holds no vectors; give the file that they were added to"):
        adopt(file, tmp_path / "index", encoder)


HOLDS_NAN = r"made\.index: its vectors hold NaN or infinity; make the file again"


def test_l2_over_nan_is_named(encoder: Path, vectors: NDArray[np.float32], tmp_path: Path) -> None:
    made = vectors.copy()
    made[0, 3] = np.nan
    with pytest.raises(DataError, match=HOLDS_NAN):
        adopt(write(make_index(made, metric=faiss.METRIC_L2), tmp_path / "made.index"), tmp_path / "index", encoder)


@pytest.mark.parametrize("key", ["Flat", "SQfp16", "SQbf16", "HNSW8", "IVF8,Flat", "IVF8,SQfp16", "PQ16x4np,RFlat"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_in_a_vector_that_is_not_compared_is_found(
    key: str, bad: float, vectors: NDArray[np.float32], tmp_path: Path
) -> None:
    made, seen = make_index(vectors, key), list[int]()
    FaissFile.open(write(made, tmp_path / "whole.index")).check_finite(seen.append)
    assert sum(seen) == COUNT
    inner = faiss.downcast_index(made.refine_index) if "RFlat" in key else made
    kept = faiss.downcast_index(inner.storage) if key == "HNSW8" else inner
    number = np.array([bad], "f4").view(np.uint8)
    if "16" in key and "RFlat" not in key:
        number = np.array([bad], "f2").view(np.uint8) if "fp16" in key else number[2:]  # bfloat16 is its upper half
    lists = kept.invlists if "IVF" in key else None
    size = kept.code_size * (lists.list_size(5) if lists else COUNT)
    codes = faiss.rev_swig_ptr(lists.get_codes(5) if lists else kept.codes.data(), size)
    codes[-len(number) :] = number  # the last number of a vector
    file = FaissFile.open(write(made, tmp_path / "made.index"))
    with pytest.raises(DataError, match=HOLDS_NAN):
        file.check_finite(seen.append)


def test_nan_anywhere_is_refused(encoder: Path, vectors: NDArray[np.float32], tmp_path: Path) -> None:
    """A full scan would take the NaN of one failed batch for the best scores."""
    made = vectors.copy()
    made[2] = np.nan  # of 400 vectors 256 are compared, the third not
    with pytest.raises(DataError, match=HOLDS_NAN):
        adopt(write(make_index(made), tmp_path / "made.index"), tmp_path / "index", encoder)
    assert not building_dir(tmp_path / "index").exists()


def test_a_transformation_that_makes_nan_is_refused(
    encoder: Path, vectors: NDArray[np.float32], tmp_path: Path
) -> None:
    index = make_index(vectors, "RR32,Flat")
    rotation = faiss.downcast_VectorTransform(index.chain.at(0))
    faiss.copy_array_to_vector(np.full(DIMENSION * DIMENSION, np.nan, np.float32), rotation.A)
    with pytest.raises(DataError, match="IndexPreTransform of IndexFlatIP makes NaN or infinity of the vectors of enc"):
        adopt(write(index, tmp_path / "made.index"), tmp_path / "index", encoder)


def test_paths_that_the_system_refuses_are_one_sentence(encoder: Path, flat: Path, tmp_path: Path) -> None:
    too_long = tmp_path / ("x" * 300)
    with pytest.raises(DataError, match=r"cannot be read \(File name too long\); give a file that this user may read"):
        adopt(too_long, tmp_path / "index", encoder)
    with pytest.raises(UserError, match=r"could not be written to .* \(File name too long\)"):
        adopt(flat, too_long, encoder)
    denied = as_user_error(OSError(errno.EROFS, "Read-only file system"), tmp_path)
    assert "(Read-only file system); choose another directory, one that this user may write to" in str(denied)


@pytest.mark.parametrize("copy", [False, True])
@pytest.mark.parametrize("how", ["written to", "replaced"])
def test_a_file_that_changes_while_it_is_compared_is_refused(
    how: str, copy: bool, encoder: Path, flat: Path, vectors: NDArray[np.float32], tmp_path: Path
) -> None:
    other = write(make_index(np.roll(vectors, 1, axis=0)), tmp_path / "other.index")

    def changing() -> Iterator[Passage]:
        yield from TOWNS
        if how == "replaced":
            other.replace(flat)
        else:
            with flat.open("r+b") as file:
                file.write(other.read_bytes()[:4])  # the same bytes
            os.utime(flat, ns=(1, 1))

    out = tmp_path / "index"
    with pytest.raises(DataError, match="was changed or replaced while it was compared with the corpus; wait"):
        adopt_index(flat, changing(), out, encoder=str(encoder), copy=copy, progress=False)
    assert not building_dir(out).exists()


# Links and copies


def test_the_file_gets_a_second_name_or_a_copy(encoder: Path, flat: Path, tmp_path: Path) -> None:
    (tmp_path / "snapshot").symlink_to(flat)  # as the hub's cache has files
    adopt(tmp_path / "snapshot", tmp_path / "linked", encoder)
    adopt(flat, tmp_path / "copied", encoder, copy=True)
    linked, copied = tmp_path / "linked/shard-0000.faiss", tmp_path / "copied/shard-0000.faiss"
    assert linked.samefile(flat)
    assert not linked.is_symlink()
    assert not copied.samefile(flat)
    assert copied.read_bytes() == flat.read_bytes()
    assert sorted(path.name for path in copied.parent.iterdir()) == [
        "corpus.arrow",
        "manifest.json",
        "shard-0000.faiss",
        "titles.npy",
    ]
    assert index_info(linked.parent) == index_info(copied.parent)
    with flat.open("r+b") as file:
        file.write(b"IxF2")
    with pytest.raises(DataError, match="got fingerprint"):
        LocalRetriever(linked.parent)
    assert LocalRetriever(copied.parent).search_batch(["town 3"], 1)


def test_a_file_on_another_file_system_needs_a_copy(
    encoder: Path, vectors: NDArray[np.float32], tmp_path: Path
) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system, /dev/shm")
    file = write(make_index(vectors), memory / f"{os.getpid()}_made.index")
    try:
        with pytest.raises(
            DataError, match=r"cannot have a second name in .*; add --copy, or choose an --out on its file"
        ):
            adopt(file, tmp_path / "index", encoder)
        assert not building_dir(tmp_path / "index").exists()
        adopt(file, tmp_path / "index", encoder, copy=True)
    finally:
        file.unlink()
    assert LocalRetriever(tmp_path / "index").search_batch(["town 3"], 1)


def test_after_an_interruption_the_same_call_goes_on(encoder: Path, flat: Path, tmp_path: Path) -> None:
    def interrupted() -> Iterator[Passage]:
        yield from TOWNS[:10]
        raise KeyboardInterrupt

    out = tmp_path / "index"
    with pytest.raises(KeyboardInterrupt):
        adopt_index(flat, interrupted(), out, encoder=str(encoder), progress=False)
    assert not out.exists()
    adopt(flat, out, encoder)
    assert not building_dir(out).exists()
    unfinished = building_dir(tmp_path / "built")
    unfinished.mkdir()
    (unfinished / "arguments.json").write_text("{}")
    with pytest.raises(DataError, match="is of an unfinished build with other arguments"):
        adopt(flat, tmp_path / "built", encoder)
    adopt(flat, tmp_path / "built", encoder, restart=True)
    assert index_info(tmp_path / "built")["count"] == COUNT


def test_what_a_killed_process_was_writing_does_not_stay(encoder: Path, flat: Path, tmp_path: Path) -> None:
    out = tmp_path / "index"
    directory = building_dir(out)
    adopt(flat, tmp_path / "first", encoder)
    directory.mkdir()
    arguments = {"adopted": str(flat.resolve()), "encoder": str(encoder)}
    (directory / ARGUMENTS_FILE).write_text(json.dumps(arguments))
    (directory / ".corpus-a1b2").mkdir()  # as SIGKILL leaves it
    (directory / ".corpus-a1b2/text.data").write_text("half")
    (directory / ".writing_a1b2_shard-0000.faiss").write_text("half")
    adopt(flat, out, encoder)
    names = [sorted(path.name for path in folder.iterdir()) for folder in (tmp_path / "first", out)]
    assert names[0] == names[1]


def test_a_link_to_a_directory_is_followed(encoder: Path, flat: Path, tmp_path: Path) -> None:
    (tmp_path / "disk/indexes").mkdir(parents=True)
    (tmp_path / "link").symlink_to("disk/indexes")
    adopt(flat, tmp_path / "link", encoder)
    assert (tmp_path / "link").is_symlink()
    assert LocalRetriever(tmp_path / "disk/indexes").search_batch(["town 3"], 1)
    (tmp_path / "new").symlink_to("disk/new")
    build_index(TOWNS[:5], tmp_path / "new", index_type="bm25", progress=False)
    assert index_info(tmp_path / "disk/new")["count"] == 5


def test_a_mounted_directory_is_refused_before_the_work(
    encoder: Path, flat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == tmp_path / "volume")
    (tmp_path / "volume").mkdir()
    with pytest.raises(DataError, match=r"volume is where a file system is mounted.*; choose a new directory in it"):
        adopt(flat, tmp_path / "volume", encoder)
    adopt(flat, tmp_path / "volume/index", encoder)


# Empty passages

EMPTY = range(7, COUNT - 3, 3)
SPARSE = [replace(p, title="", text=" - \n") if row in EMPTY else p for row, p in enumerate(TOWNS)]


@pytest.mark.parametrize("key", ["Flat", "SQ8", "HNSW8", "IDMap,IVF8,Flat", "IVF8,PQ16x4np"])
def test_empty_passages_keep_their_rows_and_are_never_found(
    key: str, encoder: Path, vectors: NDArray[np.float32], tmp_path: Path
) -> None:
    near = vectors.copy()
    noise = np.random.default_rng(0).standard_normal((len(EMPTY), DIMENSION)).astype(np.float32)
    near[list(EMPTY)] = _unit(vectors[0] + 0.02 * noise)  # nearer to the first query than any passage but its own
    file = write(make_index(near, key), tmp_path / "made.index")
    adopt(file, tmp_path / "index", encoder, SPARSE)
    manifest = Manifest.read(tmp_path / "index")
    assert [record.name for record in manifest.files] == ["empty.npy", "titles.npy"]
    assert Corpus.open(tmp_path / "index")[7] == SPARSE[7]
    options = dict.fromkeys(manifest.options, COUNT)
    retriever = LocalRetriever(tmp_path / "index", options=options)
    queries = [f"town 0 {TOWNS[0].text}", f"town 399 {TOWNS[399].text}"]
    for k in (1, 5, 300):
        found = retriever.search_batch(queries, k)
        assert [passages[0].id for passages in found] == ["t0", "t399"]
        assert [len(passages) for passages in found] == [min(k, COUNT - len(EMPTY))] * 2
        assert not {passage.id for passages in found for passage in passages} & {f"t{row}" for row in EMPTY}
        assert all(a.score >= b.score for passages in found for a, b in pairwise(passages))
    tasks = [Task(str(number), query, ("x",)) for number, query in enumerate(queries)]
    if key != "Flat":
        assert evaluate_index(tmp_path / "index", tasks, exact=True, options=options)["exact_recall@2"] > 0.7
    asked = evaluate_index(tmp_path / "index", tasks, exact=True, options=options)
    assert asked["exact_recall@2"] == 1 or key == "IVF8,PQ16x4np"


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    scaled: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return scaled


def test_a_corpus_of_empty_passages_is_refused(encoder: Path, flat: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none of the 400 passages has a letter or a digit"):
        adopt(flat, tmp_path / "index", encoder, [Passage(str(row), "-", "") for row in range(COUNT)])


# What comes after it


def test_options_are_the_makers_or_the_usual_ones(encoder: Path, vectors: NDArray[np.float32], tmp_path: Path) -> None:
    index = make_index(vectors, "IVF64,PQ16x4np,RFlat")
    adopt(write(index, tmp_path / "usual.index"), tmp_path / "usual", encoder)
    assert Manifest.read(tmp_path / "usual").options == {"num_probes": 8, "refine_factor": 8}
    index.k_factor = 3
    faiss.downcast_index(index.base_index).nprobe = 5
    adopt(write(index, tmp_path / "set.index"), tmp_path / "set", encoder)
    assert Manifest.read(tmp_path / "set").options == {"num_probes": 5, "refine_factor": 3}
    assert Manifest.read(tmp_path / "set").version != Manifest.read(tmp_path / "usual").version
    graph = make_index(vectors, "HNSW8")
    adopt(write(graph, tmp_path / "graph.index"), tmp_path / "graph", encoder)
    assert Manifest.read(tmp_path / "graph").options == {"ef_search": 128}
    with pytest.raises(ConfigError, match=r"option 'ef_search': the index, IndexRefineFlat of IndexIVFPQ, has no part"):
        LocalRetriever(tmp_path / "set", options={"ef_search": 9})
    with pytest.raises(ConfigError, match=r"index type 'faiss': unknown key options\.num_lists"):
        LocalRetriever(tmp_path / "set", options={"num_lists": 9})
    by_probes = [recall(tmp_path / "usual", vectors, num_probes=number, refine_factor=40) for number in (1, 8, 64)]
    assert by_probes[0] < by_probes[1] < by_probes[2] == 1
    assert recall(tmp_path / "usual", vectors, num_probes=0, refine_factor=40) == by_probes[1]
    by_factor = [recall(tmp_path / "usual", vectors, num_probes=64, refine_factor=factor) for factor in (1, 8)]
    assert by_factor[0] < by_factor[1]


def recall(directory: Path, vectors: NDArray[np.float32], **options: int) -> float:
    """The share of the nearest ten of each vector that is found."""
    rows = LocalRetriever(directory, options=options).rank([""] * COUNT, 10, vectors).rows
    truth = np.argsort(-(vectors @ vectors.T), axis=1)[:, :10]
    return float(np.mean([np.isin(some, true).mean() for some, true in zip(rows, truth, strict=True)]))


def test_a_layout_that_is_unknown_is_refused(encoder: Path, flat: Path, tmp_path: Path) -> None:
    adopt(flat, tmp_path / "index", encoder)
    change_json(tmp_path / "index/manifest.json", layout="{title.__class__}", digest=None)
    with pytest.raises(DataError, match=r"damaged: layout: .*not one of"):
        Manifest.read(tmp_path / "index")


def test_a_retriever_pickles_and_a_run_takes_the_index(encoder: Path, flat: Path, tmp_path: Path) -> None:
    out = tmp_path / "index"
    adopt(flat, out, encoder)
    retriever = LocalRetriever(out)
    assert pickle.loads(pickle.dumps(retriever)).search_batch(["town 9"], 2) == retriever.search_batch(["town 9"], 2)
    settings = RetrievalSettings(index=str(out), encoder=str(encoder), num_retrievers=0)
    assert named_index(settings) == out
    assert RetrieverGroup(out, settings).retriever().search
    with pytest.raises(
        ConfigError, match=r"retrieval\.num_shards: got 2, but an adopted index is one file; set it to 1"
    ):
        RetrieverGroup(out, RetrievalSettings(num_shards=2))


def test_the_command_line(encoder: Path, vectors: NDArray[np.float32], tmp_path: Path) -> None:
    corpus = tmp_path / "wiki-18.jsonl"
    corpus.write_text("".join(json.dumps(asdict(passage)) + "\n" for passage in SPARSE))
    file, out = write(make_index(vectors, "IVF8,Flat"), tmp_path / "e5.index"), tmp_path / "index"
    command = ["index", "adopt", str(file), "--corpus", str(corpus), "--encoder", str(encoder), "--out", str(out)]
    printed = CliRunner().invoke(app, command)
    assert printed.exit_code == 0, printed.output
    told = " ".join(printed.output.split())
    assert f"IndexIVFFlat: 256 passages written as {LINE!r} have a mean cosine of 1.0000 with their vectors" in told
    shape = 'wiki-18.jsonl ({"title", "text"[, "id"]}): 400 passages of 400 records'
    empty = "130 passages without a letter or a digit, never found (32%; line 8, line 11, line 14, ...)"
    assert f"{shape}; {empty}" in told
    assert "400 passages" in told
    assert "searched as type ivf" in told
    again = CliRunner().invoke(app, command)
    assert isinstance(again.exception, DataError)  # which ``ragr1`` prints as one line
    assert "is not overwritten" in str(again.exception)
    shown = CliRunner().invoke(
        app, ["index", "search", str(out), f"town 8 {TOWNS[8].text}", "--option", "num_probes=8", "--json"]
    )
    assert json.loads(shown.output)[0]["passages"][0]["id"] == "t8"
    info = CliRunner().invoke(app, ["index", "info", str(out), "--json"])
    assert json.loads(info.output)["layout"] == LINE
    assert json.loads(info.output)["corpus_report"]["num_empty"] == len(EMPTY)


def test_a_built_index_is_as_before(tmp_path: Path) -> None:
    manifest = Manifest.read(build_index(TOWNS[:20], tmp_path / "index", progress=False))
    assert (manifest.layout, manifest.options, manifest.is_adopted, manifest.files[0].name) == (
        "",
        {},
        False,
        "encoder/digests.json",
    )
