"""Encoder: text to vectors. The only module that imports sentence_transformers, once a model needs it.

::

    folder ─► plan: pooling, prompts (families) ─► model
    texts ─► prompt ─► token ids ─► batches of similar length ─► model's modules ─► length 1
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import torch
from huggingface_hub import snapshot_download
from numpy.typing import NDArray
from safetensors import safe_open

from ragr1_actors.core.disk.digests import LIST_FILE, check_digests
from ragr1_actors.core.disk.files import fingerprint_file
from ragr1_actors.core.errors import ConfigError, DataError, one_line, valid_unicode
from ragr1_actors.core.models.model_files import find_code, quiet_transformers
from ragr1_actors.core.process.imports import quick_imports
from retrieval.base import Passage
from retrieval.corpora.text import laid_out
from retrieval.encoders.families import STATIC_POOLING, EncoderPlan, StaticModel, plan_encoder

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Transformer

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
"""Types of an encoder's weights, beside ``auto``; the vectors it returns are always float32."""

_CHUNK = 1024
"""Number of texts that are sorted by length together to form batches."""
_STATIC_BATCH = 256
_MAX_TOKENS = {"cpu": 8192, "cuda": 32768}
_SPARE_TOKENS = {"cpu": 64, "cuda": 2048}
"""Padding tokens that cost as much time as one more batch: few on a CPU; on a GPU, which has idle cores, many."""
_WEIGHTS = ".safetensors"
_OLD_WEIGHTS = ".bin"
_MODEL_FILES = (_WEIGHTS, ".json", ".txt", ".model")
_HUB_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.md"]
_NO_HUB = ["onnx/*", "openvino/*"]
_NO_LIMIT = 2**20
"""Token limit above which a tokenizer has none; tokenizers without a limit report 10**30."""
_Batch = tuple[list[int], dict[str, torch.Tensor]]
"""Positions of texts in a request, with the input of the model's first module: tensors of as many rows."""


class TokenizedTexts(NamedTuple):
    """Texts in the form that ``Encoder.embed`` takes."""

    texts: list[str]
    batches: list[_Batch]
    not_pooled: dict[str, int]
    """Holds ``prompt_length`` if the encoder leaves the prompt out of the mean."""


def passage_text(passage: Passage, title_repeats: int = 1) -> str:
    """Return the text that is encoded for a passage: its title on one line, then its text."""
    return f"{passage.title}\n" * title_repeats + passage.text


