"""What of the demonstrations that were played can be learned from."""

from __future__ import annotations

import logging
from collections import Counter

from learners.algorithms.sft import segment as segment_trajectory
from ragr1_actors.core.errors import FleetError
from ragr1_actors.core.types import TrajectoryGroup

logger = logging.getLogger(__name__)


def learnable(groups: list[TrajectoryGroup]) -> tuple[list[TrajectoryGroup], Counter[str]]:
    """Return the groups that hold decisions, and how many of each category: ``{"first_search": 198, ...}``.

    That some failed is logged: what fails in all that answer, such as a reward, would teach never to answer.

    Raises:
        FleetError: there is nothing to learn from.
    """
    kept: list[TrajectoryGroup] = []
    num_decisions: Counter[str] = Counter()
    for group in groups:
        whole = [trajectory for trajectory in group.trajectories if not trajectory.stop_reason.is_failure]
        segments = [segment for trajectory in whole for segment in segment_trajectory(trajectory)]
        num_decisions.update(segment.category.value for segment in segments)
        if segments:
            kept.append(group)
    num_failed = len(groups) - len(kept)
    if num_failed:
        errors = [trajectory.error for group in groups for trajectory in group.trajectories if trajectory.error]
        reason = (
            f"the last one with: {errors[-1]}"
            if errors
            else "their prompts fill env_runners.max_context_tokens: raise it"
        )
        if not kept:
            raise FleetError(f"all {len(groups)} demonstrations failed; {reason}")
        logger.warning("%d of %d demonstrations failed and are not learned from; %s", num_failed, len(groups), reason)
    return kept, num_decisions
