"""Metrics of a run: one line of JSON per iteration in ``metrics.jsonl``, and the same values for TensorBoard.

``metrics.jsonl`` has one line per ``log`` call, its keys sorted::

    {"iteration": 3, "loop/tokens": 81920.0, "rollout/reward": 0.61, "stage": "rl", "time/iteration_s": 4.2}

If fleets got other sizes in an iteration, its line has them, with the reasons, as ``scaling/decisions``. Failures that
were mended are there as ``incidents``.

A metric's name is ``group/name``, with the groups ``rollout``, ``learner``, ``eval``, ``loop`` and others. Names that
start with ``time/`` are wall times in seconds. Two runs with the same seed agree in all metrics except these.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.disk.files import write_file
from ragr1_actors.core.disk.json_files import read_json_lines
from ragr1_actors.core.errors import RunDirectoryError
from ragr1_actors.core.types import Bucket, ToolCall, Trajectory
from ragr1_actors.runs.telemetry.events import Incident, ScalingDecision
from ragr1_actors.runs.telemetry.trackers import EventFile, Log

METRICS_FILE = "metrics.jsonl"
TIME_PREFIX = "time/"
DECISIONS = "scaling/decisions"
"""Key of the list of ``ScalingDecision``, in lines that have any."""
TOKENS = "learner/tokens"
"""Key whose sum over the iterations of RL is the step of curves over tokens."""
EXAMPLES = "examples"
MAX_CHARS = 600
"""Limit of the shown text of a record, in characters."""
INCIDENTS = "incidents"
"""Key of the list of ``Incident``, in lines that have any."""


class _Row(BaseModel):
    """Line of ``metrics.jsonl``: every other key is a metric."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, float]
    stage: str
    iteration: int
    decisions: list[ScalingDecision] = Field(default=[], alias=DECISIONS)
    incidents: list[Incident] = Field(default=[], alias=INCIDENTS)


@dataclass(frozen=True, slots=True)
class Gap:
    """Steps of SFT or iterations of RL that a damaged file lacks: ``Gap("rl", 5, 8)``."""

    stage: str
    first: int
    last: int

    def __str__(self) -> str:
        """Return ``"rl 5 to 8"``."""
        return f"{self.stage} {self.first} to {self.last}"


