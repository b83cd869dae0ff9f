"""An adopted index in use: by a fleet, a training run, an evaluation and a server; adopted twice, linked and copied."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.request import Request, urlopen

import faiss
import numpy as np
import pytest
from adopt_world import COUNT, DIMENSION, TOWNS, adopt, encoded, make_encoder, make_index, write
from http_stub import served
from numpy.typing import NDArray
from rich.console import Console
from small_world import THINGS, a_persons_environment, invoke, make_config, make_files
from test_evaluation_evaluate import Reader

from cluster.storage import Storage, StoredFolder
from ragr1_actors.core.config import RetrievalSettings
from ragr1_actors.core.errors import DataError
from ragr1_actors.runs.run_directory import create_run_directory
from ragr1_actors.training.training_run import TrainingRun
from retrieval.base import Passage
from retrieval.build import building_dir
from retrieval.corpora.readers import read_passages
from retrieval.encoders.encoder import Encoder
from retrieval.encoders.families import make_static_encoder
from retrieval.indexes.manifest import Manifest
from retrieval.local import LocalRetriever
from retrieval.replicas.client import RetrieverClient
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


# The fleet

EMPTY = range(7, COUNT - 3, 3)
QUERIES = [f"town {row} {TOWNS[row].text}" for row in (0, 1, 57, 198, COUNT - 1)]


@pytest.mark.ray
@pytest.mark.slow
async def test_a_fleet_finds_what_plain_faiss_finds_but_for_empty_passages(
    ray_local: ModuleType, encoder: Path, vectors: NDArray[np.float32], tmp_path: Path
) -> None:
    """The file's ids are those of the corpus, in no order, and its empty passages come first for the first query."""
    made, ids = vectors.copy(), 3 * np.random.default_rng(3).permutation(COUNT).astype(np.int64) + 5
    noise = np.random.default_rng(0).standard_normal((len(EMPTY), DIMENSION)).astype(np.float32)
    near = vectors[0] + 0.002 * noise
    made[list(EMPTY)] = near / np.linalg.norm(near, axis=1, keepdims=True)
    passages = [
        Passage(str(ids[row]), "", " -\n") if row in EMPTY else replace(passage, id=str(ids[row]))
        for row, passage in enumerate(TOWNS)
    ]
    index = make_index(made, "IDMap,Flat", ids=ids)
    directory = tmp_path / "index"
    adopt(write(index, tmp_path / "made.index"), directory, encoder, passages)
    scores, found = index.search(Encoder.load(encoder).encode_queries(QUERIES), COUNT)
    empty = ids[list(EMPTY)]
    assert np.isin(found[0, :100], empty).sum() >= 99  # all but the passage that the query is of
    kept = ~np.isin(found, empty)
    storage = Storage(f"file://{tmp_path / 'storage'}")

    def elsewhere(folder: str | Path) -> StoredFolder:
        return replace(storage.put(Path(folder)), path="")  # as on a node that does not see the driver's disk

    group = RetrieverGroup(directory, RetrievalSettings(num_cpus_per_retriever=0.1), elsewhere)
    try:
        group.wait_until_ready()
        client = group.retriever()
        assert isinstance(client, RetrieverClient)
        _, (*arguments, index_dir) = client.__reduce__()
        assert index_dir == str(directory)
        for with_or_without_the_corpus in (client, RetrieverClient(*arguments)):
            for k in (1, 5, 300):
                answers = await with_or_without_the_corpus.search(QUERIES, k)
                for number, hits in enumerate(answers):
                    assert [int(hit.id) for hit in hits] == found[number, kept[number]][:k].tolist()
                    expected = scores[number, kept[number]][:k].tolist()
                    assert [hit.score for hit in hits] == pytest.approx(expected, abs=1e-5)
                assert [len(hits) for hits in answers] == [min(k, COUNT - len(EMPTY))] * len(QUERIES)
                assert answers[0][0].text == TOWNS[0].text
    finally:
        group.stop()


