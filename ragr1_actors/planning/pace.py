"""How long the parts of a run take. ``plan.py`` computes a ``Pace``, ``simulation/recorded.py`` reads one from a run.

::

    EnginePace    a decode step of an engine, by its rows; a token of a prompt
    SearchPace    a batch of queries at a retriever, by its size
    LearnerPace   an update, by the trajectories of its batch; a weight sync
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EnginePace:
    """An engine that decodes all its rows in step."""

    base_s: float
    """A decode step, however many rows there are: the weights are read."""
    row_s: float
    """What each row adds to a step: its cache is read."""
    prefill_s: float = 0.0
    """A token of a prompt or observation, for which all rows wait; 0 if it is in the two above."""
    start_s: float = 0.0
    """From the start of a runner until it takes requests."""

    def step_s(self, num_rows: float) -> float:
        """Return the seconds in which each of ``num_rows`` rows samples a token."""
        return self.base_s + self.row_s * num_rows


@dataclass(frozen=True, slots=True)
class SearchPace:
    """A retriever that answers one batch after another."""

    batch_s: Callable[[int], float]
    """Seconds of a batch of so many queries, in which the retriever takes no other."""
    overhead_s: float = 0.0
    """What the caller waits besides."""
    start_s: float = 0.0
    """From the start of a retriever until it is searched."""


@dataclass(frozen=True, slots=True)
class LearnerPace:
    """The learner group, all ranks together."""

    trajectory_s: float
    """Of an update, per trajectory of the batch."""
    publish_s: float
    """A weight sync, during which the engines do not generate."""
    other_s: float = 0.0
    """What an iteration takes besides: files, metrics."""


@dataclass(frozen=True, slots=True)
class Pace:
    """All parts of a run."""

    engine: EnginePace
    search: SearchPace
    learner: LearnerPace


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one iteration, by part; estimates from peaks and bandwidths."""

    generation_s: float
    """0 without GPUs, as is ``learning_s``: CPUs are not estimated."""
    search_s: float
    batch_search_s: float
    """One batch of concurrent queries at one replica."""
    learning_s: float
    timeout_s: float
    """``retrieval.requests.timeout_s``, which a batch must keep."""
    index_s: float = 0.0
    """Encoding the passages once, before the run, on all GPUs; 0 without GPUs, without an encoder, and if the index
    is there."""
    remedy: str = ""
    """The nearest setting with which searches are fast enough, where they are not."""

    @property
    def is_too_slow(self) -> bool:
        """Whether a batch of searches would exceed its timeout."""
        return self.batch_search_s > self.timeout_s

    @property
    def problem(self) -> str:
        """What is too slow, or nothing."""
        remedy = self.remedy or "take more retrievers, or more CPUs or GPUs for each"
        if self.is_too_slow:
            return (
                f"a batch of searches takes {self.batch_search_s:.1f} s, more than retrieval.requests.timeout_s "
                f"({self.timeout_s:g}); {remedy}"
            )
        if 0 < self.generation_s / 3 < self.search_s:
            return (
                f"searches take {self.search_s:.1f} s per iteration, more than a third of generation "
                f"({self.generation_s:.1f} s); {remedy}"
            )
        return ""
