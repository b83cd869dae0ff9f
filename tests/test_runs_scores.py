"""Scores of tasks: measures, the file that an evaluation goes on with, intervals, comparisons."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from envs.measures import exact_match, token_f1
from ragr1_actors.cli.evaluate import print_evaluation, summarise
from ragr1_actors.core.errors import DataError
from ragr1_actors.core.types import Record, StopReason, Task, ToolCall, Trajectory, Turn
from ragr1_actors.runs.scores import (
    EvalArguments,
    Latency,
    TaskScore,
    append_score,
    bootstrap,
    check_shared,
    compare,
    intervals,
    latency,
    mcnemar,
    normalize_rag_r1,
    only_writer,
    open_scores,
    read_scores,
    score,
    tasks_digest,
)

SETTINGS = EvalArguments("policy", "musique", 3, "0f", "search", "indexes/mine", "1a", 8)


def one(task_id: str, em: float = 1.0, recall: float | None = None) -> TaskScore:
    said = "Beyonc\u00e9\u2028"
    return TaskScore(task_id, said, "answered", em, em, em, em, recall, rounds=1, queries=2, tokens=9, latency_s=0.5)


def test_measures_of_a_trajectory() -> None:
    records = (Record("Ana#2", "Ana", "a", 0.5), Record("17", "Bo", "b", 0.4))
    found = ToolCall("search", {"query": "q", "k": 2}, records=records)
    task = Task("t/1", "Who?", ("U S", "US"), supporting_ids=("Ana", "Bo", "Cy", "Di"))
    none = np.zeros(0, np.int32)
    turns = (Turn("", 3, "search", (found,)), Turn("", 3, "answer"))
    trajectory = Trajectory(
        "t/1/0", task, none, np.asarray([1, 1, 2], np.uint8), none, none, turns, StopReason.ANSWERED, 1.0, "the U.S."
    )
    timed = replace(trajectory, metrics={"time/trajectory_s": 0.25})
    expected = TaskScore("t/1", "the U.S.", "answered", 1.0, 1.0, 1.0, 1.0, 0.5, 1, 1, tokens=2, latency_s=0.25)
    expected = replace(expected, digest=tasks_digest([task]))
    assert score(timed) == expected
    unknown = replace(timed, task=replace(task, supporting_ids=(), golden_answers=("US",)))
    without = replace(expected, recall=None, em_rag_r1=0.0, f1_rag_r1=0.0, digest=tasks_digest([unknown.task]))
    assert score(unknown) == without


@pytest.mark.parametrize(
    ("answer", "gold", "em"),
    [("U.S.", "u s", 1.0), ("U.S.", "US", 0.0), ("The-Band", "band", 1.0), ("", ".", 0.0), ("Riga", "Riga.", 1.0)],
)
def test_rag_r1s_normaliser_puts_a_space_for_punctuation(answer: str, gold: str, em: float) -> None:
    assert exact_match(answer, [gold], normalize_rag_r1) == em


@pytest.mark.parametrize(
    ("answer", "gold", "f1", "f1_rag_r1"),
    [
        ("well-known song", "known", 0.0, 0.5),
        ("U.S.", "US", 1.0, 0.0),
        ("yes.", "yes", 1.0, 1.0),
        ("no-no", "no", 0, 0),
    ],
)
def test_f1_with_the_normalisers_of_both_papers(answer: str, gold: str, f1: float, f1_rag_r1: float) -> None:
    assert (token_f1(answer, [gold]), token_f1(answer, [gold], normalize_rag_r1)) == (f1, f1_rag_r1)


def test_latency_is_over_the_tasks() -> None:
    found = latency([replace(one(str(second)), latency_s=float(second)) for second in range(101)], 4)
    assert found == Latency(4, 101, median_s=50.0, p95_s=95.0, mean_s=50.0, tokens=9.0, rounds=1.0, queries=2.0)


def test_a_file_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert open_scores(path, SETTINGS) == []
    append_score(path, one("a", recall=0.5))
    append_score(path, one("b"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-4])
    assert open_scores(path, SETTINGS) == [one("a", recall=0.5)]
    append_score(path, one("b"))
    assert path.read_bytes() == whole
    assert read_scores(path) == (SETTINGS, [one("a", recall=0.5), one("b")])
    path.write_bytes(whole[:7])  # cut off in the first line: begun anew
    assert open_scores(path, SETTINGS) == []


def test_a_task_has_one_score(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    open_scores(path, SETTINGS)
    for _ in range(2):
        append_score(path, one("a"))
    with pytest.raises(DataError, match=r"out\.jsonl, line 3: a second score of task a; delete one of the two lines"):
        read_scores(path)


def test_one_evaluation_writes_a_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with only_writer(path):
        with (
            pytest.raises(DataError, match=r"another evaluation writes .*out\.jsonl; wait until it ends"),
            only_writer(path),
        ):
            pass
        assert open_scores(path, SETTINGS) == []
    with only_writer(path), only_writer(None), only_writer(Path(os.devnull)):
        pass
    os.mkfifo(tmp_path / "pipe")
    with (
        pytest.raises(DataError, match="pipe is no regular file; choose another --out"),
        only_writer(tmp_path / "pipe"),
    ):
        pass


def test_a_file_of_another_evaluation_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    open_scores(path, SETTINGS)
    append_score(path, one("a"))
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"of another evaluation \(digest '0f' there, '1e' here\); name another --out"):
        open_scores(path, replace(SETTINGS, digest="1e"))
    path.write_bytes(before + b"{}\n")
    with pytest.raises(DataError, match=r"out\.jsonl, line 3 is damaged: .*; name a file of"):
        open_scores(path, SETTINGS)
    assert path.read_bytes() == before + b"{}\n"
    with pytest.raises(DataError, match="no results file"):
        read_scores(tmp_path / "none.jsonl")


def test_a_users_file_of_one_line_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    path.write_text('[{"question": "Where?", "answer": "Riga"}]')  # as json.dump writes it
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"tasks\.json holds something else .* name another --out, or delete the file"):
        open_scores(path, SETTINGS)
    assert path.read_bytes() == before
    path.write_bytes(b"")
    assert open_scores(path, SETTINGS) == []


def test_the_digest_tells_tasks_apart() -> None:
    task = Task("t/1", "Who?", ("Ana",))
    digests = {
        tasks_digest([found]) for found in (task, replace(task, golden_answers=("Bo",)), Task("t/2", "Who?", ()))
    }
    assert len(digests) == 3


def test_an_interval_is_that_of_the_normal_approximation_where_there_are_many_tasks() -> None:
    values = np.asarray([1.0] * 400 + [0.0] * 600)
    found = bootstrap(values)
    half = 1.96 * (0.4 * 0.6 / 1000) ** 0.5
    assert found.mean == 0.4
    assert (found.low, found.high) == pytest.approx((0.4 - half, 0.4 + half), abs=0.004)
    assert found == bootstrap(values)


def test_recall_is_over_the_tasks_with_known_evidence() -> None:
    found = intervals([one("a", recall=0.5), one("b")])
    assert (found["recall"].mean, found["queries"].mean) == (0.5, 2.0)
    assert "recall" not in intervals([one("b")])


def test_policies_are_compared_on_the_tasks_that_both_answered() -> None:
    first = [one(str(number), em=float(number < 60)) for number in range(100)]
    second = [one(str(number), em=float(50 <= number < 60)) for number in range(100)]
    found = compare([*first, one("first only")], [*second[::-1], one("second only", em=0.0)])
    assert (found.num_tasks, found.only_first, found.only_second) == (100, 50, 0)
    assert found.em_difference.mean == 0.5
    assert 0.38 < found.em_difference.low < 0.5 < found.em_difference.high < 0.62
    assert found.p_value == 2 / 2**50
    with pytest.raises(DataError, match="no task in common"):
        compare(first, [one("second only")])


def test_one_id_of_two_questions_is_refused(tmp_path: Path) -> None:
    here, there = (Task("test/1", question, ("Riga",)) for question in ("Where?", "Where else?"))
    ours, theirs = (replace(one("test/1"), digest=tasks_digest([task])) for task in (here, there))
    with pytest.raises(DataError, match="test/1 is not the same question in both evaluations"):
        compare([ours], [theirs])
    assert compare([ours], [ours, one("test/2")]).num_tasks == compare([ours], [one("test/1")]).num_tasks == 1
    open_scores(tmp_path / "out.jsonl", SETTINGS)
    append_score(tmp_path / "out.jsonl", theirs)
    check_shared(tmp_path / "out.jsonl", [there])
    with pytest.raises(DataError, match="test/1 is not the same question"):
        check_shared(tmp_path / "out.jsonl", [here])


def test_what_is_printed_beside_the_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.jsonl"
    open_scores(path, SETTINGS)
    append_score(path, one("a"))
    details = summarise([one("a")], path, ["musique"])
    measured = [latency([one("a")], 1), latency([one("a")], 8)]
    shown = details | {"num_trained_on": 3, "latency": [asdict(found) for found in measured]}
    print_evaluation({"em": 1.0, "num_tasks": 1}, shown)
    printed = capsys.readouterr().out
    assert printed.split()[:3] == ["em", "1.000,", "95"]
    assert printed.count("em  1.000, 95 % interval 1.000 to 1.000") == 1
    assert "num_tasks  1\n" in printed
    assert "McNemar  p = 1: 0 right here only, 0 there only" in printed
    assert "warning: 3 of these questions are in the training file, environment.tasks" in printed
    assert "0.192  RAG-R1, several queries (Qwen2.5-7B-Instruct, KILT Wikipedia of 2019, bge-large" in printed
    each = "(1 questions; 9.0 tokens, 1.0 rounds, 2.0 queries each)"
    assert f"latency  0.50 s median, 0.50 s for 95 %, one at a time {each}" in printed
    assert f"latency  0.50 s median, 0.50 s for 95 %, 8 at the same time {each}" in printed
    assert summarise([one("a")], None, ["questions.json"]).keys() == {"intervals"}


def test_mcnemar() -> None:
    assert mcnemar(0, 5) == mcnemar(5, 0) == 0.0625
    assert mcnemar(0, 0) == mcnemar(3, 3) == 1.0
    assert mcnemar(2, 8) == pytest.approx(2 * (1 + 10 + 45) / 1024)
