"""Groups for tasks that are not trained on: what evaluation and the selection of tasks share."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import FleetError
from ragr1_actors.core.types import Task
from ragr1_actors.rollout.env_runner import GroupRequest
from ragr1_actors.rollout.env_runner_group import EnvRunnerGroup, FinishedGroup
from ragr1_actors.rollout.task_sampler import Issue

logger = logging.getLogger(__name__)

OnGroup = Callable[[FinishedGroup], None]


def sample_tasks(
    env_runners: EnvRunnerGroup,
    settings: RunConfig,
    tasks: Sequence[Task],
    num_trajectories: int,
    temperature: float,
    on_group: OnGroup,
    aside: OnGroup,
) -> int:
    """Sample a group for each task and return how many tasks never came to their end.

    Args:
        env_runners: sample.
        settings: of the run.
        tasks: each is sampled again where a trajectory failed, ``env_runners.max_task_retries`` times at most.
        num_trajectories: of a group.
        temperature: 0 is greedy.
        on_group: called with every group as it comes, those with a failure in them included.
        aside: called with the groups of stage 2 that come meanwhile.

    Raises:
        FleetError: no task came to its end.
    """
    left = list(tasks)
    num_attempts = 1 + settings.env_runners.max_task_retries
    room = 4 * max(1, settings.env_runners.num_env_runners) * settings.env_runners.max_concurrent_trajectories
    for attempt in range(num_attempts):
        requests = [GroupRequest(Issue(task.task_id, task, 0, attempt), num_trajectories, temperature) for task in left]
        failed = _sample(env_runners, requests, max(1, room // num_trajectories), on_group, aside)
        left = [group.request.issue.task for group in failed]
        if not left:
            return 0
    message = f"{len(left)} of {len(tasks)} evaluation tasks failed {num_attempts} times"
    message += f"; the last one with: {failed[-1].summary.errors[-1]}"
    if len(left) == len(tasks):
        raise FleetError(message)
    logger.warning("%s", message)
    return len(left)


def _sample(
    env_runners: EnvRunnerGroup, requests: list[GroupRequest], max_unfinished: int, on_group: OnGroup, aside: OnGroup
) -> list[FinishedGroup]:
    """Return the groups with a failure in them."""
    waiting, open_ids = deque(requests), {request.issue.issue_id for request in requests}
    failed: list[FinishedGroup] = []
    while open_ids:
        while waiting and env_runners.num_unfinished < max_unfinished:
            env_runners.submit(waiting.popleft())
        for group in env_runners.collect():
            if group.request.issue.issue_id not in open_ids:
                aside(group)
                continue
            open_ids.remove(group.request.issue.issue_id)
            on_group(group)
            if group.summary.num_failed:
                failed.append(group)
    return failed
