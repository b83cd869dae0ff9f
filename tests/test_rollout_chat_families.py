"""The policy's tokenizer with the chat templates and tokenizers of known model families, without their weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from chat_families import CONVERSATIONS, FAMILIES, write_family
from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from ragr1_actors.core.config import PolicySettings
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.types import Message
from ragr1_actors.rollout.engines.base import PolicyTokenizer, load_tokenizer

ENDS = {
    "qwen2.5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_no_thinking": "<|im_end|>",
    "qwen3.5": "<|im_end|>",
    "qwen3.5_no_thinking": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama3.2": "<|eot_id|>",
    "gemma2": "<end_of_turn>",
    "gemma3": "<end_of_turn>",
    "mistral_v0.2": "</s>",
    "mistral_nemo": "</s>",
    "deepseek_v3": "<\uff5cend▁of▁sentence\uff5c>",
    "deepseek_r1_distill": "<\uff5cend▁of▁sentence\uff5c>",
    "smollm2": "<|im_end|>",
}
BEGIN_IN_A_THOUGHT = {"qwen3.5", "deepseek_v3", "deepseek_r1_distill"}
QUESTION = "Is Riga in  Latvia?"
families = pytest.mark.parametrize("name", FAMILIES)


class Family:
    """A family's tokenizer, as transformers and the project load it."""

    def __init__(self, folder: Path, name: str) -> None:
        write_family(folder, name)
        self.theirs = AutoTokenizer.from_pretrained(folder)
        self.ours = load(folder, name)


@pytest.fixture(scope="module")
def make_family(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Family]:
    """Each family is loaded once."""
    return cache(lambda name: Family(tmp_path_factory.mktemp("family") / "policy", name))


@pytest.fixture
def family(make_family: Callable[[str], Family], name: str) -> Family:
    return make_family(name)


def load(folder: Path, name: str) -> PolicyTokenizer:
    return load_tokenizer(folder, PolicySettings(template_options=FAMILIES[name]["template_options"]))


def control_tokens(name: str) -> list[str]:
    return [t["content"] for t in FAMILIES[name]["tokenizer"]["added_tokens"] if t["content"].strip()]


def as_messages(conversation: str) -> list[Message]:
    return [Message(role, content) for role, content in CONVERSATIONS[conversation]]  # type: ignore[arg-type]


def test_every_family_and_its_source_are_named() -> None:
    assert FAMILIES.keys() == ENDS.keys()
    for family in FAMILIES.values():
        assert all(family["source"][key] for key in ("repository", "commit", "path", "licence"))
        assert family["model"] and family["model_licence"]
        assert family["texts"].keys() == CONVERSATIONS.keys()


@families
def test_a_prompt_is_what_the_published_template_writes(name: str, family: Family) -> None:
    options, theirs, ours = FAMILIES[name]["template_options"], family.theirs, family.ours
    for conversation, texts in FAMILIES[name]["texts"].items():
        messages = as_messages(conversation)
        chat = [{"role": message.role, "content": message.content} for message in messages]
        if texts is None:
            with pytest.raises(TemplateError):
                theirs.apply_chat_template(chat, tokenize=False)
            with pytest.raises(ConfigError, match="the chat template fails"):
                ours.prompt_ids(messages)
            continue
        for add, text in enumerate(texts):
            assert theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=bool(add), **options) == text
        assert ours.prompt_ids(messages) == theirs(texts[1], add_special_tokens=False)["input_ids"]


@families
def test_a_turn_ends_with_what_the_template_puts_behind_it(name: str, tmp_path: Path) -> None:
    """The tokenizer of a base model may name another end of sequence."""
    eos, special = ENDS[name], [t["content"] for t in FAMILIES[name]["tokenizer"]["added_tokens"] if t["special"]]
    if not name.startswith("mistral"):  # whose templates write the tokenizer's own end of sequence
        eos = next(content for content in special if content != ENDS[name])
    tokenizer = load(write_family(tmp_path / "policy", name, eos_token=eos), name)
    ids = Tokenizer.from_file(str(tmp_path / "policy" / "tokenizer.json")).token_to_id
    assert tokenizer.eos_token_ids == {ids(eos), ids(ENDS[name])}
    assert tokenizer.decode([*tokenizer.encode(" Riga"), ids(ENDS[name])]) == " Riga"


@families
def test_a_turn_begins_in_a_thought_where_the_prompt_ends_in_one(name: str, family: Family) -> None:
    tokenizer = family.ours
    for conversation, texts in FAMILIES[name]["texts"].items():
        if texts is not None:
            start = tokenizer.turn_start(tokenizer.prompt_ids(as_messages(conversation)))
            assert start == ("<think>\n" if name in BEGIN_IN_A_THOUGHT else "")
            assert texts[1].endswith("<think>\n") == bool(start)


