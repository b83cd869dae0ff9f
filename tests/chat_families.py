"""Chat templates of published model families: their texts, in ``chat_families.json``, and tiny tokenizers to test with.

The published templates are not in this repository. What each writes of some conversations is, with the place where it
was read; the templates here are worded anew and must write the same. To add a conversation or a family, complete the
file but for ``texts``, and render the published template of each family:

    python tests/chat_families.py qwen3 published_qwen3.jinja
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.utils.chat_template_utils import render_jinja_template

FILE = Path(__file__).with_suffix(".json")
STORED: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
CONVERSATIONS: dict[str, list[tuple[str, str]]] = {
    name: [(role, content) for role, content in turns] for name, turns in STORED["conversations"].items()
}
FAMILIES: dict[str, dict[str, Any]] = STORED["families"]
"""Per family: the source of its template, its tokenizer, and the text of each conversation.

``texts`` has the text without and with the assistant's header, or null where the template refuses the conversation.
"""

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
CHATML_TURN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are SAID<|im_end|>\n{% endif %}"
QWEN3 = (
    "{% set at = namespace(question=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set at.question = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% set thought, closed, said = CONTENT.rpartition('</think>') %}{% if loop.index0 > at.question %}"
    "<think>\n{{ thought.replace('<think>', '').strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ said.lstrip('\n') if closed else said }}{% else %}{{ CONTENT }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% else %}OPEN{% endif %}{% endif %}"
)
LLAMA3_TURNS = (
    "{% for m in messages if m.role not in skipped %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
LLAMA3_2_SYSTEM = (
    "<|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: {{ date_string }}"
    "\n\n{{ messages[0].content | trim if messages[0].role == 'system' }}<|eot_id|>"
)
GEMMA = (
    "{{ bos_token }}{% set first = namespace(text='') %}{% for m in messages %}{% if m.role == 'system' %}"
    "IF_SYSTEM{% else %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
    "{{ first.text }}{% set first.text = '' %}{{ m.content | trim }}<end_of_turn>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
REFUSED = "{{ raise_exception('no system turns') }}"
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}USER"
    "{% elif m.role == 'assistant' %}{{ m.content }}{{ eos_token }}{% else %}IF_SYSTEM{% endif %}{% endfor %}"
)
NEMO_SYSTEM = "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}\n\n{% endif %}"
DEEPSEEK = (
    "{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' %}<\uff5cUser\uff5c>{{ m.content }}{% elif m.role == 'assistant' %}"
    "<\uff5cAssistant\uff5c>{{ m.content.split('</think>')[-1] }}<\uff5cend▁of▁sentence\uff5c>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<\uff5cAssistant\uff5c><think>\n{% endif %}"
)
_QWEN_SYSTEM = SYSTEM.replace("SAID", "Qwen, created by Alibaba Cloud. You are a helpful assistant.")
_QWEN3 = QWEN3.replace("CONTENT", "m.content").replace("OPEN", "")
_QWEN3_5 = QWEN3.replace("CONTENT", "(m.content | trim)").replace("OPEN", "<think>\n")
_SMOLLM_SYSTEM = SYSTEM.replace("SAID", "a helpful AI assistant named SmolLM, trained by Hugging Face")
TEMPLATES = {
    "qwen2.5": _QWEN_SYSTEM + CHATML + CHATML_TURN,
    "qwen3": _QWEN3,
    "qwen3_no_thinking": _QWEN3,
    "qwen3.5": _QWEN3_5,
    "qwen3.5_no_thinking": _QWEN3_5,
    "llama3": "{{ bos_token }}{% set skipped = [] %}" + LLAMA3_TURNS,
    "llama3.2": "{{ bos_token }}{% set skipped = ['system'] %}" + LLAMA3_2_SYSTEM + LLAMA3_TURNS,
    "gemma2": GEMMA.replace("IF_SYSTEM", REFUSED),
    "gemma3": GEMMA.replace("IF_SYSTEM", "{% set first.text = m.content + '\n\n' %}"),
    "mistral_v0.2": MISTRAL.replace("USER", "[INST] {{ m.content }} [/INST]").replace("IF_SYSTEM", REFUSED),
    "mistral_nemo": MISTRAL.replace("USER", f"[INST]{NEMO_SYSTEM}{{{{ m.content }}}}[/INST]").replace("IF_SYSTEM", ""),
    "deepseek_v3": DEEPSEEK,
    "deepseek_r1_distill": DEEPSEEK,
    "smollm2": _SMOLLM_SYSTEM + CHATML + CHATML_TURN,
}
WORDS = ["▁Riga", "▁Ana", "▁in", "▁is", "Riga", "Ana", "information", "search", "▁(", "\n\n"]
"""Words of the tokenizers that are made as SentencePiece makes them; ▁ is a blank."""


def byte_level(added: list[str]) -> Tokenizer:
    """Return a tokenizer as those of GPT-2, Qwen and Llama 3."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([" Riga is in Latvia. Who wrote it? 1933 the Ana"] * 4, trainer)
    return tokenizer


