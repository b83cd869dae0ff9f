"""Conversion of the records of published sets to the keys that ``envs/tasks/files.py`` reads, and their tables.

==============  ====================================================================================================
TriviaQA        ``{"Question", "QuestionId", "Answer": {"Value", "Aliases", ...}}``, also in the hub's small letters
PopQA           ``{"question", "possible_answers": "[\\"a\\", \\"b\\"]", "prop"}``: the answers are JSON inside a text
Bamboogle       ``Question`` and ``Answer``, in CSV
FlashRAG        ``{"id", "question", "golden_answers", "metadata": {"type", "supporting_facts", ...}}``
Search-R1       FlashRAG's, in Parquet, with ``data_source`` and ``reward_model.ground_truth.target``
verl, SkyRL     Search-R1's without ``question``, which is in ``extra_info`` or behind ``Question:`` in the ``prompt``;
                SkyRL's ``reward_spec`` is verl's ``reward_model``; the ground truth is ``{"target"}``, a list or a text
KILT            ``{"id", "input", "output": [{"answer", "provenance": [{"title"}, ...]}, ...]}``
ReSearch        verl's with ``question`` and the ids in ``extra_info``; the ground truth is a list
SQuAD           ``{"data": [{"paragraphs": [{"qas": [{"id", "question", "answers": [{"text"}]}]}]}]}``, or as the hub
                stores it, ``{"id", "question", "answers": {"text": [...]}}``
MuSiQue         ``question_decomposition`` with a ``support_paragraph`` each, where ``paragraphs`` are left out
NQ              NQ-open, and the annotated forms of ``add_natural_questions``
2Wiki           ``answer_id``, whose other names are in ``id_aliases.json`` beside the file
==============  ====================================================================================================

Rounds of queries are the order in which the evidence of a question can be asked for. The names of a round are in the
question, or in a passage that an earlier round found.

::

    2Wiki      evidences [[Devotion, director, Guido Brignone], [Guido Brignone, child, Lilla Brignone]]
               ──► (("Devotion (1929 film)",), ("Guido Brignone",))
    MuSiQue    question_decomposition: step 2 asks about ``#1``  ──► ((title of step 1,), (title of step 2,))
    others     a title that the question names comes first, and what it does not name after it
"""

from __future__ import annotations

import ast
import csv
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from ragr1_actors.core.disk.data_files import is_parquet, opened, parquet_rows, unpacked_name
from ragr1_actors.core.errors import DataError, one_line

TABLES = {".csv": ",", ".tsv": "\t"}
"""Endings of tables that are text, with the separator of their columns."""
PARQUET = ".parquet"

_SPELLINGS = {
    "Question": "question",
    "Answer": "answer",
    "QuestionId": "id",
    "question_id": "id",
    "question_text": "question",
    "example_id": "id",
    "prop": "category",
    "possible_answers": "golden_answers",
}
_FROM_METADATA = ("type", "supporting_facts", "answer_aliases", "answerable", "paragraphs", "question_decomposition")
_TRIVIAQA_ANSWERS = ("value", "aliases", "humananswers", "normalizedaliases")
_RULES = ("reward_model", "reward_spec")
READ_FIELDS = (
    *("metadata", "data_source", "extra_info", "prompt", *_RULES, "input", "output"),
    *("annotations", "answer_and_def_correct_predictions", "document", "document_text", "document_tokens"),
)
"""Fields of published sets that ``plain_fields`` reads."""
ALIAS_FILE = "id_aliases.json"
"""File with 2Wiki's other names of its answers, one JSON object per line."""
_MAX_FIELD_CHARS = 2**31 - 1  # csv refuses fields of more than 131,072 characters unless told


