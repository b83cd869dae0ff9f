"""Rounds of queries: the order in which the evidence of a question can be asked for.

The names of a round are in the question, or in a passage that an earlier round found.

::

    2Wiki      evidences [[Devotion, director, Guido Brignone], [Guido Brignone, child, Lilla Brignone]]
               ──► (("Devotion (1929 film)",), ("Guido Brignone",))
    MuSiQue    question_decomposition: step 2 asks about ``#1``  ──► ((title of step 1,), (title of step 2,))
    others     a title that the question names comes first, and what it does not name after it
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

_DISAMBIGUATION = re.compile(r"\s*\([^()]*\)$")
_REFERENCE = re.compile(r"#(\d+)")


def search_rounds(question: str, titles: Sequence[str], fields: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Return the queries of each round; ``()`` if there is no evidence, or all of it is asked for at once.

    A name that is not in the question is asked for as passages write it: ``Ana Bell`` for ``Ana Bell (director)``.

    Args:
        question: its text.
        titles: of the passages that hold the evidence, each once.
        fields: the record, of which 2Wiki's ``evidences`` and MuSiQue's ``question_decomposition`` are read.
    """
    depths = _depths_of_steps(fields.get("question_decomposition")) or depths_of_triples(fields.get("evidences"))
    asked = folded(question)
    is_named = {title: folded(_bare(title)) in asked for title in titles}
    rounds: dict[int, list[str]] = {}
    for title in titles:
        depth = depths.get(folded(title), depths.get(folded(_bare(title)), 0))
        if not depth and not is_named[title] and any(is_named.values()):
            depth = 1  # the names in the triples may differ from the titles
        rounds.setdefault(depth, []).append(_bare(title) if depth and folded(title) not in asked else title)
    return tuple(tuple(rounds[depth]) for depth in sorted(rounds)) if len(rounds) > 1 else ()


def depths_of_triples(triples: Any) -> dict[str, int]:
    """Return the round of every subject of 2Wiki's triples: an object is known once the subject was read about.

    The keys are ``folded`` subjects: ``{"devotion": 0, "guidobrignone": 1}``.
    """
    if not isinstance(triples, list):
        return {}
    whole = [one for one in triples if isinstance(one, list) and len(one) == 3 and all(isinstance(t, str) for t in one)]
    known_from = {folded(found): folded(subject) for subject, _, found in whole}
    return {subject: _depth(subject, known_from) for subject in (folded(subject) for subject, _, _ in whole)}


def _depth(name: str, known_from: Mapping[str, str]) -> int:
    passed = [name]
    while (name := known_from.get(name, "")) and name not in passed:
        passed.append(name)
    return len(passed) - 1


def _depths_of_steps(steps: Any) -> dict[str, int]:
    """Return the round of every title, from MuSiQue's steps; empty if a step does not name its passage."""
    if not isinstance(steps, list):
        return {}
    depths: list[int] = []
    found: dict[str, int] = {}
    for step in steps:
        passage = step.get("support_paragraph") if isinstance(step, dict) else None
        title = passage.get("title") if isinstance(passage, dict) else None
        asked = step.get("question") if isinstance(step, dict) else None
        if not isinstance(title, str) or not isinstance(asked, str):
            return {}
        uses = [int(number) for number in _REFERENCE.findall(asked) if 0 < int(number) <= len(depths)]
        depths.append(max((depths[number - 1] + 1 for number in uses), default=0))
        found.setdefault(folded(title), depths[-1])
    return found


def _bare(title: str) -> str:
    return _DISAMBIGUATION.sub("", title) or title


def folded(text: str) -> str:
    """Return letters and digits only, since a question and a title differ in case, blanks and marks."""
    return "".join(filter(str.isalnum, text.casefold()))
