"""Forks: trajectories that begin as another one."""

from __future__ import annotations

from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.types import Trajectory

Fork = tuple[Trajectory, int, str]
"""Parent, the number of its turns that are kept, and a text written into the next turn: ``(one, 2, "Wait,")``."""


def can_fork(parent: Trajectory, num_turns: int) -> bool:
    """Return whether the parent did not fail, and has a turn behind ``num_turns`` others."""
    return not parent.stop_reason.is_failure and 0 <= num_turns < len(parent.turns)


def check_fork(parent: Trajectory, num_turns: int) -> None:
    """Raise a ``ConfigError`` if the parent cannot be forked there."""
    if not can_fork(parent, num_turns):
        raise ConfigError(
            f"got a fork of {parent.trajectory_id}, which ended as {parent.stop_reason.value} after "
            f"{len(parent.turns)} turns, before its turn {num_turns + 1}; expected a parent that did not fail, and "
            "one of its turns"
        )
