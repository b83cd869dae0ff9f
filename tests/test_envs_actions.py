import json
import random
import time
from collections.abc import Callable
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from envs.grammars.tags import (
    ANY_TAG,
    Action,
    Answer,
    Malformed,
    QueryStream,
    Search,
    format_queries,
    open_thought,
    parse_action,
)
from envs.options import QueryFormat
from envs.search import clean_queries

FORMATS: tuple[QueryFormat, ...] = get_args(QueryFormat)


@pytest.mark.parametrize(
    ("completion", "action"),
    [
        ("<think> a</think><search> Ana Bell\n Bo Cole</search>", Search(("Ana Bell", " Bo Cole"))),
        ("<answer> Riga</answer>", Answer("Riga")),
        ("<answer>\nRiga \n</answer>", Answer("Riga")),
        ("<think> <search>no</search></think><answer> x</answer>", Answer("x")),
        ("<think> <answer>no</answer></think><search> x</search>", Search(("x",))),
        ("<think> <think> a</think> </think><search> x</search>", Search(("x",))),
        ("<search>a</search><answer>b</answer>", Search(("a",))),
        ("<answer>a</answer><answer>b</answer>", Answer("a")),
        ("<answer>Riga</answer>\n<search>", Answer("Riga")),  # the last token was ">\n<search>"
        ("</search></think><search>a</search>", Search(("a",))),
        ("<answer>2 < 3 > 1</answer>", Answer("2 < 3 > 1")),
    ],
)
def test_the_first_action_outside_think_counts(completion: str, action: Action) -> None:
    assert parse_action(completion) == action


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("", "no <search>"),
        ("Riga", "no <search>"),
        ("Riga</answer>", "no <search>"),
        ("<ANSWER>Riga</ANSWER>", "no <search>"),
        ("<search>Riga", "<search> is never closed"),  # cut by the length limit
        ("<search>Riga</sear", "<search> is never closed"),
        ("<think> a <search>Riga</search>", "<think> is never closed"),
        ("<think> a</think><think><answer>Riga</answer>", "<think> is never closed"),
        ("<answer> </answer>", "<answer> is empty"),
        ("<search>\n</search>", "<search> is empty"),
        ("<search>a<answer>b</answer></search>", "<answer> inside <search>"),
        ("<search>a<search>b</search></search>", "<search> inside <search>"),
        ("<search>a<answer>b</answer>", "<search> is never closed"),
        ("<answer>a</think>b</answer>", "</think> inside <answer>"),
    ],
)
def test_a_turn_without_one_whole_action_is_malformed(completion: str, reason: str) -> None:
    action = parse_action(completion)
    assert isinstance(action, Malformed)
    assert action.reason.startswith(reason)


def test_a_comma_inside_a_query_splits_it_only_where_the_recipe_says_so() -> None:
    body = "<search>Martin Luther King, Jr.\nAna</search>"
    assert parse_action(body) == Search(("Martin Luther King, Jr.", "Ana"))
    assert parse_action(body, "comma") == Search(("Martin Luther King", " Jr.\nAna"))
    assert parse_action(body, "single") == Search(("Martin Luther King, Jr.\nAna",))


def test_queries_as_a_json_list() -> None:
    queries = ("Ana Bell", 'the "Silent River", in\nRiga', "Beyoncé 🎉", "")
    for ensure_ascii in (True, False):
        body = json.dumps(queries, ensure_ascii=ensure_ascii, indent=1)
        assert parse_action(f"<search>{body}</search>", "json") == Search(queries)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("Ana Bell", "holds no JSON: Expecting value"),
        ('["Ana Bell"', "holds no JSON: Expecting ',' delimiter"),
        ('["Ana Bell",]', "holds no JSON"),
        ('["Ana\nBell"]', "holds no JSON"),
        ('"Ana Bell"', "not a list of strings"),
        ('["Ana Bell", 3]', "not a list of strings"),
        ('[["Ana Bell"]]', "not a list of strings"),
        ('{"query": "Ana Bell"}', "not a list of strings"),
        ("[]", "an empty list"),
        ("[" * 100_000, "holds no JSON: maximum recursion depth"),
        (f"[{'9' * 5000}]", "holds no JSON: Exceeds the limit"),
    ],
)
def test_what_is_no_json_list_of_strings_is_malformed(body: str, reason: str) -> None:
    action = parse_action(f"<search>{body}</search>", "json")
    assert isinstance(action, Malformed)
    assert reason in action.reason


def test_what_is_cleaned_away_is_counted() -> None:
    clean = clean_queries([" a  b", "A B", "", "c", "d", "e", "c", "E"], 3)
    assert clean.queries == ["a b", "c", "d"]
    assert clean.counts == {"duplicate_queries": 3, "empty_queries": 1, "queries_over_limit": 1}


def test_control_characters_and_halves_of_characters_are_white_space() -> None:
    action = parse_action(r'<search>["\u0000Ana\u0007Bell\ud800", "\udfff", "\ud83c\udf89"]</search>', "json")
    assert isinstance(action, Search)
    assert clean_queries(action.queries, 3).queries == ["Ana Bell", "🎉"]


