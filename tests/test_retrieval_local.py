"""LocalRetriever: dense, by words and hybrid; odd queries; and directories that are damaged."""

from __future__ import annotations

import asyncio
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import run_python
from retrieval_world import NAMES, PASSAGES
from test_retrieval_reranker import config, save_tokenizer
from transformers import BertForSequenceClassification

from ragr1_actors.core.config import RetrievalSettings
from ragr1_actors.core.errors import ConfigError, DataError, RetrievalError
from retrieval.base import Hits, Passage
from retrieval.build import build_index
from retrieval.corpora.corpus import write_corpus
from retrieval.encoders.families import make_static_encoder
from retrieval.encoders.reranker import Reranker
from retrieval.indexes.manifest import Manifest
from retrieval.indexes.ranking import ABSENT
from retrieval.indexes.vector_index import VectorIndex
from retrieval.local import LocalRetriever, encoder_of, named_index

TYPES = ["flat", "pq", "bm25", "hybrid"]
ODD = ["", "xyzzy", "\x00\x07", "\ud800", " \n\t ", "?!", "🙂" * 50]


@pytest.fixture(scope="module")
def index_dirs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("retriever")
    return {name: build_index(PASSAGES, directory / name, index_type=name, progress=False) for name in TYPES}


@pytest.fixture(scope="module")
def retrievers(index_dirs: dict[str, Path]) -> dict[str, LocalRetriever]:
    return {name: LocalRetriever(directory) for name, directory in index_dirs.items()}


@pytest.fixture
def copy(index_dirs: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(index_dirs["flat"], tmp_path / "copy"))


@pytest.mark.parametrize("name", TYPES)
def test_names_find_their_passages_in_any_script(name: str, retrievers: dict[str, LocalRetriever]) -> None:
    retriever = retrievers[name]
    found = retriever.search_batch([query.upper() for query in NAMES], 2)
    assert [passages[0].id for passages in found] == [passage.id for passage in PASSAGES]
    assert all(passages[0].score > passages[-1].score or len(passages) == 1 for passages in found)
    best = found[0][0]
    assert (best.title, best.text) == ("Ana Bell", "Ana Bell was born in town0.")
    assert all(isinstance(hits, Hits) and hits.index_version == retriever.version for hits in found)
    assert retriever.manifest.version == retriever.version != ""
    assert retriever.manifest.index_type == name


@pytest.mark.parametrize("name", TYPES)
def test_odd_queries_get_an_answer(name: str, retrievers: dict[str, LocalRetriever]) -> None:
    retriever = retrievers[name]
    assert retriever.search_batch([], 3) == []
    assert retriever.search_batch(ODD, 3) == [[]] * len(ODD)
    (found,) = retriever.search_batch(["Bo\x00 \tCole\n"], 1)
    assert found == retriever.search_batch(["bo cole"], 1)[0]
    (found,) = retriever.search_batch(["Ana Bell was born in town3 " * 2000], 50)
    assert sorted(passage.id for passage in found) == [passage.id for passage in PASSAGES]
    mixed = retriever.search_batch(["Ana Bell", "", "Bo Cole"], 1)
    assert [[passage.id for passage in passages] for passages in mixed] == [["p0"], [], ["p1"]]
    for k in (0, -1):
        with pytest.raises(ValueError, match=f"k={k}"):
            retriever.search_batch(["Ana Bell"], k)


@pytest.mark.parametrize("name", TYPES)
async def test_async_search_and_pickles(name: str, retrievers: dict[str, LocalRetriever]) -> None:
    answers = await asyncio.gather(*[retrievers[name].search([query], 1) for query in NAMES])
    assert [answer[0][0].title for answer in answers] == NAMES
    again: LocalRetriever = pickle.loads(pickle.dumps(retrievers[name]))
    assert await again.search(NAMES, 3) == retrievers[name].search_batch(NAMES, 3)


@pytest.mark.parametrize("name", TYPES)
def test_rows_belong_to_their_passages(name: str, retrievers: dict[str, LocalRetriever]) -> None:
    ranking, found = retrievers[name].search_rows([*NAMES, "xyzzy"], 3)
    for rows, scores, hits in zip(ranking.rows.tolist(), ranking.scores.tolist(), found, strict=True):
        present = [row for row in rows if row != ABSENT]
        assert [hit.id for hit in hits] == [PASSAGES[row].id for row in present]
        assert [hit.score for hit in hits] == scores[: len(present)]


