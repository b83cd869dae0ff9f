"""The viewer's index and filters, over files that a run's own writer wrote."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from view_world import TASK, attempt, every_outcome, keep, keep_tokenizer, learned_from

from envs.measures import exact_match
from ragr1_actors.core.errors import DataError, UserError
from ragr1_actors.core.types import ToolCall
from ragr1_actors.pages.viewer.parts import Index, Snapshot
from ragr1_actors.pages.viewer.payloads import (
    OUTCOMES,
    Query,
    Scope,
    Searcher,
    TokenPieces,
    find_row,
    row_payloads,
    trajectory_payload,
)
from ragr1_actors.runs.scores import score


def index_of(run_dir: Path) -> Index:
    index = Index(run_dir / "trajectories", run_dir / "view")
    index.refresh()
    return index


def names(snapshot: Snapshot, query: Query) -> list[str]:
    searcher = Searcher()
    rows = searcher.find(snapshot, query)[0].tolist()
    searcher.close()
    return [row["trajectory_id"].rpartition("/")[2] for row in row_payloads(snapshot, rows)]


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ("correct", ["correct", "unsearched"]),
        ("wrong", ["ignored", "unlucky", "malformed", "truncated"]),
        ("unsearched", ["unsearched"]),
        ("ignored", ["ignored"]),
        ("malformed", ["malformed"]),
        ("failed", ["failed"]),
        ("truncated", ["truncated"]),
    ],
)
def test_outcomes(tmp_path: Path, outcome: str, expected: list[str]) -> None:
    keep(tmp_path, "iteration_00001", every_outcome())
    assert names(index_of(tmp_path).snapshot, Query(outcome=outcome)) == expected


def test_a_refused_search_and_another_tool_are_no_search(tmp_path: Path) -> None:
    made = attempt("nq/1#0/made")
    calls = {
        "made": made.turns[0].calls,
        "refused": (ToolCall("search", {"queries": 7}, "queries: expected a list"),),
        "added": (ToolCall("add", {"a": 1}, "1", latency_s=0.1),),
        "empty": (ToolCall("search", {"query": "?", "k": 1}, latency_s=0.0),),
    }
    group = [
        replace(made, trajectory_id=f"nq/1#0/{name}", turns=(replace(made.turns[0], calls=of_it), made.turns[1]))
        for name, of_it in calls.items()
    ]
    keep(tmp_path, "iteration_00001", group)
    assert names(index_of(tmp_path).snapshot, Query(outcome="unsearched")) == ["refused", "added"]


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        (Scope("ÜNÏQUE"), ["unsearched"]),
        (Scope("who BELL"), ["ignored", "unlucky"]),
        (Scope('"bell who"'), []),
        (Scope(r"i.k .*"), []),
        (Scope("engine lost"), ["failed"]),
        (Scope("unlucky"), ["unlucky"]),
        (Scope(stage="evaluation"), ["late"]),
        (Scope(first=2, last=2), ["late"]),
        (Scope(task="nq/2"), ["late"]),
    ],
)
def test_scopes(tmp_path: Path, scope: Scope, expected: list[str]) -> None:
    keep(tmp_path, "iteration_00001", every_outcome())
    keep(
        tmp_path,
        "eval_iteration_00002",
        [attempt("late", answer="x", passages=None, task=replace(TASK, task_id="nq/2"))],
    )
    assert names(index_of(tmp_path).snapshot, Query(scope)) == expected


def test_evidence_is_a_golden_answer_where_no_passages_are_named(tmp_path: Path) -> None:
    open_task = replace(TASK, supporting_ids=())
    yes = replace(open_task, golden_answers=("yes",))
    group = [
        attempt("seen", answer="x", task=open_task),
        attempt("unseen", answer="x", task=open_task, document="Tom Mossman filmed."),
        attempt("common", answer="x", task=yes, document="yes"),
    ]
    keep(tmp_path, "iteration_00001", group)
    assert names(index_of(tmp_path).snapshot, Query(outcome="ignored")) == ["seen"]


@pytest.mark.parametrize(
    ("answer", "golden_answers"),
    [("The U.S.", ("us",)), ("", ("",)), (" ", ("the",)), ("a", ("the",)), ("Bo", ("Ana", "Bo")), ("Bo", ())],
)
def test_an_answer_is_correct_where_exact_match_has_it(
    tmp_path: Path, answer: str, golden_answers: tuple[str, ...]
) -> None:
    keep(tmp_path, "iteration_00001", [attempt("a", answer=answer, task=replace(TASK, golden_answers=golden_answers))])
    expected = ["a"] if exact_match(answer, golden_answers) else []
    assert names(index_of(tmp_path).snapshot, Query(outcome="correct")) == expected


@pytest.mark.parametrize(
    ("passages", "supporting_ids", "gold", "has_all"),
    [
        (("8113", "17"), ("Title of 8113",), [True, False], True),  # as in wiki-18: ids are numbers
        (("Riga#3", "Bonn"), ("Riga", "Bonn"), [True, True], True),  # a piece of a passage
        (("8113", "17"), ("Title of 8113", "Oslo"), [True, False], False),
        (("8113", "17"), (), [True, True], True),  # every document has the golden answer
    ],
)
def test_evidence_is_what_recall_counts(
    tmp_path: Path, passages: tuple[str, ...], supporting_ids: tuple[str, ...], gold: list[bool], has_all: bool
) -> None:
    wrong = attempt("wrong", answer="Bo", passages=passages, task=replace(TASK, supporting_ids=supporting_ids))
    keep(tmp_path, "iteration_00001", [wrong])
    snapshot = index_of(tmp_path).snapshot
    assert names(snapshot, Query(outcome="ignored")) == ["wrong"] * has_all
    recall = score(wrong).recall
    assert recall is None or (recall == 1.0) is has_all
    shown = trajectory_payload(snapshot, 0, TokenPieces([]))
    assert [found["gold"] for found in shown["turns"][0]["calls"][0]["records"]] == gold


def test_pages_and_orders(tmp_path: Path) -> None:
    for iteration in (1, 2, 10):
        keep(
            tmp_path,
            f"iteration_{iteration:05d}",
            [attempt(f"{iteration}/{n}") for n in "ab"],
            [attempt(f"{iteration}/c")],
        )
    keep(tmp_path, "eval_rl", [attempt("x/end", answer="wrong")])
    snapshot = index_of(tmp_path).snapshot
    assert names(snapshot, Query()) == ["end", "a", "b", "c", "a", "b", "c", "a", "b", "c"]
    assert names(snapshot, Query(offset=2, limit=2)) == ["b", "c"]
    assert names(snapshot, Query(order="oldest"))[-1] == "end"
    assert names(snapshot, Query(order="reward"))[0] == "end"


def test_the_evaluation_at_the_end_counts_as_the_last_iteration(tmp_path: Path) -> None:
    for name in ("eval_start", "iteration_00001", "iteration_00060", "eval_iteration_00060", "eval_rl"):
        keep(tmp_path, name, [attempt(name)])
    snapshot = index_of(tmp_path).snapshot
    assert names(snapshot, Query(Scope(first=40))) == ["eval_rl", "eval_iteration_00060", "iteration_00060"]
    assert names(snapshot, Query(Scope(last=59))) == ["iteration_00001", "eval_start"]
    assert row_payloads(snapshot, [find_row(snapshot, "eval_rl", "eval_rl")])[0]["iteration"] == 60


def test_the_index_follows_the_run(tmp_path: Path) -> None:
    index = Index(tmp_path / "trajectories", tmp_path / "view")
    assert not index.refresh() and not index.snapshot.num_rows
    keep(tmp_path, "iteration_00001", every_outcome())
    assert index.refresh() and index.snapshot.num_rows == 7
    assert not index.refresh()
    keep(tmp_path, "iteration_00002", [attempt("b")])
    assert index.refresh() and index.snapshot.num_rows == 8
    keep(tmp_path, "iteration_00002", [attempt("c"), attempt("d")])  # a run that was rolled back
    assert index.refresh() and names(index.snapshot, Query(Scope(first=2))) == ["c", "d"]
    (tmp_path / "trajectories" / "iteration_00001.arrow").unlink()
    assert index.refresh() and index.snapshot.num_rows == 2


def test_parts_are_read_again_and_made_again_when_damaged(tmp_path: Path) -> None:
    keep(tmp_path, "iteration_00001", every_outcome())
    index_of(tmp_path)
    part = tmp_path / "view" / "iteration_00001.arrow"
    written = part.stat().st_mtime_ns
    assert index_of(tmp_path).snapshot.num_rows == 7 and part.stat().st_mtime_ns == written
    part.write_bytes(b"ARROW1 no more")
    assert index_of(tmp_path).snapshot.num_rows == 7


def test_a_damaged_file_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    keep(tmp_path, "iteration_00001", every_outcome())
    (tmp_path / "trajectories" / "iteration_00002.arrow").write_bytes(b"half a file")
    snapshot = index_of(tmp_path).snapshot
    assert snapshot.num_rows == 7 and len(snapshot.problems) == 1
    assert "iteration_00002.arrow cannot be read" in snapshot.problems[0]


def test_no_damage_ends_the_viewer(tmp_path: Path) -> None:
    """Damaged offsets lead out of the mapped memory, so that a process that follows them ends without a word."""
    keep(tmp_path, "iteration_00001", every_outcome())
    whole = (tmp_path / "trajectories" / "iteration_00001.arrow").read_bytes()
    rng = np.random.default_rng(0)
    for number in range(2, 42):
        damaged = bytearray(whole)
        for place in rng.integers(len(whole), size=rng.integers(1, 65)):
            damaged[place] = rng.integers(256)
        (tmp_path / "trajectories" / f"iteration_{number:05d}.arrow").write_bytes(damaged)
    keep(tmp_path, "iteration_99999999999", [attempt("late")])
    snapshot = index_of(tmp_path).snapshot
    assert len(snapshot.parts) + len(snapshot.problems) == snapshot.num_files == 42
    assert len(snapshot.problems) > 10
    assert names(snapshot, Query())[0] == "late"


def test_a_damaged_tokenizer_is_said_once_and_tokens_stay_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tokenizer.json").write_text('{"a" 1}')
    keep_tokenizer(tmp_path / "other")
    assert TokenPieces([tmp_path]).of([5]) == TokenPieces([tmp_path]).of([5]) == ["5"]
    assert caplog.text.count("tokenizer.json cannot be read") == 1
    assert TokenPieces([tmp_path, tmp_path / "other"]).of([5]) == ["five"]


@pytest.mark.parametrize("is_restored", [True, False])
def test_a_damaged_file_is_no_problem_once_it_is_restored_or_removed(tmp_path: Path, is_restored: bool) -> None:
    keep(tmp_path, "iteration_00001", [attempt("a")])
    damaged = tmp_path / "trajectories" / "iteration_00002.arrow"
    damaged.write_bytes(b"half a file")
    index = index_of(tmp_path)
    assert len(index.snapshot.problems) == 1 and not index.refresh()
    damaged.unlink()
    if is_restored:
        keep(tmp_path, "iteration_00002", [attempt("b")])
    assert index.refresh() and index.snapshot.problems == ()
    assert index.snapshot.num_rows == index.snapshot.num_files == 1 + is_restored
    assert not index.refresh()


def test_a_file_that_is_put_back_as_it_was_is_no_problem(tmp_path: Path) -> None:
    keep(tmp_path, "iteration_00001", [attempt("a")])
    index = index_of(tmp_path)
    path = tmp_path / "trajectories" / "iteration_00001.arrow"
    path.rename(tmp_path / "backup")
    path.write_bytes(b"half a file")
    assert index.refresh() and len(index.snapshot.problems) == 1
    (tmp_path / "backup").replace(path)
    assert index.refresh() and index.snapshot.problems == ()
    assert names(index.snapshot, Query()) == ["a"]


def test_counts_are_of_the_scope(tmp_path: Path) -> None:
    keep(tmp_path, "iteration_00001", every_outcome())
    searcher = Searcher()
    _, counts = searcher.find(index_of(tmp_path).snapshot, Query(Scope("bell"), outcome="correct"))
    searcher.close()
    assert counts == dict.fromkeys(OUTCOMES, 0) | {"all": 2, "wrong": 2, "ignored": 1}


def test_a_trajectory_with_its_tokens_documents_and_siblings(tmp_path: Path) -> None:
    keep(tmp_path, "iteration_00001", [attempt("other")], every_outcome("g"))
    keep(tmp_path, "iteration_00002", every_outcome("g"))
    snapshot = index_of(tmp_path).snapshot
    row = find_row(snapshot, "iteration_00001", "g/ignored")
    shown = trajectory_payload(snapshot, row, TokenPieces([]))
    assert shown["summary"]["file"] == "iteration_00001" and shown["answer"] == "Ana Bell"
    assert shown["tokens"]["pieces"] == ["5", "6", "7", "8", "9"] and not shown["tokens"]["is_text"]
    assert np.allclose(shown["tokens"]["logprobs"], [0, -0.5, -2.0, 0, -0.25])
    (found,) = shown["turns"][0]["calls"]
    assert (found["latency_s"], found["is_cached"], found["asked"]) == (0.25, True, "Endless Horizon")
    assert [record["score"] for record in found["records"]] == [0.5]
    assert len(shown["siblings"]) == 7
    assert [s["above_mean"] for s in shown["siblings"][:3]] == pytest.approx([2 / 3, 2 / 3, -1 / 3])
    assert snapshot.parts[int(snapshot.scalars["part"][find_row(snapshot, "", "g/ignored")])].origin.iteration == 2
    for file, name in (("iteration_00003", "g/ignored"), ("iteration_00001", "gone")):
        with pytest.raises(DataError, match="no trajectory"):
            find_row(snapshot, file, name)


def test_advantages_and_ratios_are_those_of_model_tokens(tmp_path: Path) -> None:
    learned = learned_from("g/correct", [1.5, -0.5, 0.0], [1.0, 0.9, float("nan")])
    keep(tmp_path, "iteration_00001", every_outcome("g"), learned=learned)
    keep(tmp_path, "eval_rl", [attempt("e")])
    snapshot = index_of(tmp_path).snapshot
    row = find_row(snapshot, "iteration_00001", "g/correct")
    tokens = trajectory_payload(snapshot, row, TokenPieces([]))["tokens"]
    assert tokens["advantages"] == [None, 1.5, -0.5, None, 0.0]
    assert tokens["ratios"] == [None, 1.0, pytest.approx(0.9), None, pytest.approx(float("nan"), nan_ok=True)]
    for file, name in (("iteration_00001", "g/failed"), ("eval_rl", "e")):
        other = trajectory_payload(snapshot, find_row(snapshot, file, name), TokenPieces([]))["tokens"]
        assert not {"advantages", "ratios"} & other.keys()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"stage": "train"}, "got stage 'train'; did you mean 'training'?"),
        ({"text": "x" * 201}, "got a text of 201 characters, expected at most 200"),
    ],
)
def test_scopes_that_are_refused(wrong: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        Scope(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"outcome": "wrongs"}, "got outcome 'wrongs'; did you mean 'wrong'?"),
        ({"order": "up"}, "got order 'up'; expected one of: newest, oldest, reward, length"),
        ({"limit": 501}, "limit 501, expected 0 or more and 1 to 500"),
        ({"offset": -1}, "got offset -1"),
    ],
)
def test_queries_that_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        Query(**wrong)
