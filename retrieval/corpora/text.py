"""Texts as keys: valid Unicode, words and their stems, 64-bit hashes, and a compact table of hashes."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from array import array
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from typing import Any

import Stemmer

from ragr1_actors.core.errors import ConfigError
from retrieval.base import Passage, page_title

_FIRST_SLOTS = 1024


def normalise(query: str) -> str:
    r"""Return the query with single spaces: ``" Ana\n Bell "`` and ``"Ana Bell"`` are the same query.

    Case is kept, since an encoder may distinguish it.
    """
    return " ".join(query.split())


def hash_text(text: str) -> int:
    """Return 64 bits of BLAKE2b of a valid text, the same in every process and on every machine, never 0.

    Two of ``n`` different texts share a hash with a probability of about ``n * n / 2**65``: 1 in 80,000 for 21 million.
    """
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") or 1


class HashTable:
    """Table from hashes to whole numbers, 0 where none was set: a dict of 18 to 36 bytes per entry.

    It uses open addressing with linear probing, 12 bytes per slot, and at most two thirds of the slots.
    """

    def __init__(self) -> None:
        """Make an empty table."""
        self._size = 0
        self._allocate(_FIRST_SLOTS)

    def get(self, key: int) -> int:
        """Return the value of a hash from ``hash_text``."""
        return self._values[self._slot(key)]

    def set(self, key: int, value: int) -> None:
        """Set the value of a hash, from 0 to ``2**32 - 1``."""
        slot = self._slot(key)
        if not self._keys[slot]:
            if 3 * self._size >= 2 * len(self._keys):
                self._grow()
                slot = self._slot(key)
            self._keys[slot] = key
            self._size += 1
        self._values[slot] = value

    def _slot(self, key: int) -> int:
        """Return the position of a key, or the position where it would be inserted."""
        keys, mask = self._keys, len(self._keys) - 1
        slot = key & mask
        while (found := keys[slot]) and found != key:
            slot = (slot + 1) & mask
        return slot

    def _grow(self) -> None:
        keys, values = self._keys, self._values
        self._allocate(2 * len(keys))
        for key, value in zip(keys, values, strict=True):
            if key:
                slot = self._slot(key)
                self._keys[slot], self._values[slot] = key, value

    def _allocate(self, num_slots: int) -> None:
        self._keys, self._values = array("Q", [0]) * num_slots, array("I", [0]) * num_slots


_STOP_WORDS = """
    a about above after again against all am an and any are as at be because been before being below between both but by
    can could did do does doing down during each few for from further had has have having he her here hers herself him
    himself his how i if in into is it its itself just me more most my myself no nor not now of off on once only or
    other our ours ourselves out over own same she should so some such than that the their theirs them themselves then
    there these they this those through to too under until up very was we were what when where which while who whom why
    will with would you your yours yourself yourselves
    aren couldn d didn doesn don hadn hasn haven isn ll m re s shouldn t ve wasn weren won wouldn
"""
# The last line has the rests of words with an apostrophe, such as "don't", "it's" or "we'll".
STOP_WORDS = frozenset(_STOP_WORDS.split())
"""English words that carry no topic. Without them a question reads a tenth of the postings."""

_LANGUAGE = "english"
_WORD = re.compile(r"[^\W_]+")
_STEMMER = Stemmer.Stemmer(_LANGUAGE)


def split_words(text: str) -> list[str]:
    """Return the words of a text in order: letters and digits, lower-case, without accents.

    All other characters separate words, control characters and lone surrogates too. A script without spaces between
    words gives one word per run.
    """
    if not text.isascii():
        text = "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))
    return _WORD.findall(text.lower())


def has_word(text: str) -> bool:
    """Return whether a text has a letter or a digit."""
    return _WORD.search(text) is not None


LAYOUTS = ('"{title}"\n{text}', "{title}\n{text}", "{title} {text}", "{text}", "{title}\n{title}\n{text}")
"""Layouts of a passage for an encoder: ``contents`` of Search-R1's and FlashRAG's files, title and text on separate
lines or on one line, the text alone, and the layout that `ragr1 index build` uses for its static encoder."""


def laid_out(passage: Passage, layout: str) -> str:
    """Return a passage in one of ``LAYOUTS``; a passage without a title becomes its text alone, as in those files."""
    return layout.format(title=passage.title, text=passage.text) if passage.title else passage.text


def is_empty(passage: Passage) -> bool:
    """Return whether a passage has no letter and no digit: its vector carries no meaning and may be near any query."""
    return not (has_word(passage.title) or has_word(passage.text))


def stem_word(word: str) -> str:
    """Return the stem of a word of ``split_words`` (``"cities"`` -> ``"citi"``), or ``""`` for a stop word."""
    return "" if word in STOP_WORDS else _STEMMER.stemWord(word)


def stop_word_stem(word: str) -> str:
    """Return the stem of a stop word of ``split_words``, which no other word has, or ``""`` for any other word."""
    return f" {word}" if word in STOP_WORDS else ""


def word_settings() -> dict[str, Any]:
    """Return the settings of ``split_words`` and ``stem_word``: with other settings an index misses words silently."""
    version = ".".join(Stemmer.version().split(".")[:2])
    return {"pattern": _WORD.pattern, "stemmer": f"{_LANGUAGE} {version}", "stop_words": sorted(STOP_WORDS)}


MAX_WORDS = 1_000_000

_NUMBERED = re.compile(r"#[0-9]+\Z")


def split_passages(passages: Iterable[Passage], num_words: int) -> Iterator[Passage]:
    """Cut passages into pieces of at most ``num_words`` words, none of them empty.

    Pieces keep the title and the white space between their words, and are named ``id#0``, ``id#1``. A passage that fits
    stays as it is, unless its id ends in ``#`` and a number: it could be taken for a piece, so it is named ``id#0``.

    Raises:
        ConfigError: ``num_words`` is below 1 or above ``MAX_WORDS``.
    """
    if not 1 <= num_words <= MAX_WORDS:
        raise ConfigError(f"got passages of {num_words} words, expected 1 to {MAX_WORDS:,}")
    run = re.compile(rf"\S++(?:\s++\S++){{0,{num_words - 1}}}")
    return (piece for passage in passages for piece in _pieces(passage, run))


def whole_id(passage_id: str) -> str:
    """Return the id of the passage that a piece belongs to: ``"Riga"`` for ``"Riga#1"``; any other id unchanged."""
    return _NUMBERED.sub("", passage_id) if "#" in passage_id else passage_id


def found_evidence(
    gold: set[str],
    passage_ids: Iterable[str],
    titles: Iterable[str],
    corpus_ids: set[str] | frozenset[str] = frozenset(),
) -> set[str]:
    """Return the ``supporting_ids``, ``gold``, that passages match: by id, by title, or as a piece of a passage.

    ``found_evidence({"Riga", "17", "Bonn"}, ["Riga#2", "17"], ["Riga", "Oslo"]) == {"Riga", "17"}``

    ``corpus_ids`` are ids of the corpus, where they are known: a name among them is the passage of that id, and no
    other of that title.
    """
    ids, titles = set(passage_ids), set(titles)
    return gold & (ids | ({*titles, *map(page_title, titles), *map(whole_id, ids)} - corpus_ids))


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
