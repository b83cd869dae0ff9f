"""The annotated forms of Natural Questions: their answers are put under the key ``golden_answers``.

NQ-open, which FlashRAG and both papers use, is ``{"question", "answer": [...]}`` and needs none of this. Its sources::

    EfficientQA   {"question", "answer", "answer_and_def_correct_predictions": [...]}   judged by people afterwards
    original      {"question_text", "document_tokens": [{"token", "html_token"}], "annotations": [...]}
    simplified    {"question_text", "document_text", "annotations": [{"short_answers": [{"start_token", "end_token"}]}]}
    the hub's     {"question": {"text"}, "document": {"tokens": {...}}, "annotations": {"short_answers": [{"text"}]}}

Every short answer of every annotator counts, and yes or no where an annotator said that. A question without either has
no answer; the reader of task files leaves it out and counts it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ragr1_actors.core.errors import DataError

_YES_NO = {"YES": "yes", "NO": "no", 1: "yes", 0: "no"}


def add_natural_questions(found: dict[str, Any], where: str) -> None:
    """Set ``question`` and ``golden_answers`` of a record in one of these forms; other records stay as they are.

    Raises:
        DataError: a short answer points outside its document; ``where`` names the record.
    """
    question = found.get("question")
    if isinstance(question, dict) and isinstance(question.get("text"), str):
        found["question"] = question["text"]
    judged = found.get("answer_and_def_correct_predictions")
    if isinstance(judged, list):
        found.setdefault("golden_answers", judged)
    if "annotations" in found and not found.keys() & {"golden_answers", "answers", "answer"}:
        found["golden_answers"] = list(_annotated(found, where))


def _annotated(record: dict[str, Any], where: str) -> Iterator[str]:
    tokens = _tokens(record)
    for annotation in _rows(record["annotations"]):
        for span in _rows(annotation.get("short_answers")):
            yield _text(span, tokens, where)
        said = annotation.get("yes_no_answer")
        if isinstance(said, str | int) and said in _YES_NO:
            yield _YES_NO[said]


def _text(span: dict[str, Any], tokens: list[str], where: str) -> str:
    text, start, end = span.get("text"), span.get("start_token"), span.get("end_token")
    if isinstance(text, str):
        return text
    if not isinstance(start, int) or not isinstance(end, int) or not 0 <= start < end <= len(tokens):
        raise DataError(
            f"{where}: got a short answer of the tokens {start} to {end}, expected a part of the document's "
            f"{len(tokens):,}; take a file with document_text or document_tokens"
        )
    return " ".join(token for token in tokens[start:end] if token)


def _tokens(record: dict[str, Any]) -> list[str]:
    """Return the tokens of the document, with "" for markup."""
    if isinstance(record.get("document_text"), str):
        plain = record["document_text"].split(" ")
        return ["" if token.startswith("<") and token.endswith(">") else token for token in plain]
    document = record.get("document")
    rows = _rows(document.get("tokens") if isinstance(document, dict) else record.get("document_tokens"))
    return ["" if row.get("html_token") or row.get("is_html") else str(row.get("token", "")) for row in rows]


def _rows(value: Any) -> list[dict[str, Any]]:
    """Return a list of objects, also of one that the hub stores as an object of lists: ``{"text": ["a", "b"]}``."""
    if isinstance(value, dict):
        columns = {name: column for name, column in value.items() if isinstance(column, list)}
        count = max(map(len, columns.values()), default=0)
        return [{name: column[row] for name, column in columns.items() if row < len(column)} for row in range(count)]
    return [row for row in value if isinstance(row, dict)] if isinstance(value, list) else []