def test_queries_encoded_elsewhere(retrievers: dict[str, LocalRetriever], index_dirs: dict[str, Path]) -> None:
    for name in ("flat", "hybrid"):
        ranker = retrievers[name].dense
        assert ranker is not None
        vectors = ranker.encoder.encode_queries(NAMES)
        blind = LocalRetriever(index_dirs[name], load_encoder=False)
        assert blind.search_batch(NAMES, 2, vectors) == retrievers[name].search_batch(NAMES, 2)
        with pytest.raises(ValueError, match="without an encoder"):
            blind.search_batch(NAMES, 2)
        with pytest.raises(RetrievalError, match="shape"):
            blind.search_batch(NAMES, 2, vectors[:1])


def test_a_hybrid_query_of_unknown_vectors_falls_back_to_words(retrievers: dict[str, LocalRetriever]) -> None:
    vectors = np.zeros((1, retrievers["hybrid"].manifest.dimension), np.float32)
    found = retrievers["hybrid"].search_batch(["dana fox"], 3, vectors)
    by_words = retrievers["bm25"].search_batch(["dana fox"], 3)
    assert [passage.id for passage in found[0]] == [passage.id for passage in by_words[0]] != []


def test_shards_of_an_index(tmp_path: Path) -> None:
    build_index(PASSAGES, tmp_path / "index", num_shards=3, progress=False)
    parts = [LocalRetriever(tmp_path / "index", shards=[number]) for number in range(3)]
    ids = [sorted(passage.id for passage in part.search_batch(["Ana Bell"], 9)[0]) for part in parts]
    assert ids == [["p0"], ["p1", "p2"], ["p3", "p4"]]
    build_index(PASSAGES, tmp_path / "hybrid", index_type="hybrid", num_shards=2, progress=False)
    with pytest.raises(ConfigError, match="type 'hybrid' cannot be searched by shards"):
        LocalRetriever(tmp_path / "hybrid", shards=[0])


