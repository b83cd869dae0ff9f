"""Words and numbers of the page: pure functions of a run's lines of metrics, its report and its settings."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.process.progress_bar import SAMPLED_TOKENS
from ragr1_actors.core.types import Failure
from ragr1_actors.runs.report import STAGE_TITLES, RunReport
from ragr1_actors.runs.scores import wilson
from ragr1_actors.runs.telemetry.events import ScalingDecision
from ragr1_actors.runs.telemetry.metrics import (
    DECISIONS,
    INCIDENTS,
    TOKENS,
    find_bottleneck,
    is_iteration,
    load_of_rows,
)

Row = Mapping[str, Any]
"""A line of ``metrics.jsonl``."""
NEWEST = 20
"""Number of iterations whose mean is shown as the present value."""
COUNTERS = {
    "env_runners/num_restarts": "env runners restarted",
    "env_runners/num_hangs": "env runners that hung",
    "env_runners/num_lost": "env runners given up",
    "env_runners/num_hedged": "slow groups sampled a second time",
    "env_runners/num_retrieval_failed": "trajectories that failed in a search",
    "env_runners/num_service_failed": "trajectories that failed as a service did not answer",
    "env_runners/num_engine_error": "trajectories that failed in the engine",
    "env_runners/num_env_error": "trajectories that failed in the environment",
    "retrieval/retriever_restarts": "retrievers restarted",
    "retrieval/retriever_hangs": "retrievers that hung",
    "retrieval/encoder_restarts": "encoders restarted",
    "retrieval/encoder_hangs": "encoders that hung",
    "retrieval/failed_attempts": "batches of queries that a replica did not answer",
    "loop/learner_restarts": "learner group restarted",
    "loop/weight_fallbacks": "weight transfers that fell back to the object store",
    "guard/alarms": "alarms of the collapse guard",
    "guard/roll_backs": "roll-backs of the collapse guard",
    "tasks/failed": "training tasks given up",
}
"""Metrics that count since the start of a process or of the run, with their meaning."""
MOST_AT_A_TIME = {
    "retrieval/retriever_lost": "retrievers that did not answer, most at a time",
    "retrieval/encoder_lost": "encoders that did not answer, most at a time",
}
"""Metrics with a present number, with the meaning of their maximum."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Number in the page's head."""

    value: str
    label: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio over the newest iterations, with its goal if there is one."""

    name: str
    value: str
    goal: str
    is_met: bool | None
    """Whether the goal is met; None without a goal."""


def rl_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the lines of the iterations of RL, without evaluations between two of them."""
    return [row for row in rows if is_iteration(row)]


def headline(config: RunConfig, rows: Sequence[Row]) -> tuple[str, str]:
    """Return title and text of the verdict over the newest iterations, as ``ragr1 simulate`` computes it."""
    newest = rl_rows(rows)[-NEWEST:]
    load = load_of_rows(config, newest)
    if load is not None:
        found = find_bottleneck(load)
        advice = found.advice[0].upper() + found.advice[1:]
        return f"{found.limit.capitalize()}-bound", f"{advice}. Iterations in the mean: {len(newest)}."
    if newest:
        return "One process", "The policy samples in the driver (env_runners.num_env_runners=0), in turns."
    return "No iteration yet", "Reinforcement learning has not begun; what limits it is not known yet."


def tiles(config: RunConfig, rows: Sequence[Row], report: RunReport | None) -> list[Tile]:
    """Return the numbers of the page's head: evaluation, searches, speed, tasks, memory."""
    iterations = rl_rows(rows)
    made = [Tile(f"{len(iterations):,}", "iterations of RL", f"of {config.training.num_iterations:,}")]
    evaluations = [row for row in rows if row.get("eval/num_tasks") and math.isfinite(row["eval/em"])]
    if evaluations:
        made.insert(0, _evaluation(evaluations))
        rounds, queries = evaluations[-1]["eval/rounds"], evaluations[-1]["eval/queries"]
        made.append(Tile(f"{rounds:.2f}", "search rounds per question", f"{queries:.2f} queries"))
    newest = iterations[-NEWEST:]
    if seconds := math.fsum(row.get("time/iteration_s", 0.0) for row in newest):
        trajectories = math.fsum(row.get("learner/trajectories", 0.0) for row in newest) / seconds
        sampled, tokens = (math.fsum(row.get(key, 0.0) for row in newest) / seconds for key in (SAMPLED_TOKENS, TOKENS))
        note = f"tokens/s: {sampled:,.0f} sampled, {tokens:,.0f} in the loss"
        made.append(Tile(f"{trajectories:,.1f}/s", "trajectories trained", note))
    if iterations and "tasks/issued" in iterations[-1]:
        last = iterations[-1]
        lost, doubled = last["tasks/lost"], last["tasks/doubled"]
        made.append(Tile(f"{last['tasks/trained']:,.0f}", "tasks trained", f"{lost:.0f} lost, {doubled:.0f} doubled"))
    if report is not None:
        memory = f"{report.peak_rss_bytes / 2**30:.1f} GiB at the peak"
        made.append(Tile(_duration(report.wall_s), "wall time", memory))
    return made