def sentencepiece(added: list[str]) -> Tokenizer:
    """Return a tokenizer as Gemma's: blanks are ▁, and bytes stand for what has no token."""
    letters = sorted({*map(chr, range(33, 127)), *"".join(WORDS)} - {"|"})
    vocab = [*dict.fromkeys(["<unk>", *added, *(f"<0x{byte:02X}>" for byte in range(256)), *letters])]
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        merges += [(word[:end], word[end]) for end in range(1, len(word))]
    merges = [*dict.fromkeys(merges)]
    vocab = [*dict.fromkeys([*vocab, *map("".join, merges)])]
    ids = {token: index for index, token in enumerate(vocab)}
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def sentencepiece_with_blank(added: list[str]) -> Tokenizer:
    """Return a tokenizer as Llama 2's: a text begins with a blank that decoding takes away."""
    tokenizer = sentencepiece(added)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = None
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def byte_level_with_blank(added: list[str]) -> Tokenizer:
    """Return a tokenizer as RoBERTa's: a text begins with a blank."""
    tokenizer = byte_level(added)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def sentencepiece_less_blank(added: list[str]) -> Tokenizer:
    """Return a tokenizer that puts no blank before a text, but decoding takes one away."""
    tokenizer = sentencepiece_with_blank(added)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return tokenizer


def metaspace(added: list[str], prepend_scheme: Literal["always", "first"]) -> Tokenizer:
    """Return a tokenizer as Llama 2's in newer files, in which one rule stands for normalizer and decoder."""
    tokenizer = sentencepiece(added)
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=prepend_scheme, split=False)]
    )
    return tokenizer


KINDS: dict[str, Callable[[list[str]], Tokenizer]] = {
    "byte_level": byte_level,
    "byte_level_with_blank": byte_level_with_blank,
    "sentencepiece": sentencepiece,
    "sentencepiece_with_blank": sentencepiece_with_blank,
    "sentencepiece_less_blank": sentencepiece_less_blank,
    "metaspace_first": partial(metaspace, prepend_scheme="first"),
    "metaspace_always": partial(metaspace, prepend_scheme="always"),
}


def write_family(folder: Path, name: str, *, kind: str = "", model_type: str = "", **changed: Any) -> Path:
    """Write the tokenizer of a family into a new ``folder`` and return it.

    ``kind`` and ``model_type`` replace the family's, ``changed`` keys of the tokenizer's configuration.
    """
    described = FAMILIES[name]["tokenizer"]
    contents = [token["content"] for token in described["added_tokens"]]
    tokenizer = KINDS[kind or described["kind"]](contents)
    tokenizer.add_tokens([AddedToken(t["content"], normalized=False) for t in described["added_tokens"]])
    tokenizer.add_special_tokens(
        [AddedToken(t["content"], normalized=False, special=True) for t in described["added_tokens"] if t["special"]]
    )
    if described["adds_bos"]:
        bos = described["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    keys = ("tokenizer_class", "bos_token", "eos_token")
    settings = {key: described[key] for key in keys} | {"clean_up_tokenization_spaces": False} | changed
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type or described["model_type"]}))
    (folder / "chat_template.jinja").write_text(TEMPLATES[name], encoding="utf-8")
    return folder


def render(family: dict[str, Any], template: str) -> dict[str, list[str] | None]:
    """Return what a template writes of each conversation, as transformers renders it: ``texts`` of a family."""
    tokens = {key: family["tokenizer"][key] or "" for key in ("bos_token", "eos_token")}
    texts: dict[str, list[str] | None] = {}
    for name, turns in CONVERSATIONS.items():
        chat = [{"role": role, "content": content} for role, content in turns]
        try:
            texts[name] = [
                render_jinja_template(
                    [chat], chat_template=template, add_generation_prompt=add, **tokens, **family["template_options"]
                )[0][0]
                for add in (False, True)
            ]
        except TemplateError:
            texts[name] = None
    return texts


if __name__ == "__main__":
    family, template_file = sys.argv[1:]
    FAMILIES[family]["texts"] = render(FAMILIES[family], Path(template_file).read_text(encoding="utf-8"))
    FILE.write_text(json.dumps(STORED, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
