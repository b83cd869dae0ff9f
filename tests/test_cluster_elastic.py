"""A run on a cluster that Ray's autoscaler grows and shrinks by the load of the fleets, on one machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_world import watch_nodes
from small_world import ROOT, make_files, make_recipe, wait_for

from benchmarks.scale.clusters import autoscaled_cluster
from ragr1_actors.runs.report import read_report

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow]

PARTS = '''
import asyncio
import time
from pathlib import Path

from envs.search import SearchEnv
from learners.algorithms.grpo import GRPOLearner


class PatientEnv(SearchEnv):
    """Each trajectory takes ten seconds until the file says that the load falls."""

    async def reset(self, task):
        for _ in range(20):
            if not Path(HURRY).exists():
                await asyncio.sleep(0.5)
        return await super().reset(task)


class PatientLearner(GRPOLearner):
    """Each update takes ten seconds longer while the load is low, so that one runner is enough on any machine."""

    def update(self, groups):
        if Path(HURRY).exists() and not Path(SEEN).exists():
            time.sleep(10)
        return super().update(groups)
'''
RUNNERS = "{max_replicas: 3, upscale_delay_s: 0, downscale_delay_s: 2, cooldown_s: 2, look_back_period_s: 2, "
RUNNERS += "target_ongoing_requests: 1, target_starvation: 0.5}"
"""Three runners while trajectories take longer than updates, one while they take less. Both are far from the target."""


def node(role: str, max_workers: int) -> dict[str, object]:
    resources = {"CPU": 1, "object_store_memory": 100_000_000}  # every actor asks for a CPU: else for memory
    return {"resources": resources, "labels": {"role": role}, "max_workers": max_workers}


def test_nodes_come_and_go_by_load_and_a_lost_one_loses_no_task(tmp_path: Path) -> None:
    run_dir, hurry, seen = tmp_path / "run", tmp_path / "hurry", tmp_path / "seen"
    recipe = make_recipe(tmp_path / "recipe.yaml", make_files(tmp_path), num_iterations=50)
    (tmp_path / "patient.py").write_text(PARTS.replace("HURRY", repr(str(hurry))).replace("SEEN", repr(str(seen))))
    train = ["train", str(recipe), "--run-dir", str(run_dir)]
    train += ["environment.env=patient:PatientEnv", "training.algorithm=patient:PatientLearner"]
    train += ["env_runners.label_selector={role: runner}"]
    train += [f"env_runners.autoscaling={RUNNERS}", "retrieval.label_selector={role: retriever}"]
    # a CPU for the learner, too: so it stays on the head, and the kill hits a runner only
    train += ["retrieval.num_cpus_per_retriever=1", "learners.num_cpus_per_learner=1"]
    types = {"runner": node("runner", 3), "retriever": node("retriever", 2)}
    with (
        autoscaled_cluster(types, num_cpus=2, idle_timeout_s=6) as environment,
        watch_nodes(environment) as nodes,
        (tmp_path / "output").open("w+") as output,
    ):

        def start(*arguments: str) -> subprocess.Popen[bytes]:
            command = [sys.executable, "-m", "ragr1_actors", *arguments]
            variables = os.environ | environment | {"PYTHONPATH": str(ROOT)}
            return subprocess.Popen(command, cwd=tmp_path, env=variables, stdout=output, stderr=subprocess.STDOUT)

        nodes.wait_for()  # the head alone
        with start(*train) as run:
            try:
                nodes.wait_for("retriever", "runner")
                nodes.wait_for("retriever", "runner", "runner", "runner")
                nodes.kill("runner")  # the oldest, whose runner has loaded: the fleet grows only once it samples
                nodes.wait_for("retriever", "runner", "runner")
                nodes.wait_for("retriever", "runner", "runner", "runner")
                with start("scale", str(run_dir), "--retrievers", "2") as order:
                    assert order.wait(600) == 0
                nodes.wait_for("retriever", "retriever", "runner", "runner", "runner")
                # the fleet removes runners that still load first
                assert wait_for(lambda: " is back after " in (tmp_path / "output").read_text(), 900, run)
                hurry.touch()
                nodes.wait_for("retriever", "retriever", "runner")
                seen.touch()
                assert run.wait(1500) == 0
            finally:
                run.kill()
                output.seek(0)
                print(output.read())
        nodes.wait_for()  # all are given back
    report = read_report(run_dir)
    said = [incident.what for incident in report.incidents]
    assert any(re.match(r"env runner \d died ", what) for what in said), said
    assert any(re.match(r"env runner \d is back after \d+ s", what) for what in said), said
    tasks = report.tasks
    assert (tasks.issued, tasks.lost, tasks.doubled) == (tasks.trained, 0, 0)
