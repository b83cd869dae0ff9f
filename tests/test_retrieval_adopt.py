"""`ragr1 index adopt`: FAISS files that plain faiss has made answer as they do there, and others are refused."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from adopt_world import COUNT, DIMENSION, LINE, QUOTED, TOWNS, adopt, encoded, make_encoder, make_index, write
from numpy.typing import NDArray

from ragr1_actors.core.errors import ConfigError, DataError
from ragr1_actors.core.types import Task
from retrieval.adopt import adopt_index
from retrieval.base import Passage
from retrieval.build import building_dir, index_info
from retrieval.corpora.readers import read_passages
from retrieval.corpora.text import LAYOUTS
from retrieval.encoders.encoder import Encoder
from retrieval.evaluation import evaluate_index
from retrieval.indexes.manifest import Manifest
from retrieval.local import LocalRetriever

pytestmark = pytest.mark.engine

PRODUCT, L2 = faiss.METRIC_INNER_PRODUCT, faiss.METRIC_L2
ROWS = [0, 1, 57, 198, COUNT - 1]
QUERIES = [f"town {row} {TOWNS[row].text}" for row in ROWS]

EXACT = {
    "Flat": ("flat", "IndexFlat"),
    "IDMap,Flat": ("flat", "IndexIDMap of IndexFlat"),
    "IDMap2,Flat": ("flat", "IndexIDMap2 of IndexFlat"),
    "SQfp16": ("fp16", "IndexScalarQuantizer"),
    "SQbf16": ("faiss", "IndexScalarQuantizer"),
    "IVF8,Flat": ("ivf", "IndexIVFFlat"),
    "IVF8_HNSW8,Flat": ("ivf", "IndexIVFFlat"),
    "IDMap,IVF8,Flat": ("ivf", "IndexIDMap of IndexIVFFlat"),
    "IVF8,SQfp16": ("faiss", "IndexIVFScalarQuantizer"),
    "HNSW8": ("hnsw", "IndexHNSWFlat"),
    "IDMap,HNSW8": ("hnsw", "IndexIDMap of IndexHNSWFlat"),
    "L2norm,Flat": ("faiss", "IndexPreTransform of IndexFlat"),
    "RR32,IVF8,Flat": ("faiss", "IndexPreTransform of IndexIVFFlat"),
    "PQ16x4np,RFlat": ("faiss", "IndexRefineFlat of IndexPQ"),
    "IVF8,PQ16x4fs,Refine(SQfp16)": ("faiss", "IndexRefine of IndexIVFPQFastScan"),
    "HNSW8,RFlat": ("faiss", "IndexRefineFlat of IndexHNSWFlat"),
}
"""Keys of ``faiss.index_factory`` whose indexes keep the vectors, with the type here and the kind."""
ROUNDED = {
    "SQ8": ("sq8", "IndexScalarQuantizer"),
    "SQ6": ("faiss", "IndexScalarQuantizer"),
    "PQ16x4np": ("faiss", "IndexPQ"),
    "PQ16x4fs": ("faiss", "IndexPQFastScan"),
    "IVF8,SQ8": ("faiss", "IndexIVFScalarQuantizer"),
    "IVF8,PQ16x4np": ("faiss", "IndexIVFPQ"),
    "IVF8,PQ16x4fs": ("faiss", "IndexIVFPQFastScan"),
    "HNSW8_SQ8": ("faiss", "IndexHNSWSQ"),
    "HNSW8,PQ16x4np": ("faiss", "IndexHNSWPQ"),
    "OPQ16,PQ16x4np": ("faiss", "IndexPreTransform of IndexPQ"),
    "PCA24,SQ8": ("faiss", "IndexPreTransform of IndexScalarQuantizer"),
    "PCAW24,Flat": ("faiss", "IndexPreTransform of IndexFlat"),
    "PCA24,Flat": ("faiss", "IndexPreTransform of IndexFlat"),
    "IDMap,OPQ16,IVF8,PQ16x4np": ("faiss", "IndexIDMap of IndexPreTransform of IndexIVFPQ"),
    "Flat,Refine(SQ8)": ("faiss", "IndexRefine of IndexFlat"),
}
"""The same of those that keep less."""


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("encoder") / "model")


@pytest.fixture(scope="module")
def vectors(encoder: Path) -> NDArray[np.float32]:
    return encoded(encoder)


@pytest.fixture
def flat(vectors: NDArray[np.float32], tmp_path: Path) -> Path:
    return write(make_index(vectors), tmp_path / "e5_Flat.index")


def found_in(directory: Path, k: int = 3, **arguments: Any) -> list[list[Passage]]:
    return LocalRetriever(directory, **arguments).search_batch(QUERIES, k)


def ids_of(found: list[list[Passage]]) -> list[list[str]]:
    return [[passage.id for passage in passages] for passages in found]


def scores_of(found: list[list[Passage]]) -> NDArray[np.float32]:
    return np.array([[passage.score for passage in passages] for passages in found], np.float32)


@pytest.fixture(scope="module")
def truth(encoder: Path, vectors: NDArray[np.float32]) -> list[list[Passage]]:
    """The nearest three passages of each query, by all products."""
    products = Encoder.load(encoder).encode_queries(QUERIES) @ vectors.T
    best = np.argsort(-products, axis=1)[:, :3]
    return [
        [replace(TOWNS[row], score=float(scores[row])) for row in rows]
        for rows, scores in zip(best.tolist(), products, strict=True)
    ]


WITH_L2 = (
    "Flat",
    "SQfp16",
    "SQ8",
    "IDMap,IVF8,Flat",
    "HNSW8",
    "HNSW8,PQ16x4np",
    "IVF8,PQ16x4fs,Refine(SQfp16)",
    "PCA24,SQ8",
)


@pytest.mark.parametrize(
    ("key", "metric"), [*((key, PRODUCT) for key in (*EXACT, *ROUNDED)), *((key, L2) for key in WITH_L2)]
)
def test_every_kind_answers(
    key: str, metric: int, encoder: Path, vectors: NDArray[np.float32], truth: list[list[Passage]], tmp_path: Path
) -> None:
    file = write(make_index(vectors, key, metric), tmp_path / "made.index")
    before = file.read_bytes()
    adoption = adopt(file, tmp_path / "index", encoder)
    index_type, kind = (EXACT | ROUNDED)[key]
    assert adoption.kind.removesuffix("IP").removesuffix("L2") == kind
    assert (adoption.layout, adoption.num_compared) == (LINE, 256)
    assert adoption.cosine > (0.9999 if key in EXACT else 0.8)
    assert adoption.mean_length == pytest.approx(1, abs=1e-4 if key in EXACT else 0.05)
    info = index_info(tmp_path / "index")
    assert (info["index_type"], info["vector_type"], info["layout"]) == (index_type, index_type, LINE)
    assert (info["count"], info["dimension"], info["encoder"]) == (COUNT, DIMENSION, str(encoder))
    assert (info["query_prompt"], info["passage_prompt"]) == ("query: ", "passage: ")
    found = found_in(
        tmp_path / "index", options=dict.fromkeys(info["options"], COUNT)
    )  # so that nothing is passed over
    assert [passages[0].id for passages in found] == [f"t{row}" for row in ROWS]
    if key in EXACT:
        assert scores_of(found) == pytest.approx(scores_of(truth), abs=2e-3)
    assert file.read_bytes() == before


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_of_the_passages_is_found_and_stored(layout: str, encoder: Path, tmp_path: Path) -> None:
    file = write(make_index(encoded(encoder, layout=layout)), tmp_path / "made.index")
    found = adopt(file, tmp_path / "index", encoder)
    assert (found.layout, found.first_share) == (layout, 1)
    assert found.cosine > 0.99999
    assert Manifest.read(tmp_path / "index").layout == layout


def test_search_r1s_own_files(encoder: Path, tmp_path: Path) -> None:
    """``contents`` as it is in the file, behind the prompt, titles with quotes, and passages without a title too."""
    passages = [*TOWNS[:-2], replace(TOWNS[-2], title='"Town" of "18"'), Passage("t399", "", "no title w1 w2")]
    contents = [f'"{p.title}"\n{p.text}' if p.title else p.text for p in passages]
    corpus = tmp_path / "wiki-18.jsonl"
    corpus.write_text(
        "".join(json.dumps({"id": p.id, "contents": c}) + "\n" for p, c in zip(passages, contents, strict=True))
    )
    vectors = encoded(encoder, [Passage("", "", text) for text in contents], "{text}")
    file = write(make_index(vectors), tmp_path / "e5_Flat.index")
    match = adopt(file, tmp_path / "index", encoder, list(read_passages(corpus)))
    assert (match.layout, match.cosine) == (QUOTED, pytest.approx(1, abs=1e-6))
    assert list(LocalRetriever(tmp_path / "index").corpus) == passages


WRONG = {
    "an offset by one": lambda folder, vectors: (folder, np.roll(vectors, 1, axis=0)),
    "another order at the end": lambda folder, vectors: (folder, np.concatenate([vectors[:380], vectors[:379:-1]])),
    "another encoder": lambda folder, vectors: (make_encoder(folder.parent / "other", seed=1), vectors),
    "no prompt": lambda folder, vectors: (make_encoder(folder.parent / "bare", prompts={}), vectors),
    "the other prompt": lambda folder, vectors: (
        make_encoder(folder.parent / "swapped", prompts={"document": "query: "}),
        vectors,
    ),
    "half of the text": lambda folder, vectors: (
        folder,
        encoded(folder, [replace(p, text=p.text[: len(p.text) // 2]) for p in TOWNS]),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_vectors_of_something_else_are_refused_with_the_figure(
    what: str, vectors: NDArray[np.float32], tmp_path: Path
) -> None:
    other, made = WRONG[what](make_encoder(tmp_path / "model"), vectors)
    file = write(make_index(made), tmp_path / "made.index")
    with pytest.raises(
        DataError, match=r"mean cosine -?0\.\d{4} of 256 passages in the best layout, .*, expected 0.999"
    ):
        adopt(file, tmp_path / "index", other)
    assert not (tmp_path / "index").exists()
    assert not building_dir(tmp_path / "index").exists()


@pytest.mark.parametrize("what", ["an offset by one", "another encoder"])
def test_rounded_vectors_of_something_else_are_refused_with_the_figure(
    what: str, vectors: NDArray[np.float32], tmp_path: Path
) -> None:
    other, made = WRONG[what](make_encoder(tmp_path / "model"), vectors)
    file = write(make_index(made, "IVF8,PQ16x4np"), tmp_path / "made.index")
    with pytest.raises(DataError, match=r"makes of the passages: \d+\.\d% of 256 passages .* expected 95%"):
        adopt(file, tmp_path / "index", other)


def test_rounded_vectors_may_miss_one_in_twenty(encoder: Path, vectors: NDArray[np.float32], tmp_path: Path) -> None:
    for share, is_taken in ((0.04, True), (0.06, False)):
        made = vectors.copy()
        made[: int(share * COUNT)] = made[int(share * COUNT) - 1 :: -1]  # the middle one of an odd number stays
        file = write(make_index(made, "SQ8"), tmp_path / "made.index")
        if is_taken:
            assert adopt(file, tmp_path / "index", encoder).first_share == pytest.approx(1 - share, abs=0.01)
        else:
            with pytest.raises(DataError, match=r"9[34]\.\d% of 256 passages"):
                adopt(file, tmp_path / "other", encoder)


def test_equal_texts_are_compared_once_and_vectors_that_are_all_equal_are_refused(
    encoder: Path, vectors: NDArray[np.float32], tmp_path: Path
) -> None:
    passages = [replace(TOWNS[row % 200], id=str(row)) for row in range(COUNT)]
    file = write(make_index(vectors[np.arange(COUNT) % 200], "SQ8"), tmp_path / "made.index")
    assert adopt(file, tmp_path / "index", encoder, passages).first_share == 1
    equal = write(make_index(vectors[:1].repeat(COUNT, axis=0), "SQ8"), tmp_path / "equal.index")
    with pytest.raises(DataError, match=r"0\.0% of 256"):
        adopt(equal, tmp_path / "other", encoder)


# Ids

ORDER = np.random.default_rng(3).permutation(COUNT)


@pytest.mark.parametrize("key", ["IDMap,Flat", "IDMap2,HNSW8", "IDMap,IVF8,Flat", "IVF8,Flat", "IVF8,PQ16x4fs,RFlat"])
def test_ids_are_rows_in_any_order(
    key: str, encoder: Path, vectors: NDArray[np.float32], truth: list[list[Passage]], tmp_path: Path
) -> None:
    has_second_stage = "RFlat" in key  # which has the vectors by id
    index = make_index(vectors, key) if has_second_stage else make_index(vectors[ORDER], key, ids=ORDER)
    adopt(write(index, tmp_path / "made.index"), tmp_path / "index", encoder)
    assert not (tmp_path / "index/rows.npy").exists()
    options = dict.fromkeys(index_info(tmp_path / "index")["options"], COUNT)
    assert ids_of(found_in(tmp_path / "index", options=options)) == ids_of(truth)


@pytest.mark.parametrize("key", ["IDMap,Flat", "IDMap,SQfp16", "IVF8,Flat", "RR32,IVF8,Flat"])
def test_ids_are_those_of_the_corpus(
    key: str, encoder: Path, vectors: NDArray[np.float32], truth: list[list[Passage]], tmp_path: Path
) -> None:
    names = 7 * ORDER + 1_000_000_007  # as of DPR's passages: from 1, in an order of their own
    passages = [replace(p, id=str(name)) for p, name in zip(TOWNS, names.tolist(), strict=True)]
    file = write(make_index(vectors[::-1].copy(), key, ids=names[::-1].copy()), tmp_path / "made.index")
    adopt(file, tmp_path / "index", encoder, passages)
    options = dict.fromkeys(index_info(tmp_path / "index")["options"], COUNT)
    found = found_in(tmp_path / "index", options=options)
    assert scores_of(found) == pytest.approx(scores_of(truth), abs=2e-3)
    assert [passages[0].title for passages in found] == [f"Town {row}" for row in ROWS]
    questions = [Task(str(row), query, ("x",)) for row, query in zip(ROWS, QUERIES, strict=True)]
    assert evaluate_index(tmp_path / "index", questions, exact=True, options=options)["exact_recall@3"] > 0.9


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        (np.arange(COUNT) + 1, r"ids, 1 to 400, are neither the numbers of the passages, 0 to 399, nor the ids"),
        (np.arange(COUNT) - 1, "ids, -1 to 398, are neither"),
        (np.arange(COUNT) // 2, "got 200 ids for 400 vectors"),
    ],
)
def test_other_ids_are_refused(
    ids: NDArray[np.int64], problem: str, encoder: Path, vectors: NDArray[np.float32], tmp_path: Path
) -> None:
    for key in ("IDMap,Flat", "IVF8,Flat"):
        file = write(make_index(vectors, key, ids=ids), tmp_path / "made.index")
        with pytest.raises(DataError, match=problem):
            adopt(file, tmp_path / "index", encoder)


# Kinds, metrics, counts


def _own_pq(vectors: NDArray[np.float32]) -> Any:
    from retrieval.indexes.vector_index import VectorIndex

    return VectorIndex.build([vectors], DIMENSION, "pq")._owner


REFUSED = {
    "NSG8,Flat": (PRODUCT, "of kind IndexNSGFlat"),
    "RQ4x4": (PRODUCT, "of kind IndexResidualQuantizer"),
    "IVF8,FlatDedup": (PRODUCT, "of kind IndexIVFFlatDedup"),
    "IDMap,RQ4x4": (PRODUCT, r"of kind IndexResidualQuantizer \(in IndexIDMap of IndexResidualQuantizer\)"),
    "PQ16x4np,Refine(RQ4x4)": (PRODUCT, "of kind IndexResidualQuantizer"),
    "LSH": (L2, "of kind IndexLSH"),
    "Flat": (faiss.METRIC_L1, r"got faiss's metrics \[2\] in IndexFlat, expected inner product"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_other_kinds_and_metrics_are_refused_by_name(
    key: str, encoder: Path, vectors: NDArray[np.float32], tmp_path: Path
) -> None:
    metric, problem = REFUSED[key]
    file = write(make_index(vectors, key, metric), tmp_path / "made.index")
    with pytest.raises(DataError, match=problem):
        adopt_index(file, unread(), tmp_path / "index", encoder=str(encoder))


def unread() -> Any:
    """Passages that must not be asked for: what can be refused without them is refused before minutes are spent."""
    pytest.fail("the corpus was read")
    yield


def test_a_type_that_is_only_built_here_is_refused(encoder: Path, vectors: NDArray[np.float32], tmp_path: Path) -> None:
    file = write(_own_pq(vectors), tmp_path / "made.index")
    with pytest.raises(DataError, match="second stage of dimension 36 and not 32"):
        adopt_index(file, unread(), tmp_path / "index", encoder=str(encoder))


def test_lists_in_another_file_are_refused(encoder: Path, vectors: NDArray[np.float32], tmp_path: Path) -> None:
    index = make_index(vectors, "IVF8,Flat")
    lists = faiss.OnDiskInvertedLists(8, index.code_size, str(tmp_path / "lists.ivfdata"))
    lists.merge_from(index.invlists, 0)
    index.replace_invlists(lists)
    file = write(index, tmp_path / "made.index")
    with pytest.raises(DataError, match=r"its lists are in another file, .*lists\.ivfdata"):
        adopt_index(file, unread(), tmp_path / "index", encoder=str(encoder))


def test_l2_needs_vectors_of_length_one(encoder: Path, vectors: NDArray[np.float32], tmp_path: Path) -> None:
    lengths = np.linspace(0.5, 2, COUNT, dtype=np.float32)[:, None]
    for key in ("Flat", "IVF8,Flat", "SQfp16", "IDMap,HNSW8"):
        file = write(make_index(vectors * lengths, key, L2), tmp_path / "made.index")
        with pytest.raises(DataError, match=r"metric L2 over vectors of length 0\.5\d\d to 2\.000, expected length 1"):
            adopt_index(file, unread(), tmp_path / "index", encoder=str(encoder))
    for key in (
        "PQ16x4np",
        "IVF8,PQ16x4fs",
        "SQ8",
    ):  # the length of a code says nothing: its vectors are compared first
        file = write(make_index(vectors * lengths, key, L2), tmp_path / "made.index")
        with pytest.raises(DataError, match=r"metric L2 over vectors of length 1\.[23]\d\d"):
            adopt(file, tmp_path / "index", encoder)


def test_inner_products_may_be_of_any_length(encoder: Path, vectors: NDArray[np.float32], tmp_path: Path) -> None:
    """As of Contriever: the order is the one that the maker of the file had."""
    lengths = np.linspace(0.5, 2, COUNT, dtype=np.float32)[:, None]
    index = make_index(vectors * lengths)
    adopt(write(index, tmp_path / "made.index"), tmp_path / "index", encoder)
    retriever = LocalRetriever(tmp_path / "index")
    assert retriever.dense is not None
    queries = retriever.dense.encoder.encode_queries(QUERIES)
    assert retriever.rank(QUERIES, 5).rows.tolist() == index.search(queries, 5)[1].tolist()


def test_other_counts_and_dimensions_are_refused(
    encoder: Path, vectors: NDArray[np.float32], flat: Path, tmp_path: Path
) -> None:
    for passages, count in ((TOWNS[:-1], 399), ([*TOWNS, Passage("new", "New", "one")], 401)):
        with pytest.raises(DataError, match=f"got 400 vectors, but the corpus has {count} passages"):
            adopt(flat, tmp_path / "index", encoder, passages)
    file = write(make_index(vectors[:, :16].copy()), tmp_path / "made.index")
    with pytest.raises(DataError, match=r"vectors of dimension 16, but those of encoder .* have 32"):
        adopt_index(file, unread(), tmp_path / "index", encoder=str(encoder))
    broken = vectors.copy()
    broken[-1, 3] = math.nan
    with pytest.raises(DataError, match="NaN or infinity"):
        adopt(write(make_index(broken), tmp_path / "nan.index"), tmp_path / "index", encoder)
    with pytest.raises(ConfigError, match="got the encoder static"):
        adopt(flat, tmp_path / "index", Path("static"))
