"""Destinations of the metrics besides their file: TensorBoard, and W&B and MLflow if ``debugging.trackers`` names them.

A training run is one run in TensorBoard. Tags of SFT begin with ``sft/``. The step of other tags is the iteration of
RL, or for tags that begin with ``by_tokens/`` the number of tokens trained in RL. TensorBoard also draws each tag over
wall time.

Weights & Biases and MLflow get every line of metrics. Server, project and key come from their environment variables
(``WANDB_PROJECT``, ``MLFLOW_TRACKING_URI``). A resumed run continues in the same run there: ``trackers.json`` in the
run directory has its id.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ragr1_actors.core.disk.json_files import read_json_as, write_json
from ragr1_actors.core.errors import ConfigError, shortened
from ragr1_actors.core.types import Bucket

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

TENSORBOARD_DIRECTORY = "tensorboard"
SFT, BY_TOKENS = "sft/", "by_tokens/"
"""Prefixes of tags whose steps are not iterations of RL."""
OVER_TOKENS = ("rollout/reward", "rollout/em", "rollout/queries", "learner/entropy", "eval/em", "eval/f1")
"""Metrics that are also curves over tokens."""
JUDGED_BY = ("eval/em", "eval/f1", "eval/rounds", "rollout/reward")
"""Metrics on the page of hyperparameters."""
NUM_BUCKETS = 20
"""Number of buckets of a histogram."""
LAYOUT: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "health": {
        "reward": ("rollout/reward",),
        "evaluation": ("eval/em", "eval/f1"),
        "groups to learn from": ("rollout/groups_with_variance", "rollout/well_formed"),
        "entropy": ("learner/entropy",),
        "gradient norm": ("learner/grad_norm",),
        "alarms": ("guard/active", "guard/alarms"),
        "tasks failed, lost, doubled": ("tasks/failed", "tasks/lost", "tasks/doubled"),
        "reward over tokens": ("by_tokens/rollout/reward",),
        "evaluation over tokens": ("by_tokens/eval/em", "by_tokens/eval/f1"),
        "loss of SFT": ("sft/learner/loss",),
    },
    "throughput": {
        "seconds of an iteration": (
            "time/iteration_s",
            "time/sample_s",
            "time/learn_s",
            "time/publish_s",
            "time/write_s",
        ),
        "seconds of a trajectory": ("time/generation_s", "time/retrieval_waited_s"),
        "tokens of a batch": ("learner/tokens", "learner/computed_tokens"),
    },
    "search behaviour": {
        "turns and rounds": ("rollout/turns", "rollout/rounds"),
        "queries": ("rollout/queries", "rollout/queries_per_round"),
        "wasted queries": ("rollout/repeated_queries", "rollout/duplicate_queries", "rollout/queries_over_limit"),
        "how trajectories end": ("rollout/stop_answered", "rollout/stop_max_turns", "rollout/stop_context_full"),
        "lengths in tokens": ("rollout/tokens", "rollout/observation_tokens", "rollout/context_tokens"),
    },
    "fleets": {
        "runners": ("env_runners/target", "env_runners/running", "env_runners/starting", "env_runners/num_healthy"),
        "load of the runners": ("env_runners/load", "env_runners/queue"),
        "retrievers": ("retrieval/retriever_target", "retrieval/retriever_running", "retrieval/retriever_starting"),
        "load of the retrievers": ("retrieval/retriever_busy", "retrieval/cache_hit_rate"),
        "restarts": ("env_runners/num_restarts", "retrieval/retriever_restarts", "loop/learner_restarts"),
    },
    "agreement of engine and learner": {
        "gap of log-probs": ("learner/logprob_gap_mean", "learner/logprob_gap_max"),
        "share of ratios outside 0.9 to 1.1": ("learner/ratio_outliers",),
        "KL of engine and learner": ("learner/engine_kl",),
        "lag in versions": ("loop/policy_lag",),
    },
}
"""Charts of the page "Custom Scalars": title of the group, title of the chart, its tags."""


class EventFile:
    """The newest event file of a run, written in the calling thread with TensorBoard's ``RecordWriter``.

    torch's ``SummaryWriter`` does not fit: its background thread prints a traceback when the disk is full, see
    ``docs/decisions/run-files.md``.
    """

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        """Start a file in ``tensorboard/`` of the run directory; ``settings`` are for the page of hyperparameters."""
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._directory = run_dir / TENSORBOARD_DIRECTORY
        self._directory.mkdir(parents=True, exist_ok=True)
        number = len(self._paths())  # TensorBoard reads files in the order of their names
        name = f"events.out.tfevents.{int(time.time()):010d}.{number:04d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (self._directory / name).open("xb")
        self._records = RecordWriter(self._file)
        self._about = (_layout(), *_hyperparameters(run_dir.name, settings))
        self._add(file_version="brain.Event:2")
        if number == 0:  # TensorBoard's loader in Python does not take the first such event for a restart
            self._add(step=0, session_log=SessionLog(status=SessionLog.START))
        for summary in self._about:
            self._add(summary=summary)

    def drop(self, stage: str, step: int, num_tokens: int) -> None:
        """Drop a stage from ``step`` on in TensorBoard, as a resumed run writes it again.

        ``num_tokens`` is the number of tokens trained before. Evaluations at the ends of stages are not dropped, as
        they would be equal.
        """
        from tensorboard.compat.proto.event_pb2 import SessionLog

        if stage not in {"sft", "rl"}:
            return
        events = self._events()
        # TensorBoard drops every tag from a step on, so tags of the other kinds of steps are written again.
        self._add(step=step, session_log=SessionLog(status=SessionLog.START))
        for summary in self._about:
            self._add(summary=summary)
        for event in events:
            found = event.summary.value
            values = [value for value in found if _is_kept(value.tag, event.step, stage, num_tokens)]
            if event.step >= step and values:
                del event.summary.value[:]
                event.summary.value.extend(values)
                self._records.write(event.SerializeToString())
        self._file.flush()

    def write(self, stage: str, step: int, values: Mapping[str, float], num_tokens: int) -> None:
        """Append the values of one step; the file has them when this returns.

        ``num_tokens`` is the number of tokens trained in RL so far.
        """
        prefix = _prefix(stage)
        self._add(step=step, summary=_scalars({prefix + name: value for name, value in values.items()}))
        over_tokens = {} if prefix else {BY_TOKENS + name: values[name] for name in OVER_TOKENS if name in values}
        if over_tokens:
            self._add(step=num_tokens, summary=_scalars(over_tokens))
        self._file.flush()

    def write_text(self, stage: str, step: int, name: str, text: str) -> None:
        """Append a Markdown text, which TensorBoard shows on its page of texts."""
        from tensorboard.plugins.text.metadata import create_summary_metadata

        metadata = create_summary_metadata(display_name="", description="")
        self._add(step=step, summary=_tensor(_prefix(stage) + name, text.encode(), metadata))
        self._file.flush()

    def write_histograms(
        self,
        stage: str,
        step: int,
        samples: Mapping[str, Sequence[float]],
        histograms: Mapping[str, Sequence[Bucket]],
    ) -> None:
        """Append histograms of non-empty lists of values, and ready ``histograms``, as ``distribution/NAME``."""
        from tensorboard.plugins.histogram.summary_v2 import histogram_pb

        for name, values in samples.items():
            if values:
                tag = f"{_prefix(stage)}distribution/{name}"
                self._add(step=step, summary=histogram_pb(tag, np.asarray(values), buckets=NUM_BUCKETS))
        for name, buckets in histograms.items():
            self._add(step=step, summary=_histogram(f"{_prefix(stage)}distribution/{name}", buckets))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _paths(self) -> list[Path]:
        return sorted(path for path in self._directory.iterdir() if path.is_file())

    def _events(self) -> list[Event]:
        """Return the events of the files so far that TensorBoard shows."""
        from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._file.flush()
        events: list[Event] = []
        for path in self._paths():
            for record in RawEventFileLoader(str(path)).Load():
                event = Event.FromString(record)
                if event.session_log.status == SessionLog.START:
                    events = [before for before in events if before.step < event.step]
                events.append(event)
        return events

    def _add(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())


def _prefix(stage: str) -> str:
    return SFT if stage == "sft" else ""


def _is_kept(tag: str, at: int, stage: str, num_tokens: int) -> bool:
    """Return whether a value at the step ``at``, which TensorBoard drops with ``stage``, stays."""
    if tag.startswith(SFT):
        return stage != "sft"
    if stage == "sft":
        return True
    return tag.startswith(BY_TOKENS) and at <= num_tokens


def _scalars(values: Mapping[str, float]) -> Summary:
    from tensorboard.compat.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in sorted(values.items())])


def _tensor(tag: str, content: bytes, metadata: Any) -> Summary:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    tensor = TensorProto(dtype=DT_STRING, string_val=[content])
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])


def _histogram(tag: str, buckets: Sequence[Bucket]) -> Summary:
    """Return a histogram as ``histogram_pb`` makes it; that function counts values itself."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.histogram.metadata import create_summary_metadata
    from tensorboard.util.tensor_util import make_tensor_proto

    metadata = create_summary_metadata(display_name="", description="")
    return Summary(value=[Summary.Value(tag=tag, tensor=make_tensor_proto(np.asarray(buckets)), metadata=metadata)])


