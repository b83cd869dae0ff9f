"""The static encoder: one vector per word, and the mean of its words' vectors for a text.

Its folder is a sentence-transformers model with a single ``StaticEmbedding``, read and written here without that
package: its import takes 6 s of CPU time in every process that searches a small index: ``time python -c "import torch,
sentence_transformers"`` and ``time python -c "import torch"``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from ragr1_actors.core.disk.digests import write_list
from ragr1_actors.core.errors import DataError
from retrieval.encoders.families import MODULES_FILE, SETTINGS_FILE, STATIC_POOLING, EncoderPlan

_TOKENIZER_FILE = "tokenizer.json"
_WEIGHTS_FILE = "model.safetensors"
_WEIGHTS = "embedding.weight"
_MODULE = "sentence_transformers.sentence_transformer.modules.static_embedding.StaticEmbedding"
_SETTINGS = {
    "model_type": "SentenceTransformer",
    "prompts": {"query": "", "document": ""},
    "default_prompt_name": None,
    "similarity_fn_name": "cosine",
}
_UNKNOWN = "[UNK]"


class StaticModel:
    """Replaces, for ``Encoder``, a SentenceTransformer whose only module is a StaticEmbedding."""

    def __init__(self, tokenizer: Tokenizer, weights: torch.Tensor) -> None:
        """Hold the vectors of all tokens, ``[num_tokens, dimension]``."""
        tokenizer.no_padding()
        self._tokenizer, self._weights = tokenizer, weights
        self.device = weights.device

    @classmethod
    def load(cls, folder: Path, plan: EncoderPlan, device: str, dtype: torch.dtype) -> Self | None:
        """Load a folder; return None if its model is of another kind or its weights have other names.

        Raises:
            Exception: a file is damaged; tokenizers and safetensors raise their own classes.
        """
        if plan.pooling != STATIC_POOLING or len(plan.module_folders) != 1:
            return None
        module = folder / plan.module_folders[0]
        if not (module / _WEIGHTS_FILE).is_file():
            return None
        with safe_open(module / _WEIGHTS_FILE, "pt") as file:
            if list(file.keys()) != [_WEIGHTS]:
                return None
            weights = file.get_tensor(_WEIGHTS)
        return cls(Tokenizer.from_file(str(module / _TOKENIZER_FILE)), weights.to(device, dtype))

    def preprocess(self, texts: list[str]) -> dict[str, torch.Tensor]:
        """Return the tokens of all texts in one row, and the position at which each text begins."""
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        starts = np.cumsum([0] + [len(encoding.ids) for encoding in encodings])[:-1]
        ids = [token for encoding in encodings for token in encoding.ids]
        return {"input_ids": torch.tensor(ids, dtype=torch.long), "offsets": torch.from_numpy(starts)}

    def __call__(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the means: ``sentence_embedding``, ``[num_texts, dimension]``."""
        found = torch.nn.functional.embedding_bag(features["input_ids"], self._weights, features["offsets"])
        return {"sentence_embedding": found}

    def get_embedding_dimension(self) -> int:
        """Return the length of a vector."""
        return self._weights.shape[1]


def make_static_encoder(directory: str | Path, texts: Iterable[str], *, dimension: int = 512, seed: int = 0) -> Path:
    """Write a sentence-transformers folder that matches words, made from ``texts`` alone: nothing is downloaded.

    Every word of ``texts`` gets a random direction with the length of its inverse document frequency, so the inner
    product of two texts is close to their tf-idf similarity (error about ``1 / sqrt(dimension)``). Case and accents do
    not matter, punctuation separates words, and words that are not in ``texts`` are ignored. The same texts, dimension
    and seed give the same files. It is meant for corpora of up to some hundred thousand distinct words: a word takes
    ``4 * dimension`` bytes.

    Raises:
        DataError: ``texts`` has no word.
        OSError: the folder could not be written.
    """
    normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.BertNormalizer()])
    splitter = pre_tokenizers.Split(Regex(r"[^\p{L}\p{M}\p{N}]+"), behavior="removed")
    num_texts = 0
    document_counts: Counter[str] = Counter()
    for text in texts:
        num_texts += 1
        clean = normalizer.normalize_str(text.encode("utf-8", "replace").decode("utf-8"))
        document_counts.update({word for word, _ in splitter.pre_tokenize_str(clean)})
    words = sorted(document_counts)
    if not words:
        raise DataError("a static encoder needs texts with words in them; the corpus has none")

    counts = np.array([document_counts[word] for word in words], np.float64)
    # BM25's formula: positive even if every text has the word, and close to 0 for "the".
    idf = np.log1p((num_texts - counts + 0.5) / (counts + 0.5))
    directions = np.random.default_rng(seed).standard_normal((len(words), dimension), dtype=np.float32)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    # Unknown words are the zero vector: they only shorten the mean, and the length is normalised later.
    weights = np.zeros((1 + len(words), dimension), np.float32)
    weights[1:] = directions * idf[:, None].astype(np.float32)

    vocabulary = {_UNKNOWN: 0} | {word: number for number, word in enumerate(words, 1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        tokenizer.save(str(folder / _TOKENIZER_FILE))
        save_file({_WEIGHTS: weights}, folder / _WEIGHTS_FILE)
    except Exception as error:  # safetensors and tokenizers report a full disk with their own exceptions
        raise OSError(f"{directory} could not be written: {error}") from error
    modules = [{"idx": 0, "name": "0", "path": "", "type": _MODULE}]
    (folder / MODULES_FILE).write_text(json.dumps(modules, indent=2), encoding="utf-8")
    (folder / SETTINGS_FILE).write_text(json.dumps(_SETTINGS, indent=2), encoding="utf-8")
    write_list(folder)
    return folder