def plain_fields(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a record with the keys of HotpotQA and MuSiQue; an existing key is not replaced.

    ``{"Question": "Who?", "Answer": {"Value": "Ana", "Aliases": ["A."]}}`` becomes ``{"question": "Who?", "answer":
    ["Ana", "A."]}``. ``where`` names the record in messages.

    Raises:
        DataError: a text that should hold JSON does not.
    """
    found = dict(fields)
    for theirs, ours in _SPELLINGS.items():
        if theirs in found and ours not in found:
            found[ours] = found.pop(theirs)
    metadata = found.get("metadata")
    if isinstance(metadata, dict):
        found |= {key: metadata[key] for key in _FROM_METADATA if metadata.get(key) is not None and key not in found}
    _add_trainers(found)
    _add_kilt(found)
    if _is_squad(found):
        answers = found["answers"]
        found["answers"] = answers["text"] if isinstance(answers, dict) else [answer["text"] for answer in answers]
    add_natural_questions(found, where)
    if isinstance(found.get("answer"), dict):
        found["answer"] = _triviaqa_answers(found["answer"]) or found["answer"]  # other values are refused later
    if "possible_answers" in fields:
        found["golden_answers"] = _from_json(found["golden_answers"], f"{where}: possible_answers")
    if isinstance(found.get("supporting_facts"), str):  # 2Wiki's value, as the hub stores it
        found["supporting_facts"] = _from_json(found["supporting_facts"], f"{where}: supporting_facts")
    if isinstance(found.get("evidences"), str):  # the same; other files may have a text there
        with suppress(ValueError, RecursionError):
            found["evidences"] = json.loads(found["evidences"])
    steps = found.get("question_decomposition")
    if "paragraphs" not in found and "supporting_facts" not in found and isinstance(steps, list):
        held = [step.get("support_paragraph") for step in steps if isinstance(step, dict)]
        found["paragraphs"] = [
            {**paragraph, "is_supporting": True} for paragraph in held if isinstance(paragraph, dict)
        ]
    return found


def _add_trainers(found: dict[str, Any]) -> None:
    """Add the answers, question and id that scripts of Search-R1, verl and SkyRL store under other keys."""
    rule: dict[str, Any] = next((found[key] for key in _RULES if isinstance(found.get(key), dict)), {})
    extra = found.get("extra_info")
    extra = extra if isinstance(extra, dict) else {}
    truth = rule.get("ground_truth")
    if truth is None:
        truth = _for_the_tool(extra)
    if isinstance(truth, str) and truth.lstrip().startswith("{"):  # the object, written as text
        with suppress(ValueError, RecursionError):
            truth = json.loads(truth)
    if isinstance(truth, dict):
        truth = truth.get("target")
    if truth is not None and found.get("golden_answers") is None:
        found["golden_answers"] = truth
    if found.get("question") is None and truth is not None:
        question = extra.get("question") or _asked(found.get("prompt"))
        if question:
            found["question"] = question
    source, index = found.get("data_source"), extra.get("index")
    local_id = extra.get("id") if found.get("id") is None else found["id"]
    if local_id is None and isinstance(index, str | int):
        local_id = f"{extra.get('split', '')}_{index}".lstrip("_")
    if isinstance(source, str) and isinstance(local_id, str | int):  # every source has a "test_0"
        found["id"] = f"{source}/{local_id}"


def _for_the_tool(extra: dict[str, Any]) -> Any:
    """Return the ground truth that the scripts of verl and SkyRL give to their search tool, or None."""
    for key in ("tools_kwargs", "search", "create_kwargs"):
        inner = extra.get(key)
        extra = inner if isinstance(inner, dict) else {}
    return extra.get("ground_truth")


def _asked(prompt: Any) -> str:
    """Return the text after ``Question:`` in the last message of a chat, or an empty text."""
    last = prompt[-1] if isinstance(prompt, list) and prompt else None
    content = last.get("content") if isinstance(last, dict) else None
    return content.rpartition("Question:")[2].strip() if isinstance(content, str) and "Question:" in content else ""


def _add_kilt(found: dict[str, Any]) -> None:
    outputs = found.get("output")
    if "question" in found or not isinstance(found.get("input"), str) or not isinstance(outputs, list | None):
        return
    found["question"] = found["input"]
    if outputs is None:  # the test sets have no answers
        return
    outputs = [output for output in outputs if isinstance(output, dict)]
    found["golden_answers"] = [output["answer"] for output in outputs if output.get("answer") is not None]
    places = [place for output in outputs for place in output.get("provenance") or [] if isinstance(place, dict)]
    titles = dict.fromkeys(place.get("title") for place in places)  # the hub writes "" for a missing title
    found.setdefault("supporting_ids", [title for title in titles if isinstance(title, str) and title])


def squad_questions(article: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the questions of an article of SQuAD's file, and the place of each in it: ``"paragraph 2"``."""
    paragraphs = article.get("paragraphs") if isinstance(article, dict) else None
    for number, paragraph in enumerate(paragraphs if isinstance(paragraphs, list) else [], start=1):
        questions = paragraph.get("qas") if isinstance(paragraph, dict) else None
        for question in questions if isinstance(questions, list) else []:
            yield question, f"paragraph {number}"


def _is_squad(record: dict[str, Any]) -> bool:
    answers = record.get("answers")
    if isinstance(answers, dict):
        return isinstance(answers.get("text"), list)
    return isinstance(answers, list) and all(isinstance(answer, dict) and "text" in answer for answer in answers)


_Fits = Callable[[dict[str, Any]], bool]


def _has(*keys: str) -> _Fits:
    return lambda record: all(record.get(key) is not None for key in keys)


def _any(*fits: _Fits) -> _Fits:
    return lambda record: any(fit(record) for fit in fits)


_SHAPES: dict[str, _Fits] = {
    "SkyRL rows": _has("reward_spec"),
    "Search-R1 rows": _has("reward_model", "golden_answers"),
    "ReSearch rows": _has("reward_model", "question"),
    "verl rows": _any(_has("reward_model"), _has("extra_info", "data_source", "prompt")),
    "KILT": lambda record: record.get("question") is None and _has("input", "output")(record),
    "SQuAD": _any(_has("is_impossible"), lambda record: bool(record.get("answers")) and _is_squad(record)),
    "TriviaQA": lambda record: isinstance(record.get("answer", record.get("Answer")), dict),
    "PopQA": _has("possible_answers"),
    "Bamboogle": _has("Question", "Answer"),
    "Natural Questions": _any(_has("annotations"), _has("answer_and_def_correct_predictions")),
    "MuSiQue": _any(_has("question_decomposition"), _has("paragraphs")),
    "2Wiki": _any(_has("answer_id"), _has("evidences")),
    "HotpotQA": _has("supporting_facts"),
    "FlashRAG": _has("id", "question", "golden_answers"),
    "RAG-R1": _has("question", "golden_answers"),
}
"""Shapes of records with the keys that tell them; the first that fits counts."""


def shape_of(record: dict[str, Any]) -> str:
    """Return the name of a record's shape, as it is in its file: ``"KILT"``."""
    return next((name for name, fits in _SHAPES.items() if fits(record)), "question and answer")


def _triviaqa_answers(answer: dict[str, Any]) -> list[Any]:
    """Return every spelling that TriviaQA accepts, the preferred one first."""
    by_key = {key.lower().replace("_", ""): value for key, value in answer.items()}
    given = [by_key[key] for key in _TRIVIAQA_ANSWERS if by_key.get(key) is not None]
    return [one for values in given for one in (values if isinstance(values, list) else [values])]


def _from_json(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: got {value[:60]!r}, expected a JSON list as text") from error


def listed(text: str) -> list[str | float] | None:
    """Return the items of a list of texts or numbers that was written as text; None for any other text.

    JSON's, Python's and NumPy's forms: ``'["Riga", "Rigan"]'``, ``"['Riga', 'Rigan']"`` and ``"['Riga' 'Rigan']"`` are
    ``["Riga", "Rigan"]``; ``"[1981.0]"`` is ``[1981.0]``; ``"[60]fullerene"`` and ``"[Untitled]"`` are no lists.
    """
    text = text.strip()
    if not (text.startswith("[") and text.endswith("]")):
        return None
    items: list[str | float] = []
    position, end = 1, len(text) - 1
    while found := _ITEM.match(text, position, end):
        item = _literal(found[1])
        if item is None:
            return None
        items.append(item)
        position = found.end()
    return items if position == end and items else None


_ITEM = re.compile(
    r"""\s*+("(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+'|-?(?:0|[1-9][0-9]*+)(?:\.[0-9]*+)?(?:[eE][-+]?[0-9]++)?+)"""
    r"""(?:\s*+,\s*+(?=["'0-9-])|\s*+\Z|\s++(?=["'0-9-]))""",
    re.DOTALL,
)
"""Text or number of a list, and the comma or white space after it."""


def _literal(source: str) -> str | float | None:
    if source[0] not in "\"'":
        with suppress(ValueError):  # more digits than Python reads
            number = int(source) if source.lstrip("-").isdecimal() else float(source)
            return number if math.isfinite(number) else None
        return None
    if "\\" not in source:
        return source[1:-1]
    if source[0] == '"':
        with suppress(ValueError):  # Python has more escapes than JSON
            return str(json.loads(source))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # unknown escapes make Python warn
            return str(ast.literal_eval(source.replace("\n", "\\n")))
    except (ValueError, SyntaxError):
        return None


def read_aliases(folder: Path) -> dict[str, list[str]]:
    """Return 2Wiki's other names by ``answer_id``, as its official script counts them: aliases and demonyms.

    ``{"Q1071": ["Riga city", "Rigan"]}``; empty if ``folder`` holds no ``id_aliases.json``.

    Raises:
        DataError: a line of the file is damaged.
    """
    path = folder / ALIAS_FILE
    found: dict[str, list[str]] = {}
    if not path.is_file():
        return found
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({one_line(error)}); fetch it again, or take it away") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            found[entry["Q_id"]] = [*entry["aliases"], *entry.get("demonyms", [])]
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise DataError(
                f'{path}, line {number}: expected {{"Q_id", "aliases", "demonyms"}} ({one_line(error)}); fetch it again'
            ) from error
    return found


def table_rows(path: Path) -> Iterator[dict[str, Any]] | None:
    """Return the rows of a CSV, TSV or Parquet file; None for any other file.

    Raises:
        DataError: the file is damaged, or a row has more cells than the heading has names.
    """
    suffix = unpacked_name(path).suffix
    if suffix == PARQUET or is_parquet(path):
        return parquet_rows(path)
    return _text_rows(path, TABLES[suffix]) if suffix in TABLES else None


def _text_rows(path: Path, delimiter: str) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(_MAX_FIELD_CHARS)
    try:
        with opened(path) as file, TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
            for number, row in enumerate(csv.DictReader(text, delimiter=delimiter), start=1):
                if None in row or None in row.values():
                    raise DataError(f"{path}, row {number}: not as many cells as the heading has names; mend the row")
                yield row
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text; save the file as UTF-8") from error
    except (OSError, csv.Error) as error:
        raise DataError(f"{path} cannot be read ({one_line(error)})") from error


# -- Natural Questions -------------------------------------------------------------------------------------------------


_YES_NO = {"YES": "yes", "NO": "no", 1: "yes", 0: "no"}


def add_natural_questions(found: dict[str, Any], where: str) -> None:
    """Set ``question`` and ``golden_answers`` of a record in one of these forms; other records stay as they are.

    NQ-open, which FlashRAG and both papers use, is ``{"question", "answer": [...]}`` and needs none of this. Its
    sources::

        EfficientQA  {"question", "answer", "answer_and_def_correct_predictions": [...]}   judged by people afterwards
        original     {"question_text", "document_tokens": [{"token", "html_token"}], "annotations": [...]}
        simplified   {"question_text", "document_text", "annotations": [{"short_answers": [{"start_token", ...}]}]}
        the hub's    {"question": {"text"}, "document": {"tokens": {..}}, "annotations": {"short_answers": [..]}}

    Every short answer of every annotator counts, and yes or no where an annotator said that. A question without either
    has no answer; the reader of task files leaves it out and counts it.

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


_DISAMBIGUATION = re.compile(r"\s*\([^()]*\)$")
_REFERENCE = re.compile(r"#(\d+)")


def search_rounds(question: str, titles: Sequence[str], fields: Mapping[str, Any]) -> tuple[tuple[str, ...], ...]:
    """Return the queries of each round; ``()`` if there is no evidence, or all of it is asked for at once.

    A name that is not in the question is asked for as passages write it: ``Ana Bell`` for ``Ana Bell (director)``.

    Args:
        question: its text.
        titles: of the passages that hold the evidence, each once.
        fields: the record, of which ``search_rounds``, the rounds themselves, 2Wiki's ``evidences`` and MuSiQue's
            ``question_decomposition`` are read.
    """
    given = fields.get("search_rounds")
    if isinstance(given, list) and given and all(isinstance(one, list) and one for one in given):
        return tuple(tuple(map(str, one)) for one in given)
    depths = _depths_of_steps(fields.get("question_decomposition")) or depths_of_triples(fields.get("evidences"))
    asked = folded(question)
    is_named = {title: folded(_bare(title)) in asked for title in titles}
    rounds: dict[int, list[str]] = {}
    for title in titles:
        depth = depths.get(folded(title), depths.get(folded(_bare(title)), 0))
        if not depth and not is_named[title] and any(is_named.values()):
            depth = 1  # the names in the triples may differ from the titles
        rounds.setdefault(depth, []).append(_bare(title) if depth and folded(title) not in asked else title)
    return tuple(tuple(rounds[depth]) for depth in sorted(rounds)) if len(rounds) > 1 else ()


def depths_of_triples(triples: Any) -> dict[str, int]:
    """Return the round of every subject of 2Wiki's triples: an object is known once the subject was read about.

    The keys are ``folded`` subjects: ``{"devotion": 0, "guidobrignone": 1}``.
    """
    if not isinstance(triples, list):
        return {}
    whole = [one for one in triples if isinstance(one, list) and len(one) == 3 and all(isinstance(t, str) for t in one)]
    known_from = {folded(found): folded(subject) for subject, _, found in whole}
    return {subject: _depth(subject, known_from) for subject in (folded(subject) for subject, _, _ in whole)}


def _depth(name: str, known_from: Mapping[str, str]) -> int:
    passed = [name]
    while (name := known_from.get(name, "")) and name not in passed:
        passed.append(name)
    return len(passed) - 1


def _depths_of_steps(steps: Any) -> dict[str, int]:
    """Return the round of every title, from MuSiQue's steps; empty if a step does not name its passage."""
    if not isinstance(steps, list):
        return {}
    depths: list[int] = []
    found: dict[str, int] = {}
    for step in steps:
        passage = step.get("support_paragraph") if isinstance(step, dict) else None
        title = passage.get("title") if isinstance(passage, dict) else None
        asked = step.get("question") if isinstance(step, dict) else None
        if not isinstance(title, str) or not isinstance(asked, str):
            return {}
        uses = [int(number) for number in _REFERENCE.findall(asked) if 0 < int(number) <= len(depths)]
        depths.append(max((depths[number - 1] + 1 for number in uses), default=0))
        found.setdefault(folded(title), depths[-1])
    return found


def _bare(title: str) -> str:
    return _DISAMBIGUATION.sub("", title) or title


def folded(text: str) -> str:
    """Return letters and digits only, since a question and a title differ in case, blanks and marks."""
    return "".join(filter(str.isalnum, text.casefold()))