def _hyperparameters(name: str, settings: Mapping[str, Any]) -> tuple[Summary, ...]:
    """Return the summaries for TensorBoard's page of hyperparameters; empty if no setting is given."""
    from tensorboard.plugins.hparams import summary_v2

    if not settings:
        return ()
    plain = {
        key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in settings.items()
    }
    metrics = [summary_v2.Metric(tag) for tag in JUDGED_BY]
    return (
        summary_v2.hparams_config_pb([summary_v2.HParam(key) for key in plain], metrics),
        summary_v2.hparams_pb(plain, trial_id=name),
    )


def _layout() -> Summary:
    # tensorboard's ``custom_scalar.summary.pb`` needs TensorFlow
    from tensorboard.plugins.custom_scalar.layout_pb2 import Category, Chart, Layout, MultilineChartContent
    from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG, create_summary_metadata

    categories = [
        Category(
            title=title,
            chart=[
                # tags are regular expressions there; anchored, as "rollout/em" would find "by_tokens/rollout/em", too
                Chart(title=name, multiline=MultilineChartContent(tag=[f"^{tag}$" for tag in tags]))
                for name, tags in charts.items()
            ],
        )
        for title, charts in LAYOUT.items()
    ]
    return _tensor(CONFIG_SUMMARY_TAG, Layout(category=categories).SerializeToString(), create_summary_metadata())


