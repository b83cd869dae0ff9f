"""The loop in virtual time: its clock, its books, what limits it, and times read from a run."""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from math import fsum
from pathlib import Path
from typing import get_args

import pytest
from rich.console import Console
from small_world import invoke

from ragr1_actors.cli import simulate as cli
from ragr1_actors.core.config import RetrieverAutoscaling, RunConfig, RunnerAutoscaling, SearchRequests
from ragr1_actors.core.errors import DataError
from ragr1_actors.core.types import Sampling
from ragr1_actors.lab.simulation.fleet import SimulatedEngine, SimulatedRetrievers, SimulatedRunners, VirtualLoop
from ragr1_actors.lab.simulation.run import Iteration, Simulation, Simulator, Size, Study, simulate
from ragr1_actors.lab.simulation.workload import (
    Attempt,
    DrawnWorkload,
    TurnShape,
    fit_line,
    made_up_task,
    read_recording,
)
from ragr1_actors.planning.pace import EnginePace, LearnerPace, Pace, SearchPace
from ragr1_actors.rollout.groups import FinishedGroup, GroupRequest
from ragr1_actors.runs.run_directory import create_run_directory, keep_trajectories
from ragr1_actors.runs.storage.store import RunStore, find_store
from ragr1_actors.runs.telemetry.metrics import Limit, MetricsLogger
from ragr1_actors.training.algorithm_config import AlgorithmConfig

STEP_S = 0.01
TIMES = ("time/generation_s", "time/retrieval_waited_s")
"""What the time of a trajectory is made of."""
ENGINE = EnginePace(base_s=STEP_S, row_s=0.0)


def batch_s(base_s: float, query_s: float, num_queries: int) -> float:
    return base_s + query_s * num_queries


FAST = Pace(ENGINE, SearchPace(partial(batch_s, 0.001, 0.0)), LearnerPace(0.001, 0.01))


def configured(lag: int = 0, **training: int) -> RunConfig:
    return (
        AlgorithmConfig()
        .environment(prompt="{question}", max_turns=3, options={"max_queries_per_turn": 2, "top_k": 1})
        .env_runners(max_concurrent_trajectories=8)
        .training(**{"train_batch_size": 8, "group_size": 4, "max_policy_lag": lag, **training})
        .freeze()
    )


def simulated(config: RunConfig, pace: Pace, size: Size, num_iterations: int = 4) -> Simulation:
    return simulate(config, pace, DrawnWorkload(config), size, num_iterations)


# -- the clock ---------------------------------------------------------------------------------------------------------


def test_an_hour_passes_at_once() -> None:
    async def nap(seconds: float) -> float:
        async with asyncio.timeout(2 * seconds):
            await asyncio.sleep(seconds)
        return asyncio.get_running_loop().time()

    async def naps() -> list[float]:
        return await asyncio.gather(nap(3600), nap(60), nap(0.5))

    started = time.monotonic()
    with closing(VirtualLoop()) as loop:
        assert loop.run_until_complete(naps()) == pytest.approx([3600, 60, 0.5])
        assert loop.time() == pytest.approx(3600)
    assert time.monotonic() - started < 60


def test_a_timeout_ends_a_wait_in_virtual_time() -> None:
    async def impatient() -> None:
        async with asyncio.timeout(30):
            await asyncio.Event().wait()

    with closing(VirtualLoop()) as loop:
        with pytest.raises(TimeoutError):
            loop.run_until_complete(impatient())
        assert loop.time() == pytest.approx(30)


def test_a_wait_for_nothing_is_an_error() -> None:
    with closing(VirtualLoop()) as loop:
        waiting = loop.create_task(asyncio.Event().wait())
        with pytest.raises(RuntimeError, match="waits for ever"):
            loop.run_until_complete(waiting)
        waiting.cancel()
        loop.run_until_complete(asyncio.gather(waiting, return_exceptions=True))


# -- the engine --------------------------------------------------------------------------------------------------------


def generated(pace: EnginePace, requests: dict[str, tuple[float, int]]) -> dict[str, float]:
    """Return when each of ``{name: (when it is asked, its tokens)}`` is done."""

    async def ask(engine: SimulatedEngine, name: str, at_s: float) -> float:
        await asyncio.sleep(at_s)
        await engine.generate([0] * 100, Sampling(1000), request_id=name)
        return asyncio.get_running_loop().time()

    async def ask_all(engine: SimulatedEngine) -> list[float]:
        return await asyncio.gather(*(ask(engine, name, at_s) for name, (at_s, _) in requests.items()))

    with closing(VirtualLoop()) as loop:
        engine = SimulatedEngine(loop, pace, "lines", lambda time_s: 1.0, version=0)
        for name, (_, num_tokens) in requests.items():
            engine.play(name, Attempt((TurnShape(num_tokens),), is_right=True))
        return dict(zip(requests, loop.run_until_complete(ask_all(engine)), strict=True))


