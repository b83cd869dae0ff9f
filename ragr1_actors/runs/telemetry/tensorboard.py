"""TensorBoard run of a training run: its event file, and the layout of its page of custom scalars.

A training run is one run in TensorBoard. Tags of SFT begin with ``sft/``. The step of other tags is the iteration of
RL, or for tags that begin with ``by_tokens/`` the number of tokens trained in RL. TensorBoard also draws each tag over
wall time.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ragr1_actors.core.types import Bucket

if TYPE_CHECKING:
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