TRACKERS_FILE = "trackers.json"
PROJECT = "ragr1"
"""Project or experiment if the environment names none."""
SFT_STEP, RL_STEP = "sft/step", "iteration"
"""Steps over which W&B draws the metrics of SFT, and all other metrics."""
_MAX_PARAMETER = 6000
"""Limit of a parameter for MLflow, in characters."""

logger = logging.getLogger(__name__)

Log = Callable[[str, int, Mapping[str, float]], None]
"""Function that takes stage, iteration and metrics, like ``MetricsLogger.log``."""


@contextmanager
def trackers(names: Sequence[str], run_dir: Path, settings: Mapping[str, Any]) -> Iterator[Log]:
    """Yield a function to call with every line of metrics; the trackers' runs end with the block.

    Args:
        names: names from ``debugging.trackers``; if empty, no tracker is imported.
        run_dir: run directory, whose name their runs get.
        settings: hyperparameters to show.

    Raises:
        ConfigError: a tracker is not installed, or did not accept the run.
    """
    with ExitStack() as stack:
        logs = [stack.enter_context(_TRACKERS[name](run_dir, settings)) for name in names]

        def log(stage: str, iteration: int, metrics: Mapping[str, float]) -> None:
            for one in logs:
                one(stage, iteration, metrics)

        yield log


