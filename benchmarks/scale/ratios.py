"""``ragr1 bench scale``: fleets that follow their load, a learner that does not wait, a driver for hundreds of runners.

======================== =================================================================== =======
metric                   ratio                                                               goal
======================== =================================================================== =======
autoscaled_throughput    batches/h ÷ those of the best fixed size, sawtooth load             >= 0.9
autoscaled_hours         runner-hours ÷ those of the best fixed size, sawtooth load          <= 0.6
throughput_step          as autoscaled_throughput, load of a step                            >= 0.9
throughput_ramp          as autoscaled_throughput, load of a ramp                            >= 0.9
throughput_spike         as autoscaled_throughput, load of a spike                           >= 0.9
hours_step               as autoscaled_hours, load of a step
hours_ramp               as autoscaled_hours, load of a ramp
hours_spike              as autoscaled_hours, load of a spike
reversals                changes of direction of the fleet ÷ steps of the load               <= 1
learner_wait             share of its time that the learner waits at lag 1, 64 runners       <= 0.03
lag_speedup              trajectories/s at lag 1 ÷ at lag 0, as in learner_wait              >= 1.8
policy_lag               mean lag of the groups trained at lag 1, as in learner_wait         <= 1
stale_share              groups too old for the learner ÷ groups sampled, at lags 1 to 3 **  <= 0
driver_cores             cores of a driver for 512 runners of 8 trajectories, 64 retrievers  <= 1
simulate_1000            seconds of ``simulate`` for 1,000 runners ÷ 120                      <= 1
scale_out                seconds from an order to a new env runner's first request ÷ 5 *     <= 1
submission               seconds from ``ragr1 submit`` to the first iteration ÷ 20 *         <= 1
start_ask                seconds from ``ragr1 ask`` to its first token ÷ the libraries' ***
start_train              seconds from ``ragr1 train quickstart`` to its first token ÷ them
elastic_em               EM of the quickstart, autoscaled ÷ fixed fleets, nodes that come    >= 0.97
elastic_actor_s          seconds of runners and retrievers in RL, as in elastic_em           <= 1
======================== =================================================================== =======

All but ``driver_cores`` and the last four are simulated (``ragr1_actors/lab/simulation``) and repeat to the bit,
but for the seconds of ``simulate_1000``. ``benchmarks/scale/loads.py`` describes the loads.
``driver_cores`` is CPU seconds per group of a driver with real actors and as many groups in flight, times the groups
per second of the simulated fleet.

Two stars: where the learner is three times as fast as in learner_wait, so that long trajectories are overtaken.

Three stars: the seconds in which a process imports torch and transformers' model classes. Standard error has the parts.

A star: without the seconds in which models load (``benchmarks/scale/latency.py``); standard error has both parts.
``submission`` is the quickstart with one step of SFT: its world is made, indexed and demonstrated in these seconds.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measurement import LOWER, Goal, Measurement, Repeats, Sample, choose, log, measure, quotient
from benchmarks.scale import elastic, latency, loads
from benchmarks.scale.latency import Wait
from ragr1_actors.lab.simulation.run import Simulation, Size, simulate
from ragr1_actors.lab.simulation.workload import DrawnWorkload
from ragr1_actors.planning.machine import GPUS, Machine
from ragr1_actors.planning.pace import LearnerPace, Pace
from ragr1_actors.planning.plan import make_pace
from ragr1_actors.training.algorithm_config import AlgorithmConfig

_THROUGHPUT, _HOURS = Goal(0.9, at_least=True), Goal(0.6, at_least=False)
_BY_LOAD = {
    "sawtooth": ("autoscaled_throughput", "autoscaled_hours"),
    "step": ("throughput_step", "hours_step"),
    "ramp": ("throughput_ramp", "hours_ramp"),
    "spike": ("throughput_spike", "hours_spike"),
}
GOALS: dict[str, Goal] = {
    "autoscaled_throughput": _THROUGHPUT,
    "autoscaled_hours": _HOURS,
    **{f"throughput_{name}": _THROUGHPUT for name in ("step", "ramp", "spike")},
    **{f"hours_{name}": LOWER for name in ("step", "ramp", "spike")},
    "reversals": Goal(1.0, at_least=False),
    "learner_wait": Goal(0.03, at_least=False),
    "lag_speedup": Goal(1.8, at_least=True),
    "policy_lag": Goal(1.0, at_least=False),
    "stale_share": Goal(0.0, at_least=False),
    "driver_cores": Goal(1.0, at_least=False),
    "simulate_1000": Goal(1.0, at_least=False),
    "scale_out": Goal(1.0, at_least=False),
    "submission": Goal(1.0, at_least=False),
    "start_ask": LOWER,
    "start_train": LOWER,
    "elastic_em": Goal(0.97, at_least=True),  # two standard errors of a difference of 0.98 and 0.98 over 200 tasks
    "elastic_actor_s": Goal(1.0, at_least=False),
}
METRICS = tuple(GOALS)
_LAG_UNITS = {"learner_wait": "s", "lag_speedup": "trajectories/s", "policy_lag": "versions"}
_ELASTIC_UNITS = {"elastic_em": "EM", "elastic_actor_s": "s"}
NUM_PERIODS, NUM_PERIODS_QUICK = 2.0, 0.05
NUM_PASSAGES = 21_015_324
"""Search-R1's corpus."""
LIMIT_S, SCALE_OUT_S, SUBMISSION_S = 120.0, 5.0, 20.0
LEARNER_SHARE = 0.95
"""Seconds of sampling per second of learning, where both go on at the same time."""


