"""Text to vectors. The only door to sentence_transformers."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from ragr1_actors.errors import DataError
from retrieval.base import Passage

STATIC_DIMENSION = 512
_BATCH_SIZE = 256
_MODEL_FILES = (".safetensors", ".bin", ".json", ".txt", ".model")
_UNKNOWN = "[UNK]"


def passage_text(passage: Passage, title_repeats: int = 1) -> str:
    """Return what is encoded of a passage: a line for its title, and its text."""
    return f"{passage.title}\n" * title_repeats + passage.text


class Encoder:
    """A sentence-transformers model whose vectors all have length 1 (or 0, for a text without one known word)."""

    def __init__(self, model: SentenceTransformer, name: str, fingerprint: str) -> None:
        """Wrap a loaded model; use ``Encoder.load``."""
        self._model = model
        self.name = name
        self.fingerprint = fingerprint
        """Hash of the model's files: two encoders of one fingerprint give the same vectors."""
        dimension = model.get_embedding_dimension()
        assert dimension is not None
        self.dimension: int = dimension
        # A mean over words cannot tell a title from a mention: twice gains .03 recall@3 on HotpotQA, three times less.
        self._title_repeats = 2 if isinstance(model[0], StaticEmbedding) else 1

    @classmethod
    def load(cls, name_or_path: str | Path) -> Encoder:
        """Load a sentence-transformers folder, or a model by its hub name.

        Raises:
            DataError: neither a folder of a model nor a model of the hub (or of its cache, without a network).
        """
        name = str(name_or_path)
        is_folder = Path(name).is_dir()
        if not is_folder and (name.startswith((".", "/", "~")) or name.count("/") > 1):
            raise DataError(f"no encoder folder {name}; give an existing sentence-transformers folder or a hub name")
        try:
            model = SentenceTransformer(name)
            folder = Path(name) if is_folder else _hub_folder(name)
        except (OSError, ValueError) as error:
            cause = " ".join(str(error).split())
            raise DataError(
                f"encoder {name!r} cannot be loaded ({cause}); give a sentence-transformers model"
            ) from error
        return cls(model, name, _fingerprint(folder))

    def encode_queries(self, queries: list[str]) -> NDArray[np.float32]:
        """Encode queries, with the model's query prompt where it has one: float32 ``[len(queries), dimension]``."""
        return self._encode(queries, self._model.encode_query)

    def encode_passages(self, passages: list[Passage]) -> NDArray[np.float32]:
        """Encode passages, with the model's document prompt if it has one: float32 ``[len(passages), dimension]``."""
        texts = [passage_text(passage, self._title_repeats) for passage in passages]
        return self._encode(texts, self._model.encode_document)

    def _encode(self, texts: list[str], encode: Callable[..., Any]) -> NDArray[np.float32]:
        if not texts:
            return np.zeros((0, self.dimension), np.float32)
        # Lone surrogates cannot be handed to the tokenizer; a policy's decoded text may hold one.
        clean = [text.encode("utf-8", "replace").decode("utf-8") for text in texts]
        vectors = encode(clean, batch_size=_BATCH_SIZE, show_progress_bar=False, convert_to_numpy=True)
        # Not the model's own normalisation: a text without a known word stays the zero vector rather than NaN.
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        normalised: NDArray[np.float32] = np.ascontiguousarray(vectors / np.where(norms > 0, norms, 1), np.float32)
        return normalised


def set_encoder_threads(num_threads: int) -> None:
    """Set torch's threads. They are the whole process's: only a process that does nothing but retrieve may call it."""
    torch.set_num_threads(num_threads)


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


def _fingerprint(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in _MODEL_FILES and path.is_file():
            digest.update(os.fsencode(path.relative_to(folder).as_posix()) + b"\0")
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _hub_folder(name: str) -> Path:
    from huggingface_hub import snapshot_download  # only a hub name needs it

    return Path(snapshot_download(name, local_files_only=True))
