"""The inverted index: weights as bm25s has them, exact rankings, odd queries, and what is refused."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import bm25s
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragr1_actors.core.errors import DataError
from retrieval.base import Passage
from retrieval.corpora.text import split_words, stem_word
from retrieval.indexes import bm25 as bm25_build
from retrieval.indexes.bm25 import K1, METHOD, B, BM25Ranker, bm25_settings, bm25_text, build_bm25
from retrieval.indexes.manifest import FileRecord, Manifest
from retrieval.indexes.ranking import ABSENT, Ranking

DATA = Path(__file__).resolve().parents[1].parent / "shared/data"
VOCABULARY = ["riga", "oslo", "bonn", "lyon", "cities", "city", "river", "the", "of", "1902", "dom", "x"]
TEXTS = [
    "Riga\nRiga is the capital of Latvia, on the river Daugava.",
    "Oslo\nOslo is the capital of Norway.",
    "Zoë O'Neill\nZoë was born in 1902 in Łódź; she didn't write «Дом».",
    "東京\nTwo cities: 東京, Oslo.",
    "",
    "the of and",
]

sentences = st.lists(st.sampled_from(VOCABULARY), max_size=8).map(" ".join)
corpora = st.lists(sentences, min_size=1, max_size=40)


def manifest_of(directory: Path, count: int, names: list[str]) -> Manifest:
    (directory / "corpus.arrow").write_bytes(b"corpus")
    files = tuple(FileRecord.of(directory, name) for name in names)
    return Manifest("bm25", count, FileRecord.of(directory, "corpus.arrow"), files)


def ranker_over(directory: Path, texts: list[str]) -> BM25Ranker:
    return BM25Ranker(directory, manifest_of(directory, len(texts), build_bm25(iter(texts), directory)))


def stems(text: str) -> list[str]:
    return [stem for stem in map(stem_word, split_words(text)) if stem]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bm25")
    manifest_of(directory, len(TEXTS), build_bm25(TEXTS, directory)).write(directory)
    return directory


@pytest.fixture(scope="module")
def ranker(directory: Path) -> BM25Ranker:
    return BM25Ranker(directory, Manifest.read(directory))


@pytest.fixture
def copy(directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(directory, tmp_path / "copy"))


def rows(ranking: Ranking) -> list[list[int]]:
    assert (ranking.scores.dtype, ranking.rows.dtype) == (np.float32, np.int64)
    assert np.array_equal(ranking.rows == ABSENT, np.isneginf(ranking.scores))
    return [[row for row in found if row != ABSENT] for found in ranking.rows.tolist()]


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ("RIGA", [0]),
        ("norway's capital", [1, 0]),
        ("zoe", [2]),
        ("ZOE\u0308", [2]),
        ("o'neill", [2]),
        ("дом?", [2]),
        ("1902", [2]),
        ("東京", [3]),
        ("city", [3]),
        ("Norway\x00\x07 \t(Norway)\n", [1]),
    ],
)
def test_a_word_finds_its_rows(ranker: BM25Ranker, query: str, expected: list[int]) -> None:
    assert rows(ranker.rank([query], 6)) == [expected]


@pytest.mark.parametrize(
    ("query", "expected"),
    [("the of and", [5, 0, 1]), ("It", []), ("She, in", [2]), ("the Riga", [0]), ("the xyzzy", []), ("", [])],
)
def test_stop_words_count_in_a_query_of_nothing_else(ranker: BM25Ranker, query: str, expected: list[int]) -> None:
    assert rows(ranker.rank([query], 6)) == [expected]


def test_an_older_index_has_no_stop_words(copy: Path) -> None:
    texts = [" ".join(stems(text)) for text in TEXTS]  # as it had them
    older = manifest_of(copy, len(TEXTS), build_bm25(texts, copy))
    path = copy / "bm25" / "settings.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 1}))
    ranker = BM25Ranker(copy, older)
    assert rows(ranker.rank(["the of and", "the Riga"], 6)) == [[], [0]]


def test_queries_without_a_known_word_find_nothing(ranker: BM25Ranker) -> None:
    queries = ["", " \n", "xyzzy", "\x00\x07", "\ud800", "!?", "the xyzzy \U0001f600"]
    ranking = ranker.rank(queries, 3)
    assert ranking.rows.shape == (len(queries), 3)
    assert rows(ranking) == [[]] * len(queries)
    assert ranker.rank([], 3).rows.shape == (0, 3)


def test_ten_thousand_words_and_a_k_beyond_the_corpus(ranker: BM25Ranker) -> None:
    long = " ".join(f"word{i} the" for i in range(5000))
    assert rows(ranker.rank([long, long + " Oslo", "norway oslo " * 5000], 2)) == [[], [1, 3], [1, 3]]
    ranking = ranker.rank(["oslo"], 50)
    assert ranking.rows.shape == (1, len(TEXTS))
    assert rows(ranking) == [[1, 3]]


@given(texts=corpora)
def test_weights_are_those_of_bm25s(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    tokens = [stems(text) for text in texts]
    if not any(tokens):
        return
    ranker = ranker_over(tmp_path_factory.mktemp("weights"), texts)
    oracle = bm25s.BM25(method=METHOD, k1=K1, b=B)
    oracle.index(tokens, show_progress=False)
    for word in {word for words in tokens for word in words}:
        expected = np.asarray(oracle.get_scores([word]))
        found = ranker.rank([word], len(texts))
        dense = np.zeros(len(texts), np.float32)
        dense[found.rows[found.rows != ABSENT]] = found.scores[found.rows != ABSENT]
        np.testing.assert_allclose(dense, expected, rtol=1e-6)


@given(
    texts=corpora,
    queries=st.lists(st.lists(st.sampled_from(VOCABULARY)).map(" ".join), max_size=6),
    k=st.integers(1, 50),
)
def test_rankings_are_exact_in_any_batch(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], queries: list[str], k: int
) -> None:
    if not any(map(stems, texts)):
        return
    ranker = ranker_over(tmp_path_factory.mktemp("exact"), texts)
    together = ranker.rank(queries, k)
    for query, scores, found in zip(queries, together.scores, together.rows, strict=True):
        alone = ranker.rank([" ".join(reversed(query.split()))], k)
        assert alone.rows[0].tobytes() == found.tobytes()
        assert alone.scores[0].tobytes() == scores.tobytes()
        everything = ranker.rank([query], len(texts))
        expected = sorted(
            zip(-everything.scores[0], everything.rows[0], strict=True), key=lambda pair: (pair[0], pair[1])
        )
        assert found[found != ABSENT].tolist() == [row for _, row in expected if row != ABSENT][:k]
        words = stems if stems(query) else split_words  # stop words count where there are no others
        sharing = [row for row, text in enumerate(texts) if set(words(text)) & set(words(query))]
        assert sorted(everything.rows[0][everything.rows[0] != ABSENT].tolist()) == sharing


def test_equal_scores_are_ordered_by_row(tmp_path: Path) -> None:
    ranker = ranker_over(tmp_path, ["oslo city", "riga"] * 500)
    assert rows(ranker.rank(["oslo", "riga city"], 4)) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert rows(ranker.rank(["riga"], 1000)) == [list(range(1, 1000, 2))]


def test_a_build_in_small_blocks_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [" ".join(VOCABULARY[i % 7 : i % 11]) + f" word{i % 13}" for i in range(50)]
    build_bm25(texts, tmp_path / "large")
    monkeypatch.setattr(bm25_build, "_BLOCK_PASSAGES", 3)
    monkeypatch.setattr(bm25_build, "_BLOCK_POSTINGS", 7)
    monkeypatch.setattr(bm25_build, "_CACHED_WORDS", 2)
    names = build_bm25(iter(texts), tmp_path / "small")
    assert sorted(path.name for path in (tmp_path / "small/bm25").iterdir()) == sorted(Path(n).name for n in names)
    for name in names:
        assert (tmp_path / "small" / name).read_bytes() == (tmp_path / "large" / name).read_bytes()


def test_texts_are_read_as_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bm25_build, "_BLOCK_PASSAGES", 10)
    alive = 0

    class Text(str):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def texts() -> Iterator[str]:
        nonlocal alive
        for i in range(1000):
            alive += 1
            assert alive <= 25
            yield Text(f"oslo {i}")

    build_bm25(texts(), tmp_path)


def test_a_second_build_replaces_the_first_and_a_corpus_without_words_is_refused(tmp_path: Path) -> None:
    build_bm25(TEXTS, tmp_path)
    (tmp_path / "bm25/old").touch()
    ranker = ranker_over(tmp_path, ["oslo"])
    assert rows(ranker.rank(["oslo", "riga"], 1)) == [[0], []]
    assert not (tmp_path / "bm25/old").exists()
    for texts in ([], ["", "the of"]):
        with pytest.raises(DataError, match="no stop words"):
            build_bm25(texts, tmp_path)
        assert not list((tmp_path / "bm25").iterdir())


def test_an_index_is_mapped_and_not_read(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path, 10_000, build_bm25((f"word{i} word{i + 1}" for i in range(10_000)), tmp_path))
    least_bytes = min(path.stat().st_size for path in (tmp_path / "bm25").glob("*.npy"))
    tracemalloc.start()
    try:
        ranker = BM25Ranker(tmp_path, manifest)
        allocated, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert allocated < least_bytes / 2
    assert rows(ranker.rank(["word500"], 2)) == [[499, 500]]


@pytest.mark.parametrize("name", ["settings.json", "words.npy", "starts.npy", "rows.npy", "weights.npy"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "text", "other"])
def test_a_damaged_folder_is_refused(copy: Path, tmp_path: Path, name: str, damage: str) -> None:
    path = copy / "bm25" / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "other":
        build_bm25(["one two three four five"], tmp_path / "other")
        shutil.copy(tmp_path / "other/bm25" / name, path)
    else:
        path.write_bytes({"empty": b"", "truncated": content[: len(content) * 3 // 4], "text": b"[1, 2]"}[damage])
    with pytest.raises(DataError, match=r"build it again") as caught:
        for file in Manifest.read(copy).files:
            file.check(copy)
    assert str(copy) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_settings_and_another_corpus_are_refused(copy: Path, directory: Path) -> None:
    path = copy / "bm25/settings.json"
    found = json.loads(path.read_text())
    assert found == {**bm25_settings(), "num_passages": len(TEXTS)}
    found["words"]["stop_words"].remove("the")
    path.write_text(json.dumps(found))
    with pytest.raises(DataError, match=r"other settings.*words"):
        BM25Ranker(copy, Manifest.read(copy))
    with pytest.raises(DataError, match="num_passages"):
        BM25Ranker(directory, Manifest("bm25", 7, FileRecord("corpus.arrow", 0, ""), ()))


def test_the_title_is_indexed_twice() -> None:
    assert stems(bm25_text(Passage("a", "Riga", "A city."))) == ["riga", "riga", "citi"]


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no real data in {DATA}")
def test_recall_on_hotpotqa(tmp_path: Path) -> None:
    corpus = json.loads((DATA / "hotpotqa_corpus_994.json").read_text(encoding="utf-8"))
    records = json.loads((DATA / "hotpotqa_100.json").read_text(encoding="utf-8"))
    titles = list(corpus)
    ranker = ranker_over(tmp_path, [bm25_text(Passage(title, title, " ".join(corpus[title]))) for title in titles])
    found = rows(ranker.rank([record["question"] for record in records], 5))
    gold = [{titles.index(title) for title, _ in record["supporting_facts"]} for record in records]
    recall = {k: np.mean([len(g & set(f[:k])) / len(g) for g, f in zip(gold, found, strict=True)]) for k in (2, 5)}
    print(recall)
    assert recall[2] >= 0.60
    assert recall[5] >= 0.76