def describe() -> str:
    """The workload, in one line."""
    return "scale: simulated fleets; loads of 0.1 to 1 over four hours, batches of 24 groups of 4"


def run(only: str | None = None, repeats: int | None = None, quick: bool = False) -> Iterator[Measurement]:
    """Measure, and yield what is found.

    Raises:
        UserError: ``only`` is no metric.
    """
    wanted = choose(only, METRICS)
    yield from _simulated(wanted, quick)
    yield from _on_this_machine(wanted, Repeats(repeats or (1 if quick else None)), quick)


def _simulated(wanted: set[str], quick: bool) -> Iterator[Measurement]:
    for name, metrics in _BY_LOAD.items():
        if wanted & {*metrics, "reversals"} and (wanted & set(metrics) or name == "step"):
            yield from (found for found in _autoscaled(name, quick) if found.metric in wanted)
    study = LagStudy() if wanted & {*_LAG_UNITS, "stale_share"} else None
    if study and wanted & set(_LAG_UNITS):
        found = study.lag_one(1 if quick else 4)
        yield from (_measured(name, found[name], unit) for name, unit in _LAG_UNITS.items() if name in wanted)
    if study and "stale_share" in wanted:
        yield _measured("stale_share", study.stale_share(2 if quick else 8), "groups")
    if "simulate_1000" in wanted:
        yield _measured("simulate_1000", simulate_1000(1 if quick else 2), "s")


def _on_this_machine(wanted: set[str], repeats: Repeats, quick: bool) -> Iterator[Measurement]:
    if "driver_cores" in wanted:
        yield measure("driver_cores", driver_cores(repeats, quick=quick), "cores", GOALS["driver_cores"])
    if "scale_out" in wanted:
        yield measure("scale_out", scale_out(repeats), "s", GOALS["scale_out"])
    if "submission" in wanted:
        yield measure("submission", submission(repeats), "s", GOALS["submission"])
    if wanted & {"start_ask", "start_train"}:
        found = starts(repeats)
        yield from (measure(name, found[name], "s", GOALS[name]) for name in found if name in wanted)
    if wanted & set(_ELASTIC_UNITS):
        found = elastic_fleets(quick=quick)
        yield from (_measured(name, found[name], unit) for name, unit in _ELASTIC_UNITS.items() if name in wanted)