@contextmanager
def _wandb(run_dir: Path, settings: Mapping[str, Any]) -> Iterator[Log]:
    """Yield the function for W&B, whose separate process sends the lines: a call neither waits nor fails."""
    try:
        import wandb
    except ImportError as error:
        raise _not_installed("wandb", error) from error
    run_id = _ids(run_dir).get("wandb", uuid.uuid4().hex[:12])
    try:
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run_id,
            name=run_dir.name,
            dir=run_dir,
            config=dict(settings),
            resume="allow",
            settings=wandb.Settings(console="off"),
        )
    except wandb.Error as error:
        raise ConfigError(
            f"debugging.trackers: W&B did not accept the run: {_reason(error)}; set WANDB_API_KEY, or "
            "WANDB_MODE=offline to write its files only"
        ) from error
    _keep_id(run_dir, "wandb", run_id)
    known: set[str] = set()

    def log(stage: str, iteration: int, metrics: Mapping[str, float]) -> None:
        prefix, step = ("sft/", SFT_STEP) if stage == "sft" else ("", RL_STEP)
        named = {prefix + name: value for name, value in metrics.items()}
        for name in named.keys() - known:  # of the patterns "*" and "sft/*" W&B takes either for a metric of SFT
            run.define_metric(name, step_metric=step)
        known.update(named)
        run.log(named | {step: iteration})

    try:
        yield log
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish(exit_code=0)


@contextmanager
def _mlflow(run_dir: Path, settings: Mapping[str, Any]) -> Iterator[Log]:
    """Yield the function for MLflow, whose thread sends the lines; a line that does not arrive is counted."""
    try:
        from mlflow import MlflowClient
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException
    except ImportError as error:
        raise _not_installed("mlflow-skinny", error) from error
    # by default it tries for minutes, and the end of a run would wait for it
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    try:
        client = MlflowClient()
        run_id = _begin_mlflow(client, run_dir, settings)
    except MlflowException as error:
        raise ConfigError(
            f"debugging.trackers: MLflow did not accept the run: {_reason(error)}; set MLFLOW_TRACKING_URI to the "
            "address of its server"
        ) from error
    sent: list[Any] = []

    def log(stage: str, iteration: int, metrics: Mapping[str, float]) -> None:
        prefix, now_ms = "sft/" if stage == "sft" else "", time.time_ns() // 10**6
        points = [Metric(prefix + name, value, now_ms, iteration) for name, value in metrics.items()]
        sent.append(client.log_batch(run_id, metrics=points, synchronous=False))

    status = "FAILED"
    try:
        yield log
        status = "FINISHED"
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    finally:
        lost = []
        for operation in sent:
            try:
                operation.wait()
            except MlflowException as error:
                lost.append(_reason(error))
        if lost:
            logger.warning("MLflow did not get %d of %d lines of metrics: %s", len(lost), len(sent), lost[-1])
        try:
            client.set_terminated(run_id, status)
        except MlflowException as error:
            logger.warning("MLflow does not know that the run has ended: %s", _reason(error))


def _begin_mlflow(client: MlflowClient, run_dir: Path, settings: Mapping[str, Any]) -> str:
    """Return the id of a new run, or of the run that this run directory had before."""
    from mlflow.entities import Param, RunTag

    before = _ids(run_dir).get("mlflow")
    if before is not None:
        client.update_run(before, status="RUNNING")
        return before
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    experiment = client.get_experiment_by_name(name)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
    run_id: str = client.create_run(experiment_id, run_name=run_dir.name).info.run_id
    parameters = [Param(key, str(value)[:_MAX_PARAMETER]) for key, value in settings.items()]
    client.log_batch(run_id, params=parameters, tags=[RunTag("run_dir", str(run_dir))])
    _keep_id(run_dir, "mlflow", run_id)
    return run_id


_TRACKERS = {"wandb": _wandb, "mlflow": _mlflow}


def _not_installed(package: str, error: ImportError) -> ConfigError:
    return ConfigError(f"debugging.trackers: {error}; run `pip install {package}`")


def _reason(error: Exception) -> str:
    return shortened(str(error).partition("\n")[0], 200)


def _ids(run_dir: Path) -> dict[str, str]:
    path = run_dir / TRACKERS_FILE
    return read_json_as(dict[str, str], path) if path.is_file() else {}


def _keep_id(run_dir: Path, tracker: str, run_id: str) -> None:
    write_json(run_dir / TRACKERS_FILE, _ids(run_dir) | {tracker: run_id})