def test_rows_decode_in_step() -> None:
    pace = EnginePace(base_s=0.01, row_s=0.01)
    assert generated(pace, {"a": (0, 100)}) == pytest.approx({"a": 2.0})
    # 50 steps alone take 1 s; then both need 50 more, which take 0.03 s each
    assert generated(pace, {"a": (0, 100), "b": (1, 50)}) == pytest.approx({"a": 2.5, "b": 2.5})
    # b ends first, and a goes on alone
    assert generated(pace, {"a": (0, 100), "b": (1, 10)}) == pytest.approx({"b": 1.3, "a": 2.1})


def test_all_rows_wait_for_a_prompt() -> None:
    pace = EnginePace(base_s=0.01, row_s=0.0, prefill_s=0.001)
    assert generated(pace, {"a": (0, 100), "b": (0.5, 10)}) == pytest.approx({"b": 0.7, "a": 1.2})


# -- the loop ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lag", [0, 1])
def test_the_same_seed_gives_the_same_result_to_the_bit(lag: int) -> None:
    config = configured(lag)
    first, second = (simulated(config, FAST, Size(3, 2)) for _ in range(2))
    assert first == second
    other = config.model_copy(update={"debugging": config.debugging.model_copy(update={"seed": 1})})
    assert simulated(other, FAST, Size(3, 2)).iterations != first.iterations


def test_made_up_tasks_are_shuffled_whatever_the_curriculum() -> None:
    config = configured()
    environment = config.environment.model_copy(update={"curriculum": "difficulty"})  # they have no pass rate
    ordered = config.model_copy(update={"environment": environment})
    assert simulated(ordered, FAST, Size(1, 1)).iterations == simulated(config, FAST, Size(1, 1)).iterations


@pytest.mark.integration
@pytest.mark.parametrize("lag", [0, 2])
def test_every_task_is_trained_failed_or_outstanding(lag: int) -> None:
    # a batch takes longer than the timeout now and then, so that searches fail and tasks are issued again
    search = SearchPace(partial(batch_s, 0.5, 0.0))
    config = configured(lag)
    retrieval = config.retrieval.model_copy(update={"requests": SearchRequests(timeout_s=0.6, max_retries=0)})
    config = config.model_copy(update={"retrieval": retrieval})
    found = simulated(config, replace(FAST, search=search), Size(2, 2), num_iterations=6)
    tasks = found.tasks
    assert tasks["issued"] == tasks["trained"] + tasks["failed"] + tasks["outstanding"]
    assert tasks["trained"] == 8 * (6 + 1 + lag)
    assert tasks["lost"] == tasks["doubled"] == 0
    assert tasks["outstanding"] <= 8 * (1 + lag)
    assert fsum(i.rollout["rollout/failed_trajectories"] for i in found.iterations) + tasks["failed"] >= 0
    assert all(i.lag <= lag for i in found.iterations)


def test_in_turns_an_iteration_is_sampling_and_learning() -> None:
    found = simulated(configured(), FAST, Size(2, 1))
    for iteration in found.iterations:
        parts = iteration.sample_s + iteration.learn_s + iteration.publish_s
        assert iteration.iteration_s == pytest.approx(parts)
        assert iteration.learn_s == pytest.approx(0.001 * 32)
        assert iteration.publish_s == pytest.approx(0.01)
        assert iteration.num_trajectories == 32


@pytest.mark.integration
def test_more_retrievers_help_where_searches_limit() -> None:
    pace = replace(FAST, search=SearchPace(partial(batch_s, 2.0, 0.0)))
    few, many = (simulated(configured(), pace, Size(8, count)) for count in (1, 8))
    assert few.verdict.limit == "retrieval"
    assert few.load.retriever_busy > 0.8
    assert many.trajectories_per_s > 1.5 * few.trajectories_per_s
    assert many.load.retriever_busy < few.load.retriever_busy


