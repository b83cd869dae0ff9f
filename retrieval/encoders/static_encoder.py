"""An encoder that matches words, made from the corpus alone. With ``encoder``, the door to sentence_transformers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from ragr1_actors.core.errors import DataError

STATIC_DIMENSION = 512
_UNKNOWN = "[UNK]"


def make_static_encoder(
    directory: str | Path, texts: Iterable[str], *, dimension: int = STATIC_DIMENSION, seed: int = 0
) -> Path:
    """Write a sentence-transformers folder that matches words, made from ``texts`` alone: nothing is downloaded.

    Every word of ``texts`` gets a random direction with the length of its inverse document frequency, so the inner
    product of two texts is close to their tf-idf similarity (error about ``1 / sqrt(dimension)``). Case and accents do
    not matter, punctuation separates words, and a word that ``texts`` does not hold counts nothing. The same texts,
    dimension and seed give the same files. Meant for corpora up to some hundred thousand words: a word takes
    ``4 * dimension`` bytes.

    Raises:
        DataError: no word in ``texts``.
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
    # BM25's form: positive even where every text holds the word, and next to nothing for "the".
    idf = np.log1p((num_texts - counts + 0.5) / (counts + 0.5))
    directions = np.random.default_rng(seed).standard_normal((len(words), dimension), dtype=np.float32)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    # Unknown words are the zero vector. They shorten the mean, and the length is normalised away.
    weights = np.zeros((1 + len(words), dimension), np.float32)
    weights[1:] = directions * idf[:, None].astype(np.float32)

    vocabulary = {_UNKNOWN: 0} | {word: number for number, word in enumerate(words, 1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=_UNKNOWN))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter
    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_weights=weights)], device="cpu")
    try:
        model.save_pretrained(str(directory), create_model_card=False)
    except Exception as error:  # safetensors and tokenizers report a full disk with exceptions of their own
        raise OSError(f"{directory} could not be written: {error}") from error
    return Path(directory)
