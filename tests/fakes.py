"""Fakes: three retrievers, a tokenizer of bytes, and the section of an environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from envs.observations import defuse
from envs.options import SearchOptions
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.errors import RetrievalError
from ragr1_actors.core.types import Message
from retrieval.base import Passage


class DictRetriever:
    """Finds the passage whose title is the query; counts its calls."""

    def __init__(self, passages: Sequence[Passage] = ()) -> None:
        self.by_title = {passage.title: passage for passage in passages}
        self.calls: list[list[str]] = []

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        assert queries, "search() with no queries"
        assert all(query.strip() == query and query for query in queries), queries
        assert k >= 1
        self.calls.append(queries)
        return [[self.by_title[query]] if query in self.by_title else [] for query in queries]


class BrokenRetriever:
    """Always fails, as a fleet whose replicas are all dead."""

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        raise RetrievalError("tried 3 replicas; the last one: connection lost")


class OnePassage:
    """Pickles, and finds the same passage for every query."""

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        return [[Passage("p", "Riga", "Riga is a city in Latvia.", 1.0)] for _ in queries]


def environment(keys: Mapping[str, Any]) -> EnvironmentSettings:
    """Return the section with ``keys``, its own and options of an environment that searches."""
    options = {name: value for name, value in keys.items() if name in SearchOptions.model_fields}
    own = {name: value for name, value in keys.items() if name not in options}
    return EnvironmentSettings.model_validate(own | {"options": options})


class ByteTokenizer:
    """One token per byte; the ids are the bytes."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def defuse(self, text: str) -> str:
        return defuse(text)

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return self.encode("".join(f"{message.role}: {message.content}\n" for message in messages))

    def turn_start(self, prompt_ids: Sequence[int]) -> str:
        return "<think>" if self.decode(prompt_ids).rstrip().endswith("<think>") else ""

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode()
