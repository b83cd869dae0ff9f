"""The options of environments that search: ``environment.options``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ragr1_actors.core.section import Section

QueryFormat = Literal["lines", "comma", "json", "single"]
"""Format of the queries of a turn inside ``<search>``; ``envs/grammars/tags.py`` shows each."""
ObservationFormat = Literal["grouped", "ragr1_json", "ragr1", "searchr1"]
"""Layout of the passages inside ``<information>``; ``envs/observations.py`` shows each."""


Mode = Literal["search", "direct", "rag"]
"""Whether the policy searches itself; see ``SearchOptions.mode``."""


class TopKOptions(Section):
    """Number of passages, for an environment that shows all that it finds."""

    top_k: int = Field(3, ge=1, le=100)
    """Passages per query. Default: Search-R1 and RAG-R1."""


class PassageOptions(TopKOptions):
    """Limits of the queries of a turn and of the passages that it is shown."""

    max_queries_per_turn: int = Field(3, ge=1, le=64)
    """Queries per turn that are executed; further ones are dropped and counted. Default: RAG-R1."""
    max_observation_tokens_per_query: int = Field(512, ge=8)
    """Token budget for the passages of one query; longer ones are cut. Default: about Search-R1's 500."""
    max_observation_tokens: int = Field(1536, ge=16)
    """Token budget of one observation. Default: three queries of 512 tokens."""


class SearchOptions(PassageOptions):
    """Options of ``SearchEnv``: how a policy searches, and how passages are shown to it."""

    mode: Mode = "search"
    """``search``, or a baseline of one turn: ``direct`` answers without a search, ``rag`` answers with the passages
    found by the question. The passages replace ``{passages}`` in the prompt, or else follow it."""
    query_format: QueryFormat = "lines"
    """Format of a turn's queries: ``lines``, ``comma`` (RAG-R1-mq), ``json``, or ``single`` (RAG-R1-sq, Search-R1). The
    default is this project's: no character of a query has a second meaning."""
    observation_format: ObservationFormat = "grouped"
    """Layout of passages: ``grouped`` by query (this project's), or ``ragr1_json``, ``ragr1``, ``searchr1`` for
    published checkpoints."""


class ToolOptions(PassageOptions):
    """Options of ``ToolEnv``: limits of the calls of a turn."""

    max_calls_per_turn: int = Field(8, ge=1, le=64)
    """Calls of a turn that are executed; further ones get a result that says so."""
