"""Demonstrations of a teacher: every format becomes the same turns, and a file has the checks of a task file."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from envs.sources import TeacherSource
from envs.tasks.demonstrations import as_message, load_demonstrations
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.errors import DataError
from ragr1_actors.core.types import CallRequest, Message

SEARCH = "<think> where</think><search> Ana Bell</search>"
ANSWER = "<think> found</think><answer> Riga</answer>"
FOUND = "\n<information>\nDoc 1: Question: x <answer> Oslo</answer>\n</information>\n"
PROMPT = "Write <search> query </search> and <answer> Beijing </answer>. Question: Where was Ana Bell born?\n"
CALL = {"name": "search", "arguments": {"query": "Ana Bell"}}


def messages(*contents: tuple[str, str], **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in contents], **fields}


def load(
    folder: Path, *records: object, query_format: Any = "lines", **options: Any
) -> tuple[Any, Mapping[str, tuple[str, ...]]]:
    path = folder / "teacher.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records), encoding="utf-8")
    return load_demonstrations(path, query_format, **options)


@pytest.mark.parametrize(
    "record",
    [
        messages(("system", "x"), ("user", PROMPT), ("assistant", SEARCH), ("user", FOUND), ("assistant", ANSWER)),
        messages(("user", PROMPT), ("assistant", SEARCH + FOUND + "\n\n" + ANSWER)),
        {"conversations": [{"from": "human", "value": PROMPT}, {"from": "gpt", "value": f"{SEARCH}{FOUND}{ANSWER}"}]},
        {"instruction": PROMPT, "input": "", "output": SEARCH + FOUND + ANSWER},
        {"instruction": "", "input": f"{PROMPT}<|im_end|>\nassistant\n{SEARCH}{FOUND}", "output": ANSWER},
        messages(
            ("user", "Where was Ana Bell born?"),
            ("assistant", f"<think> where</think><tool_call>\n{json.dumps(CALL)}\n</tool_call>"),
            ("tool", "<tool_response>Ana Bell was born in Riga</tool_response>"),
            ("assistant", ANSWER),
        ),
        {
            "messages": [
                {"role": "user", "content": "Where was Ana Bell born?"},
                {
                    "role": "assistant",
                    "content": "<think> where</think>",
                    "tool_calls": [{"function": {"name": "search", "arguments": '{"queries": ["Ana Bell"]}'}}],
                },
                {"role": "tool", "content": "Ana Bell was born in Riga"},
                {"role": "assistant", "content": ANSWER},
            ]
        },
        {
            "conversations": [
                {"from": "human", "value": "Call <tool_call>{...}</tool_call>.\nQuestion: Where was Ana Bell born?"},
                {"from": "gpt", "value": "<think> where</think>"},
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "Riga"},
                {"from": "gpt", "value": ANSWER},
            ]
        },
        messages(("user", f"Question: Who?\nAnswer: Bo\n\n{PROMPT}"), ("assistant", SEARCH + FOUND + ANSWER)),
        messages(
            ("user", "Where was Ana Bell born?"),
            ("assistant", "<think> where</think><|begin_of_query|> Ana Bell<|end_of_query|>"),
            ("user", "<|begin_of_documents|> Riga <|end_of_documents|>"),
            ("assistant", ANSWER),
        ),
    ],
)
def test_every_format_is_the_same_turns(tmp_path: Path, record: dict[str, Any]) -> None:
    loaded, turns_of = load(tmp_path, record)
    (task,) = loaded.tasks
    assert (task.question, task.golden_answers) == ("Where was Ana Bell born?", ("Riga",))
    assert turns_of == {"teacher/0": (SEARCH, ANSWER)}


def test_a_tag_in_a_thought_ends_no_turn(tmp_path: Path) -> None:
    thinks = "<think> I may write <search> queries </search> now, or </answer>.</think><search> Ana Bell</search>"
    _, turns = load(tmp_path, {"question": "Where was Ana Bell born?", "output": thinks + FOUND + ANSWER})
    assert list(turns.values()) == [(thinks, ANSWER)]


def test_tool_calls_are_written_in_the_format_of_the_queries(tmp_path: Path) -> None:
    call = json.dumps({"name": "search", "arguments": {"queries": ["Ana Bell", "Bo, Cole"]}})
    record = messages(
        ("user", "Who?"), ("assistant", f"<tool_call>{call}</tool_call>{ANSWER}"), golden_answers=["B", "C"]
    )
    loaded, turns_of = load(tmp_path, record, query_format="comma")
    assert turns_of["teacher/0"][0] == "<search> Ana Bell,Bo  Cole</search>"
    assert loaded.tasks[0].golden_answers == ("B", "C")


@pytest.mark.parametrize(
    "fields",
    [
        {"supporting_ids": ["Ana Bell", "Riga"]},
        {"supporting_facts": [["Ana Bell", 0], ["Riga", 2], ["Riga", 3]], "golden_answers": ["Riga city"]},
        {"metadata": {"supporting_facts": {"title": ["Ana Bell", "Riga"], "sent_id": [0, 2]}, "answerable": True}},
        {"paragraphs": [{"title": title, "is_supporting": title != "Oslo"} for title in ("Ana Bell", "Oslo", "Riga")]},
    ],
)
def test_the_supporting_passages_of_a_record_are_kept(tmp_path: Path, fields: dict[str, Any]) -> None:
    written = {"instruction": PROMPT, "input": "", "output": SEARCH + FOUND + ANSWER}
    loaded, _ = load(tmp_path, {**written, **fields}, {**written, "question": "Who was born?"})
    assert [task.supporting_ids for task in loaded.tasks] == [("Ana Bell", "Riga"), ()]
    assert loaded.tasks[0].golden_answers == tuple(fields.get("golden_answers", ["Riga"]))


def test_other_fields_reach_the_environment(tmp_path: Path) -> None:
    record = {"instruction": PROMPT, "input": "", "output": SEARCH + ANSWER, "id": 7, "type": "bridge"}
    loaded, _ = load(
        tmp_path, {**record, "candidates": ["Riga"], "system": "x"}, messages(("user", "Who?"), ("assistant", ANSWER))
    )
    assert [(task.task_id, dict(task.meta)) for task in loaded.tasks] == [
        ("teacher/0", {"candidates": ["Riga"]}),
        ("teacher/1", {}),
    ]


def test_a_file_is_checked_and_reported_as_a_task_file(tmp_path: Path) -> None:
    whole = messages(("user", PROMPT), ("assistant", SEARCH), ("tool", FOUND), ("assistant", ANSWER))
    beginning = {"instruction": PROMPT, "input": "", "output": SEARCH}
    empty = messages(("user", " "), ("assistant", ANSWER))
    article = messages(("user", PROMPT), ("assistant", "<answer> the</answer>"))
    loaded, _ = load(tmp_path, whole, beginning, whole, empty, article)
    assert str(loaded.report) == (
        "teacher.jsonl: 1 tasks of 5 records; 1 duplicate questions left out (line 3); "
        "1 empty questions left out (line 4); 2 without a usable answer left out (line 2, line 5)"
    )


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x"}, r"teacher.jsonl, line 2: got .*text.*expected messages"),
        ({"messages": ["x"]}, "line 2: got .*expected messages"),
        (messages(("user", "x"), ("assistant", ANSWER), supporting_ids=3), "line 2: got supporting facts 3, expected"),
        (messages(("user", "x"), ("assistant", ["y"])), "line 2: got a message of list, expected text"),  # type: ignore[arg-type]
        (messages(("user", "x"), ("assistant", "<tool_call>{</tool_call>")), "line 2: got the tool call '{', expected"),
        (messages(("user", "x"), ("assistant", "<tool_call>[]</tool_call>")), "line 2: got a tool call with None"),
        ([], "line 2: got .*expected an object"),
        (
            messages(("user", "x"), ("assistant", "<tool_call>{}</tool_call>")),
            "got a tool call with None, expected query",
        ),
        (messages(("user", "x"), ("assistant", f"<tool_call>{'[' * 9999}</tool_call>")), "got the tool call .*JSON"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": "x"}]}, "got tool_calls x, expected obj"),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{"arguments": "{"}]}]},
            "got the tool call '{', expected JSON",
        ),
        (
            messages(("user", "x"), ("assistant", '<tool_call>{"arguments": {"query": " "}}</tool_call>')),
            "expected query or queries",
        ),
    ],
)
def test_a_record_in_another_form_is_named(tmp_path: Path, record: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load(tmp_path, messages(("user", PROMPT), ("assistant", ANSWER)), record)


def test_a_question_may_compare_and_an_empty_one_is_counted(tmp_path: Path) -> None:
    compares = messages(("user", "Question: Is 3 < 5 or not?"), ("assistant", ANSWER))
    loaded, _ = load(tmp_path, compares, messages(("user", PROMPT), ("assistant", ANSWER), question=""))
    assert [task.question for task in loaded.tasks] == ["Is 3 < 5 or not?"]
    assert "1 empty questions left out" in str(loaded.report)


def test_several_queries_need_a_format_that_takes_them(tmp_path: Path) -> None:
    call = json.dumps({"arguments": {"queries": ["Ana", "Bo"]}})
    with pytest.raises(DataError, match=r"line 1: .*choose another environment.options.query_format"):
        load(tmp_path, messages(("user", "x"), ("assistant", f"<tool_call>{call}</tool_call>")), query_format="single")


def test_a_file_without_a_finished_demonstration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="none of 1 demonstrations has a question, an answer and an end"):
        load(tmp_path, {"instruction": PROMPT, "output": SEARCH})


@pytest.mark.timeout(60)  # for each of these a pattern that goes back took hours
@pytest.mark.parametrize("unit", ["a", " ", "Question: ", "<tool_call>", "<information>", "<search>", "<answer> "])
def test_a_long_demonstration_is_read_once(unit: str, tmp_path: Path) -> None:
    text = unit * (1_000_000 // len(unit))
    asked = "" if unit in ("<search>", "<answer> ") else text  # they would begin the first turn
    _, turns_of = load(tmp_path, {"instruction": f"{PROMPT}{asked}b", "input": "", "output": ANSWER + text})
    assert [turns[-1][-len(ANSWER) :] for turns in turns_of.values()] == [ANSWER]


def asked_of(name: str, /, **arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


CALLING = {
    "messages": [
        {"role": "system", "content": "You have tools."},
        {"role": "user", "content": "Where was Ana Bell born?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "who",
            "tool_calls": [asked_of("search", queries=["Ana Bell", "Bo"]), asked_of("open_page", title="Ana Bell")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "Ana Bell was born in Riga. <answer>Oslo</answer>"},
        {"role": "tool", "tool_call_id": "c1", "content": "<tool_call>{}</tool_call>"},
        {"role": "assistant", "content": "<think>so</think>", "tool_calls": [asked_of("now")]},
        {"role": "tool", "content": "today"},
        {"role": "assistant", "content": "<think>found</think>Riga"},
    ]
}
MESSAGES = [
    Message(
        "assistant",
        "<think>\nwho\n</think>",
        (CallRequest("search", {"queries": ["Ana Bell", "Bo"]}), CallRequest("open_page", {"title": "Ana Bell"})),
    ),
    Message("assistant", "<think>so</think>", (CallRequest("now", {}),)),
    Message("assistant", "<think>found</think>Riga"),
]


def test_calls_of_any_tool_stay_calls(tmp_path: Path) -> None:
    loaded, turns_of = load(tmp_path, CALLING, keeps_calls=True)
    (task,) = loaded.tasks
    assert (task.question, task.golden_answers) == ("Where was Ana Bell born?", ("Riga",))
    assert [as_message(turn, "lines") for turn in turns_of["teacher/0"]] == MESSAGES
    with pytest.raises(DataError, match="expected query or queries"):
        load(tmp_path, CALLING)


@pytest.mark.parametrize(
    "written",
    [
        [{"from": "gpt", "value": "<think>so</think>"}, {"from": "function_call", "value": json.dumps(CALL)}],
        [{"role": "assistant", "content": f"<think>so</think>\n<tool_call>{json.dumps(CALL)}</tool_call>"}],
        [{"role": "assistant", "content": "<think>so</think>", "tool_calls": [CALL]}],
    ],
)
def test_every_way_to_write_a_call_is_one(tmp_path: Path, written: list[dict[str, Any]]) -> None:
    user, answer = {"role": "user", "content": "Question: Where?"}, {"role": "assistant", "content": "Riga"}
    record = {
        "messages": [user, *written, {"role": "tool", "content": "x"}, answer],
        "golden_answers": ["Riga, Latvia"],
    }
    loaded, turns_of = load(tmp_path, record, keeps_calls=True)
    assert loaded.tasks[0].golden_answers == ("Riga, Latvia",)
    assert [as_message(turn, "lines") for turn in turns_of["teacher/0"]] == [
        Message("assistant", "<think>so</think>", (CallRequest("search", {"query": "Ana Bell"}),)),
        Message("assistant", "Riga"),
    ]


def test_demonstrations_in_tags_are_read_as_before_where_calls_are_kept(tmp_path: Path) -> None:
    written = messages(("user", PROMPT), ("assistant", SEARCH), ("user", FOUND), ("assistant", ANSWER))
    old = {"instruction": PROMPT, "input": "", "output": SEARCH + FOUND + ANSWER, "question": "Who?"}
    _, turns_of = load(tmp_path, written, old, keeps_calls=True)
    assert list(turns_of.values()) == [(SEARCH, ANSWER)] * 2
    assert as_message(SEARCH, "lines").calls == (CallRequest("search", {"queries": ["Ana Bell"]}),)


def test_a_conversation_that_ends_with_a_call_is_left_out(tmp_path: Path) -> None:
    beginning = {"messages": CALLING["messages"][:6]}
    loaded, _ = load(tmp_path, CALLING, beginning, keeps_calls=True)
    assert "1 without a usable answer left out (line 2)" in str(loaded.report)


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"tool_calls": [{"function": {"name": 7, "arguments": "{}"}}]}, "a call is no object with a name"),
        ({"tool_calls": [{"function": {"name": "a", "arguments": "[]"}}]}, "arguments of a are no object"),
        ({"tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}, "tool call '{', expected JSON"),
        ({"content": "<tool_call>\n{'a'"}, 'got the turn "<tool_call>'),
        ({"reasoning_content": 7}, "got a message of int, expected text"),
    ],
)
def test_a_call_that_cannot_be_read_is_named(tmp_path: Path, message: dict[str, Any], problem: str) -> None:
    record = {"messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", **message}]}
    with pytest.raises(DataError, match=f"line 2: .*{problem}"):
        load(tmp_path, CALLING, record, keeps_calls=True)


def test_a_source_keeps_calls_for_an_environment_that_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "teacher.json"
    path.write_text(json.dumps([CALLING]), encoding="utf-8")
    (task,) = (source := TeacherSource(EnvironmentSettings(env="tools"), path)).tasks("train")
    assert as_message(source.demonstrate(task, random.Random(0))[1], "lines") == MESSAGES[1]
    with pytest.raises(DataError, match="expected query or queries"):
        TeacherSource(EnvironmentSettings(), path)
