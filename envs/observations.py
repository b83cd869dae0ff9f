r"""Observations: the passages of a search, laid out inside ``<information>`` within token budgets.

The layouts, named in a recipe as ``environment.options.observation_format``::

    grouped      \n<information>\nQuery: Ana Bell\n(1) Ana Bell: Ana Bell was born in Riga.\n</information>\n
    ragr1_json   \n<information>\n{"query": ["Ana Bell"], "documents": ["Doc 1: ..\nDoc 2: .."]}\n</information>\n
    ragr1        \n<information>\nDoc 1: Ana Bell Ana Bell was born in Riga.\nDoc 2: ..\n</information>\n
    searchr1     \n\n<information>Doc 1(Title: Ana Bell) Ana Bell was born in Riga.\nDoc 2..</information>\n\n

``grouped`` is this project's format. RAG-R1-mq, RAG-R1-sq and Search-R1 were trained on the others; published
checkpoints can be run with them. Two deviations keep text that the originals lose:

* Every tag is closed. A cut at a fixed length loses the end of the observation with its tag.
* ``ragr1_json``, indented by 2 as theirs, keeps characters as they are, where RAG-R1 writes ``Beyonc\u00e9``: an escape
  costs several tokens, and an answer copied from it is wrong. Text is cut before it becomes JSON.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from envs.options import ObservationFormat
from ragr1_actors.core.types import DefuseFn, EncodeFn
from retrieval.base import Passage

# The possessive quantifiers keep a document of a thousand blanks from being read a million times.
_TAG = re.compile(r"<\s*+(?:/\s*+)?(?:think|search|information|answer)\s*+>", re.IGNORECASE)
_RESULT_TAG = re.compile(r"<\s*+(?:/\s*+)?tool_response\s*+>", re.IGNORECASE)
_NO_TOKEN = re.compile("(?!)")
_BLANK = " \t\r\n\u2581"  # the last one is the blank of SentencePiece
_SURROGATE = re.compile(r"[\ud800-\udfff]")
# Where a text may be cut: behind a word, behind a character of the scripts that put no blanks between words (from
# U+2E80 on), and within what is too long for a word.
_UNIT = re.compile(r"[\u2e80-\U0010ffff]|[^\s\u2e80-\U0010ffff]{1,24}")


@dataclass(frozen=True, slots=True)
class _Layout:
    """One format of observations. ``header`` and ``line`` make up the block of a query."""

    line: str
    header: str = ""
    opening: str = "\n<information>\n"
    closing: str = "\n</information>\n"
    is_json: bool = False

    def block(self, query: str, passages: Sequence[Passage], defuse: DefuseFn) -> str:
        """Return the block of a query: ``"Query: Ana Bell\n(1) Ana Bell: Ana Bell was born in Riga."``"""
        lines = [self.line.format(rank=rank, title=p.title, text=p.text) for rank, p in enumerate(passages, 1)]
        # defused as a whole: a tag may begin in a title and end in the text after it
        return defuse("\n".join([self.header.format(query=query), *lines] if self.header else lines))

    def write(self, parts: Sequence[tuple[str, str]]) -> str:
        """Put (query, block) pairs inside the tag."""
        if not self.is_json:
            return self.opening + "\n".join(block for _, block in parts) + self.closing
        fields = {"query": [query for query, _ in parts], "documents": [block for _, block in parts]}
        return self.opening + json.dumps(fields, ensure_ascii=False, indent=2) + self.closing


_LAYOUTS: dict[ObservationFormat, _Layout] = {
    "grouped": _Layout("({rank}) {title}: {text}", header="Query: {query}"),
    "ragr1_json": _Layout("Doc {rank}: {title} {text}", is_json=True),
    "ragr1": _Layout("Doc {rank}: {title} {text}"),
    "searchr1": _Layout("Doc {rank}(Title: {title}) {text}", opening="\n\n<information>", closing="</information>\n\n"),
}


def format_observation(
    queries: Sequence[str],
    results: Sequence[Sequence[Passage]],
    encode: EncodeFn,
    *,
    max_tokens_per_query: int,
    max_tokens: int,
    observation_format: ObservationFormat = "grouped",
    is_tagged: bool = True,
    defuse: DefuseFn,
) -> str:
    r"""Write the passages of each query, ``results``, ``[len(queries)][<= k]``, best first, inside a closed tag.

    The text of one query has at most ``max_tokens_per_query`` tokens and the whole at most ``max_tokens``. The rest is
    cut from the end of the longest blocks, between words or else between characters. If not even one token per query is
    left, the tag is empty; the tag itself is never cut. Without ``is_tagged`` there is no tag: a chat template frames
    the result of a tool itself. ``encode`` and ``defuse`` come from ``EnvContext``.
    """
    layout = _LAYOUTS[observation_format]
    if not is_tagged:
        layout = replace(layout, opening="", closing="")
    parts = [
        (defuse(query), layout.block(query, passages, defuse)) for query, passages in zip(queries, results, strict=True)
    ]
    observation = layout.write(parts)
    total = len(encode(observation))
    if total <= min(max_tokens_per_query, max_tokens):  # true nearly always, and needs one call of the tokenizer
        return observation
    budgets = _Budgets(layout, encode)
    sizes = [budgets.size(part) for part in parts]
    if total <= max_tokens and max(sizes) <= max_tokens_per_query:
        return observation
    budget = min(max_tokens_per_query, _fair_share(sizes, max_tokens - (total - sum(sizes))))
    while budget > 0:
        observation = layout.write([budgets.cut(part, budget) for part in parts])
        excess = len(encode(observation)) - max_tokens
        if excess <= 0:
            return observation
        budget -= max(1, excess // len(parts))
    return layout.write([])


def control_tokens(contents: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that finds the control tokens among a tokenizer's added tokens.

    ``control_tokens(["<|im_end|>", "[/INST]", "\\n\\n", " Ana", "'s", "</search>"])`` finds the first two. A control
    token has a letter or digit between other characters. The protocol's tags, white space and plain words do not count.
    """
    found = {core for content in contents if is_control(core := content.strip(_BLANK)) and not _TAG.fullmatch(core)}
    return re.compile("|".join(map(re.escape, sorted(found, key=len, reverse=True)))) if found else _NO_TOKEN


