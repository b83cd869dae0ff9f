"""Pages: what a look-up by title gives is what a pass over all passages gives, from a mapped file or without one."""

from __future__ import annotations

import asyncio
import json
import pickle
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ragr1_actors.core.errors import DataError
from retrieval.base import HEADING, Page, PageRetriever, Passage, page_title
from retrieval.build import build_index
from retrieval.corpora.corpus import MAX_PIECES, Corpus, Titles, rows_by_title, write_corpus, write_titles
from retrieval.corpora.readers import read_passages
from retrieval.corpora.text import found_evidence
from retrieval.indexes.manifest import Manifest
from retrieval.local import LocalRetriever

TITLES = [
    *("Riga", "riga", "RIGA (film)", "Riga § History", "Riga § Economy", "Riga § History § Early", "Rīga", "Rigas"),
    *("Çelik Öz", "ÇELIK öz", "İzmir", "ΣΑΣ", "李 明", "🗼", "", " Riga", "Riga\0", "Riga/History", "a\nb", "Riga §"),
]


def corpus_of(titles: list[str], folder: Path) -> Corpus:
    folder.mkdir(exist_ok=True)
    write_corpus((Passage(f"p{number}", title, f"text {number}") for number, title in enumerate(titles)), folder)
    return Corpus.open(folder)


def of(titles: list[str], title: str) -> list[int]:
    """Return the rows of a page by a pass over all titles."""

    def rows(same: str, others: list[str]) -> list[int]:
        return [row for row, one in enumerate(others) if one == same or one.startswith(same + HEADING)]

    return (rows(title, titles) or rows(title.lower(), [one.lower() for one in titles])) if title else []


@pytest.mark.parametrize("seed", range(20))
def test_a_page_is_what_a_pass_over_all_titles_finds(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    titles = rng.choices(TITLES, k=rng.randrange(1, 60))
    corpus = corpus_of(titles, tmp_path / "corpus")
    write_titles(corpus, tmp_path / "titles.npy")
    mapped, sorted_here = Titles.open(corpus, tmp_path / "titles.npy"), Titles.open(corpus, tmp_path / "none")
    for title in [*TITLES, "rIgA", "riga § HISTORY", "nowhere", "\U0010ffff", "\0", "çelik öz"]:
        found = mapped.page(title, "v")
        assert [passage.id for passage in found] == [f"p{row}" for row in of(titles, title)], title
        assert (found, found.near) == (sorted_here.page(title), sorted_here.page(title).near)
        assert not (found and found.near)
        assert found.index_version == "v"


def test_an_unknown_title_has_the_titles_that_are_like_it(tmp_path: Path) -> None:
    corpus = corpus_of([*TITLES, "Ana  Bell § Life", *map(str, range(99))], tmp_path)
    titles = Titles(corpus, rows_by_title(corpus))
    assert titles.page("Ana Belll").near == ("Ana Bell",)
    assert titles.page("riga (flm)").near[0] == "RIGA (film)"
    assert titles.page("nothing like this").near == titles.page("").near == titles.page("\ud800").near == ()


def test_a_title_of_too_many_passages_is_cut(tmp_path: Path) -> None:
    corpus = corpus_of(["Riga"] * (MAX_PIECES + 5), tmp_path)
    found = Titles(corpus, rows_by_title(corpus)).page("riga")
    assert [passage.id for passage in found] == [f"p{row}" for row in range(MAX_PIECES)]


@pytest.mark.parametrize("index_type", ["flat", "bm25"])
def test_an_index_opens_pages(index_type: str, tmp_path: Path) -> None:
    passages = [Passage(f"p{n}", f"Person{n % 7}", f"born in town{n}") for n in range(30)]
    index = build_index(passages, tmp_path / "index", index_type=index_type, progress=False)
    retriever: LocalRetriever = pickle.loads(pickle.dumps(LocalRetriever(index)))
    assert isinstance(retriever, PageRetriever)
    (found, missing) = asyncio.run(retriever.open_pages(["person3", "Person33"]))
    assert found == passages[3::7]
    assert isinstance(found, Page)
    assert found.index_version == retriever.version
    assert (missing, missing.near[0]) == ([], "Person3")


def test_an_index_of_an_earlier_version_opens_pages_and_has_the_same_name(tmp_path: Path) -> None:
    passages = [Passage(f"p{n}", f"Person{n % 7}", f"born in town{n}") for n in range(30)]
    index = build_index(passages, tmp_path / "index", index_type="bm25", progress=False)
    version = Manifest.read(index).version
    (index / "titles.npy").unlink()
    with pytest.raises(DataError, match=r"no .*titles\.npy; copy the index as a whole"):
        LocalRetriever(index)
    manifest = Manifest.read(index)
    replace(manifest, files=tuple(file for file in manifest.files if file.name != "titles.npy")).write(index)
    earlier = LocalRetriever(index)
    assert earlier.version == version
    assert earlier.open_batch(["Person3"]) == [passages[3::7]]


def test_the_file_is_used_and_one_of_another_corpus_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "titles.npy", np.array([1, 0], np.int32))  # in the wrong order
    assert Titles.open(corpus_of(["a", "b"], tmp_path / "other"), tmp_path / "titles.npy").page("b") == []
    np.save(tmp_path / "titles.npy", np.arange(3, dtype=np.int32))
    with pytest.raises(DataError, match=r"titles\.npy: got \(3,\) rows, but the corpus has 2 passages"):
        Titles.open(corpus_of(["a", "b"], tmp_path), tmp_path / "titles.npy")


def test_headings_are_kept_in_titles(tmp_path: Path) -> None:
    records = [
        {"title": "Riga", "text": "Riga lies in Latvia."},
        {"title": "Riga", "heading": "History", "text": "It was founded in 1201."},
        {"id": 7, "contents": '"Riga"\nIts port is large.', "heading": " Economy "},
        {"title": "Riga", "heading": None, "text": "It has bridges."},
    ]
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    passages = list(read_passages(path))
    assert [(one.id, one.title) for one in passages] == [
        ("Riga", "Riga"),
        ("Riga § History", "Riga § History"),
        ("7", "Riga § Economy"),
        ("Riga#2", "Riga"),
    ]
    assert passages[2].text == "Its port is large."
    index = build_index(passages, tmp_path / "index", index_type="bm25", progress=False)
    assert Corpus.open(index).has_headings
    assert not corpus_of(["Riga", "Riga §"], tmp_path).has_headings
    whole, history = LocalRetriever(index).open_batch(["riga", "Riga § history"])
    assert (whole, history) == (passages, [passages[1]])
    assert found_evidence({"Riga", "Riga § History", "Oslo"}, ["7"], iter(["Riga § Economy"])) == {"Riga"}
    path.write_text(json.dumps({"title": "Riga", "heading": ["a"], "text": "b"}))
    with pytest.raises(DataError, match=r"line 1: the heading is \['a'\], expected a string"):
        list(read_passages(path))


def test_a_page_title_has_no_heading() -> None:
    assert [page_title(one) for one in ("Riga § History § Early", "Riga §", "Riga")] == ["Riga", "Riga §", "Riga"]
