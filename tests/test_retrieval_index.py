"""Index directories: exact search, what is refused, and what a failed build leaves."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragr1_actors.errors import ConfigError, DataError, UserError
from ragr1_actors.types import Task
from retrieval.base import Passage
from retrieval.build import build_index, evaluate_index, index_info
from retrieval.corpus import write_corpus
from retrieval.encoder import make_static_encoder
from retrieval.index import VectorIndex
from retrieval.retriever import LocalRetriever

NAMES = ["Ana Bell", "Bo Cole", "Çelik Öz", "Dana Fox 1902", "李 明"]
PASSAGES = [Passage(f"p{i}", name, f"{name} was born in town{i}.") for i, name in enumerate(NAMES)]


@pytest.fixture(scope="module")
def index_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_index(PASSAGES, tmp_path_factory.mktemp("index") / "index", progress=False)


@pytest.fixture(scope="module")
def retriever(index_dir: Path) -> LocalRetriever:
    return LocalRetriever(index_dir)


@pytest.fixture
def copy(index_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(index_dir, tmp_path / "copy"))


def test_names_find_their_passages_in_any_script(retriever: LocalRetriever) -> None:
    found = retriever.search_batch([name.upper() for name in NAMES], 2)
    assert [passages[0].id for passages in found] == [passage.id for passage in PASSAGES]
    assert all(passages[0].score > passages[1].score for passages in found)
    best = found[0][0]
    assert (best.title, best.text) == ("Ana Bell", "Ana Bell was born in town0.")


def test_k_beyond_the_corpus_empty_lists_and_nonsense(retriever: LocalRetriever) -> None:
    (found,) = retriever.search_batch(["Ana Bell"], 50)
    assert sorted(passage.id for passage in found) == [passage.id for passage in PASSAGES]
    assert retriever.search_batch([], 3) == []
    assert retriever.search_batch(["", "xyzzy", "\x00\x07", "\ud800", "Bo\x00 \tCole\n"], 1) == [
        [], [], [], [], retriever.search_batch(["bo cole"], 1)[0],
    ]  # fmt: skip
    with pytest.raises(ValueError, match="k=0"):
        retriever.search_batch(["Ana Bell"], 0)


async def test_async_search_leaves_the_loop_free_and_pickles(retriever: LocalRetriever) -> None:
    answers = await asyncio.gather(*[retriever.search([name], 1) for name in NAMES])
    assert [answer[0][0].title for answer in answers] == NAMES
    again: LocalRetriever = pickle.loads(pickle.dumps(retriever))
    assert await again.search(NAMES, 3) == retriever.search_batch(NAMES, 3)


@given(
    seed=st.integers(0, 10**6), count=st.integers(1, 400), k=st.integers(1, 12), size=st.integers(1, 40),
    repeats=st.booleans(),
)  # fmt: skip
@settings(deadline=None, max_examples=40)
def test_search_is_exact_and_the_same_in_any_batch(seed: int, count: int, k: int, size: int, repeats: bool) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((count, 64), dtype=np.float32)
    if repeats:  # equal scores
        vectors = vectors[rng.integers(0, count, count)]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries = rng.standard_normal((size, 64), dtype=np.float32)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    index = VectorIndex.build(np.array_split(vectors, 3), 64)
    scores, rows = index.search(queries, k, 1)
    assert rows.shape == scores.shape == (size, min(k, count))
    truth = -np.sort(-(queries @ vectors.T), axis=1)[:, :k]
    assert np.allclose(scores, truth, atol=1e-5)
    for number in range(size):
        alone_scores, alone_rows = index.search(queries[number : number + 1], k, 1)
        assert np.array_equal(alone_scores[0], scores[number])
        if not repeats:
            assert np.array_equal(alone_rows[0], rows[number])


def test_info_and_recall(index_dir: Path) -> None:
    info = index_info(index_dir)
    assert (info["count"], info["dimension"], info["index_type"], info["encoder"]) == (5, 512, "flat", "encoder")
    assert info["bytes"] > info["index_bytes"] > 0
    tasks = [
        Task("a", "Where was Ana Bell born?", ("x",), supporting_ids=("p0",)),
        Task("b", "bo cole", ("x",), supporting_ids=("p1", "absent")),
        Task("c", "no evidence known", ("x",)),
    ]
    assert evaluate_index(index_dir, tasks, ks=(1, 5)) == {"recall@1": 0.75, "recall@5": 0.75}
    with pytest.raises(DataError, match="supporting"):
        evaluate_index(index_dir, tasks[2:])


def test_an_existing_index_is_never_overwritten(index_dir: Path, tmp_path: Path) -> None:
    before = index_info(index_dir)
    with pytest.raises(DataError, match="exists already"):
        build_index(PASSAGES[:1], index_dir, progress=False)
    assert index_info(index_dir) == before
    (tmp_path / "empty").mkdir()
    assert build_index(PASSAGES, tmp_path / "empty", progress=False) == tmp_path / "empty"
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


def test_same_passages_same_index(index_dir: Path, tmp_path: Path) -> None:
    again = build_index(iter(PASSAGES), tmp_path / "deep" / "again", progress=False)
    assert index_info(again) == index_info(index_dir)
    other = build_index(iter(PASSAGES), tmp_path / "other", seed=1, progress=False)
    assert index_info(other)["index_hash"] != index_info(index_dir)["index_hash"]


def test_encoder_folder_is_used_from_where_it_is_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_static_encoder("model", [passage.text for passage in PASSAGES], seed=8)
    build_index(PASSAGES, "index", encoder="model", progress=False)
    monkeypatch.chdir("/")
    assert LocalRetriever(tmp_path / "index").search_batch(["Ana Bell"], 1)[0][0].id == "p0"
    shutil.rmtree(tmp_path / "model")
    make_static_encoder(tmp_path / "model", [passage.text for passage in PASSAGES], seed=9)
    with pytest.raises(DataError, match=r"fingerprint .* was built with .* use that encoder or build"):
        LocalRetriever(tmp_path / "index")


def _truncate(directory: Path) -> None:
    path = directory / "index.faiss"
    path.write_bytes(path.read_bytes()[:-100])


def _foreign(directory: Path) -> None:
    path = directory / "index.faiss"
    path.write_bytes(b"x" * path.stat().st_size)


def _of_other_vectors(directory: Path) -> None:
    path = directory / "index.faiss"
    index = faiss.read_index(str(path))
    faiss.write_index(VectorIndex.build([np.ones((index.ntotal, index.d), np.float32)], index.d)._index, str(path))


def _manifest(change: Callable[[dict[str, object]], None]) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        content = json.loads((directory / "manifest.json").read_text())
        change(content)
        (directory / "manifest.json").write_text(json.dumps(content))

    return damage


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_truncate, r"index\.faiss: got \d+ bytes, expected \d+"),
        (_foreign, r"index\.faiss: got hash"),
        (_of_other_vectors, r"index\.faiss: got hash .* belongs to another index"),
        (lambda d: (d / "index.faiss").unlink(), r"no .*index\.faiss"),
        (lambda d: write_corpus(PASSAGES[::-1], d), "rows changed"),
        (lambda d: write_corpus(PASSAGES[:-1], d), "got 4 passages .* built over 5"),
        (lambda d: (d / "corpus.arrow").write_bytes(b"ARROW1"), "not a whole Arrow file"),
        (lambda d: (d / "corpus.arrow").unlink(), "no corpus"),
        (lambda d: (d / "manifest.json").unlink(), r"manifest\.json is missing"),
        (lambda d: (d / "manifest.json").write_text("{"), "not valid JSON"),
        (lambda d: (d / "manifest.json").write_text("[]"), "format version None, expected 1"),
        (_manifest(lambda m: m.update(format_version=99)), "format version 99, expected 1"),
        (_manifest(lambda m: m.pop("count")), "missing or unknown: count"),
        (_manifest(lambda m: m.update(encoder_fingerprint="0" * 64)), "use that encoder"),
        (lambda d: shutil.rmtree(d / "encoder"), "encoder"),
        (shutil.rmtree, "no index in"),
    ],
)
def test_damaged_directories_are_refused(copy: Path, damage: Callable[[Path], object], said: str) -> None:
    damage(copy)
    with pytest.raises(DataError, match=said) as caught:
        LocalRetriever(copy)
    assert "\n" not in str(caught.value)


def test_failed_builds_leave_nothing(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="used twice"):
        build_index([PASSAGES[0], PASSAGES[0]], tmp_path / "a", progress=False)
    with pytest.raises(DataError, match="no passages"):
        build_index([], tmp_path / "a", progress=False)
    with pytest.raises(ConfigError, match="unknown index type 'cube'"):
        build_index(PASSAGES, tmp_path / "a", index_type="cube", progress=False)
    with pytest.raises(DataError, match="no encoder folder"):
        build_index(PASSAGES, tmp_path / "a", encoder="./nowhere", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_sentence_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on file sizes fails each writer in turn, as a full disk does: corpus, encoder, index."""
    script = textwrap.dedent("""
        import resource, sys
        from ragr1_actors.errors import UserError
        from retrieval.base import Passage
        from retrieval.build import build_index
        # Most bytes in the index, fewer in the encoder, fewest in the corpus.
        passages = [Passage(str(i), f"word{i % 50}", "a b c " * 4) for i in range(800)]
        for limit in (8_000, 60_000, 1_000_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                build_index(passages, sys.argv[1], progress=False)
            except UserError as error:
                print(f"refused: {error}")
    """)
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "index")],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
        check=False,
    )
    lines = ran.stdout.splitlines()
    assert len(lines) == 3, ran.stdout + ran.stderr
    assert all(line.startswith("refused: the index could not be written") for line in lines), lines
    assert list(tmp_path.iterdir()) == []


def test_errors_are_user_errors() -> None:
    assert issubclass(DataError, UserError)