class Encoder:
    """Sentence-transformers model whose vectors have length 1, or 0 for a text without a known word."""

    def __init__(
        self, model: SentenceTransformer | StaticModel, name: str, plan: EncoderPlan, fingerprint: str
    ) -> None:
        """Wrap a loaded model; use ``Encoder.load``."""
        self._model = model
        self._model_lock = Lock()
        self._tokens = None
        self._pools_prompt = True
        if plan.pooling != STATIC_POOLING:
            from sentence_transformers.sentence_transformer.modules import Pooling

            assert not isinstance(model, StaticModel)
            self._tokens = _Tokens(cast("Transformer", model[0]), plan)
            self._pools_prompt = all(module.include_prompt for module in model if isinstance(module, Pooling))
        self.name = name
        self.plan = plan
        self.fingerprint = fingerprint
        """Hash of the model's files, pooling and prompts: encoders with equal fingerprints give equal vectors."""
        dimension = model.get_embedding_dimension()
        assert dimension is not None
        self.dimension: int = dimension
        # A mean over words cannot tell a title from a mention: two titles gain .03 recall@3 on HotpotQA, three less.
        self._title_repeats = 1 if self._tokens else 2

    @classmethod
    def load(cls, name_or_path: str | Path, *, device: str = "cpu", dtype: str = "auto") -> Encoder:
        """Load a sentence-transformers folder, or a model by its hub name.

        A folder of transformers alone is loaded only if its family is known, see ``families``. ``device`` is ``cpu`` or
        ``cuda``. ``dtype`` is the type of the weights, a key of ``DTYPES`` or ``auto``: float16 on a GPU, else float32.

        Raises:
            DataError: there is no such folder or model of the hub (or of its cache, without a network), or it is
                damaged or does not name its pooling.
            ConfigError: the device or dtype is unknown.
        """
        name = str(name_or_path)
        weights_dtype = _weights_dtype(dtype, device)
        folder = _find(name)
        if any(find_code(part) for part in (folder, *folder.glob("*/"))):
            raise code_refused("encoder", name)
        try:
            check_digests(folder)
        except DataError as error:
            raise DataError(f"{error}; copy the index as a whole or build it again") from error
        plan = plan_encoder(folder, name)
        try:
            model: SentenceTransformer | StaticModel | None = StaticModel.load(folder, plan, device, weights_dtype)
            if model is None:
                with quiet_transformers():
                    model = _load_model(folder, plan, device, weights_dtype)
        except DataError:
            raise
        except Exception as error:  # tokenizers raises a plain Exception for a damaged tokenizer.json
            if "trust_remote_code" in str(error):
                raise code_refused("encoder", name) from error
            raise DataError(
                f"encoder {name!r} cannot be loaded ({one_line(error)}); give a sentence-transformers model, or copy "
                "this one again"
            ) from error
        return cls(model, name, plan, _fingerprint(folder, plan))

    def encode_queries(self, queries: list[str]) -> NDArray[np.float32]:
        """Encode queries, each behind its prompt: float32 ``[len(queries), dimension]``.

        A query with more tokens than the model takes is cut. Raises ``DataError`` for NaN or infinity.
        """
        return self.embed(self._tokenize(queries, self.plan.query_prompt))

    def encode_passages(self, passages: list[Passage], layout: str = "") -> NDArray[np.float32]:
        """Encode passages, each behind its prompt: float32 ``[len(passages), dimension]``; same errors.

        ``layout``: one of ``LAYOUTS``; empty is title and text on lines of their own.
        """
        return self.embed(self.tokenize_passages(passages, layout))

    def tokenize_passages(self, passages: list[Passage], layout: str = "") -> TokenizedTexts:
        """Do the part of ``encode_passages`` that needs no model; any number of threads may call it."""
        if layout:
            texts = [laid_out(passage, layout) for passage in passages]
        else:
            texts = [passage_text(passage, self._title_repeats) for passage in passages]
        return self._tokenize(texts, self.plan.passage_prompt)

    def embed(self, tokens: TokenizedTexts) -> NDArray[np.float32]:
        """Do the rest of ``encode_passages``: float32 ``[len(tokens.texts), dimension]``, one thread at a time."""
        texts = tokens.texts
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        found: list[tuple[list[int], torch.Tensor]] = []
        device = self._model.device
        with self._model_lock, torch.inference_mode():
            for positions, features in tokens.batches:
                inputs: dict[str, Any] = {key: value.to(device) for key, value in features.items()} | tokens.not_pooled
                embedding = self._model(inputs)["sentence_embedding"][:, : self.dimension].float()
                found.append((positions, embedding))
            for positions, embedding in found:  # copied last: the GPU goes on with the next batches
                vectors[positions] = embedding.cpu().numpy()
        is_finite = np.isfinite(vectors).all(axis=1)
        if not is_finite.all():
            text = texts[int(np.argmin(is_finite))]
            raise DataError(
                f"encoder {self.name!r} gives NaN or infinity for {text[:64]!r}; its files are damaged, or its numbers "
                "overflow in half precision, so copy it again or load it with dtype float32"
            )
        # Normalised here, not by the model, so that a text without a known word stays the zero vector rather than NaN.
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        normalised: NDArray[np.float32] = np.ascontiguousarray(vectors / np.where(norms > 0, norms, 1), np.float32)
        return normalised

    def _tokenize(self, texts: list[str], prompt: str) -> TokenizedTexts:
        not_pooled = {"prompt_length": self._tokens.count(prompt)} if self._tokens and not self._pools_prompt else {}
        batches: list[_Batch] = []
        for start in range(0, len(texts), _CHUNK):
            chunk = [prompt + valid_unicode(text) for text in texts[start : start + _CHUNK]]
            batches += [([start + row for row in rows], features) for rows, features in self._batches(chunk)]
        return TokenizedTexts(texts, batches, not_pooled)

    def _batches(self, texts: list[str]) -> Iterator[_Batch]:
        if self._tokens is not None:
            yield from self._tokens.batches(texts, self._model.device.type)
            return
        for start in range(0, len(texts), _STATIC_BATCH):
            batch = texts[start : start + _STATIC_BATCH]
            yield list(range(start, start + len(batch))), self._model.preprocess(batch)


