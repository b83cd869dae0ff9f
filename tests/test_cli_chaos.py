"""``ragr1 chaos``: which processes it hits, and a run that loses nothing although they are killed and stopped."""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from small_world import ROOT, a_persons_environment, invoke, make_config, make_files, make_recipe, started, wait_for

from ragr1_actors.lab.chaos import DRIVER, Damage, draw_damage, schedule
from ragr1_actors.runs.report import read_report
from ragr1_actors.runs.run_directory import create_run_directory, read_order, read_starts
from ragr1_actors.runs.storage.store import find_store
from ragr1_actors.runs.telemetry.metrics import read_metrics
from ragr1_actors.training.algorithm_config import AlgorithmConfig

KINDS = (DRIVER, "env runner", "learner")
LENGTHS = {"sft": 100, "rl": 40}
COUNTS = {"kill": 20, "hang": 6, "flip": 10}


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_is_hit_as_often_and_the_driver_is_never_stopped(seed: int) -> None:
    hits = schedule(COUNTS, KINDS, LENGTHS, seed)
    assert sorted(Counter(hit.kind for hit in hits if hit.deed == "kill").values()) == [6, 7, 7]
    assert Counter(hit.kind for hit in hits if hit.deed == "hang") == {"env runner": 4, "learner": 2}
    assert Counter((hit.kind, hit.stage) for hit in hits if hit.deed == "flip") == {("", "rl"): 10}
    assert {hit.stage for hit in hits if (hit.kind, hit.deed) == ("env runner", "hang")} == {"rl"}
    assert schedule(COUNTS, KINDS, LENGTHS, seed) == hits
    assert schedule(COUNTS, KINDS, LENGTHS, seed + 1) != hits


def test_hits_are_spread_over_the_stages_in_their_order() -> None:
    hits = schedule({"kill": 20, "hang": 0, "flip": 0}, KINDS, LENGTHS, 0)
    assert [hit.stage for hit in hits] == ["sft"] * 5 + ["rl"] * 15
    for stage, num_steps, most in (("sft", 100, 40), ("rl", 40, 6)):
        at = [hit.iteration for hit in hits if hit.stage == stage]
        assert at == sorted(at)
        assert at[-1] < num_steps - 1
        assert max(after - before for before, after in pairwise([0, *at, num_steps])) <= most
    assert {hit.stage for hit in schedule(COUNTS, KINDS, LENGTHS | {"sft": 0}, 0)} == {"rl"}


def test_a_run_with_one_kind_of_actor_has_its_hangs_there() -> None:
    for kinds, kind in (((DRIVER, "env runner"), "env runner"), ((DRIVER, "learner"), "learner")):
        hits = schedule({"kill": 0, "hang": 6, "flip": 0}, kinds, LENGTHS, 0)
        assert [(hit.kind, hit.deed) for hit in hits] == [(kind, "hang")] * 6


