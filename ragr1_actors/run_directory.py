"""Making and opening the directory of a run; light, so that mistakes are told before torch and Ray are loaded."""

from __future__ import annotations

from pathlib import Path

import yaml

from ragr1_actors.checkpoint import POLICY_FOLDER, CheckpointStore
from ragr1_actors.config import AlgorithmConfig, RunConfig
from ragr1_actors.errors import RunDirectoryError

CONFIG_FILE = "config.yaml"
_START_ANEW = "put the file back, or start a new run in another --run-dir"


def create_run_directory(config: RunConfig, run_dir: Path) -> None:
    """Make the directory of a new run and store the resolved configuration in it.

    Raises:
        RunDirectoryError: it holds a run already, or cannot be made.
    """
    try:
        if (run_dir / CONFIG_FILE).exists():
            raise RunDirectoryError(
                f"{run_dir} holds a run already; go on with it by --resume, or choose another --run-dir"
            )
        run_dir.mkdir(parents=True, exist_ok=True)
        # whole or absent: half of it would be another run's configuration to whoever resumes
        writing = run_dir / f".writing_{CONFIG_FILE}"
        try:
            writing.write_text(config.to_yaml(), encoding="utf-8")
            writing.rename(run_dir / CONFIG_FILE)
        finally:
            writing.unlink(missing_ok=True)
    except OSError as error:
        shown = _shortened(run_dir)
        raise RunDirectoryError(f"cannot write to {shown}: {error.strerror}; choose another --run-dir") from error


def open_run_directory(run_dir: Path) -> RunConfig:
    """Return the configuration of the run in a directory.

    Raises:
        RunDirectoryError: there is no run in it, or its configuration is not whole.
    """
    path = run_dir / CONFIG_FILE
    try:
        if not path.is_file():
            raise RunDirectoryError(f"{run_dir} holds no run (no {CONFIG_FILE}); give the directory that a run printed")
        sections = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunDirectoryError(
            f"{_shortened(path)} cannot be read: {error.strerror}; give the directory that a run printed"
        ) from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:  # ValueError: no UTF-8, or a date that is none
        raise RunDirectoryError(f"{path} is damaged ({' '.join(str(error).split())}); {_START_ANEW}") from error
    if not _is_complete(sections):  # a key that is missing would silently become its default
        raise RunDirectoryError(f"{path} has not just the sections and keys that this version writes; {_START_ANEW}")
    return AlgorithmConfig(sections).freeze()


def find_checkpoint(path: Path) -> tuple[Path, Path]:
    """Return the run directory and the checkpoint that ``path`` names.

    Raises:
        RunDirectoryError: it is neither a run with a checkpoint nor a checkpoint of a run.
    """
    try:
        is_run = (path / CONFIG_FILE).is_file()
    except OSError as error:
        raise RunDirectoryError(
            f"{_shortened(path)} cannot be read: {error.strerror}; give the directory that a run printed"
        ) from error
    if is_run:
        newest = CheckpointStore(path / "checkpoints").latest()
        if newest is None:
            raise RunDirectoryError(f"{path} has no checkpoint yet; let the run go on for a while")
        return path, newest
    run_dir = path.absolute().parent.parent  # RUN/checkpoints/step_10, or best
    if (path / POLICY_FOLDER / "config.json").is_file() and (run_dir / CONFIG_FILE).is_file():
        return run_dir, path
    raise RunDirectoryError(
        f"{path} is neither the directory of a run nor a checkpoint of one; give a folder such as runs/mine or "
        "runs/mine/checkpoints/best"
    )


def _shortened(path: Path) -> str:
    text = str(path)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_complete(sections: object) -> bool:
    fields = RunConfig.model_fields
    return (
        isinstance(sections, dict)
        and sections.keys() == fields.keys()
        and all(
            isinstance(sections[name], dict) and sections[name].keys() == type(field.default).model_fields.keys()
            for name, field in fields.items()
        )
    )