def _evaluation(evaluations: Sequence[Row]) -> Tile:
    first, last = evaluations[0], evaluations[-1]
    found = wilson(last["eval/em"], int(last["eval/num_tasks"]))
    begun = f", {first['eval/em']:.3f} at the start" if first is not last else ""
    note = f"{found.low:.3f} to {found.high:.3f} over {last['eval/num_tasks']:,.0f} tasks{begun}"
    return Tile(f"{found.mean:.3f}", "held-out exact match", note)


def ratios(config: RunConfig, rows: Sequence[Row]) -> list[Ratio]:
    """Return the ratios over the newest iterations, with the goals of the project."""
    newest = rl_rows(rows)[-NEWEST:]
    if not newest:
        return []

    def mean(name: str) -> float | None:
        values = [row[name] for row in newest if name in row and math.isfinite(row[name])]
        return math.fsum(values) / len(values) if values else None

    seconds = mean("time/iteration_s")
    waits, publishes = mean("time/sample_s"), mean("time/publish_s")
    generates, searches = mean("time/generation_s"), mean("time/retrieval_waited_s")
    waited = _share(searches, mean("time/retrieval_s"))
    has_lag = config.training.max_policy_lag > 0
    made = [
        _ratio("learner waits for samples", _share(waits, seconds), 0.03 if has_lag else None),
        _ratio("weights are published", _share(publishes, seconds), None),
        _ratio("trajectories and metrics are written", _share(mean("time/write_s"), seconds), 0.01),
        _ratio("a trajectory waits for searches", _share(searches, (generates or 0.0) + (searches or 0.0)), None),
        _ratio("search time hidden from its trajectory", None if waited is None else 1 - waited, None),
        _ratio("retrievers work", mean("retrieval/retriever_busy"), None),
        _ratio("searches from the cache", mean("retrieval/cache_hit_rate"), None),
        _ratio("padding in computed tokens", mean("learner/padding_waste"), 0.01),
        _ratio("tokens with a ratio outside 0.9 to 1.1", mean("learner/ratio_outliers"), None),
    ]
    return [one for one in made if one is not None]


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _ratio(name: str, value: float | None, goal: float | None) -> Ratio | None:
    if value is None:
        return None
    met = None if goal is None else value <= goal
    return Ratio(name, f"{value:.2%}", "" if goal is None else f"at most {goal:.0%}", met)


def failures(rows: Sequence[Row]) -> list[tuple[str, int]]:
    """Return the kinds of mended failures, with their numbers over all processes of the run; zeros are left out."""
    iterations = rl_rows(rows)

    def values(name: str) -> list[float]:
        return [row[name] for row in iterations if name in row]

    found = [(what, total_of_counter(values(name))) for name, what in COUNTERS.items()]
    found += [(what, round(max(values(name), default=0.0))) for name, what in MOST_AT_A_TIME.items()]
    return [(what, number) for what, number in found if number]


def total_of_counter(values: Sequence[float]) -> int:
    """Return the total of a counter that each process begins at 0: ``total_of_counter([0, 2, 0, 1]) == 3``."""
    total, before = 0.0, 0.0
    for value in filter(math.isfinite, values):
        total += value - before if value >= before else value
        before = value
    return round(total)


def incidents(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return local time and text of each incident."""
    return [(_when(one["time_s"]), one["what"]) for row in rows for one in row.get(INCIDENTS, ())]


def decisions(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return local time and text of the changes of the fleets' sizes."""
    return [(_when(one["time_s"]), str(ScalingDecision(**one))) for row in rows for one in row.get(DECISIONS, ())]


def failed_tasks(report: RunReport) -> list[tuple[str, str, str, str, str]]:
    """Return id, epoch, kind of failure, tries and last error of the tasks that were given up."""
    return [
        (
            task.task_id,
            str(task.epoch),
            "data, in quarantine" if task.failure is Failure.DATA else str(task.failure),
            str(task.num_tries),
            task.error,
        )
        for task in report.failed_tasks
    ]


def evaluations(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return time, EM with its 95 % Wilson interval, F1, rounds, queries, tokens, tasks and failures of evaluations."""
    made = []
    for row in rows:
        if not row.get("eval/num_tasks"):
            continue
        when = f"iteration {row.get('eval/policy_version', row['iteration']):.0f}"
        for stage, title in STAGE_TITLES.items():
            when = title if row["stage"] == f"eval_{stage}" else when
        found = wilson(row["eval/em"], int(row["eval/num_tasks"]))
        numbers = (f"{row[f'eval/{name}']:.2f}" for name in ("rounds", "queries"))
        made.append(
            (
                when,
                f"{found.mean:.3f}",
                f"{found.low:.3f} to {found.high:.3f}",
                f"{row['eval/f1']:.3f}",
                *numbers,
                f"{row['eval/tokens']:.1f}",
                f"{row['eval/num_tasks']:,.0f}",
                f"{row.get('eval/num_failed', 0.0):.0f}",
            )
        )
    return made


def _when(time_s: float) -> str:
    return time.strftime("%F %T", time.localtime(time_s))


def _duration(seconds: float) -> str:
    """Return ``"45 s"``, ``"12 min"`` or ``"3.4 h"``."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
