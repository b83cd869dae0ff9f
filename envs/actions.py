"""The tag grammar of a search turn: pure functions from a completion's text to an action.

A turn is the policy's reasoning followed by exactly one action::

    <think> two people, two birth years</think><search> Ana Bell
     Bo Cole</search>

    <think> 1931 is before 1950</think><answer> Ana Bell</answer>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from envs.base import Action, Answer, Malformed, Search

STOP_TAGS = ("</search>", "</answer>")
_ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
_THINK = re.compile(r"<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class CleanQueries:
    """Queries of one turn after cleaning, with counts of what was cleaned away."""

    queries: tuple[str, ...]
    num_duplicate: int
    num_empty: int
    num_over_limit: int


def parse_action(completion: str, separator: str = "\n") -> Action:
    """Read the first action that stands outside ``<think>``; queries are split at ``separator`` and not cleaned yet.

    ``parse_action("<think> a <search>b</search></think><answer> Riga</answer>") == Answer("Riga")``
    """
    outside = _THINK.sub("", completion)
    match = _ACTION.search(outside)
    if match is None:
        return Malformed("no <search>...</search> or <answer>...</answer> in the turn")
    tag, body = match.group(1), match.group(2).strip()
    if not body:
        return Malformed(f"<{tag}> is empty")
    return Search(tuple(body.split(separator))) if tag == "search" else Answer(body)


def clean_queries(queries: Sequence[str], limit: int) -> CleanQueries:
    """Reduce the queries of one turn to at most ``limit`` distinct ones.

    ``clean_queries(["Ana Bell", " Bo  Cole", "ana bell", ""], 3).queries == ("Ana Bell", "Bo Cole")``

    White space is squeezed, empty queries are dropped, and duplicates (ignoring case) are merged; what stands after the
    limit is left out. Each is counted.
    """
    squeezed = [" ".join(query.split()) for query in queries]
    filled = [query for query in squeezed if query]
    first_by_key: dict[str, str] = {}
    for query in filled:
        first_by_key.setdefault(query.casefold(), query)
    distinct = tuple(first_by_key.values())
    return CleanQueries(
        queries=distinct[:limit],
        num_duplicate=len(filled) - len(distinct),
        num_empty=len(squeezed) - len(filled),
        num_over_limit=max(0, len(distinct) - limit),
    )