class MetricsLogger:
    """Appends to ``metrics.jsonl`` and ``tensorboard/`` of one run directory."""

    def __init__(
        self,
        run_dir: Path,
        export: Callable[[Mapping[str, float]], None] = lambda metrics: None,
        settings: Mapping[str, Any] | None = None,
        track: Log | None = None,
    ) -> None:
        """Make the folder and open the files to append; ``DataError`` on a damaged ``metrics.jsonl``.

        ``export`` gets the metrics of every line, too, and ``track`` with their stage and iteration. ``settings`` are
        the hyperparameters that TensorBoard shows.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        self._run_dir = run_dir
        self._export = export
        self._track = track
        self._settings = settings or {}
        self._path = run_dir / METRICS_FILE
        if self._path.is_file():
            self._rewrite(read_metrics(run_dir))  # drops a last line that a crash cut off
        self._file = self._path.open("a", encoding="utf-8")
        self._events: EventFile | None = None
        self._begun: set[str] = set()
        self._num_tokens = 0.0
        self._tokens_at: dict[int, float] = {}
        """Sum of the tokens by iteration: an evaluation is logged when further iterations have ended."""

    def log(
        self,
        stage: str,
        iteration: int,
        metrics: Mapping[str, float],
        decisions: Sequence[ScalingDecision] = (),
        incidents: Sequence[Incident] = (),
        samples: Mapping[str, Sequence[float]] | None = None,
        histograms: Mapping[str, Sequence[Bucket]] | None = None,
    ) -> None:
        """Append the metrics of an iteration to both files, as in ``log("rl", 3, {"rollout/reward": 0.61})``.

        ``decisions`` and ``incidents`` date from after the previous call. ``samples`` are values whose histograms
        TensorBoard shows, such as ``{"turns": [2.0, 3.0]}``; ``histograms`` are given as buckets: ``{"ratio": [(0.9,
        1.1, 7.0)]}``.

        A logger's first line of a stage drops the lines of that stage from ``iteration`` on, so that a run resumed from
        iteration 3 does not keep the lines that an earlier process logged after that checkpoint.
        """
        values = {name: float(value) for name, value in metrics.items()}
        events = self._begin(stage, iteration) if stage not in self._begun or not self._events else self._events
        made = {DECISIONS: [asdict(decision) for decision in decisions]} if decisions else {}
        made |= {INCIDENTS: [asdict(incident) for incident in incidents]} if incidents else {}
        self._file.write(_line({"stage": stage, "iteration": iteration, **values, **made}))
        self._file.flush()
        self._count_tokens({"stage": stage, "iteration": iteration, **values})
        at = self._tokens_at.get(iteration, self._num_tokens) if stage == "rl" else self._num_tokens
        events.write(stage, iteration, values, int(at))
        self._export(values)
        if self._track:
            self._track(stage, iteration, values)
        events.write_histograms(stage, iteration, samples or {}, histograms or {})
        if decisions:
            events.write_text(stage, iteration, DECISIONS, "\n\n".join(map(str, decisions)))

    def log_examples(self, stage: str, iteration: int, examples: Mapping[str, str]) -> None:
        """Show trajectories in TensorBoard as Markdown, after the line of their evaluation: ``{"wrong": "..."}``."""
        assert self._events is not None, "log_examples() before log()"
        for name, text in examples.items():
            self._events.write_text(stage, iteration, f"{EXAMPLES}/{name}", text)

    def rewind(self, stage: str) -> None:
        """Let the next line of a stage drop the lines from its iteration on, such as after a resume."""
        self._begun.discard(stage)

    def close(self) -> None:
        """Close every file, even if writing the last bytes of one fails; may be called twice."""
        with ExitStack() as files:
            files.callback(self._file.close)
            if self._events:
                files.callback(self._events.close)
            self._events = None

    def _begin(self, stage: str, iteration: int) -> EventFile:
        rows = read_metrics(self._run_dir)
        kept = [row for row in rows if row["stage"] != stage or row["iteration"] < iteration]
        if len(kept) < len(rows):
            self._file.close()
            self._rewrite(kept)
            self._file = self._path.open("a", encoding="utf-8")
        self._num_tokens, self._tokens_at = 0.0, {}
        for row in kept:
            self._count_tokens(row)
        events = self._events or EventFile(self._run_dir, self._settings)
        self._events = events
        self._begun.add(stage)
        if any(row["stage"] == stage for row in rows):
            events.drop(stage, iteration, int(self._num_tokens))
        return events

    def _count_tokens(self, row: Mapping[str, Any]) -> None:
        if row["stage"] == "rl" and TOKENS in row:
            self._num_tokens += row[TOKENS]
            self._tokens_at[row["iteration"]] = self._num_tokens

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        text = "".join(_line(row) for row in rows)
        write_file(self._path, lambda writing: writing.write_text(text, encoding="utf-8"))


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of ``metrics.jsonl`` but one that a crash cut off; ``DataError`` on a damaged line."""
    path = run_dir / METRICS_FILE
    if not path.is_file():
        raise RunDirectoryError(f"{run_dir} holds no {METRICS_FILE}; give the directory of a run")
    rows = read_json_lines(_Row, path, "delete the line")
    return [row.model_dump(by_alias=True, exclude_defaults=True) for row in rows]


def is_iteration(row: Mapping[str, Any]) -> bool:
    """Return whether a line is of an iteration of RL; evaluations between two iterations also have the stage ``rl``."""
    return row["stage"] == "rl" and "time/iteration_s" in row


