"""Reranker: a cross-encoder that scores each pair of query and passage, and sorts the passages by score."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from ragr1_actors.core.errors import DataError, RetrievalError, one_line, valid_unicode
from ragr1_actors.core.models.model_files import find_code
from retrieval.base import Passage
from retrieval.encoders.encoder import batch_by_length, code_refused, passage_text

MAX_TOKENS = 512
"""Length of a query and a passage together; longer pairs are cut, the longer text first."""

_ARCHITECTURE = "ForSequenceClassification"
_BATCH_TOKENS = {"cpu": 4096, "cuda": 65536}
"""Limit of tokens per batch, padding included. Measured on the CPU, where larger batches are no faster."""
_SPARE_TOKENS = {"cpu": 64, "cuda": 4096}
_CHARS_PER_TOKEN = 32
"""More characters than a token has on average in any text; longer texts are cut first, since the tokenizer is slow."""


class Reranker:
    """A model that scores pairs of query and passage, on one device.

    The scores are logits: after a sigmoid, good passages would tie.
    """

    def __init__(self, model: Any, tokenizer: Any, max_tokens: int, device: str) -> None:
        """Hold a loaded model; use ``Reranker.load``."""
        self._model = model.to(device).eval()
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._device = device

    @classmethod
    def load(cls, name_or_path: str | Path, *, device: str = "cpu") -> Reranker:
        """Load a transformers model for sequence classification with one label, such as sentence-transformers saves.

        ``name_or_path`` is a folder or a hub name. The weights are float32 on ``cpu`` and float16 on ``cuda``.

        Raises:
            DataError: there is no such model, it is damaged, or it does not score pairs.
        """
        name = str(name_or_path)
        if not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
            raise DataError(f"no reranker folder {name}; give the folder of a cross-encoder or a hub name")
        if find_code(Path(name)):
            raise code_refused("reranker", name)
        dtype = torch.float32 if device == "cpu" else torch.float16
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
            _check_kind(name, config)
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            model, report = AutoModelForSequenceClassification.from_pretrained(
                name, dtype=dtype, output_loading_info=True, trust_remote_code=False
            )
        except DataError:
            raise
        except Exception as error:  # safetensors and tokenizers raise their own exceptions for a damaged file
            if "trust_remote_code" in str(error):
                raise code_refused("reranker", name) from error
            raise DataError(f"reranker {name!r} cannot be loaded ({one_line(error)}); give a cross-encoder") from error
        if report["missing_keys"]:
            missing = ", ".join(sorted(report["missing_keys"]))
            raise DataError(f"reranker {name!r} has no weights for {missing}; give a cross-encoder that was trained")
        if tokenizer.pad_token_id is None:
            raise DataError(f"reranker {name!r} has no padding token, so pairs cannot be scored in batches; add one")
        positions = config.to_dict().get("max_position_embeddings") or MAX_TOKENS
        return cls(model, tokenizer, min(MAX_TOKENS, tokenizer.model_max_length, positions), device)

    def rerank(self, queries: list[str], found: Sequence[Sequence[Passage]], k: int) -> list[list[Passage]]:
        """Return the best ``k`` of the passages found for each query, best first, equal scores in their former order.

        All pairs are scored together, equal ones once. ``found`` is ``[len(queries)]``, the result ``[len(queries)][<=
        k]`` with the scores of this model. Raises ``RetrievalError`` if a score is not finite.
        """
        texts = [[passage_text(p, title_repeats=1 if p.title else 0) for p in passages] for passages in found]
        pairs = list(dict.fromkeys((query, text) for query, row in zip(queries, texts, strict=True) for text in row))
        scores = dict(zip(pairs, self._score(pairs).tolist(), strict=True))
        reranked = []
        for query, passages, row in zip(queries, found, texts, strict=True):
            scored = [replace(p, score=scores[query, text]) for p, text in zip(passages, row, strict=True)]
            reranked.append(sorted(scored, key=lambda passage: -passage.score)[:k])
        return reranked

    def _score(self, pairs: list[tuple[str, str]]) -> NDArray[np.float32]:
        scores = np.zeros(len(pairs), np.float32)
        if not pairs:
            return scores
        tokens = self._tokenizer(
            [self._cut(query) for query, _ in pairs],
            [self._cut(text) for _, text in pairs],
            truncation="longest_first",
            max_length=self._max_tokens,
        )
        kind = "cpu" if self._device == "cpu" else "cuda"
        lengths = [len(ids) for ids in tokens["input_ids"]]
        for chosen in batch_by_length(lengths, _BATCH_TOKENS[kind], _SPARE_TOKENS[kind]):
            scores[chosen] = self._score_batch({name: [rows[i] for i in chosen] for name, rows in tokens.items()})
        if not np.isfinite(scores).all():
            raise RetrievalError(
                "the reranker's scores hold NaN or infinity; check its files, or set retrieval.num_gpus_per_retriever "
                "to 0 (on a CPU it is float32)"
            )
        return scores

    @torch.inference_mode()
    def _score_batch(self, tokens: dict[str, list[list[int]]]) -> NDArray[np.float32]:
        """Return a score for each row of ids and masks, ``[num_pairs][num_tokens]``, after padding on the right."""
        padding = {"input_ids": self._tokenizer.pad_token_id, "attention_mask": 0, "token_type_ids": 0}
        inputs = {
            name: pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_value=padding[name])
            for name, rows in tokens.items()
        }
        logits = self._model(**{name: values.to(self._device) for name, values in inputs.items()}).logits
        scores: NDArray[np.float32] = logits[:, 0].float().cpu().numpy()
        return scores

    def _cut(self, text: str) -> str:
        return valid_unicode(text[: _CHARS_PER_TOKEN * self._max_tokens])


def _check_kind(name: str, config: Any) -> None:
    """Refuse a model without a head, since transformers would fill one with random numbers."""
    architectures = config.architectures or ["no architecture"]
    if not architectures[0].endswith(_ARCHITECTURE):
        raise DataError(
            f"reranker {name!r} is a {architectures[0]}, which does not score pairs; give a cross-encoder, a model "
            f"...{_ARCHITECTURE} with one label"
        )
    if config.num_labels != 1:
        raise DataError(
            f"reranker {name!r} has {config.num_labels} labels, expected 1, the score of a pair; give a cross-encoder "
            "that was trained to rank"
        )
