"""The text of a turn while its tokens are still being sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence


class TurnText:
    """The text of a turn's tokens as they come, decoding each a few times at most.

    Tokens are decoded together with those of the last piece of text, since a tokenizer may write a token differently at
    the beginning of a text. A character of several tokens appears when its last one is there; the text only grows, and
    is always a beginning of what the whole turn decodes to.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        """Start a turn. ``decode`` is the tokenizer's."""
        self.text = ""
        self._decode = decode
        self._start = 0  # of the tokens of the last piece
        self._end = 0  # of the tokens that are in the text
        self._num_known = 0  # characters of those from start to end
        self._next_try = 0  # number of tokens worth decoding again

    def grow(self, token_ids: Sequence[int]) -> bool:
        """Take the turn's tokens so far; return whether the text has grown."""
        if len(token_ids) < self._next_try:
            return False
        recent = self._decode(token_ids[self._start :])
        if recent.endswith("\ufffd") or len(recent) <= self._num_known:
            # the beginning of a character, or a special token; where more and more of them come, look more seldom
            self._next_try = len(token_ids) + 1 + (len(token_ids) - self._end) // 8
            return False
        self.text += recent[self._num_known :]
        self._start, self._end = self._end, len(token_ids)
        self._num_known = len(self._decode(token_ids[self._start :]))
        return True
