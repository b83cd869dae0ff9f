"""``ragr1 chaos``: which processes it hits, and a run that loses nothing although they are killed and stopped."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from small_world import ROOT, a_persons_environment, invoke, make_files, make_recipe

from ragr1_actors.cli.chaos import DRIVER, schedule
from ragr1_actors.runs.report import read_report

KINDS = (DRIVER, "env runner", "learner")
LENGTHS = {"sft": 100, "rl": 40}


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_is_hit_as_often_and_the_driver_is_never_stopped(seed: int) -> None:
    hits = schedule(20, KINDS, LENGTHS, seed)
    assert sorted(Counter(hit.kind for hit in hits).values()) == [6, 7, 7]
    assert {hit.signal for hit in hits if hit.kind == DRIVER} == {signal.SIGKILL}
    assert schedule(20, KINDS, LENGTHS, seed) == hits != schedule(20, KINDS, LENGTHS, seed + 1)


def test_hits_are_spread_over_the_stages_in_their_order() -> None:
    hits = schedule(20, KINDS, LENGTHS, 0)
    assert [hit.stage for hit in hits] == ["sft"] * 5 + ["rl"] * 15
    for stage, num_steps, most in (("sft", 100, 40), ("rl", 40, 6)):
        at = [hit.iteration for hit in hits if hit.stage == stage]
        assert at == sorted(at)
        assert at[-1] < num_steps - 1
        assert max(after - before for before, after in pairwise([0, *at, num_steps])) <= most
    assert {hit.stage for hit in schedule(20, KINDS, LENGTHS | {"sft": 0}, 0)} == {"rl"}


def test_some_actors_are_stopped_and_not_killed() -> None:
    signals = Counter(hit.signal for hit in schedule(400, KINDS[1:], LENGTHS, 0))
    assert signals.keys() == {signal.SIGKILL, signal.SIGSTOP}
    assert signals[signal.SIGKILL] > signals[signal.SIGSTOP] > 50


def test_a_directory_that_exists_is_refused(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "recipe.yaml", make_files(tmp_path))
    assert "exists; give a new directory" in invoke("chaos", str(recipe), "--run-dir", str(tmp_path))


@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.slow
def test_a_run_whose_processes_are_killed_loses_no_task(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "recipe.yaml", make_files(tmp_path), num_iterations=40)
    command = [sys.executable, "-m", "ragr1_actors", "chaos", str(recipe), "--kills", "5", "--run-dir", "run"]
    ended = subprocess.run(
        [*command, "--seed", "2"], cwd=tmp_path, env=a_persons_environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    log = (tmp_path / "run.chaos.log").read_text()
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}\n{log[-5000:]}"
    hit = Counter(re.findall(r": SIG(?:KILL|STOP) (.+)$", ended.stdout, re.MULTILINE))
    assert hit.total() == 5
    assert hit.keys() == {"driver", "env runner", "retriever", "learner"}
    tasks = read_report(tmp_path / "run").tasks
    assert (tasks.issued, tasks.lost, tasks.doubled) == (tasks.trained, 0, 0)
    assert tasks.trained == 40 * 8
    assert "5 processes killed or stopped" in ended.stdout
    assert log.count("│ run directory ") == 1 + hit["driver"]  # each driver prints it at its start
