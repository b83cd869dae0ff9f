"""The shapes one record of a corpus file can have, and the passages in it.

A record is a JSON object: a passage, an article, or a question with the paragraphs it was published with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from retrieval.base import Passage
from retrieval.corpora.texts import HashTable, hash_text, valid_unicode

Record = dict[str, Any]

_ID_KEYS = ("id", "_id", "wikipedia_id")
_MARK = re.compile(r"\s*(?:Section|BULLET|[A-Z]+)::::[-*\s]*")


class RecordError(ValueError):
    """A record that is not of its shape; the message says what was got and what was expected, not where."""


class Namer:
    """Ids for passages that have none, and the paragraphs seen before.

    Neither titles nor texts are kept, only their hashes: 18 to 36 bytes a title, and as much a paragraph where
    paragraphs repeat. Should two titles share a hash (see ``hash_text``), the second becomes ``title#2``; should two
    paragraphs, the second is left out.
    """

    def __init__(self) -> None:
        """Know no title."""
        self._uses = HashTable()
        self._paragraphs = HashTable()

    def name(self, title: str) -> str:
        """Return an id not returned before: the title, ``title#2`` from its second use on; ``#1`` for an empty one."""
        uses = self._use(title)
        if title and uses == 1:
            return title
        while self._use(name := f"{title}#{uses}") > 1:  # a passage is called like this itself
            uses = self._use(title)
        return name

    def is_new(self, title: str, text: str) -> bool:
        """Return whether this paragraph comes for the first time."""
        key = hash_text(f"{title}\0{text}")
        if self._paragraphs.get(key):
            return False
        self._paragraphs.set(key, 1)
        return True

    def _use(self, title: str) -> int:
        key = hash_text(title)
        uses = self._uses.get(key) + 1
        self._uses.set(key, uses)
        return uses


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape: how it looks, how to tell it, and how to read it."""

    looks: str
    fits: Callable[[Record], bool]
    passages: Callable[[Record, Namer], Iterator[Passage]]
    """Raises ``RecordError``."""


def join_sentences(sentences: list[str]) -> str:
    """Join sentences, with a blank where neither brings one: HotpotQA's begin with it, those of 2Wiki do not."""
    joined: list[str] = []
    for sentence in filter(None, sentences):
        if joined and not (joined[-1][-1].isspace() or sentence[0].isspace()):
            joined.append(" ")
        joined.append(sentence)
    return "".join(joined).strip()


def is_texts(value: Any) -> bool:
    """Return whether this is a list of strings."""
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _plain(record: Record, namer: Namer) -> Iterator[Passage]:
    yield _passage(record, _title(record), record["text"], namer)


def _contents(record: Record, namer: Namer) -> Iterator[Passage]:
    """Search-R1's ``"Riga"\\nRiga lies in Latvia.``: the title stands in quotes on the first line."""
    title, text = _title(record), record["contents"]
    head, newline, rest = text.partition("\n")
    head = head.strip()
    if len(head) > 1 and head[0] == head[-1] == '"':
        head = head[1:-1]  # one pair only: a title may hold quotes of its own
    if newline and title in ("", head):
        title, text = head, rest
    yield _passage(record, title, text, namer)


def _article(record: Record, namer: Namer) -> Iterator[Passage]:
    """KILT's: the title is the first paragraph again; headings and list items are marked ``Section::::History.``."""
    title = record["wikipedia_title"]
    paragraphs = list(map(_unmarked, record["text"]))
    if paragraphs and paragraphs[0] == title.strip():
        del paragraphs[0]
    yield _passage(record, title, "\n".join(filter(None, paragraphs)), namer)


def _unmarked(paragraph: str) -> str:
    """Return ``"History: Early years."`` of ``"Section::::History.:Early years."``."""
    mark = _MARK.match(paragraph)
    return (paragraph[mark.end() :].replace(".:", ": ", 1) if mark else paragraph).strip()


