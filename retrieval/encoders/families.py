"""Pooling and prompts of an encoder, read from its folder: they define the vector of a text.

``StaticModel`` is an encoder without a transformer: a vector per word, and the mean of its words' vectors for a text.
It is read here without the sentence-transformers package, whose import takes 6 s of CPU time in every process that
searches a small index: ``time python -c "import torch, sentence_transformers"`` and ``time python -c "import torch"``.

A transformer returns one vector per token. The weights do not tell which of these, or whether their mean, is the vector
of the text, nor which prompts began queries and passages in training. A wrong choice raises no error, but finds fewer
passages. So each choice is read from a file or from the table below; there is no default.

::

    modules.json ─► 1_Pooling/config.json             pooling that the folder names ──┐  they must agree
    folder, hub name, _name_or_path, model card ─► family: pooling and prompts ───────┘
    config_sentence_transformers.json                 prompts that the folder carries come before the family's
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from ragr1_actors.core.disk.digests import write_list
from ragr1_actors.core.disk.json_files import read_json_as
from ragr1_actors.core.errors import DataError

_REMEDY = "copy the encoder again"
MODULES_FILE = "modules.json"
STATIC_POOLING = "static"
SETTINGS_FILE = "config_sentence_transformers.json"
_CONFIG_FILE = "config.json"
_CARD_FILE = "README.md"
_QUERY_KEYS = ("query",)
_PASSAGE_KEYS = ("document", "passage", "corpus")
_LEGACY_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_INSTRUCTION = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
_BGE_EN = "Represent this sentence for searching relevant passages: "
_BGE_ZH = "为这个句子生成表示以用于检索相关文章："  # noqa: RUF001


@dataclass(frozen=True)
class Family:
    """Family of encoders that were trained alike."""

    name: str
    pattern: str
    """Regular expression over a model's name in lower case."""
    pooling: str
    query_prompt: str = ""
    passage_prompt: str = ""


# From the model cards of intfloat, BAAI, thenlper, Alibaba-NLP and sentence-transformers, whose code reads
# `average_pool`, `last_hidden_state[:, 0]` or `last_token_pool`; FlagEmbedding's table of embedders says the same. The
# vectors of all are normalised. The first pattern that is found wins.
FAMILIES = (
    # Its card uses mean pooling, unlike e5-mistral's, with the same instruction.
    Family("multilingual-e5-instruct", r"multilingual-e5-large-instruct", "mean", _INSTRUCTION),
    Family("e5-mistral", r"e5-mistral-7b-instruct", "lasttoken", _INSTRUCTION),
    Family("e5", r"(multilingual-)?e5-(small|base|large)(-v2)?", "mean", "query: ", "passage: "),
    Family("bge-en", r"bge-(small|base|large)-en(-v1\.5)?", "cls", _BGE_EN),
    Family("bge-zh", r"bge-(small|base|large)-zh(-v1\.5)?", "cls", _BGE_ZH),
    Family("bge-m3", r"bge-m3(?!-retromae)", "cls"),
    Family("gte-qwen", r"gte-qwen(1\.5|2)-[0-9.]+b-instruct", "lasttoken", _INSTRUCTION),
    Family("gte-v1.5", r"gte-(base|large)-en-v1\.5|gte-multilingual-base|gte-modernbert-base", "cls"),
    Family("gte-zh", r"gte-(small|base|large)-zh", "cls"),
    Family("gte", r"gte-(small|base|large)", "mean"),
    Family("all", r"all-(minilm-l[0-9]+|mpnet-base|distilroberta|roberta-large)-v[12]", "mean"),
)


@dataclass(frozen=True)
class EncoderPlan:
    """Pooling, prompts and modules with which a folder's vectors are made."""

    pooling: str
    """Pooling: ``mean``, ``cls``, ``lasttoken`` or ``static``; several, such as ``cls+mean``, are concatenated."""
    query_prompt: str
    """Text before every query."""
    passage_prompt: str
    is_plain: bool
    """Whether the folder is from transformers alone, so that the pooling has to be added."""
    ends_texts: bool
    """Whether every text must end with the end-of-text token, whose vector is used."""
    module_folders: tuple[str, ...]
    """Folders of the model's modules, relative to its folder."""
    notes: tuple[str, ...]
    """Notes for the user on choices that the folder does not make."""


@dataclass(frozen=True)
class _Module:
    """Entry of ``modules.json``."""

    type: str
    path: str


@dataclass(frozen=True)
class _Settings:
    """Fields that are read from ``config_sentence_transformers.json``."""

    model_type: str = "SentenceTransformer"
    prompts: dict[str, str | None] | None = None


def plan_encoder(folder: Path, name: str) -> EncoderPlan:
    """Read from an encoder's folder how its vectors are made; a folder of transformers alone needs a known family.

    ``name`` is the hub name or path that the encoder was asked for by; it tells the family too.

    Raises:
        DataError: there is no encoder, a file is broken, the pooling is unknown or not the family's, or two fit.
    """
    config = read_json_as(dict[str, Any], folder / _CONFIG_FILE, _REMEDY) if (folder / _CONFIG_FILE).is_file() else {}
    if not config and not (folder / MODULES_FILE).is_file():
        raise DataError(
            f"encoder {name!r} is no model: {folder} holds neither {MODULES_FILE} nor {_CONFIG_FILE}; give the folder "
            "of a sentence-transformers model"
        )
    family = _recognise(folder, name, config)
    if (folder / MODULES_FILE).is_file():
        return _plan_modules(folder, name, family)
    if family is None:
        raise DataError(
            f"encoder {name!r} does not say how it pools: {folder} holds no {MODULES_FILE}, and its name, "
            f"{_CONFIG_FILE} and {_CARD_FILE} tell no known family ({', '.join(each.name for each in FAMILIES)}); give "
            "a folder saved by sentence-transformers"
        )
    notes = (f"pooling {family.pooling!r} and prompts of the {family.name} family: the folder names none",)
    prompts = (family.query_prompt, family.passage_prompt)
    return EncoderPlan(family.pooling, *prompts, True, family.pooling == "lasttoken", ("",), notes)