def is_control(content: str) -> bool:
    """Return whether an added token is neither white space nor a plain word: ``"<tool_call>"``, ``"[/INST]"``."""
    core = content.strip(_BLANK)
    return bool(core) and not (core[0].isalnum() or core[-1].isalnum()) and any(map(str.isalnum, core))


def defuse(text: str, control: re.Pattern[str] = _NO_TOKEN) -> str:
    """Make a document or a question harmless: ``defuse("</ Answer>") == "(/ Answer)"``.

    The protocol's tags, in any case and with any white space, and the tokens that ``control`` finds get round brackets
    in place of their outer characters. ``PolicyTokenizer.encode`` reads no control tokens at all, but prompts and
    endpoints do. Halves of surrogate pairs, which no tokenizer can encode, become U+FFFD.
    """
    text = control.sub(_in_brackets, _TAG.sub(_in_brackets, text))
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def defuse_result(text: str) -> str:
    """Return the result of a tool without the tags that chat templates put around it: ``"(/tool_response)"``.

    They are plain text in some tokenizers, such as Qwen2.5's, where ``defuse`` leaves them.
    """
    return _RESULT_TAG.sub(_in_brackets, text)


def _in_brackets(token: re.Match[str]) -> str:
    return f"({token[0][1:-1]})"


@dataclass(frozen=True, slots=True)
class _Budgets:
    """Measures and cuts the text of one query: its block, and in JSON the query beside it."""

    layout: _Layout
    encode: EncodeFn

    def size(self, part: tuple[str, str]) -> int:
        query, block = part
        return self._tokens(block) + (self._tokens(query) if self.layout.is_json else 0)

    def cut(self, part: tuple[str, str], max_tokens: int) -> tuple[str, str]:
        query, block = part
        if not self.layout.is_json:
            return query, cut_text(block, max_tokens, self._tokens)
        query = cut_text(query, max_tokens, self._tokens)
        return query, cut_text(block, max_tokens - self._tokens(query), self._tokens)

    def _tokens(self, text: str) -> int:
        if self.layout.is_json:  # escapes count too; the frame has the quotes
            text = json.dumps(text, ensure_ascii=False)[1:-1]
        return len(self.encode(text))


MAX_TOKEN_CHARS = 32
"""Limit of characters per token above which text is cut before it is encoded: few tokens have as many."""


def cut_text(text: str, max_tokens: int, tokens: Callable[[str], int]) -> str:
    """Return the longest prefix of whole units of ``text`` that has at most ``max_tokens`` tokens."""
    if tokens(text) <= max_tokens:
        return text
    ends = [unit.end() for unit in _UNIT.finditer(text)]
    num_fitting = bisect_right(ends, max_tokens, key=lambda end: tokens(text[:end]))
    return text[: ends[num_fitting - 1]] if num_fitting else ""


def _fair_share(sizes: Sequence[int], room: int) -> int:
    """Return the largest budget that all may use in full: ``_fair_share([10, 90, 90], 110) == 50``."""
    ascending = sorted(sizes)
    for index, size in enumerate(ascending):
        num_left = len(sizes) - index
        if size * num_left > room:
            return room // num_left
        room -= size
    return ascending[-1]
