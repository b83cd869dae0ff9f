"""Encoders of a few kilobytes, random but whole: folders of transformers, and of sentence-transformers around them."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

WORDS = [
    *"abcdefghijklmnopqrstuvwxyz",
    "the",
    "born",
    "in",
    "riga",
    "oslo",
    "query",
    "passage",
    "instruct",
    ":",
    ".",
    "?",
]
MAX_TOKENS = 32
SPECIAL = {"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}


def write_plain(folder: Path, *, tokenizer_adds: bool = True, **config: Any) -> Path:
    """Write a BERT of two layers and 16 dimensions, with its tokenizer, as transformers does."""
    folder.mkdir(parents=True)
    for name, content in _files(tokenizer_adds).items():
        (folder / name).write_bytes(content)
    change_json(folder / "config.json", **config)
    return folder


@cache
def _files(tokenizer_adds: bool) -> dict[str, bytes]:
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
    from transformers.utils import logging

    vocabulary = SPECIAL | {word: number for number, word in enumerate(WORDS, len(SPECIAL))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if tokenizer_adds:
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        eos_token="[SEP]",
    )
    shape = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=MAX_TOKENS,
    )
    model = BertModel(shape)
    torch.manual_seed(0)
    for parameter in model.parameters():  # far from what another seed gives
        parameter.data.normal_(0, 0.3)
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as directory:
        fast.save_pretrained(directory)
        model.save_pretrained(directory)
        return {path.name: path.read_bytes() for path in Path(directory).iterdir()}


def write_modules(folder: Path, pooling: str, prompts: dict[str, str] | None = None, **config: Any) -> Path:
    """Write the same BERT as a sentence-transformers folder with a pooling module."""
    write_plain(folder, **config)
    kinds = {"": "base.modules.transformer.Transformer", "1_Pooling": "sentence_transformer.modules.pooling.Pooling"}
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.{kind}"}
        for number, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({"embedding_dimension": 16, "pooling_mode": pooling}))
    if prompts is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    return folder


def change_json(path: Path, **values: Any) -> None:
    """Set keys of a JSON file; None removes one."""
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
