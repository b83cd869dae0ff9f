"""The tables of the runs with a real model, from what the runs wrote."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.real import results, runs
from ragr1_actors.core.errors import DataError, UserError
from ragr1_actors.core.schema import groups_to_record_batch, write_trajectories
from ragr1_actors.core.types import Record, StopReason, Task, TokenKind, ToolCall, Trajectory, TrajectoryGroup, Turn
from ragr1_actors.runs.report import EvalResult, RunReport, StageReport, TaskCounts, write_report

GOLD = {"a": ("comparison", "Riga"), "b": ("comparison", "yes"), "c": ("bridge", "Oslo")}


def answered(name: str, answer: str, num_rounds: int) -> TrajectoryGroup:
    category, gold = GOLD[name]
    task = Task(name, f"{name}?", (gold,), category=category)
    record = Record("p", "P", "It lies in Riga, not in Oslo.", 1.0)
    calls = tuple(ToolCall("search", {"query": query, "k": 1}, records=(record,)) for query in ("x", "y"))
    search = Turn("<search>x</search>", 1, "search", calls, "P: It lies in Riga")
    turns = [search] * num_rounds + [Turn("<answer>", 1, "answer")]
    kinds = np.array([TokenKind.PROMPT] + [TokenKind.MODEL] * len(turns), np.uint8)
    trajectory = Trajectory(
        trajectory_id=f"{name}/0",
        task=task,
        token_ids=np.arange(len(kinds), dtype=np.int32),
        kinds=kinds,
        logprobs=np.zeros(len(kinds), np.float32),
        policy_versions=np.zeros(len(kinds), np.int32),
        turns=tuple(turns),
        stop_reason=StopReason.ANSWERED,
        reward=0.0,
        answer=answer,
    )
    return TrajectoryGroup(task, (trajectory,))


def write_run(root: Path, name: str, groups: list[TrajectoryGroup], minutes: float = 30) -> None:
    """A run directory with what the tables read."""
    (root / name / "trajectories").mkdir(parents=True)
    means = EvalResult(em=0.5, f1=0.5, rounds=1, queries_per_round=2, queries=2, tokens=3, num_tasks=len(groups))
    tasks = TaskCounts(issued=1, trained=1, failed=0, lost=0, doubled=0)
    write_report(root / name, RunReport((StageReport("rl", means, 1.0),), 60 * minutes, 9_000_000_000, tasks))
    write_trajectories(root / name / "trajectories" / "eval_rl.arrow", [groups_to_record_batch(groups)])


def test_the_tables_hold_all_seeds_by_type_and_the_paired_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path, "several_seed0", [answered("a", "Riga", 1), answered("b", "no", 1), answered("c", "Oslo", 2)])
    write_run(tmp_path, "several_seed2", [answered("a", "Bonn", 1)], minutes=50)
    write_run(tmp_path, "one_seed1", [answered("a", "Riga", 2)])
    write_run(tmp_path, "one_seed2", [answered("a", "Riga", 3), answered("c", "Oslo", 4)])
    results.main(["several", "one"], tmp_path)
    printed = capsys.readouterr().out.splitlines()
    assert printed[1] == "### several: seeds 0, 2, 40 minutes each, 9.0 GB at the peak"
    rows = {tuple(part.strip() for part in line.split("|")[1:4]): line for line in printed[3:11] if "| rl |" in line}
    assert list(rows) == [
        ("rl", "bridge", "1"),
        ("rl", "comparison", "3"),
        ("rl", "all", "4"),
        ("rl", "all but yes and no", "3"),
    ]
    assert "| comparison | 3 | 2 | 2 |" in rows["rl", "comparison", "3"], "Riga is found and read, yes is not"
    assert "| bridge | 1 | 1 | 0 |" in rows["rl", "bridge", "1"], "Oslo is cut off"
    assert "| 0.333 (0.000 to 1.000) |" in rows["rl", "comparison", "3"]
    assert "| 0.500 (" in rows["rl", "all", "4"]
    assert "| 1.250 (" in rows["rl", "all", "4"] and "| 2.500 (" in rows["rl", "all", "4"], "rounds and queries"
    assert "| 0.667 (" in rows["rl", "all but yes and no", "3"]
    assert "one less several, after RL:" in printed
    assert "- em: +1.000 (+1.000 to +1.000)" in printed, "of seed 2 alone, and of the question that both answered"
    assert "- rounds: +2.000 (+2.000 to +2.000)" in printed


def test_an_attempt_that_the_machinery_failed_is_no_answer(tmp_path: Path) -> None:
    """Its task was asked again, and both are in the file."""
    whole = answered("a", "Riga", 1)
    failed = replace(whole.trajectories[0], stop_reason=StopReason.ENGINE_ERROR, answer="", error="gone")
    write_run(tmp_path, "one_seed0", [TrajectoryGroup(whole.task, (failed,)), whole])
    (run,) = results.finished("one", tmp_path)
    assert [one.score.em for one in run.answers("rl")] == [1.0]


def test_runs_are_in_the_order_of_their_seeds_and_other_folders_are_left_alone(tmp_path: Path) -> None:
    for name in ("one_seed10", "one_seed9", "one_seed9_old", "one_seed", "another_one_seed1"):
        write_run(tmp_path, name, [answered("a", "Riga", 1)])
    (tmp_path / "one_seed3").mkdir()  # interrupted
    assert [run.seed for run in results.finished("one", tmp_path)] == [9, 10]


def test_what_a_run_lacks_is_named(tmp_path: Path) -> None:
    write_run(tmp_path, "one_seed0", [answered("a", "Riga", 1)])
    write_run(tmp_path, "other_seed1", [answered("a", "Riga", 1)])
    write_run(tmp_path, "empty_seed0", [])
    write_run(tmp_path, "bare_seed0", [])
    (tmp_path / "bare_seed0" / "trajectories" / "eval_rl.arrow").unlink()
    write_run(tmp_path, "damaged_seed0", [])
    (tmp_path / "damaged_seed0" / "report.json").write_text("{")
    for names, said in (
        (["one", "other"], r"one_seed0 and .*other_seed1 answered no question with the same seed"),
        (["empty"], r"empty_seed0.*eval_rl\.arrow has no answers"),
        (["bare"], r"bare_seed0.*eval_rl\.arrow cannot be read"),
        (["damaged"], r"damaged_seed0.*report\.json"),
    ):
        with pytest.raises(UserError, match=said):
            results.main(names, tmp_path)
    run = runs.FinishedRun(tmp_path / "one_seed0")
    assert run.evaluated("rl", "em") == 0.5
    with pytest.raises(DataError, match="was evaluated after rl, expected sft too"):
        run.evaluated("sft", "em")


def test_a_name_without_a_finished_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no run .*several_seed. has ended; train it with: ragr1 bench real"):
        results.main(["several"], tmp_path)