# Runs, evaluations and servers


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small world; ``adopted`` is the only index over it, its encoder is in ``encoder``."""
    files = make_files(tmp_path_factory.mktemp("files"))
    (files / "index").rename(files / "gone")
    passages = list(read_passages(files / "corpus.json"))
    encoder = make_static_encoder(files / "encoder", [f"{passage.title} {passage.text}" for passage in passages])
    file = write(make_index(encoded(encoder, passages), "IDMap,Flat"), files / "made.index")
    adopt(file, files / "adopted", encoder, passages)
    tasks = json.loads((files / "eval_tasks.json").read_text())
    (files / "eval_tasks.json").write_text(json.dumps([task | {"supporting_ids": [task["id"]]} for task in tasks]))
    (files / "recipe.yaml").write_text(json.dumps(make_config(files).model_dump()))
    return files


@pytest.mark.slow
def test_a_run_trains_over_an_adopted_index(files: Path, tmp_path: Path) -> None:
    config = make_config(files, {"num_steps": 2, "num_demonstrations": 16}, num_iterations=1)
    settings = {"index": str(files / "adopted"), "encoder": str(files / "encoder")}
    config = config.model_copy(update={"retrieval": config.retrieval.model_copy(update=settings)})
    create_run_directory(config, tmp_path / "run")
    printed = io.StringIO()
    report = TrainingRun(config, tmp_path / "run", Console(file=printed, width=300)).execute()
    assert (report.tasks.trained, report.tasks.failed) == (8, 0)
    assert "the question as query finds the evidence with recall@2 1.00, " in printed.getvalue()


@pytest.mark.integration
def test_an_evaluation_searches_an_adopted_index(files: Path) -> None:
    command = ["--recipe", str(files / "recipe.yaml"), "--tasks", str(files / "tasks.json"), "--json"]
    command += ["--index", str(files / "adopted"), f"retrieval.encoder={files / 'encoder'}"]
    with served(Reader().answer) as url:
        printed = invoke("evaluate", "--endpoint", f"{url}/v1", "--model", "big", *command)
    found = json.loads(printed)
    assert (found["em"], found["queries"], found["num_tasks"]) == (1, 1, 8)  # it answers with the place that it reads


@pytest.mark.integration
@pytest.mark.slow
def test_an_adopted_index_is_served(files: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "ragr1_actors", "index", "serve", str(files / "adopted"), "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
        env=a_persons_environment(),
    )
    assert process.stderr is not None
    try:
        url = next(line for line in process.stderr if line.startswith("http://")).split("/retrieve")[0]
        body = json.dumps({"queries": [f"the {thing}" for thing in THINGS], "topk": 1, "return_scores": True})
        with urlopen(Request(f"{url}/retrieve", body.encode(), {"Content-Type": "application/json"})) as answer:
            found = json.load(answer)
    finally:
        process.terminate()
        process.communicate()
    assert [hits[0]["document"]["id"] for hits in found["result"]] == THINGS
    assert found["index_version"] == Manifest.read(files / "adopted").version


# Links, copies and a second call


def test_a_link_has_the_files_inode_and_both_outlive_its_first_name(encoder: Path, flat: Path, tmp_path: Path) -> None:
    for name, copy in (("linked", False), ("copied", True)):
        adopt(flat, tmp_path / name, encoder, copy=copy)
    linked, copied = (tmp_path / name / "shard-0000.faiss" for name in ("linked", "copied"))
    assert linked.stat().st_ino == flat.stat().st_ino != copied.stat().st_ino
    assert (linked.stat().st_nlink, copied.stat().st_nlink) == (2, 1)
    before = LocalRetriever(tmp_path / "linked").search_batch(QUERIES, 3)
    flat.unlink()
    assert LocalRetriever(tmp_path / "linked").search_batch(QUERIES, 3) == before
    assert LocalRetriever(tmp_path / "copied").search_batch(QUERIES, 3) == before


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_second_call_is_refused_and_changes_nothing(
    encoder: Path, flat: Path, vectors: NDArray[np.float32], tmp_path: Path
) -> None:
    out = tmp_path / "index"
    out.mkdir()  # an empty directory is taken
    adopt(flat, out, encoder)
    before = contents(out)
    other = write(make_index(vectors, "HNSW8"), tmp_path / "other.index")
    for file in (flat, other):
        for copy in (False, True):
            with pytest.raises(DataError, match=r"index exists already and is not overwritten; remove it or choose"):
                adopt(file, out, encoder, copy=copy)
    assert contents(out) == before
    assert not building_dir(out).exists()


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("then", [False, True])
def test_a_call_that_was_cut_off_goes_on_and_leaves_nothing_of_itself(
    first: bool, then: bool, encoder: Path, flat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> Iterator[None]:
        (building_dir(out) / ".writing_0a_shard-0000.faiss").touch()  # as a process leaves it that is killed
        raise KeyboardInterrupt

    out = tmp_path / "index"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Manifest, "write", interrupted)
        adopt(flat, out, encoder, copy=first)
    assert not out.exists()
    other = write(faiss.read_index(str(flat)), tmp_path / "other.index")
    with pytest.raises(DataError, match=r"unfinished build with other arguments \(adopted '.*e5_Flat\.index', now"):
        adopt(other, out, encoder)
    adopt(flat, out, encoder, copy=then)
    assert (out / "shard-0000.faiss").samefile(flat) is not then
    assert set(contents(out)) == {"corpus.arrow", "manifest.json", "shard-0000.faiss", "titles.npy"}
    assert not building_dir(out).exists()


def test_a_copy_that_was_cut_off_is_removed(
    encoder: Path, flat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def half(source: Path, target: Path) -> None:
        target.write_bytes(source.read_bytes()[:1000])
        raise KeyboardInterrupt

    out = tmp_path / "index"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("shutil.copyfile", half)
        adopt(flat, out, encoder, copy=True)
    assert "corpus.arrow" in contents(building_dir(out))
    assert not [name for name in contents(building_dir(out)) if "shard" in name]
    adopt(flat, out, encoder)
    assert set(contents(out)) == {"corpus.arrow", "manifest.json", "shard-0000.faiss", "titles.npy"}
