"""Small functions on texts: when two answers are equal, and the words that error messages share."""

from __future__ import annotations

import difflib
import re
import string
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # so that envs and retrieval do not load pydantic for this module
    from pydantic import ValidationError

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_answer(text: str) -> str:
    """Apply SQuAD's normalisation (arXiv:1606.05250): lower case, no ASCII punctuation, no articles, single spaces.

    ``normalize_answer("The  U.S.") == "us"``
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def one_line(error: BaseException, max_length: int = 500) -> str:
    r"""Return the message of an error on one line, cut to ``max_length`` characters; its type if it has no message.

    ``one_line(ValueError("bad\n  header")) == "bad header"``
    """
    return shortened(" ".join(str(error).split()) or type(error).__name__, max_length)


def shortened(text: str, max_length: int = 80) -> str:
    """Return the text, cut to ``max_length`` characters of which the last three are dots."""
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message on an unknown name: the most similar known name, or all known names.

    ``nearest("group_sze", ["lr", "group_size"]) == "; did you mean 'group_size'?"``
    """
    known = list(known)
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else f"; expected one of: {', '.join(known)}"


def first_problem(error: ValidationError) -> tuple[str, Any, str]:
    """Return the first key that pydantic refused, such as ``training.lr``, the value it got, and what is wrong."""
    first = error.errors()[0]
    message = first["msg"]
    return ".".join(str(part) for part in first["loc"]), first["input"], f"{message[:1].lower()}{message[1:]}"