def _measured(metric: str, sample: Sample, unit: str) -> Measurement:
    return measure(metric, [sample], unit, GOALS[metric])


def _autoscaled(name: str, quick: bool) -> Iterator[Measurement]:
    num_periods = NUM_PERIODS_QUICK if quick else NUM_PERIODS
    fixed = loads.best_fixed(loads.LOADS[name], num_periods)
    ours = loads.run(loads.LOADS[name], fixed.sizes[0], num_periods, is_autoscaled=True)
    log(
        f"{name}: {fixed.batches_per_h:.1f} batches/h with {fixed.sizes[0]} runners; "
        f"{ours.batches_per_h:.1f} autoscaled, with {ours.runner_h:.1f} in the mean, sizes {ours.sizes}"
    )
    throughput, hours = _BY_LOAD[name]
    yield _measured(throughput, quotient(ours.batches_per_h, fixed.batches_per_h), "batches/h")
    yield _measured(hours, quotient(ours.runner_h, fixed.runner_h), "runners")
    if name == "step":
        num_steps = max(1, round(2 * num_periods))
        yield _measured("reversals", quotient(ours.num_reversals, num_steps), "changes")


class LagStudy:
    """A recipe for 7B at full size, whose learner takes a chosen time."""

    def __init__(self) -> None:
        """Measure how long a batch takes to sample while the learner does nothing."""
        self._config = AlgorithmConfig.from_recipe("search_r1_grpo_7b").freeze()
        self._pace = make_pace(self._config, Machine(GPUS["h200-141gb"], 8, 96, 0, 0, 0), NUM_PASSAGES)
        self._workload = DrawnWorkload(self._config)
        self._sample_s = self._simulate(0, self._pace.learner, 2).total("sample_s") / 2

    def _simulate(self, lag: int, learner: LearnerPace, num_iterations: int) -> Simulation:
        training = self._config.training.model_copy(update={"max_policy_lag": lag})
        config = self._config.model_copy(update={"training": training})
        pace = Pace(self._pace.engine, self._pace.search, learner)
        return simulate(config, pace, self._workload, Size(64, 16), num_iterations)

    def _learner(self, learning_s: float) -> LearnerPace:
        training = self._config.training
        batch = training.train_batch_size * training.group_size
        return LearnerPace(learning_s / batch, self._pace.learner.publish_s)

    def lag_one(self, num_iterations: int) -> dict[str, Sample]:
        """Return lag 1 against lag 0, where sampling would take ``LEARNER_SHARE`` of the time of learning."""
        learner = self._learner(self._sample_s / LEARNER_SHARE)
        in_turns, ours = (self._simulate(lag, learner, num_iterations) for lag in (0, 1))
        lags = [iteration.lag for iteration in ours.iterations]
        log(
            f"{self._sample_s:.1f} s of sampling; lag 1: {ours.total('sample_s'):.2f} of {ours.wall_s:.1f} s waited, "
            f"{ours.trajectories_per_s:.1f} trajectories/s; lag 0: {in_turns.trajectories_per_s:.1f}"
        )
        return {
            "learner_wait": quotient(ours.total("sample_s"), ours.wall_s),
            "lag_speedup": quotient(ours.trajectories_per_s, in_turns.trajectories_per_s),
            "policy_lag": quotient(sum(lags), len(lags)),
        }

    def stale_share(self, num_iterations: int) -> Sample:
        """Return the groups that were sampled in vain, and all, at lags 1, 2 and 3."""
        learner = self._learner(self._sample_s / LEARNER_SHARE / 3)
        found = [self._simulate(lag, learner, num_iterations) for lag in (1, 2, 3)]
        num_stale = sum(iteration.num_stale for one in found for iteration in one.iterations)
        num_trained = sum(len(one.iterations) for one in found) * self._config.training.train_batch_size
        return quotient(num_stale, num_stale + num_trained)


