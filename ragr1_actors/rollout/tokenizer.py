"""The policy's tokenizer: chat template in, token ids out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, GenerationConfig

from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.types import Message


class PolicyTokenizer:
    """A Hugging Face tokenizer with the methods that a trajectory needs."""

    def __init__(self, policy_dir: str | Path) -> None:
        """Load the tokenizer and end-of-sequence ids of a folder or hub name; ``ConfigError`` if either is missing."""
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(policy_dir)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot load a tokenizer from {policy_dir}: {error}") from error
        # the Rust tokenizer: encoding is called many times per turn, and the Python around it costs most of the time
        self._backend: Any = self._tokenizer.backend_tokenizer
        ids = {self._tokenizer.eos_token_id} | _generation_eos(policy_dir)
        self.eos_token_ids = frozenset(int(i) for i in ids if i is not None)
        if not self.eos_token_ids:
            raise ConfigError(f"the tokenizer in {policy_dir} has no end-of-sequence token; set eos_token in it")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text; nothing is added before or after it."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids, without special tokens (end of sequence)."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=True)
        return text

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the token ids of a chat up to the assistant's turn; without a chat template, of the bare contents."""
        if self._tokenizer.chat_template is None:
            return self.encode("\n".join(message.content for message in messages) + "\n")
        chat = [{"role": message.role, "content": message.content} for message in messages]
        # without return_dict=False transformers 5 returns a BatchEncoding, whose length is its number of fields
        ids: Any = self._tokenizer.apply_chat_template(
            chat, tokenize=True, add_generation_prompt=True, return_dict=False
        )
        return list(ids)

    def tokens_containing(self, characters: set[str]) -> frozenset[int]:
        """Return the ids of the tokens whose text contains any of some ASCII characters."""
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return frozenset(i for token, i in vocabulary.items() if any(char in token for char in characters))


def _generation_eos(policy_dir: str | Path) -> set[int]:
    try:
        eos = GenerationConfig.from_pretrained(policy_dir).eos_token_id
    except OSError:  # the file is optional
        return set()
    return set(eos) if isinstance(eos, list) else {eos} if eos is not None else set()