class _Tokens:
    """Converts texts to padded token ids. sentence-transformers is slower, and pads all queries to the longest."""

    def __init__(self, transformer: Transformer, plan: EncoderPlan) -> None:
        tokenizer = transformer.tokenizer
        assert tokenizer is not None
        self._tokenizer: Any = tokenizer
        self._limit = _max_tokens(transformer)
        self._end: list[int] = []
        if plan.ends_texts and self._ids(["a"])["input_ids"][0][-1] != tokenizer.eos_token_id:
            self._end = [tokenizer.eos_token_id]
        self._ids(["a"])  # sets the truncation, which no thread may do while another one tokenizes

    def count(self, prompt: str) -> int:
        """Return how many tokens ``prompt`` adds at the beginning of a text."""
        ids = self._ids([prompt])["input_ids"][0] if prompt else []
        return len(ids) - (bool(ids) and ids[-1] in self._tokenizer.all_special_ids)

    def batches(self, texts: list[str], device_type: str) -> Iterator[_Batch]:
        """Yield the texts in batches of similar length; texts without a token are left out."""
        ids = self._ids(texts)
        lengths = [len(text_ids) for text_ids in ids["input_ids"]]
        kind = "cpu" if device_type == "cpu" else "cuda"
        for batch in batch_by_length(lengths, _MAX_TOKENS[kind], _SPARE_TOKENS[kind]):
            positions = [position for position in batch if lengths[position]]
            if positions:
                yield positions, self._pad(ids, positions, [lengths[position] for position in positions])

    def _ids(self, texts: list[str]) -> dict[str, list[list[int]]]:
        end = self._end
        limits = {} if self._limit is None else {"truncation": True, "max_length": self._limit - len(end)}
        found = dict(self._tokenizer(texts, return_attention_mask=False, verbose=False, **limits))
        if end:
            found["input_ids"] = [ids + end for ids in found["input_ids"]]
        return found

    def _pad(
        self, ids: dict[str, list[list[int]]], positions: list[int], lengths: list[int]
    ) -> dict[str, torch.Tensor]:
        columns, ends = np.arange(lengths[0]), np.array(lengths)[:, None]
        mask = columns >= lengths[0] - ends if self._tokenizer.padding_side == "left" else columns < ends
        features = {"attention_mask": torch.from_numpy(mask.astype(np.int64))}
        for key, rows in ids.items():
            # The value at a masked position does not matter, but it must be a legal token id.
            filler = self._tokenizer.pad_token_id or 0 if key == "input_ids" else 0
            padded = np.full(mask.shape, filler, np.int64)
            padded[mask] = np.fromiter(chain.from_iterable(rows[position] for position in positions), np.int64)
            features[key] = torch.from_numpy(padded)
        return features