def _plan_modules(folder: Path, name: str, family: Family | None) -> EncoderPlan:
    path = folder / SETTINGS_FILE
    settings = read_json_as(_Settings, path, _REMEDY) if path.is_file() else _Settings()
    if settings.model_type != "SentenceTransformer":
        raise DataError(f"encoder {name!r} is a {settings.model_type}; give a model that makes one vector of a text")
    modules = read_json_as(list[_Module], folder / MODULES_FILE, _REMEDY)
    pooling = _read_pooling(folder, name, modules)
    if pooling == STATIC_POOLING:
        family = None
    if family is not None and pooling != family.pooling:
        raise DataError(
            f"encoder {name!r}: its files name pooling {pooling!r}, but the {family.name} family pools "
            f"{family.pooling!r}; correct its pooling, or if it was trained so, keep the family's name out of its "
            f"folder, {_CONFIG_FILE} and {_CARD_FILE}"
        )
    chosen, notes = _choose_prompts(settings.prompts or {}, family)
    ends_texts = family is not None and pooling == "lasttoken"
    return EncoderPlan(pooling, *chosen, False, ends_texts, tuple(module.path for module in modules), notes)


def _read_pooling(folder: Path, name: str, modules: list[_Module]) -> str:
    kinds = [module.type.rpartition(".")[2] for module in modules]
    if "StaticEmbedding" in kinds:
        return STATIC_POOLING
    if "Pooling" not in kinds:
        raise DataError(
            f"encoder {name!r} names no pooling: its modules are {', '.join(kinds) or 'none'}; give a model with a "
            "Pooling or a StaticEmbedding module"
        )
    path = folder / modules[kinds.index("Pooling")].path / _CONFIG_FILE
    config = read_json_as(dict[str, Any], path, _REMEDY)
    modes = config.get("pooling_mode") or [mode for key, mode in _LEGACY_MODES.items() if config.get(key)]
    if isinstance(modes, str):
        modes = [modes]
    if not isinstance(modes, list) or not modes or not all(isinstance(mode, str) for mode in modes):
        raise DataError(
            f"{path}: names no pooling mode, and sentence-transformers would take the mean; add the right one"
        )
    return "+".join(modes)


def _choose_prompts(prompts: dict[str, str | None], family: Family | None) -> tuple[tuple[str, str], tuple[str, ...]]:
    """Return the query prompt and the passage prompt, and notes on their choice."""
    chosen: list[str] = []
    notes: list[str] = []
    for role, keys in (("query", _QUERY_KEYS), ("passage", _PASSAGE_KEYS)):
        own = next((text for key in keys if (text := prompts.get(key))), "")
        known = (family.query_prompt if role == "query" else family.passage_prompt) if family else ""
        if family and own and own != known:
            notes.append(f"{role} prompt {own!r} is the folder's own; that of the {family.name} family is {known!r}")
        elif family and known and not own:
            notes.append(f"{role} prompt {known!r} is that of the {family.name} family: the folder carries none")
        chosen.append(own or known)
    unused = sorted(key for key, text in prompts.items() if text and key not in (*_QUERY_KEYS, *_PASSAGE_KEYS))
    if unused and not any(chosen):
        notes.append(f"no prompt is used: the folder's own are for {', '.join(unused)}")
    return (chosen[0], chosen[1]), tuple(notes)


def _recognise(folder: Path, name: str, config: dict[str, Any]) -> Family | None:
    """Return the only family that the names of the model tell; None if they tell none."""
    found: dict[str, str] = {}
    for source, text in _names(folder, name, config):
        for family in FAMILIES:
            if re.search(rf"(?<![a-z0-9])({family.pattern})(?![a-z0-9])", text.lower()):
                found.setdefault(family.name, f"{source} {text!r}")
                break
    if len(found) > 1:
        told = " and ".join(f"{family} by its {source}" for family, source in found.items())
        raise DataError(f"encoder {name!r} names two families, {told}; correct the wrong one")
    return next((each for each in FAMILIES if each.name in found), None)


def _names(folder: Path, name: str, config: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the names of the model, each with its source."""
    names = [("name", Path(name).name), ("folder", folder.resolve().name)]
    if folder.parent.name == "snapshots":  # a folder of the hub's cache: models--intfloat--e5-base-v2/snapshots/1c64...
        names.append(("folder", folder.parent.parent.name))
    origin = config.get("_name_or_path")
    if isinstance(origin, str):
        names.append((f"{_CONFIG_FILE}'s _name_or_path", origin.rstrip("/").rpartition("/")[2]))
    card = folder / _CARD_FILE
    if card.is_file():
        names += [(_CARD_FILE, title) for title in _titles(card.read_text(encoding="utf-8", errors="replace"))]
    return names


def _titles(card: str) -> list[str]:
    """Return the names of the model in a model card: in its results, and in its first heading if that is a name."""
    results = re.search(r"^model-index:\s*\n- name: *+(\S++) *$", card, re.MULTILINE)
    heading = re.search(r"^#++ ++(.+)$", card, re.MULTILINE)
    titles = [match[1].rstrip(" ") for match in (results, heading) if match]
    # "SentenceTransformer based on BAAI/bge-base-en" is another model, trained with other prompts or none.
    return [title for title in titles if re.fullmatch(r"[\w./-]+", title)]


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