def test_an_index_knows_its_encoder_by_any_path_to_it(
    index_dirs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [passage.text for passage in PASSAGES]
    make_static_encoder(tmp_path / "models" / "mine", words)
    make_static_encoder(tmp_path / "models" / "other", words)
    (tmp_path / "link").symlink_to(tmp_path / "models" / "mine")
    index = build_index(PASSAGES, tmp_path / "index", encoder="models/mine", progress=False)
    for encoder in ("models/mine", "models/mine/", "link", "mine", str(tmp_path / "models" / "mine")):
        assert named_index(RetrievalSettings(index=str(index), encoder=encoder)) == index
    assert named_index(RetrievalSettings(index=str(index))) == index  # its own
    assert encoder_of(RetrievalSettings(index=str(index))) == str(tmp_path / "models" / "mine")
    with pytest.raises(
        DataError, match=r"index was built with encoder .*mine', but retrieval\.encoder is 'models/other'"
    ):
        named_index(RetrievalSettings(index=str(index), encoder="models/other"))
    static = str(index_dirs["flat"])
    assert named_index(RetrievalSettings(index=static, encoder="static")) == index_dirs["flat"]
    assert encoder_of(RetrievalSettings(index=static)) == encoder_of(RetrievalSettings()) == "static"
    assert encoder_of(RetrievalSettings(index="elsewhere", encoder="e5")) == "e5"
    with pytest.raises(DataError, match=r"but retrieval\.encoder is 'models/encoder'"):  # the name of the folder inside
        named_index(RetrievalSettings(index=static, encoder="models/encoder"))
    make_static_encoder(tmp_path / "static", words)  # a folder called as the word
    named = str(build_index(PASSAGES, tmp_path / "other", encoder="./static", progress=False))
    assert str(named_index(RetrievalSettings(index=named, encoder="./static"))) == named
    with pytest.raises(DataError, match=r"but retrieval\.encoder is 'static'"):
        named_index(RetrievalSettings(index=named, encoder="static"))


def test_options_are_checked_and_passed_on(index_dirs: dict[str, Path]) -> None:
    for name, options, said in [
        ("flat", {"ef_search": 3}, "index type 'flat': unknown key options.ef_search"),
        ("pq", {"refine_facter": 3}, "did you mean 'refine_factor'"),
        ("bm25", {"refine_factor": 3}, "index type 'bm25': unknown key options.refine_factor"),
        ("hybrid", {"fusion_depth": 0}, "got 0; input should be greater than or equal to 1"),
    ]:
        with pytest.raises(ConfigError, match=said):
            LocalRetriever(index_dirs[name], options=options)
    retriever = LocalRetriever(index_dirs["pq"], options={"refine_factor": 2, "rerank_candidates": 7})
    assert retriever.search_batch(["Ana Bell"], 1)[0][0].id == "p0"


def test_a_reranker_orders_anew_what_was_found(index_dirs: dict[str, Path], tmp_path: Path) -> None:
    torch.manual_seed(0)
    BertForSequenceClassification(config()).save_pretrained(tmp_path)
    save_tokenizer(tmp_path, pad_token="[PAD]")
    reranker = Reranker.load(tmp_path)
    for name in ("flat", "hybrid"):
        plain = LocalRetriever(index_dirs[name])
        for candidates in (1, 4):
            retriever = LocalRetriever(
                index_dirs[name], reranker=str(tmp_path), options={"rerank_candidates": candidates}
            )
            found = retriever.search_batch([*NAMES, "xyzzy"], 2)
            wide = plain.search_batch([*NAMES, "xyzzy"], max(2, candidates))
            assert found == reranker.rerank([*NAMES, "xyzzy"], wide, 2)
            assert {hits.index_version for hits in found if isinstance(hits, Hits)} == {retriever.version}
            assert pickle.loads(pickle.dumps(retriever)).search_batch(NAMES, 2) == found[:5]


@pytest.mark.integration
def test_importing_the_retriever_is_light() -> None:
    script = (
        "import sys, retrieval.local\n"
        "print([name for name in ('torch', 'faiss', 'sentence_transformers', 'bm25s', 'ray') if name in sys.modules])"
    )
    assert run_python(script) == "[]\n"


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
    path = directory / "shard-0000.faiss"
    path.write_bytes(path.read_bytes()[:-100])


def _foreign(directory: Path) -> None:
    path = directory / "shard-0000.faiss"
    path.write_bytes(b"x" * path.stat().st_size)


def _of_other_vectors(directory: Path) -> None:
    manifest = Manifest.read(directory)
    other = VectorIndex.build([np.ones((manifest.count, manifest.dimension), np.float32)], manifest.dimension)
    other.save(directory / "shard-0000.faiss")


def _manifest(change: Callable[[dict[str, Any]], object], *, listed: bool = False) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        content = json.loads((directory / "manifest.json").read_text())
        change(content)
        if not listed:  # as of a version that wrote no digest
            del content["digest"]
        (directory / "manifest.json").write_text(json.dumps(content))

    return damage


def _other_encoder(directory: Path) -> None:
    (directory / "encoder" / "modules.json").write_text("[]")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_truncate, r"shard-0000\.faiss: got \d+ bytes, expected \d+"),
        (_foreign, r"shard-0000\.faiss: got fingerprint"),
        (_of_other_vectors, r"shard-0000\.faiss: got fingerprint .* belongs to another index"),
        (lambda d: (d / "shard-0000.faiss").unlink(), r"no .*shard-0000\.faiss"),
        (lambda d: write_corpus(PASSAGES[::-1], d), r"corpus\.arrow: got"),
        (lambda d: write_corpus(PASSAGES[:-1], d), r"corpus\.arrow: got \d+ bytes"),
        (
            lambda d: write_corpus([*PASSAGES[:-1], Passage("p4", "李 明", "李 明 was born in town5.")], d),
            "fingerprint",
        ),
        (lambda d: (d / "corpus.arrow").write_bytes(b"ARROW1"), r"corpus\.arrow: got 6 bytes"),
        (lambda d: (d / "corpus.arrow").unlink(), r"no .*corpus\.arrow"),
        (lambda d: (d / "manifest.json").unlink(), r"manifest\.json is missing"),
        (lambda d: (d / "manifest.json").write_text("{"), "manifest.json cannot be read: .*; build the index again"),
        (lambda d: (d / "manifest.json").write_text("[]"), "format version None, expected 2"),
        (_manifest(lambda m: m.update(format_version=99)), "format version 99, expected 2"),
        (_manifest(lambda m: m.pop("count")), r"count: .*required"),
        (_manifest(lambda m: m.update(count=4)), "build the index again"),
        (_manifest(lambda m: m.update(count="four")), r"count: .*integer.*'four'"),
        (_manifest(lambda m: m.update(pages=4)), "pages: "),
        (_manifest(lambda m: m.update(passage_prompt="x"), listed=True), "damaged or edited"),
        (_manifest(lambda m: m.update(shards=[])), "build the index again"),
        (_manifest(lambda m: m.update(encoder_fingerprint="0" * 64)), "it was edited"),
        (_manifest(lambda m: m["corpus"].update(name="../other.arrow")), "leads out of the index directory"),
        (_manifest(lambda m: m["corpus"].update(name="/etc/passwd")), "leads out of the index directory"),
        (_other_encoder, "encoder"),
        (lambda d: shutil.rmtree(d / "encoder"), "encoder"),
        (shutil.rmtree, "no index in"),
    ],
)
def test_damaged_directories_are_refused(copy: Path, damage: Callable[[Path], object], said: str) -> None:
    damage(copy)
    with pytest.raises(DataError, match=said) as caught:
        LocalRetriever(copy)
    assert "\n" not in str(caught.value)