@pytest.mark.integration
def test_more_runners_help_where_sampling_limits_and_not_where_learning_does() -> None:
    config = configured(1, train_batch_size=16)
    slow_engine = replace(FAST, engine=EnginePace(base_s=0.0, row_s=STEP_S))
    few, many = (simulated(config, slow_engine, Size(count, 1)) for count in (2, 4))
    assert few.verdict.limit == "rollout"
    assert many.trajectories_per_s == pytest.approx(2 * few.trajectories_per_s, rel=0.2)
    slow_learner = replace(FAST, learner=LearnerPace(1.0, 0.0))
    few, many = (simulated(config, slow_learner, Size(count, 1)) for count in (8, 16))
    assert few.verdict.limit == many.verdict.limit == "learner"
    assert many.trajectories_per_s == pytest.approx(few.trajectories_per_s)


@pytest.mark.integration
def test_fleets_follow_their_load() -> None:
    """Both start with one replica; the policy of a run gives them more, which serve after their start."""
    config = configured(1)
    more = {"max_replicas": 8, "upscale_delay_s": 5}
    by_load = RunnerAutoscaling.model_validate(more)
    runners = config.env_runners.model_copy(update={"max_concurrent_trajectories": 4, "autoscaling": by_load})
    retrieval = config.retrieval.model_copy(update={"autoscaling": RetrieverAutoscaling.model_validate(more)})
    pace = Pace(
        EnginePace(0.1, 0.0, start_s=20), SearchPace(partial(batch_s, 1.0, 1.0), start_s=20), LearnerPace(1.0, 1.0)
    )
    fixed = config.model_copy(update={"env_runners": runners.model_copy(update={"autoscaling": None})})
    scaled = config.model_copy(update={"env_runners": runners, "retrieval": retrieval})
    slow, fast = (simulated(one, pace, Size(1, 1), 12) for one in (fixed, scaled))
    assert slow.resized == ()
    assert {change.fleet for change in fast.resized} == {"runners", "retrievers"}
    assert all(1 <= change.after <= 8 for change in fast.resized)
    assert all(change.reason for change in fast.resized)
    assert fast.trajectories_per_s > 2 * slow.trajectories_per_s
    assert slow.total("runner_s") == pytest.approx(slow.wall_s)
    assert fast.total("runner_s") > 2 * fast.wall_s
    assert fast.tasks["lost"] == fast.tasks["doubled"] == 0


@pytest.mark.integration
def test_littles_law_holds() -> None:
    """Trajectories in flight are the rate at which they end times the time that each takes."""
    config, num_in_flight, num_trajectories = configured(), 20, 400
    workload = DrawnWorkload(config)
    pace = replace(FAST, engine=EnginePace(0.005, 0.002), search=SearchPace(partial(batch_s, 0.3, 0.01)))
    requests = [GroupRequest(f"{number}#0", made_up_task(number), 1, 1.0) for number in range(num_trajectories)]
    seconds: list[float] = []
    rates: list[float] = []
    with closing(VirtualLoop()) as loop:
        retrievers = SimulatedRetrievers(loop, config, pace, workload, 2)
        fleet = SimulatedRunners(loop, config, pace, workload, retrievers, lambda time_s: 1.0)
        fleet.scale_to(4, 0.0)

        async def ask() -> None:
            """Ask for one group after the other."""
            while requests:
                group = await fleet.sample(requests.pop())
                seconds.append(sum(group.summary.means.get(name, 0.0) for name in TIMES))
            rates.append(len(seconds) / loop.time())

        async def ask_all() -> None:
            await asyncio.gather(*(ask() for _ in range(num_in_flight)))

        loop.run_until_complete(ask_all())
    assert rates[0] * fsum(seconds) / len(seconds) == pytest.approx(num_in_flight, rel=0.1)


# -- times of a run ----------------------------------------------------------------------------------------------------


def test_a_line_is_fitted_with_both_parts_at_least_zero() -> None:
    rng = random.Random(0)
    xs = [rng.uniform(1, 64) for _ in range(200)]
    weights = [rng.uniform(1, 100) for _ in xs]
    assert fit_line(xs, [0.02 + 0.003 * x for x in xs], weights) == pytest.approx((0.02, 0.003))
    assert fit_line(xs, [0.003 * x - 0.001 for x in xs], weights)[0] == 0.0
    assert fit_line(xs, [1.0 - 0.003 * x for x in xs], weights)[1] == 0.0
    assert fit_line([8.0, 8.0], [1.0, 3.0], [1.0, 3.0]) == (2.5, 0.0)


