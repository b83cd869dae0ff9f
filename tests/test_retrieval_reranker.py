"""The reranker over a small cross-encoder of random weights: its scores, its order, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedTokenizerFast,
)

from ragr1_actors.core.errors import DataError, RetrievalError
from retrieval.base import Passage
from retrieval.encoders.reranker import Reranker

pytestmark = pytest.mark.engine

PIECES = ["riga", "oslo", "bonn", "where", "is", "the", "lamp", "coin", "in", "lies", "##s", ".", "?", "a", "b", "c"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
MAX_POSITIONS = 48
QUERIES = ["Where is the lamp?", "where lies a coin", "", "oslo"]
FOUND = [
    [Passage(f"{q}{i}", "Riga" if i % 2 else "", "The lamp lies in Oslo. " * (i + q), 0.5) for i in range(7)]
    for q in range(4)
]


def save_tokenizer(folder: Path, **special: str) -> None:
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(SPECIAL + PIECES)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", **special}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)


def config(num_labels: int = 1) -> BertConfig:
    return BertConfig(
        vocab_size=len(SPECIAL + PIECES),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=MAX_POSITIONS,
        num_labels=num_labels,
        initializer_range=0.3,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cross") / "encoder"
    torch.manual_seed(0)
    BertForSequenceClassification(config()).save_pretrained(folder)
    save_tokenizer(folder, pad_token="[PAD]")
    return folder


@pytest.fixture(scope="module")
def reranker(folder: Path) -> Reranker:
    return Reranker.load(folder)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


class BareModel:
    """Transformers alone, a pair at a time, without padding."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForSequenceClassification.from_pretrained(folder).eval()

    def score(self, query: str, passage: Passage) -> float:
        text = f"{passage.title}\n{passage.text}" if passage.title else passage.text
        inputs = self.tokenizer([query], [text], truncation=True, max_length=MAX_POSITIONS, return_tensors="pt")
        with torch.no_grad():
            return self.model(**inputs).logits.item()


def test_scores_and_order_are_those_of_the_bare_model(folder: Path, reranker: Reranker) -> None:
    bare = BareModel(folder)
    for query, passages, reranked in zip(QUERIES, FOUND, reranker.rerank(QUERIES, FOUND, 10), strict=True):
        expected = {passage.id: bare.score(query, passage) for passage in passages}
        assert {passage.id: passage.score for passage in reranked} == pytest.approx(expected, abs=1e-5)
        assert [passage.score for passage in reranked] == sorted((p.score for p in reranked), reverse=True)
        assert len({round(score, 4) for score in expected.values()}) > 3
        by_id = {passage.id: passage for passage in passages}
        assert all((p.title, p.text) == (by_id[p.id].title, by_id[p.id].text) for p in reranked)


def test_a_query_is_answered_alike_in_any_batch(reranker: Reranker) -> None:
    together = reranker.rerank(QUERIES * 30, FOUND * 30, 3)
    for position, (query, passages) in enumerate(zip(QUERIES, FOUND, strict=True)):
        (alone,) = reranker.rerank([query], [passages], 3)
        assert len(alone) == 3
        for other in together[position :: len(QUERIES)]:
            assert [passage.id for passage in other] == [passage.id for passage in alone]
            assert [p.score for p in other] == pytest.approx([p.score for p in alone], abs=1e-5)


def test_equal_scores_stay_in_their_former_order(reranker: Reranker) -> None:
    same = [Passage(name, "", "Oslo", 1.0) for name in "cab"]
    other = Passage("z", "Riga", "the coin lies in bonn.")
    (reranked,) = reranker.rerank(["where"], [[same[0], other, *same[1:]]], 4)
    assert [passage.id for passage in reranked if passage.id != "z"] == ["c", "a", "b"]


def test_nothing_found_long_texts_and_odd_queries(reranker: Reranker) -> None:
    assert reranker.rerank([], [], 3) == []
    assert reranker.rerank(["where", "where"], [[], [Passage("a", "", "")]], 3)[0] == []
    long = "oslo riga " * 5000
    queries = [long, "\x00\x07", "\ud800", "where", long]
    passages = [Passage("a", "", "Oslo"), Passage("b", "", long), Passage("c", "\ud800", "\x00")]
    for reranked in reranker.rerank(queries, [passages] * 5, 2):
        assert len(reranked) == 2
        assert np.isfinite([passage.score for passage in reranked]).all()
    # What is cut off does not count.
    cut = [Passage("a", "", "lamp " * 100 + end) for end in ("coin", "riga")]
    ((first, second),) = reranker.rerank(["where"], [cut], 2)
    assert first.score == pytest.approx(second.score, abs=1e-5)  # two rows of a batch may be summed in two ways


def test_half_precision_orders_alike(folder: Path, reranker: Reranker) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.bfloat16)
    half = Reranker(model, AutoTokenizer.from_pretrained(folder), MAX_POSITIONS, "cpu").rerank(QUERIES, FOUND, 7)
    for expected, found in zip(reranker.rerank(QUERIES, FOUND, 7), half, strict=True):
        scores = {passage.id: passage.score for passage in expected}
        assert {p.id: p.score for p in found} == pytest.approx(scores, rel=0.05, abs=0.05)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "text"])
def test_a_damaged_folder_is_refused(copy: Path, name: str, damage: str) -> None:
    path = copy / name
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "truncated": content[: len(content) // 2], "text": b"[1]"}[damage])
    with pytest.raises(DataError, match="reranker") as caught:
        Reranker.load(copy)
    assert str(copy) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_models_are_refused(copy: Path, tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "labels", pad_token="[PAD]")
    BertForSequenceClassification(config(3)).save_pretrained(tmp_path / "labels")
    with pytest.raises(DataError, match="has 3 labels, expected 1"):
        Reranker.load(tmp_path / "labels")

    save_tokenizer(tmp_path / "plain", pad_token="[PAD]")
    BertModel(config()).save_pretrained(tmp_path / "plain")
    with pytest.raises(DataError, match="is a BertModel, which does not score pairs"):
        Reranker.load(tmp_path / "plain")

    # An encoder that only claims to have a head.
    content = json.loads((tmp_path / "plain/config.json").read_text())
    content["architectures"] = ["BertForSequenceClassification"]
    (tmp_path / "plain/config.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="no weights for classifier"):
        Reranker.load(tmp_path / "plain")

    save_tokenizer(copy)
    with pytest.raises(DataError, match="no padding token"):
        Reranker.load(copy)
    with pytest.raises(DataError, match="no reranker folder"):
        Reranker.load(tmp_path / "none")
    with pytest.raises(DataError, match="cannot be loaded"):
        Reranker.load("nobody/no-such-model")


def test_scores_that_are_no_numbers_are_a_failed_search(copy: Path) -> None:
    model = BertForSequenceClassification.from_pretrained(copy)
    with torch.no_grad():
        model.classifier.bias.fill_(float("nan"))
    model.save_pretrained(copy)
    with pytest.raises(RetrievalError, match=r"NaN or infinity; .* set retrieval\.num_gpus_per_retriever to 0"):
        Reranker.load(copy).rerank(QUERIES, FOUND, 2)
