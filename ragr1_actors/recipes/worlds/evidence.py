"""The evidence of a task: what of it some passages are, and the recall that several methods measure."""

from __future__ import annotations

from collections.abc import Sequence

from ragr1_actors.core.types import Record, Task, Trajectory
from retrieval.corpora.text import found_evidence


def evidence_in(task: Task, records: Sequence[Record]) -> set[str]:
    """Return those of the task's ``supporting_ids`` that some passages are: ``{"p1"}``."""
    return found_evidence(set(task.supporting_ids), [one.id for one in records], [one.title for one in records])


def recall(trajectory: Trajectory) -> float:
    """Return the share of the evidence that the calls of a trajectory brought, in [0, 1]; 0 where none is known."""
    brought = [record for call in trajectory.calls for record in call.records]
    return len(evidence_in(trajectory.task, brought)) / max(1, len(trajectory.task.supporting_ids))
