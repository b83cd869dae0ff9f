"""When two answers are the same: for rewards, for leakage between tasks, and for what a corpus can answer."""

from __future__ import annotations

import re
import string

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_answer(text: str) -> str:
    """SQuAD's normalisation (Rajpurkar et al. 2016): lower case, no ASCII punctuation, no articles, single spaces.

    ``normalize_answer("The  U.S.") == "us"``
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())
