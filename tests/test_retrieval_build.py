"""Building an index of every type: it is whole or absent, and wrong arguments are refused before anything is made."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from encoder_world import change_json, write_modules, write_plain

from ragr1_actors.core.disk.digests import LIST_FILE
from ragr1_actors.core.errors import ConfigError, DataError
from retrieval.base import Passage
from retrieval.build import build_index, index_info
from retrieval.corpora.corpus import Corpus
from retrieval.encoders.embedding import Workers
from retrieval.encoders.families import make_static_encoder
from retrieval.indexes.manifest import Manifest
from retrieval.local import LocalRetriever

NAMES = ["Ana Bell", "Bo Cole", "Çelik Öz", "Dana Fox 1902", "李 明"]
PASSAGES = [Passage(f"p{i}", name, f"{name} was born in town{i}.") for i, name in enumerate(NAMES)]
MANY = [Passage(str(i), f"Person{i}", f"Born in town{i % 97}.") for i in range(200)]


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
        "manifest.json", "corpus.arrow", "titles.npy", "shard-0000.faiss",
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
    out = build(tmp_path / "index", MANY, index_type=index_type, **arguments)
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
    listed = {out / "encoder" / LIST_FILE} & set(out.rglob("*"))
    assert {path.relative_to(out).as_posix() for path in [*(out / "bm25").glob("*"), *listed]} | {"titles.npy"} == names


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
        ({"options": {"m": 3}}, ConfigError, "index type 'flat': unknown key options.m"),
        ({"num_shards": 0}, ConfigError, "got 0 shards .* expected at least 1"),
        ({"num_shards": 2, "index_type": "bm25"}, ConfigError, "got 2 shards .* expected 1, as it has no vectors"),
        ({"num_shards": 6}, ConfigError, "got 6 shards for 5 passages; ask for fewer"),
        ({"workers": Workers(device="tpu5")}, ConfigError, "unknown device 'tpu5'"),
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
        ([Passage("a", "", "?!")], "none of the 1 passages has a letter or a digit"),
        (broken(), "line 2"),
    ]:
        with pytest.raises(DataError, match=said):
            build(tmp_path / "a", passages)
        assert list(tmp_path.iterdir()) == []


def test_passages_without_a_word_are_left_out_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [Passage("a", "Riga", ""), Passage("b", "", " .\n"), Passage("c", "", "1902"), Passage("d", "—", "")]
    assert index_info(build_index(given, tmp_path / "index"))["count"] == 2
    assert "2 passages without a letter or a digit are left out" in capsys.readouterr().out
    assert list(Corpus.open(tmp_path / "index").ids.to_pylist()) == ["a", "c"]
    with pytest.raises(DataError, match="none of the 2 passages has a letter or a digit; give another corpus"):
        build_index([given[1], given[3]], tmp_path / "none")


def test_arguments_of_a_finished_build_are_not_kept(index_dir: Path, tmp_path: Path) -> None:
    """Nor is the lock: only the index is left, which may be copied."""
    copy = shutil.copytree(index_dir, tmp_path / "copy")
    assert json.loads((copy / "manifest.json").read_text())["version"] == index_info(copy)["version"]
    assert not any((index_dir / name).exists() for name in ("arguments.json", "lock", "embeddings"))
