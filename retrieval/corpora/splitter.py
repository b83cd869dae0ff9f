"""Cut passages into pieces of a number of words, as DPR and KILT cut Wikipedia."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice

from ragr1_actors.core.errors import ConfigError
from retrieval.base import Passage

DEFAULT_WORDS = 100
MAX_WORDS = 1_000_000

_NUMBERED = re.compile(r"#[0-9]+\Z")


def split_passages(passages: Iterable[Passage], num_words: int = DEFAULT_WORDS) -> Iterator[Passage]:
    """Cut passages into pieces of at most ``num_words`` words, none of them empty.

    Pieces keep the title and what stands between their words (a paragraph stays one), and are called ``id#0``,
    ``id#1``. A passage that fits is left as it is. Ids stay unique: one that fits but ends in ``#`` and a number, so
    that it could be a piece of another, is called ``id#0`` too.

    Raises:
        ConfigError: ``num_words`` is below 1 or above ``MAX_WORDS``.
    """
    if not 1 <= num_words <= MAX_WORDS:
        raise ConfigError(f"got passages of {num_words} words, expected 1 to {MAX_WORDS:,}")
    run = re.compile(rf"\S++(?:\s++\S++){{0,{num_words - 1}}}")
    return (piece for passage in passages for piece in _pieces(passage, run))


def whole_id(passage_id: str) -> str:
    """Return the id that a piece's passage had: ``"Riga"`` for ``"Riga#1"``; any other id as it is."""
    return _NUMBERED.sub("", passage_id)


def _pieces(passage: Passage, run: re.Pattern[str]) -> Iterator[Passage]:
    matches = run.finditer(passage.text)
    first = list(islice(matches, 2))
    if len(first) == 2:
        for number, match in enumerate(chain(first, matches)):
            yield Passage(f"{passage.id}#{number}", passage.title, match[0])
    elif _NUMBERED.search(passage.id):
        yield Passage(f"{passage.id}#0", passage.title, passage.text)
    else:
        yield passage
