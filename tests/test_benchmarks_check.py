"""All benchmarks by one command, how often a metric is repeated, and what counts as a regression."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import BENCHMARKS, check, everything, fast, growth, measurement
from benchmarks.measurement import HIGHER, LOWER, Goal, Measurement, Repeats, Sample, measure, this_machine
from ragr1_actors.core.errors import UserError

AT_LEAST_TWO = Goal(2.0, at_least=True)


def row(*ratios: float, goal: Goal = AT_LEAST_TWO, metric: str = "speed") -> Measurement:
    return measure(metric, [Sample(ratio, ratio, 1.0) for ratio in ratios], "s", goal)


@pytest.mark.parametrize(
    ("count", "seconds", "expected"), [(None, 59.0, 5), (None, 61.0, 3), (1, 1.0, 1), (2, 61.0, 2), (7, 1.0, 7)]
)
def test_a_metric_is_repeated_five_times_if_that_is_quick(
    count: int | None, seconds: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter([100.0, 100.0 + seconds])
    monkeypatch.setattr(measurement.time, "monotonic", lambda: next(times))
    assert list(Repeats(count)) == list(range(expected))


def test_a_row_says_where_it_was_measured_and_is_read_back() -> None:
    found = row(2.5, 3.5, 3.0)
    assert found.machine == this_machine()
    assert found.machine.num_cpus >= 1 and found.machine.versions["torch"]
    assert Measurement.from_json(found.to_json()) == replace(found, spread=float(f"{1 / 3:.5g}"))


@pytest.mark.parametrize("line", ["", "{}", "[1]", "loading", '{"metric": "speed", "machine": {}}'])
def test_a_line_that_is_no_row_is_refused(line: str) -> None:
    with pytest.raises(UserError, match="expected a line of ragr1 bench --json"):
        Measurement.from_json(line)


@pytest.mark.parametrize(
    ("now", "stored", "is_worse"),
    [
        (row(2.6, 2.6), row(2.8, 3.2, 3.0), False),  # the spread is .4
        (row(2.5, 2.5), row(2.8, 3.2, 3.0), True),
        (row(9.0, 9.0), row(2.8, 3.2, 3.0), False),
        (row(1.5, 1.5, goal=LOWER), row(1.0, 1.2, 1.1, goal=LOWER), True),
        (row(1.3, 1.3, goal=LOWER), row(1.0, 1.2, 1.1, goal=LOWER), False),
        (row(0.1, 0.1, goal=LOWER), row(1.0, 1.2, 1.1, goal=LOWER), False),
        (row(0.1, 0.1, goal=HIGHER), row(1.0, 1.2, 1.1, goal=HIGHER), True),
        (row(0.0, 0.2, 0.2, goal=LOWER), row(0.0, 0.0, 0.0, goal=LOWER), True),
        (row(2.1), row(9.0), False),  # one repeat has no spread: the goal decides
        (row(1.9), row(9.0), True),
        (row(1.5), row(1.9), False),  # missed before
        (row(1.9), row(2.8, 3.2, 3.0), True),
    ],
)
def test_what_is_worse_than_stored_by_more_than_its_spread_is_named(
    now: Measurement, stored: Measurement, is_worse: bool
) -> None:
    found = check.compare({"speed": now}, {"speed": stored})
    assert bool(found) == is_worse
    assert all(said.startswith("speed: ") for said in found)


def test_check_exits_with_one_if_a_ratio_is_worse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored, now = tmp_path / "stored.jsonl", tmp_path / "now.jsonl"
    stored.write_text(f"{row(3.0, 3.0).to_json()}\n{row(1.0, 1.0, metric='old').to_json()}\n")
    now.write_text(row(2.5, 2.5).to_json() + "\n")
    assert check.main([str(now), "--against", str(stored)]) == 1
    captured = capsys.readouterr()
    assert captured.out == "speed: 2.5, was 3: worse by 0.5, the stored spread is 0\n"
    assert captured.err == "not measured now: old\n"
    assert check.main([str(stored), "--against", str(stored)]) == 0
    assert capsys.readouterr().out == "2 rows, none is worse\n"


def test_check_without_stored_rows_names_missed_goals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = tmp_path / "now.jsonl"
    said_by_make = ".venv/bin/ragr1 bench all --json\nLooking in indexes: somewhere\n"
    now.write_text(said_by_make + row(1.5, 1.5).to_json() + "\n" + row(9.0, metric="other").to_json() + "\n")
    assert check.main([str(now)]) == 1
    assert capsys.readouterr().out == "speed: 1.5 misses its goal of >= 2\n"


def test_check_says_that_the_machine_is_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored, now = tmp_path / "stored.jsonl", tmp_path / "now.jsonl"
    elsewhere = replace(this_machine(), cpu="Abacus", num_cpus=3, gpu="")
    stored.write_text(replace(row(3.0, 3.0), machine=elsewhere).to_json() + "\n")
    now.write_text(row(3.0, 3.0).to_json() + "\n")
    assert check.main([str(now), "--against", str(stored)]) == 0
    assert capsys.readouterr().err.startswith("measured on another machine: 3 of Abacus, now ")


@pytest.mark.parametrize("text", ["", "\n", "loading the model\n", "{}\n"])
def test_check_refuses_what_has_no_rows(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = tmp_path / "now.jsonl"
    now.write_text(text)
    assert check.main([str(now)]) == 2
    assert check.main([str(tmp_path / "missing.jsonl")]) == 2
    assert capsys.readouterr().err.count("error: ") == 2


def test_growth_is_the_slope_of_the_logarithms() -> None:
    found = growth.exponent((10, 20, 40, 80), lambda size: 3 * size**1.5)
    assert found.ratio == pytest.approx(1.5)
    assert (found.ours, found.theirs) == pytest.approx((3 * 80**1.5, 3 * 10**1.5))


@pytest.mark.engine
@pytest.mark.parametrize("metric", growth.METRICS)
def test_growth_is_measured(metric: str) -> None:
    (found,) = growth.run(only=metric, quick=True)
    assert found.metric == metric and found.ours > 0 and found.theirs > 0
    if metric == "corpus_bytes":
        assert found.ratio == pytest.approx(1.0, abs=0.02)


@pytest.mark.parametrize(("name", "floors"), fast.FLOORS.items())
def test_floors_are_of_metrics_that_exist(name: str, floors: dict[str, Goal]) -> None:
    goals: dict[str, Goal] = importlib.import_module(BENCHMARKS[name]).GOALS
    assert floors.keys() <= goals.keys()
    assert all(floor.at_least == goals[metric].at_least for metric, floor in floors.items())


@pytest.mark.parametrize(("floor", "is_met"), [(Goal(0.01, at_least=False), False), (Goal(1.0, at_least=False), True)])
def test_a_floor_takes_the_place_of_the_goal(floor: Goal, is_met: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "FLOORS", {"learner": {"prefix_sharing": floor}})
    (found,) = fast.run(only="prefix_sharing", quick=True)
    assert (found.goal, found.met, found.repeats) == (floor.limit, is_met, 1)


def python_that(tmp_path: Path, says: str, status: int) -> Callable[[str], Path]:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{says}\nEND\nexit {status}\n")
    program.chmod(0o755)
    return lambda name: program


def test_a_benchmark_that_fails_is_named_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    says = f"a library talks\n{row(3.0, 3.0).to_json()}"
    monkeypatch.setattr(everything, "NAMES", ("learner", "scale"))
    monkeypatch.setattr(everything, "python_of", python_that(tmp_path, says, 3))
    rows = everything.run()
    assert [next(rows).metric, next(rows).metric] == ["speed", "speed"]
    with pytest.raises(UserError, match=r"learner \(exit status 3\), scale \(exit status 3\)"):
        next(rows)
    assert capsys.readouterr().err.count("a library talks") == 2


def test_rollout_runs_where_vllm_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert everything.python_of("learner") == Path(sys.executable)
    monkeypatch.setattr(everything, "find_spec", lambda name: None)
    assert everything.python_of("rollout") == everything.VLLM_PYTHON
    monkeypatch.setattr(everything, "find_spec", lambda name: object())
    assert everything.python_of("rollout") == Path(sys.executable)


def test_only_one_metric_of_all_runs_its_benchmark_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = everything.run(only="prefix_sharing", repeats=2, quick=True)
    assert (found.metric, found.repeats) == ("prefix_sharing", 2)
    assert json.loads(found.to_json())["machine"]["versions"]
    with pytest.raises(UserError, match="got --only speed"):
        next(iter(everything.run(only="speed")))