def _context(record: Record, namer: Namer) -> Iterator[Passage]:
    """A question of HotpotQA or 2Wiki; on the data sets hub the columns of its context stand apart."""
    context = record["context"]
    if isinstance(context, dict):
        titles, texts = context.get("title"), context.get("sentences")
        if not isinstance(titles, list) or not isinstance(texts, list) or len(titles) != len(texts):
            raise RecordError(f"got the context {_shown(context)}, expected a list of [title, [sentence, ...]]")
        context = list(zip(titles, texts, strict=True))
    for item in context:
        if not (isinstance(item, list | tuple) and len(item) == 2 and isinstance(item[0], str) and is_texts(item[1])):
            raise RecordError(f"got {_shown(item)} in the context, expected [title, [sentence, ...]]")
        yield from _paragraph(item[0], join_sentences(item[1]), namer)


def _paragraphs(record: Record, namer: Namer) -> Iterator[Passage]:
    """A question of MuSiQue."""
    for item in record["paragraphs"]:
        title, text = (item.get("title"), item.get("paragraph_text")) if isinstance(item, dict) else (None, None)
        if not isinstance(title, str) or not isinstance(text, str):
            raise RecordError(f"got {_shown(item)} among the paragraphs, expected title and paragraph_text as strings")
        yield from _paragraph(title, text, namer)


SHAPES = {
    "plain": Shape('{"title", "text"[, "id"]}', lambda r: isinstance(r.get("text"), str), _plain),
    "contents": Shape('{"id", "contents"}', lambda r: isinstance(r.get("contents"), str), _contents),
    "article": Shape(
        '{"_id", "wikipedia_title", "text": [paragraph, ...]}',
        lambda r: isinstance(r.get("wikipedia_title"), str) and is_texts(r.get("text")),
        _article,
    ),
    "context": Shape(
        '{"question", "context": [[title, [sentence, ...]], ...]}',
        lambda r: isinstance(r.get("context"), list | dict),
        _context,
    ),
    "paragraphs": Shape(
        '{"question", "paragraphs": [{"title", "paragraph_text"}, ...]}',
        lambda r: isinstance(r.get("paragraphs"), list),
        _paragraphs,
    ),
}


def passages_of(record: Any, shapes: tuple[str, ...], namer: Namer) -> Iterator[Passage]:
    """Yield the passages of a record that must have one of some shapes, named by keys of ``SHAPES``.

    Raises:
        RecordError: it has none of them, or more than one.
    """
    if not isinstance(record, dict):
        raise RecordError(f"got a JSON {type(record).__name__}, expected an object with title and text")
    fitting = [name for name in shapes if SHAPES[name].fits(record)]
    if fitting == ["plain", "contents"]:  # FlashRAG writes the passage both ways
        fitting = ["plain"]
    if not fitting:
        expected = " or ".join(SHAPES[name].looks for name in shapes)
        raise RecordError(f"got keys {_shown(sorted(record))}, expected {expected}, texts being strings")
    if len(fitting) > 1:
        raise RecordError(
            f"got keys {_shown(sorted(record))}, which could be {' or '.join(SHAPES[name].looks for name in fitting)}; "
            "name the corpus format"
        )
    return SHAPES[fitting[0]].passages(record, namer)


def _passage(record: Record, title: str, text: str, namer: Namer) -> Passage:
    title = valid_unicode(title)
    given = next((record[key] for key in _ID_KEYS if record.get(key) is not None), None)
    if given is None:
        return Passage(namer.name(title), title, valid_unicode(text))
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise RecordError(f"the id is {_shown(given)}, expected a string or a whole number")
    return Passage(valid_unicode(str(given)), title, valid_unicode(text))


def _paragraph(title: str, text: str, namer: Namer) -> Iterator[Passage]:
    title, text = valid_unicode(title), valid_unicode(text)
    if namer.is_new(title, text):
        yield Passage(namer.name(title), title, text)


def _title(record: Record) -> str:
    title = record.get("title", "")
    if not isinstance(title, str):
        raise RecordError(f"the title is {_shown(title)}, expected a string")
    return title


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."