def make_run(folder: Path) -> Path:
    """Write files like those of a run; the newest checkpoint is step_10."""
    run = folder / "run"
    for name in ("checkpoints/step_9/state.json", "checkpoints/step_10/policy/config.json", "index/manifest.json"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(bytes(range(200)))
    for name in ("checkpoints/.writing_step_11", "policy_sft", "view", "trajectories"):
        (run / name).mkdir()
        (run / name / "file").write_bytes(b"abc")
    (run / "policy_sft" / "empty").touch()
    (run / "metrics.jsonl").write_text("{}")
    (run / "checkpoints" / "best").symlink_to("step_9")
    return run


def contents(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}


def test_a_run_would_go_on_with_what_is_damaged_and_it_can_be_undone(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    before, rng, damaged = contents(run), random.Random(0), Counter[str]()
    for _ in range(200):
        damage = draw_damage(run, rng)
        damage.apply()
        after = contents(run)
        (name,) = [name for name in before if after.get(name) != before[name]]
        if name in after:  # one byte of it
            assert sum(one != other for one, other in zip(before[name], after[name], strict=True)) == 1
        assert name in str(damage)
        damaged[f"{'flip' if name in after else 'loss'} {name}"] += 1
        damage.undo()
        assert contents(run) == before
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
    files = ["checkpoints/step_10/policy/config.json", "index/manifest.json", "policy_sft/file"]
    expected = {f"{deed} {name}" for deed in ("flip", "loss") for name in files} | {"loss policy_sft/empty"}
    assert damaged.keys() == expected
    damage = draw_damage(run, rng)
    damage.apply()
    shutil.rmtree(damage.path.parent)  # the run went on and pruned it
    damage.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_damage_is_named_by_the_files_path_on_any_lines(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    folder = run / "checkpoints" / "step_10"
    damage = Damage(run, folder / "policy" / "config.json", 3, 1)
    advice = f"delete the folder {folder} and --resume goes on from step_9"
    assert damage.is_named_in(f"error: {folder}/policy/conf\nig.json is damaged")
    assert not damage.is_named_in(f"error: {folder} is damaged; {advice}")
    assert damage.checkpoint_to_delete(f"error: it is damaged; {advice[:40]}\n{advice[40:]}") == folder
    assert damage.checkpoint_to_delete("error: it is damaged; copy it again") is None
    assert Damage(run, run / "index" / "manifest.json", 3, 1).checkpoint_to_delete(advice) is None


def test_a_directory_that_exists_is_refused(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "recipe.yaml", make_files(tmp_path))
    assert "exists; give a new directory" in invoke("chaos", str(recipe), "--run-dir", str(tmp_path))
    assert "cannot write to" in invoke("chaos", str(recipe), "--run-dir", str(recipe / "run"))  # below a file


def test_what_is_to_be_hit_is_named_once(tmp_path: Path) -> None:
    assert "give a recipe to train, or --run" in invoke("chaos")
    assert "give a recipe to train, or --run" in invoke("chaos", "quickstart", "--run", str(tmp_path))
    assert "holds no run (no config.yaml)" in invoke("chaos", "--run", str(tmp_path))


def test_a_run_without_actors_and_one_that_has_ended_are_refused(tmp_path: Path) -> None:
    alone = make_config(make_files(tmp_path))
    create_run_directory(alone, tmp_path / "alone")
    assert "its driver does everything" in invoke("chaos", "--run", str(tmp_path / "alone"))
    create_run_directory(AlgorithmConfig().freeze(), tmp_path / "ended")
    (tmp_path / "ended" / "report.json").touch()
    assert "is finished; give a run that is under way" in invoke("chaos", "--run", str(tmp_path / "ended"))


def test_nothing_is_ordered_before_a_person_agrees(tmp_path: Path) -> None:
    create_run_directory(AlgorithmConfig().freeze(), tmp_path / "run")
    said = invoke("chaos", "--run", str(tmp_path / "run"), "--kills", "3")
    assert "kill 3 actors (env runner, retriever, learner) of the run in" in said
    assert read_order(find_store(tmp_path / "run")) is None


@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.slow
def test_a_live_run_kills_its_own_actors_when_it_is_asked_to_and_loses_nothing(tmp_path: Path) -> None:
    recipe, run_dir = make_recipe(tmp_path / "recipe.yaml", make_files(tmp_path), num_iterations=5000), tmp_path / "run"

    def rows() -> list[dict[str, Any]]:
        is_there = (run_dir / "metrics.jsonl").is_file()
        return [row for row in read_metrics(run_dir) if row["stage"] == "rl"] if is_there else []

    no_hangs = "debugging.fault_tolerance={hang_timeout_s: 300, max_learner_restarts: 4}"  # a busy machine is none
    with started(str(recipe), "--run-dir", str(run_dir), no_hangs, cwd=tmp_path) as run:
        assert wait_for(lambda: len(rows()) > 2, 300, run), run.communicate()
        asked = ("chaos", "--run", str(run_dir), "--kills", "3", "--seed", "4", "--every-s", "1", "--yes")
        said = invoke(*asked)
        killed = Counter(re.findall(r"of 3: killed one of \d (.+)", said))
        assert killed == {"runners": 1, "retrievers": 1, "learners": 1}, said
        number = len(rows())
        assert wait_for(lambda: len(rows()) > number + 2, 300, run), run.communicate()
        run.send_signal(signal.SIGTERM)
        output, errors = run.communicate(timeout=300)
    last = rows()[-1]
    assert (last["tasks/lost"], last["tasks/doubled"], last["tasks/failed"]) == (0, 0, 0)
    assert (last["env_runners/num_restarts"], last["loop/learner_restarts"]) == (1, 1), output + errors


@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.slow
def test_a_run_whose_processes_are_killed_loses_no_task(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "recipe.yaml", make_files(tmp_path), num_iterations=14)
    command = [sys.executable, "-m", "ragr1_actors", "chaos", str(recipe), "--run-dir", "run", "--json"]
    command += ["--kills", "2", "--hangs", "1", "--flips", "1", "debugging.fault_tolerance={hang_timeout_s: 15}"]
    ended = subprocess.run(
        [*command, "--seed", "19"], cwd=tmp_path, env=a_persons_environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=2300, check=False,
    )  # fmt: skip
    log = (tmp_path / "run.chaos.log").read_text()
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}\n{log[-5000:]}"
    assert "learner rank 0 died: " in log
    assert "(raylet)" not in log, "Ray says it too, in many lines"
    killed = Counter(re.findall(r": kill (.+)$", ended.stderr, re.MULTILINE))
    assert killed == {"driver": 1, "learner": 1}
    tasks = read_report(tmp_path / "run").tasks
    assert (tasks.issued, tasks.lost, tasks.doubled) == (tasks.trained, 0, 0)
    assert tasks.trained == 14 * 8
    found = json.loads(ended.stdout)
    counts = ("kills", "hangs", "hangs_noticed", "flips", "silent", "unnamed", "trained", "lost", "doubled")
    assert [found[name] for name in counts] == [2, 1, 1, 1, 0, 0, 112, 0, 0]
    assert len(found["noticed_s"]) == 1
    # an actor whose driver is hit next is started with it, and is not counted
    assert {"driver"} <= found["back_s"].keys() <= {"driver", "env runner", "retriever", "learner"}
    assert read_starts(tmp_path / "run")[0].words[0] == str(recipe)