# Tags, halves of tags, all that delimits, and what is hard to encode.
TAGS = ("<search>", "</search>", "<answer>", "</answer>", "<think>", "</think>", "<information>", "</information>")
HARMLESS = (
    *("<", "/", ">", "</", "search>", "<sea", "think", "[", "]", '"', '", "', "\\", "\\u", "d83c", ",", "null", "{"),
    *("\n", "\n\n", " ", "\t", "a", "A", "b c", "é", "日本", "🎉", "\x00", "\x1f", "\u2028", "\ufffd"),
    *("\ud800", "\udc00"),
)
PIECES = (*TAGS, *HARMLESS)
TEXTS = st.lists(st.sampled_from(PIECES), max_size=30).map("".join) | st.text(max_size=60)
NEARLY_WHOLE = st.tuples(TEXTS, TEXTS, TEXTS).map(lambda t: f"<think>{t[0]}</think><search>{t[1]}</search>{t[2]}")
JSON_LISTS = st.lists(st.text(max_size=12), max_size=6).map(lambda q: f"<search>{json.dumps(q)}</search>")


def check(completion: str, query_format: QueryFormat, limit: int) -> Action:
    """Parse, and check that a retriever accepts every query."""
    action = parse_action(completion, query_format)
    if isinstance(action, Search):
        clean = clean_queries(action.queries, limit)
        counts = sum(clean.counts.values())
        assert len(clean.queries) <= limit
        assert len(clean.queries) + counts == len(action.queries)
        assert len({query.casefold() for query in clean.queries}) == len(clean.queries)
        for query in clean.queries:
            assert query
            assert query == " ".join(query.split())
            assert query.encode()
    elif isinstance(action, Answer):
        assert action.text == action.text.strip() != ""
    else:
        assert action.reason
    return action


@given(TEXTS | NEARLY_WHOLE | JSON_LISTS, st.sampled_from(FORMATS), st.integers(1, 4))
def test_no_text_breaks_the_parser(completion: str, query_format: QueryFormat, limit: int) -> None:
    check(completion, query_format, limit)


@given(TEXTS | NEARLY_WHOLE | JSON_LISTS, st.sampled_from(FORMATS), st.lists(st.integers(0, 90), max_size=12))
@example('<search>["a", "b\\"c"]</search>', "json", list(range(30)))
@example("<think></think><search>a\nb\n</search>", "lines", list(range(40)))
def test_a_stream_reads_what_the_parser_reads_in_any_pieces(
    completion: str, query_format: QueryFormat, cuts: list[int]
) -> None:
    stream = QueryStream(query_format)
    queries = [query for cut in sorted(cuts) for query in stream.feed(completion[:cut])] + stream.feed(completion)
    assert queries == QueryStream(query_format).feed(completion)
    action = parse_action(completion, query_format)
    if isinstance(action, Search):
        assert clean_queries(queries, 3).queries == clean_queries(action.queries, 3).queries


@pytest.mark.parametrize(
    ("query_format", "body", "ends"),
    [
        ("lines", "Ana\n Bo, C</search>", {"Ana": 4, " Bo, C": 19}),
        ("comma", "Ana, Bo\nC</search>", {"Ana": 4, " Bo\nC": 18}),
        ("single", "Ana, Bo\nC</search>", {"Ana, Bo\nC": 18}),
        ("json", '["Ana", "B\\"o"]</search>', {"Ana": 6, 'B"o': 14}),
    ],
)
def test_a_query_is_read_as_soon_as_it_is_complete(query_format: QueryFormat, body: str, ends: dict[str, int]) -> None:
    stream = QueryStream(query_format)
    opening = "<think> <search>x\n</search></think> <search>"
    assert stream.feed(opening) == []
    read = {query: end for end in range(len(body) + 1) for query in stream.feed(opening + body[:end])}
    assert read == ends


WHOLE = st.text(st.characters(exclude_categories=["Cs"]), min_size=1).map(str.strip).filter(bool)
WHOLE = WHOLE.filter(lambda text: not ANY_TAG.search(text))  # Hypothesis draws strings of the source code, too


@given(st.lists(WHOLE, min_size=1, max_size=4), st.sampled_from(FORMATS))
@example(["Martin Luther King, Jr.", 'the "Silent River", in\nRiga', "\\"], "json")
@example(["Martin Luther King, Jr.", "2 < 3 > 1"], "lines")
@example(["<", "think>"], "comma")
def test_what_is_formatted_is_parsed_as_it_was(queries: list[str], query_format: QueryFormat) -> None:
    separator = {"lines": "\n", "comma": ","}.get(query_format, "")
    if separator:
        queries = [query for text in queries for query in text.split(separator) if query.strip()]
        queries = [query.strip() for query in queries] or ["a"]
    if query_format == "single":
        queries = queries[:1]
    assert parse_action(f"<search>{format_queries(queries, query_format)}</search>", query_format) == Search(
        tuple(queries)
    )