def find_gaps(rows: Iterable[Mapping[str, Any]], done: Mapping[str, int]) -> tuple[Gap, ...]:
    """Return the gaps in the lines up to the steps ``done`` by stage, such as ``{"sft": 300, "rl": 8}``."""
    found = {(row["stage"], row["iteration"]) for row in rows if row["stage"] != "rl" or is_iteration(row)}
    gaps: list[Gap] = []
    for stage, last in done.items():
        for number in (number for number in range(1, last + 1) if (stage, number) not in found):
            if gaps and (gaps[-1].stage, gaps[-1].last) == (stage, number - 1):
                gaps[-1] = replace(gaps[-1], last=number)
            else:
                gaps.append(Gap(stage, number, number))
    return tuple(gaps)


def read_events(run_dir: Path) -> tuple[tuple[ScalingDecision, ...], tuple[Incident, ...]]:
    """Return the decisions about the fleets' sizes, and what failed and was mended; ``DataError`` on a damaged line."""
    rows = read_metrics(run_dir)
    decisions = tuple(ScalingDecision(**made) for row in rows for made in row.get(DECISIONS, ()))
    return decisions, tuple(Incident(**found) for row in rows for found in row.get(INCIDENTS, ()))


def ratio(means: Mapping[str, float], over: str, under: str) -> float:
    """Return one mean divided by another; 0 if the latter is 0 or missing."""
    return means[over] / means[under] if means.get(under) else 0.0


