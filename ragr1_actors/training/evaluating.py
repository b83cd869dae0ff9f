"""One evaluation of a policy that a run has trained, in this process and without a learner."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import DataError
from ragr1_actors.runs.report import EvalResult
from ragr1_actors.runs.run_directory import find_checkpoint, open_run_directory
from ragr1_actors.training.algorithm import Algorithm
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from ragr1_actors.training.preflight import check_names


def evaluate(
    path: Path, *, tasks: Path | None = None, index: Path | None = None, num_tasks: int | None = None
) -> EvalResult:
    """Answer tasks greedily with a checkpoint, as the run that wrote it does at the end of a stage.

    Args:
        path: a run directory, of which the newest checkpoint is taken, or one of its checkpoints, such as
            ``runs/mine/checkpoints/best``.
        tasks: a task file; without it, the tasks that the run held out.
        index: an index directory; without it, the run's own.
        num_tasks: the first of them; without it, as many as the run takes.

    Raises:
        UserError: there is no such run or checkpoint, or a file cannot be used.
    """
    run_dir, checkpoint = find_checkpoint(path)
    config = evaluation_config(open_run_directory(run_dir), run_dir, checkpoint, tasks, index, num_tasks)
    check_names(config)
    with tempfile.TemporaryDirectory(prefix="ragr1-") as scratch:  # the run is left as it is
        algorithm = Algorithm(config, Path(scratch), learns=False)
        try:
            return algorithm.evaluate()
        finally:
            algorithm.stop()


def evaluation_config(
    config: RunConfig, run_dir: Path, checkpoint: Path, tasks: Path | None, index: Path | None, num_tasks: int | None
) -> RunConfig:
    """Return the run's configuration, changed so that it evaluates a checkpoint in one process and writes nothing."""
    sections = config.model_dump()
    environment, retrieval, evaluation = sections["environment"], sections["retrieval"], sections["evaluation"]
    sections["policy"]["model"] = str(checkpoint / "policy")
    sections["env_runners"]["num_env_runners"] = sections["learners"]["num_learners"] = 0
    sections["env_runners"]["weight_transport"] = "object_store"  # there is no fleet to broadcast to
    sections["checkpointing"]["keep_trajectories"] = False
    retrieval["num_retrievers"] = 0
    if index is not None:
        retrieval["index"] = str(index)
    elif not retrieval["index"] and (run_dir / "index").is_dir():
        retrieval["index"] = str(run_dir / "index")
    if num_tasks is not None:
        is_of_one_file = environment["tasks"] != "world" and not environment["eval_tasks"]
        if num_tasks > evaluation["num_tasks"] and tasks is None and is_of_one_file:
            raise DataError(
                f"the run held {evaluation['num_tasks']:,} tasks out, got --num-tasks {num_tasks}: the rest it was "
                "trained on; ask for fewer, or name a file with --tasks"
            )
        evaluation["num_tasks"] = num_tasks
    if tasks is not None:
        environment["eval_tasks"] = str(tasks)
        environment["tasks"] = "world"  # none of it is used; the run's own file may be gone, or be this one
    return AlgorithmConfig(sections).freeze()