def driver_cores(repeats: Repeats, *, quick: bool) -> list[Sample]:
    """Return the cores of the driver, and the goal of one core, as ``ours`` and ``theirs``."""
    from benchmarks.rollout.workload import make_policy
    from benchmarks.scale.driver import RealTraffic, simulated_rate

    simulated = simulated_rate(2 if quick else 8)
    log(f"simulated: {simulated:.1f} groups/s")
    with tempfile.TemporaryDirectory(prefix="ragr1-bench-") as directory:
        make_policy(Path(directory))
        real = RealTraffic(Path(directory), simulated)
        try:
            real.measure(2)  # warm
            found = [real.measure(2 if quick else 8) for _ in repeats]
        finally:
            real.close()
    return [quotient(simulated * traffic.cpu_s_per_group, 1.0) for traffic in found]


def scale_out(repeats: Repeats) -> list[Sample]:
    """Return the seconds until a new env runner works, against the limit."""
    from benchmarks.rollout.workload import make_policy

    with tempfile.TemporaryDirectory(prefix="ragr1-bench-") as directory:
        make_policy(Path(directory))
        return [_waited(latency.scale_out(Path(directory)), SCALE_OUT_S) for _ in repeats]


def starts(repeats: Repeats) -> dict[str, list[Sample]]:
    """Return the seconds of ``ragr1 train`` and, of its run, ``ragr1 ask`` to their first token, each by repeat."""
    found: dict[str, list[Sample]] = {"start_train": [], "start_ask": []}
    for _ in repeats:
        with tempfile.TemporaryDirectory(prefix="ragr1-bench-", ignore_cleanup_errors=True) as directory:
            parts, libraries_s = latency.train(Path(directory)), latency.libraries_s()
            shown = ", ".join(f"{name} after {seconds:.1f} s" for name, seconds in parts.items())
            log(f"train: {shown}; the libraries alone {libraries_s:.1f} s")
            found["start_train"].append(quotient(parts["token"], libraries_s))
            found["start_ask"].append(quotient(latency.ask(Path(directory) / "run"), libraries_s))
    return found


def submission(repeats: Repeats) -> list[Sample]:
    """Return the seconds until a submitted job trains, against the limit."""
    return [_waited(latency.submission(), SUBMISSION_S) for _ in repeats]


def _waited(wait: Wait, limit_s: float) -> Sample:
    log(f"{wait.total_s:.1f} s, of which {wait.loading_s:.1f} s of loading")
    return quotient(wait.beyond_loading_s, limit_s)


def elastic_fleets(*, quick: bool) -> dict[str, Sample]:
    """Return the quickstart with autoscaled fleets against fixed ones, on clusters whose nodes come and go."""
    ours, fixed = elastic.compare(quick=quick)
    return {
        "elastic_em": Sample(ours.em / fixed.em if fixed.em else 0.0, ours.em, fixed.em),
        "elastic_actor_s": quotient(ours.actor_s, fixed.actor_s),
    }


def simulate_1000(num_iterations: int) -> Sample:
    """Return the seconds in which 1,000 runners and 64 retrievers are simulated, against the limit."""
    config = AlgorithmConfig.from_recipe("search_r1_grpo_7b").training(max_policy_lag=1, train_batch_size=1024).freeze()
    pace = make_pace(config, Machine(GPUS["h200-141gb"], 8, 96, 0, 0, 0), NUM_PASSAGES)
    started, cpu_s = time.perf_counter(), time.process_time()
    found = simulate(config, pace, DrawnWorkload(config), Size(1000, 64), num_iterations)
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
    log(f"{found.tasks['issued']} tasks of {config.training.group_size} in {seconds:.0f} s, {cpu_s:.0f} s of one core")
    return quotient(seconds, LIMIT_S)