@pytest.mark.integration
def test_times_read_from_a_run_are_those_that_it_took(tmp_path: Path) -> None:
    """A simulated run is written down as a run is, and read."""
    config = configured(train_batch_size=16)
    pace = Pace(
        EnginePace(0.02, 0.005), SearchPace(partial(batch_s, 0.1, 0.02), overhead_s=0.03), LearnerPace(0.01, 0.5)
    )
    create_run_directory(config, tmp_path)
    with closing(VirtualLoop()) as loop, closing(MetricsLogger(tmp_path)) as logger:
        simulator = Simulator(loop, config, pace, DrawnWorkload(config), Size(3, 2), lambda time_s: 1.0)
        try:
            for number in range(1, 7):
                batch: list[FinishedGroup] = []
                iteration = simulator.train(batch.extend)
                keep_trajectories(tmp_path, f"iteration_{number:05d}", [group.batch for group in batch])
                logger.log("rl", number, as_metrics(iteration, simulator))
        finally:
            simulator.stop()
    found = read_recording(tmp_path)
    assert found.num_iterations == 6
    assert found.pace.engine.base_s == pytest.approx(0.02, rel=0.1)
    assert found.pace.engine.row_s == pytest.approx(0.005, rel=0.1)
    assert found.pace.search.batch_s(2) == pytest.approx(0.14, rel=0.15)
    assert found.pace.learner.trajectory_s == pytest.approx(0.01)
    assert found.pace.learner.publish_s == pytest.approx(0.5)
    uri = f"file://{tmp_path / 'stored'}"
    with RunStore(uri) as place:
        for name in ("config.yaml", "metrics.jsonl"):
            shutil.copy(tmp_path / name, place.path)
        shutil.copytree(tmp_path / "trajectories", place.path / "trajectories")
    stored = read_recording(uri)
    assert (stored.config, stored.num_iterations) == (config, 6)
    assert (stored.pace.engine, stored.trajectories_per_s) == (found.pace.engine, found.trajectories_per_s)
    again = simulate(config, found.pace, found.workload, Size(3, 2), 6)
    assert again.trajectories_per_s == pytest.approx(found.trajectories_per_s, rel=0.15)


def as_metrics(iteration: Iteration, simulator: Simulator) -> dict[str, float]:
    seconds = {f"time/{name}": getattr(iteration, name) for name in ("sample_s", "learn_s", "publish_s", "iteration_s")}
    return iteration.rollout | seconds | simulator.retrievers.metrics()


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_run_without_times_is_refused(tmp_path: Path, scheme: str) -> None:
    run_dir = f"{scheme}{tmp_path / 'run'}"
    create_run_directory(configured(), place := find_store(run_dir))
    with closing(MetricsLogger(place.path)) as logger:
        logger.log("rl", 1, {"time/iteration_s": 1.0})
    place.upload()
    with pytest.raises(DataError, match="no iteration of RL with time/generation_s"):
        read_recording(run_dir)
    said = invoke("simulate", "quickstart", "--from", run_dir)
    assert said.startswith(f"error: {run_dir} has no iteration of RL with time/generation_s")


# -- the command line --------------------------------------------------------------------------------------------------


@pytest.mark.integration
def test_the_command_answers_how_many_are_needed(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps({"training": {"train_batch_size": 4, "group_size": 2}, "policy": {"model": "tiny"}}))
    arguments = ["simulate", str(recipe), "--runners", "4", "--retrievers", "2", "--iterations", "2"]
    # as a person calls it: the points of the curves are simulated by other processes, which import the main module
    command = [sys.executable, "-m", "ragr1_actors", *arguments, "--json"]
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": "150"}  # rich takes its output for a terminal
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    found = json.loads(done.stdout)
    assert re.search(r"simulating .*7/7", done.stderr)
    assert [point["num_runners"] for point in found["by_runners"]] == [1, 2, 4, 8]
    assert [point["num_retrievers"] for point in found["by_retrievers"]] == [1, 2, 4]
    assert found["needed"]["num_runners"] <= 8
    assert found["asked"]["verdict"]["limit"] in get_args(Limit)
    assert "expected one of a100" in invoke(*arguments, "--gpu", "abacus")


def test_a_study_is_printed_with_its_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    printed = Console(record=True, width=120, file=io.StringIO())
    for module in ("ragr1_actors.cli", "ragr1_actors.cli.simulate"):
        monkeypatch.setattr(f"{module}.console", printed)
    slow_search = replace(FAST, search=SearchPace(partial(batch_s, 2.0, 0.0)))
    curve = tuple(simulated(configured(), slow_search, Size(8, count), 1) for count in (1, 4))
    cli.print_study(Study(curve[0], curve[:1], curve))
    text = printed.export_text()
    assert "Throughput by retrievers, with 8 runners" in text
    assert "limited by: retrieval; trajectories wait for searches" in text
    assert "enough for" in text
    assert text.count("█" * cli.BAR_WIDTH) == 2  # the best of each curve