def mean_over(metrics: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Average each name over the mappings that have it.

    ``mean_over([{"a": 1.0}, {"a": 2.0, "b": 5.0}]) == {"a": 1.5, "b": 5.0}``
    """
    values: dict[str, list[float]] = {}
    for mapping in metrics:
        for name, value in mapping.items():
            values.setdefault(name, []).append(float(value))
    return {name: math.fsum(numbers) / len(numbers) for name, numbers in values.items()}


def _line(row: Mapping[str, Any]) -> str:
    # JSON has no infinity or NaN, and a diverged run must still leave a file that every JSON reader opens.
    plain = {
        name: value if not isinstance(value, float) or math.isfinite(value) else str(value)
        for name, value in row.items()
    }
    return json.dumps(plain, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"


def as_markdown(trajectory: Trajectory) -> str:
    """Return question, turns with their calls, and answer, for TensorBoard. Texts of others are in code blocks."""
    task = trajectory.task
    lines = [f"**question** {_block(task.question)}", f"**gold answers** {_block(' | '.join(task.golden_answers))}"]
    for number, turn in enumerate(trajectory.turns, start=1):
        lines.append(f"**turn {number}, {turn.num_model_tokens} tokens** {_block(turn.completion_text)}")
        lines += [_called(call) for call in turn.calls]
    end = f"**answer, reward {trajectory.reward:g}, {trajectory.stop_reason.value}**"
    lines.append(f"{end} {_block(trajectory.answer)}")
    return "\n\n".join(lines)


def _called(call: ToolCall) -> str:
    records = [f"{record.score:.3f}  {record.title}: {record.text[:MAX_CHARS]}" for record in call.records]
    result = "\n".join(filter(None, (call.result[:MAX_CHARS], *records)))
    return f"**{call.tool}** {_block(call.asked)}\n\n{_block(result)}"


def _block(text: str) -> str:
    """Return a code block; its fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"\n{fence}text\n{text}\n{fence}"


Limit = Literal["learner", "retrieval", "batch", "rollout"]

BUSY_LEARNER, BUSY_LEARNER_IN_TURNS = 0.9, 0.5
"""Share of time that the learner works from which it is the bottleneck: with a lag, and in turns with sampling."""
LONG_SEARCHES = 0.2
"""Share of a trajectory's time that it waits for searches, above which retrieval matters."""
BUSY_RETRIEVERS = 0.7
"""Share of their time that retrievers work, above which queries wait longer than their search takes."""
EMPTY_RUNNERS = 0.25
"""Share of their trajectories that runners have in flight, below which more runners have nothing to do."""


@dataclass(frozen=True, slots=True)
class Load:
    """Means over some iterations of a run."""

    learner_wait: float
    """Share of the time that the learner waited for a batch: ``time/sample_s`` of ``time/iteration_s``."""
    search_wait: float
    """Share of a trajectory's time that it waited for searches: ``time/retrieval_waited_s`` of its sum with
    ``time/generation_s``."""
    retriever_busy: float
    """Share of their time that the retrievers worked: ``retrieval/retriever_busy``."""
    runner_load: float
    """Trajectories in flight per runner, ``env_runners/load``, over ``env_runners.max_concurrent_trajectories``."""
    num_runners: int
    num_retrievers: int
    max_policy_lag: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Bottleneck of the throughput, and advice: ``Verdict("retrieval", "... add 3 retrievers")``."""

    limit: Limit
    advice: str


def load_of_rows(config: RunConfig, rows: Sequence[Mapping[str, Any]]) -> Load | None:
    """Return the means of lines of ``metrics.jsonl``; None without an iteration of RL, or if no runner sampled.

    Without runners the policy samples in the driver, between two updates.
    """
    found = [row for row in rows if is_iteration(row)]
    if not found or not config.env_runners.num_env_runners:
        return None

    def mean(name: str) -> float:
        return math.fsum(float(row.get(name, 0.0)) for row in found) / len(found)

    waited_s, generated_s = mean("time/retrieval_waited_s"), mean("time/generation_s")
    return Load(
        learner_wait=mean("time/sample_s") / mean("time/iteration_s"),
        search_wait=waited_s / (waited_s + generated_s) if waited_s else 0.0,
        retriever_busy=mean("retrieval/retriever_busy"),
        runner_load=mean("env_runners/load") / config.env_runners.max_concurrent_trajectories,
        num_runners=round(mean("env_runners/running")),
        num_retrievers=round(mean("retrieval/retriever_running")),
        max_policy_lag=config.training.max_policy_lag,
    )


def find_bottleneck(load: Load) -> Verdict:
    """Return the bottleneck; of several, the first of learner, retrieval, batch and rollout."""
    waits, runners, retrievers = load.learner_wait, load.num_runners, load.num_retrievers
    enough = BUSY_LEARNER if load.max_policy_lag else BUSY_LEARNER_IN_TURNS
    in_turns = "" if load.max_policy_lag else "; with training.max_policy_lag=1 it would not wait while they sample"
    if waits <= 1 - enough:
        return Verdict("learner", f"the learner works {1 - waits:.0%} of the time: add learner ranks{in_turns}")
    if load.search_wait >= LONG_SEARCHES and load.retriever_busy >= BUSY_RETRIEVERS:
        missing = max(1, math.ceil(retrievers * load.retriever_busy / BUSY_RETRIEVERS) - retrievers)
        return Verdict(
            "retrieval",
            f"trajectories wait for searches {load.search_wait:.0%} of their time, and the retrievers work "
            f"{load.retriever_busy:.0%} of theirs: add at least {missing} to the {retrievers}",
        )
    if load.search_wait >= LONG_SEARCHES:
        return Verdict(
            "retrieval",
            f"trajectories wait for searches {load.search_wait:.0%} of their time, though the retrievers work only "
            f"{load.retriever_busy:.0%} of theirs: make a search faster by a compressed index, more shards or GPUs",
        )
    if load.runner_load < EMPTY_RUNNERS:
        return Verdict(
            "batch",
            f"the runners have {load.runner_load:.0%} of the trajectories that they can have in flight: raise "
            f"training.train_batch_size or training.max_policy_lag, or take fewer than {runners} runners{in_turns}",
        )
    # in turns, sampling takes wait / (1 - wait) times as long as learning, and should become as long
    wanted = runners * enough * (1 if load.max_policy_lag else 2 * waits) / max(0.01, 1 - waits)
    missing = max(1, math.ceil(wanted) - runners)
    return Verdict(
        "rollout",
        f"the learner waits {waits:.0%} of the time for samples: add {missing} to the {runners} runners, where GPUs or "
        f"CPUs are free{in_turns}",
    )