def _weights_dtype(dtype: str, device: str) -> torch.dtype:
    try:
        is_gpu = torch.device(device).type == "cuda"
    except RuntimeError as error:
        raise ConfigError(f"unknown device {device!r}; expected cpu or cuda") from error
    if is_gpu and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} of the encoder: torch sees no GPU here; use cpu")
    if dtype == "auto":
        return torch.float16 if is_gpu else torch.float32
    if dtype not in DTYPES:
        raise ConfigError(f"unknown dtype {dtype!r} of an encoder; expected auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def _find(name: str) -> Path:
    """Return the folder of a model; it is downloaded if it is not on this machine."""
    path = Path(name)
    if not name:
        raise DataError("the encoder's name is empty; give a folder or a hub name")
    if path.is_dir():
        return path
    if path.is_file():
        raise DataError(f"encoder {name!r} is a file; give the folder of a sentence-transformers model")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise DataError(f"no encoder folder {name}; give an existing sentence-transformers folder or a hub name")
    repository = name if "/" in name else f"sentence-transformers/{name}"
    cache = os.environ.get("SENTENCE_TRANSFORMERS_HOME")
    try:
        folder = Path(
            snapshot_download(repository, cache_dir=cache, allow_patterns=_HUB_FILES, ignore_patterns=_NO_HUB)
        )
        if not any(folder.rglob(f"*{_WEIGHTS}")):
            snapshot_download(repository, cache_dir=cache, allow_patterns=[f"*{_OLD_WEIGHTS}"], ignore_patterns=_NO_HUB)
    except (OSError, ValueError) as error:
        raise DataError(
            f"encoder {name!r} is no folder and cannot be loaded from the hub ({one_line(error)}); check the name and "
            "the network, or give a folder"
        ) from error
    return folder


def code_refused(kind: str, name: str) -> DataError:
    """Return the error for an encoder or a reranker, ``kind``, that needs its own Python code (``auto_map``)."""
    return DataError(
        f"{kind} {name!r} brings Python code from its repository, which is never run here; give a model of an "
        "architecture that transformers knows"
    )


def _load_model(folder: Path, plan: EncoderPlan, device: str, dtype: torch.dtype) -> SentenceTransformer:
    # Always given: transformers' default is the type of the saved weights, even float16 on a CPU.
    settings: dict[str, Any] = {"dtype": dtype}
    with quick_imports():
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    if plan.is_plain:
        no_code = {"trust_remote_code": False}  # without it, transformers asks on the terminal
        transformer = Transformer(
            str(folder), model_kwargs=settings | no_code, config_kwargs=no_code, processor_kwargs=dict(no_code)
        )
        pooling = Pooling(transformer.get_embedding_dimension(), pooling_mode=plan.pooling)
        model = SentenceTransformer(modules=[transformer, pooling], device=device)
    else:
        model = SentenceTransformer(str(folder), device=device, model_kwargs=settings, local_files_only=True)
    _check_model(model, folder, plan)
    return model.eval()


def _check_model(model: SentenceTransformer, folder: Path, plan: EncoderPlan) -> None:
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding, Transformer

    first = model[0]
    if isinstance(first, StaticEmbedding):
        return
    if not isinstance(first, Transformer) or (not plan.is_plain and "message" in first.modality_config):
        raise DataError(f"{folder}: its {type(first).__name__} takes no plain texts; give an encoder of texts")
    missing = _missing_weights(folder / plan.module_folders[0], first.model)
    if missing:
        raise DataError(
            f"{folder}: {len(missing)} weights are missing, such as {missing[0]}, and would be random; copy it again"
        )


def _missing_weights(folder: Path, model: Any) -> list[str]:
    """Return the names of weights that the files lack; transformers fills them with random numbers."""
    expected = {key for key in model.state_dict() if not _is_unused(key)}
    present = set()
    for path in folder.glob(f"*{_WEIGHTS}"):
        with safe_open(path, "numpy") as file:
            for key in file.keys():  # noqa: SIM118
                parts = key.split(".")
                present |= {".".join(parts[start:]) for start in range(min(3, len(parts)))}  # bert.encoder.layer...
    if expected <= present:
        return []
    # Old files may have renamed weights; transformers reports the missing ones when it loads them.
    _, report = type(model).from_pretrained(folder, output_loading_info=True)
    return sorted(key for key in report["missing_keys"] if not _is_unused(key))


def _is_unused(key: str) -> bool:
    return key.startswith("pooler.")  # BERT's head for another task; many encoders are published without it


def _max_tokens(transformer: Transformer) -> int | None:
    """Return the largest number of tokens of a text; None if the model has no limit."""
    limit = transformer.max_seq_length or _NO_LIMIT
    for name, module in transformer.model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            # RoBERTa's positions begin after the padding's.
            unused = 0 if module.padding_idx is None else module.padding_idx + 1
            limit = min(limit, module.num_embeddings - unused)
    return limit if limit < _NO_LIMIT else None


def _fingerprint(folder: Path, plan: EncoderPlan) -> str:
    digest = hashlib.sha256(
        json.dumps([plan.pooling, plan.query_prompt, plan.passage_prompt, plan.ends_texts]).encode()
    )
    for name in sorted({"", *plan.module_folders}):
        files = sorted(path for path in (folder / name).glob("*") if path.is_file())
        is_old = not any(path.suffix == _WEIGHTS for path in files)
        for path in files:
            if path.name == LIST_FILE:
                continue
            if path.suffix in _MODEL_FILES or (is_old and path.suffix == _OLD_WEIGHTS):
                digest.update(os.fsencode(path.relative_to(folder).as_posix()) + b"\0")
                digest.update(fingerprint_file(path).encode())
    return digest.hexdigest()


def batch_by_length(lengths: Sequence[int], max_tokens: int, spare_tokens: int) -> list[list[int]]:
    """Divide texts of ``lengths`` tokens into batches of their positions, longest first and equal lengths in order.

    A batch ends before it would hold more than ``max_tokens``, or more padding than ``spare_tokens``: more padding
    would cost more than another batch. A text longer than ``max_tokens`` is a batch alone.
    """
    batches: list[list[int]] = []
    longest = padding = 0
    for position in sorted(range(len(lengths)), key=lambda position: -lengths[position]):
        padding += longest - lengths[position]
        if not batches or longest * (len(batches[-1]) + 1) > max_tokens or padding > spare_tokens:
            batches.append([])
            longest, padding = lengths[position], 0
        batches[-1].append(position)
    return batches
