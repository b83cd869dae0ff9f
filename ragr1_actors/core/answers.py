"""Normalisation of answers for comparisons."""

from __future__ import annotations

import re
import string

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_answer(text: str) -> str:
    """Apply SQuAD's normalisation (arXiv:1606.05250): lower case, no ASCII punctuation, no articles, single spaces.

    ``normalize_answer("The  U.S.") == "us"``
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())
