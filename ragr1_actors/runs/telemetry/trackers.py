"""Weights & Biases and MLflow: they get every line of metrics, too, if ``debugging.trackers`` names them.

Server, project and key come from their environment variables (``WANDB_PROJECT``, ``MLFLOW_TRACKING_URI``). A resumed
run continues in the same run there: ``trackers.json`` in the run directory has its id.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragr1_actors.core.disk.json_files import read_json_as, write_json
from ragr1_actors.core.errors import ConfigError, shortened

if TYPE_CHECKING:
    from mlflow import MlflowClient

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