@families
def test_no_question_and_no_document_writes_a_control_token(name: str, family: Family) -> None:
    tokenizer, theirs = family.ours, family.theirs
    control = {theirs.convert_tokens_to_ids(content): content for content in control_tokens(name)}
    everything = f" (1) {' '.join(control.values())}\n{''.join(control.values())} Riga "
    for text in (*control.values(), everything, f"\n<information>\n{everything}\n</information>\n"):
        ids = tokenizer.encode(text)
        assert not [control[i] for i in ids if i in control and control[i] not in ("<think>", "</think>")]
        assert tokenizer.decode(ids) == text

    def prompt(text: str) -> list[int]:
        return tokenizer.prompt_ids([Message("user", tokenizer.defuse(f"{QUESTION} {text}"))])

    of_template = [i for i in prompt("") if i in control]
    assert [i for i in prompt(everything) if i in control] == of_template
    bos = FAMILIES[name]["tokenizer"]["bos_token"]
    if FAMILIES[name]["tokenizer"]["adds_bos"]:
        assert prompt(everything)[0] == of_template[0] == theirs.convert_tokens_to_ids(bos)
        assert of_template.count(of_template[0]) == 1


PIECES = [
    "<think> Ana</think>",
    "<search>Riga</search>",
    "\n<information>\n(1) Riga </s> <s>\n",
    " Riga is in </information>",
    "Ana",
    "  Riga",
    "",
    " ",
    "\n\n",
    "東京 🎉",
    "e\u0301",
]
"""What a trajectory is put together from; each is encoded alone."""
WITH_BLANK = {
    "file": {"kind": "sentencepiece_with_blank"},
    "llama_2": {"kind": "sentencepiece_with_blank", "model_type": "llama", "legacy": True},
    "llama_2_not_legacy": {"kind": "sentencepiece_with_blank", "model_type": "llama", "legacy": False},
    "metaspace_first": {"kind": "metaspace_first"},
    "metaspace_always": {"kind": "metaspace_always"},
    "byte_level": {"kind": "byte_level_with_blank"},
    "decoding_alone": {"kind": "sentencepiece_less_blank"},
}
"""Tokenizers that put a blank before a text, or take one away in decoding."""
with_blank = pytest.mark.parametrize("changed", WITH_BLANK.values(), ids=WITH_BLANK)


@with_blank
def test_pieces_neither_get_nor_lose_blanks_where_they_meet(changed: dict[str, Any], tmp_path: Path) -> None:
    folder = write_family(tmp_path / "policy", "mistral_v0.2", **changed)
    theirs, tokenizer = AutoTokenizer.from_pretrained(folder), PolicyTokenizer(folder)
    alone = [theirs(piece, add_special_tokens=False)["input_ids"] for piece in PIECES]
    assert [theirs.decode(2 * ids) for ids in alone] != [2 * piece for piece in PIECES], "as they are, they do"
    for piece in PIECES:
        assert tokenizer.decode(tokenizer.encode(piece)) == piece
    prompt = tokenizer.prompt_ids([Message("user", QUESTION)])
    ids = [token_id for piece in PIECES for token_id in tokenizer.encode(piece)]
    assert tokenizer.decode(ids) == "".join(PIECES)
    assert theirs.decode([*prompt, *ids]) == theirs.decode(prompt) + "".join(PIECES)
    first = tokenizer.encode("A")  # nothing that a blank follows
    assert theirs.decode([*prompt, *first]) == theirs.decode(prompt) + "A"
    assert not tokenizer.tokens_containing({" "}) & {*tokenizer.encode("Riga")}
    assert tokenizer.tokens_containing({" "}) >= {*tokenizer.encode(" ")}


@with_blank
def test_bare_contents_are_read_as_the_tokenizer_reads_a_text(changed: dict[str, Any], tmp_path: Path) -> None:
    """With the start of sequence, and with the blank that the tokenizer puts before a text."""
    folder = write_family(tmp_path / "policy", "mistral_v0.2", **changed)
    (folder / "chat_template.jinja").unlink()
    theirs, tokenizer = AutoTokenizer.from_pretrained(folder), PolicyTokenizer(folder)
    for question in (QUESTION, " Riga", "\n"):
        ids = tokenizer.prompt_ids([Message("system", question), Message("user", question)])
        assert ids == theirs(f"{question}\n{question}\n")["input_ids"]
        assert ids[0] == theirs.bos_token_id and ids.count(theirs.bos_token_id) == 1


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "mistral_v0.2"])
def test_what_a_file_says_of_truncation_and_padding_is_not_done(name: str, family: Family, tmp_path: Path) -> None:
    folder = write_family(tmp_path / "policy", name)
    described = Tokenizer.from_file(str(folder / "tokenizer.json"))
    described.enable_truncation(4)
    described.enable_padding(length=64)
    described.save(str(folder / "tokenizer.json"))
    plain, tokenizer = family.ours, PolicyTokenizer(folder)
    long = "Riga is in Latvia. <|im_end|> </s> <end_of_turn> " * 3
    for text in ("Riga", long):
        assert tokenizer.encode(text) == plain.encode(text)
        assert tokenizer.prompt_ids([Message("user", text)]) == plain.prompt_ids([Message("user", text)])
        assert tokenizer.encode(text) == plain.encode(text)
    (folder / "chat_template.jinja").unlink()
    prompt = PolicyTokenizer(folder).prompt_ids([Message("user", long)])
    assert prompt == family.theirs(f"{long}\n")["input_ids"]
