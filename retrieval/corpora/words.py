"""Texts to words as the inverted index counts them. One rule for passages and queries."""

from __future__ import annotations

import re
import unicodedata
from typing import Any

import Stemmer

_STOP_WORDS = """
    a about above after again against all am an and any are as at be because been before being below between both but by
    can could did do does doing down during each few for from further had has have having he her here hers herself him
    himself his how i if in into is it its itself just me more most my myself no nor not now of off on once only or
    other our ours ourselves out over own same she should so some such than that the their theirs them themselves then
    there these they this those through to too under until up very was we were what when where which while who whom why
    will with would you your yours yourself yourselves
    aren couldn d didn doesn don hadn hasn haven isn ll m re s shouldn t ve wasn weren won wouldn
"""
# The last line is what an apostrophe leaves of "don't", "it's" or "we'll".
STOP_WORDS = frozenset(_STOP_WORDS.split())
"""English words that say nothing of what a text is about. Without them a question touches a tenth of the postings."""

_LANGUAGE = "english"
_WORD = re.compile(r"[^\W_]+")
_STEMMER = Stemmer.Stemmer(_LANGUAGE)


def split_words(text: str) -> list[str]:
    """Return the words of a text in order: letters and digits, lower-case, without accents.

    Anything else separates words, control characters and lone surrogates too. A script that puts no spaces between
    words gives one word a run.
    """
    if not text.isascii():
        text = "".join(char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))
    return _WORD.findall(text.lower())


def stem_word(word: str) -> str:
    """Return the stem of a word of ``split_words`` (``"cities"`` -> ``"citi"``), or ``""`` for a stop word."""
    return "" if word in STOP_WORDS else _STEMMER.stemWord(word)


def word_settings() -> dict[str, Any]:
    """Return what the two functions depend on: an index built with other settings would miss words in silence."""
    version = ".".join(Stemmer.version().split(".")[:2])
    return {"pattern": _WORD.pattern, "stemmer": f"{_LANGUAGE} {version}", "stop_words": sorted(STOP_WORDS)}