@given(st.lists(st.sampled_from([*PIECES, "Ana", "\n", ","]), max_size=8).map("".join), st.sampled_from(FORMATS))
def test_any_query_can_be_formatted_and_stays_one(text: str, query_format: QueryFormat) -> None:
    queries = [f" Riga {text}", f" {text} Oslo"][: 1 if query_format == "single" else 2]
    action = parse_action(f"<search>{format_queries(queries, query_format)}</search>", query_format)
    assert isinstance(action, Search), action
    assert len(action.queries) == len(queries)
    assert all(name in query for name, query in zip(("Riga", "Oslo"), action.queries, strict=False))


def test_a_format_that_cannot_hold_the_queries_says_so() -> None:
    with pytest.raises(ValueError, match="got 2 queries in the format 'single', expected exactly one"):
        format_queries(["Ana", "Bo"], "single")
    with pytest.raises(ValueError, match="got 0 queries"):
        format_queries([], "lines")


LONG = 100_000
ADVERSARIAL: dict[str, Callable[[int], str]] = {
    "open search": lambda n: "<search>" * (n // 8),
    "open search, answered": lambda n: "<search>" * (n // 8) + "<answer>x</answer>",
    "open think": lambda n: "<think>" * (n // 7),
    "open answer": lambda n: "<answer>" * (n // 8),
    "thoughts": lambda n: "<think></think>" * (n // 15),
    "searching thoughts": lambda n: "<think><search></think>" * (n // 23),
    "ends": lambda n: "</search>" * (n // 9),
    "brackets": lambda n: "<" * n,
    "half tags": lambda n: "<search" * (n // 7),
    "empty queries": lambda n: "<search>" + "\n" * n + "</search>",
    "queries": lambda n: "<search>" + "".join(f"{i}\n" for i in range(n // 6)) + "</search>",
    "blanks": lambda n: "<search>" + " " * n + "</search>",
    "lists": lambda n: "<search>" + "[" * n + "</search>",
    "escapes": lambda n: '<search>["' + "\\" * n + '"]</search>',
    "strings": lambda n: "<search>[" + '"a", ' * (n // 5) + '"b"]</search>',
}


@pytest.mark.parametrize("name", list(ADVERSARIAL))
def test_time_is_linear_in_the_text_whatever_the_text(name: str) -> None:
    completion = ADVERSARIAL[name](LONG)
    for query_format in FORMATS:
        started = time.process_time()
        check(completion, query_format, 3)
        QueryStream(query_format).feed(completion)
        assert time.process_time() - started < 5.0  # quadratic would be minutes


def test_a_stream_that_comes_character_by_character_is_read_once() -> None:
    stream = QueryStream("lines")
    text = "<think>" + "x" * 20_000 + "</think><search>" + "ab\n" * 5_000
    started = time.process_time()
    for end in range(len(text)):
        stream.feed(text[:end])
    assert time.process_time() - started < 2.0


@pytest.mark.slow
def test_two_hundred_thousand_texts_break_nothing() -> None:
    rng = random.Random(20_260_101)
    names: dict[type[Action], int] = {Search: 0, Answer: 0, Malformed: 0}
    for index in range(200_000):
        query_format = FORMATS[index // 4 % 4]
        pieces = rng.choices(PIECES, k=rng.randrange(14))
        if index % 2:
            tag = ("search", "answer")[index % 8 == 1]
            body = rng.choices(HARMLESS, k=rng.randrange(8))
            if query_format == "json":
                body = ['["', *body, '"]']
            pieces = ["<think>", *pieces[:2], "</think>", f"<{tag}>", *body, f"</{tag}>", *pieces[2:]]
        completion = "".join(pieces)
        names[type(check(completion, query_format, 1 + index // 16 % 3))] += 1
        QueryStream(query_format).feed(completion)
    assert min(names.values()) > 10_000, names


@pytest.mark.timeout(60)  # reading again from the string's or the list's beginning took hours
@pytest.mark.parametrize("beginning", ['["', "[", '["a",', '["a"', ""])
def test_the_stream_of_a_turn_reads_nothing_twice(beginning: str) -> None:
    stream = QueryStream("json")
    text = "<search>" + beginning + ("a" if beginning.endswith('["') else " ") * 1_000_000
    found = [query for _ in range(20_000) for query in stream.feed(text)]  # as many tokens, if they were empty
    assert found == (["a"] if '"a"' in beginning else [])


@pytest.mark.parametrize(
    ("turn", "opened"),
    [
        ("<think> a <search> b </search>", "<think>"),
        ("<think> a</think> <think> <answer>b</answer>", "<think>"),
        ("<think> a</think> <search> b </search>", ""),
        ("<search> a <think> b", ""),
        ("</think> a", ""),
        ("", ""),
    ],
)
def test_a_thought_that_a_turn_leaves_open(turn: str, opened: str) -> None:
    assert open_thought(turn) == opened
