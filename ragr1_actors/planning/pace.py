"""Pace: seconds of the parts of a run. ``plan.py`` computes one; ``lab/simulation/recorded.py`` reads one from a run.

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
    """Engine that decodes all its rows in step."""

    base_s: float
    """Seconds of a decode step for any number of rows: the weights are read."""
    row_s: float
    """Seconds that each row adds to a step: its cache is read."""
    prefill_s: float = 0.0
    """Seconds of a token of a prompt or observation, for which all rows wait; 0 if the two above contain it."""
    start_s: float = 0.0
    """Seconds from the start of a runner until it takes requests."""

    def step_s(self, num_rows: float) -> float:
        """Return the seconds in which each of ``num_rows`` rows samples a token."""
        return self.base_s + self.row_s * num_rows


@dataclass(frozen=True, slots=True)
class SearchPace:
    """Retriever that answers one batch after another."""

    batch_s: Callable[[int], float]
    """Function of the number of queries that returns the seconds of a batch, in which no other is taken."""
    overhead_s: float = 0.0
    """Seconds that the caller waits in addition."""
    start_s: float = 0.0
    """Seconds from the start of a retriever until it is searched."""


@dataclass(frozen=True, slots=True)
class LearnerPace:
    """Learner group with all its ranks."""

    trajectory_s: float
    """Seconds of an update, per trajectory of the batch."""
    publish_s: float
    """Seconds of a weight sync, during which the engines do not generate."""
    other_s: float = 0.0
    """Seconds of an iteration for files and metrics."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Paces of all parts of a run."""

    engine: EnginePace
    search: SearchPace
    learner: LearnerPace


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one iteration, by part; estimates from peaks and bandwidths."""

    generation_s: float
    """Seconds of generation; 0 without GPUs, like ``learning_s``: CPUs are not estimated."""
    search_s: float
    batch_search_s: float
    """Seconds of one batch of concurrent queries at one replica."""
    learning_s: float
    timeout_s: float
    """Value of ``retrieval.requests.timeout_s``, within which a batch must be answered."""
    index_s: float = 0.0
    """Seconds of encoding the passages once, before the run, on all GPUs; 0 without GPUs, without an encoder, and if
    the index exists."""
    remedy: str = ""
    """Nearest setting with which searches are fast enough, if they are not."""

    @property
    def is_too_slow(self) -> bool:
        """Whether a batch of searches would exceed its timeout."""
        return self.batch_search_s > self.timeout_s

    @property
    def problem(self) -> str:
        """Sentence about what is too slow, or an empty text."""
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
