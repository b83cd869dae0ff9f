"""What a trained policy is used for without a learner: ``ragr1 evaluate`` and ``ragr1 ask``.

Both sample in this process, with a ``Sampler`` over the checkpoint's policy and the run's index.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from envs.tasks import load_tasks
from ragr1_actors.core.config import RunConfig, SamplerConfig
from ragr1_actors.core.errors import DataError
from ragr1_actors.core.files import POLICY_FOLDER
from ragr1_actors.core.schema import groups_from_record_batch
from ragr1_actors.core.types import Task, Trajectory
from ragr1_actors.rollout.env_runner import GroupRequest, GroupSummary
from ragr1_actors.rollout.env_runner_group import FinishedGroup
from ragr1_actors.rollout.sampler import Sampler
from ragr1_actors.rollout.task_sampler import Issue
from ragr1_actors.runs.metrics import mean_over
from ragr1_actors.runs.report import EvalResult
from ragr1_actors.runs.run_directory import find_checkpoint, open_run_directory
from ragr1_actors.training.data import WORLD, prepare_index, split_tasks
from ragr1_actors.training.preflight import check_sampler


def evaluate(
    path: Path, *, tasks: Path | None = None, index: Path | None = None, num_tasks: int | None = None
) -> EvalResult:
    """Answer tasks greedily with a checkpoint, as its run does at the end of a stage. Nothing is written.

    Args:
        path: a run directory, whose newest checkpoint is taken; or one of its checkpoints, such as
            ``runs/mine/checkpoints/best``.
        tasks: a task file; None takes the tasks that the run held out.
        index: an index directory; None takes the run's own.
        num_tasks: the number of tasks; None takes as many as the run evaluates.

    Raises:
        UserError: there is no such run or checkpoint, or a file cannot be used.
    """
    run_dir, checkpoint = find_checkpoint(path)
    run = open_run_directory(run_dir)
    config = sampler_config(run, run_dir, index)
    check_sampler(config, has_index=True)
    found = evaluation_tasks(run, tasks, num_tasks)
    groups: list[FinishedGroup] = []
    with Sampler(config, checkpoint / POLICY_FOLDER, prepare_index(config, run_dir)) as sampler:
        num_failed = sampler.sample_tasks(found, 1, 0.0, groups.append)
    return eval_result([group.summary for group in groups], num_failed)


def ask(path: Path, question: str) -> Trajectory:
    """Answer ``question`` greedily with the newest checkpoint of a run, or with the checkpoint that is named.

    Raises:
        RunDirectoryError: there is no run, or it has no checkpoint yet.
    """
    run_dir, checkpoint = find_checkpoint(path)
    config = sampler_config(open_run_directory(run_dir), run_dir)
    with Sampler(config, checkpoint / POLICY_FOLDER, prepare_index(config, run_dir)) as sampler:
        sampler.env_runners.submit(GroupRequest(Issue("ask", Task("ask", question, ()), 0), 1, 0.0))
        (finished,) = sampler.env_runners.collect()
    (group,) = groups_from_record_batch(finished.batch)
    return group.trajectories[0]


def sampler_config(run: RunConfig, run_dir: Path, index: Path | None = None) -> SamplerConfig:
    """Return what is needed to sample in this process as a run does, without its fleets.

    Args:
        run: the run's configuration.
        run_dir: its directory; ``index`` in it is used if the run has built one.
        index: an index directory; None takes the run's own.
    """
    return SamplerConfig(
        environment=run.environment,
        policy=run.policy,
        env_runners=run.env_runners.model_copy(update={"num_env_runners": 0}),
        retrieval=run.retrieval.model_copy(
            update={"num_retrievers": 0, "index": str(index or run.retrieval.index or run_dir / "index")}
        ),
        debugging=run.debugging,
    )


def evaluation_tasks(run: RunConfig, tasks: Path | None, num_tasks: int | None) -> tuple[Task, ...]:
    """Return the first ``num_tasks`` tasks of a file, or of those that a run held out.

    Raises:
        DataError: the file cannot be used; more tasks are asked for than the run held out of its task file.
    """
    num_held_out, environment = run.evaluation.num_tasks, run.environment
    count = num_tasks or num_held_out
    if tasks is not None:
        if not tasks.is_file():
            raise DataError(f"there is no file {tasks}; --tasks wants a task file (JSON or JSONL)")
        return load_tasks(tasks).tasks[:count]
    if count > num_held_out and environment.tasks != WORLD and not environment.eval_tasks:
        raise DataError(
            f"the run held {num_held_out:,} tasks out, got --num-tasks {count}: the rest it was trained on; ask for "
            "fewer, or name a file with --tasks"
        )
    _, held_out, _ = split_tasks(run, max(count, num_held_out))
    return held_out[:count]


def eval_result(summaries: Sequence[GroupSummary], num_failed: int) -> EvalResult:
    """Average the groups without a failed trajectory; ``num_failed`` tasks have none."""
    answered = [summary for summary in summaries if not summary.num_failed]
    mean = mean_over([summary.means for summary in answered])
    rounds = mean["rounds"]
    return EvalResult(
        em=mean["em"],
        f1=mean["f1"],
        rounds=rounds,
        queries_per_round=mean["queries"] / rounds if rounds else 0.0,
        queries=mean["queries"],
        tokens=mean["tokens"],
        num_tasks=len(answered),
        num_failed=num_failed,
    )
