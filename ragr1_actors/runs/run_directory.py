"""Making and opening the directory of a run; light, so that mistakes are told before torch and Ray are loaded."""

from __future__ import annotations

from pathlib import Path

import yaml

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import ConfigError, RunDirectoryError
from ragr1_actors.core.files import POLICY_FOLDER
from ragr1_actors.core.resolve import override, resolve
from ragr1_actors.runs.checkpoint import CheckpointStore

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
    except OSError as error:
        raise _cannot_write(run_dir, error) from error
    _write_config(config, run_dir)


def _write_config(config: RunConfig, run_dir: Path) -> None:
    """Whole or not at all: half of it would be another run's configuration to whoever resumes."""
    writing = run_dir / f".writing_{CONFIG_FILE}"
    try:
        writing.write_text(config.to_yaml(), encoding="utf-8")
        writing.rename(run_dir / CONFIG_FILE)
    except OSError as error:
        raise _cannot_write(run_dir, error) from error
    finally:
        writing.unlink(missing_ok=True)


def _cannot_write(run_dir: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(f"cannot write to {_shortened(run_dir)}: {error.strerror}; choose another --run-dir")


def change_learners(run_dir: Path, config: RunConfig, assignments: list[str]) -> RunConfig:
    """Change keys of ``learners`` in a run's configuration, such as the number of ranks that it goes on on.

    Args:
        run_dir: of the run.
        config: what ``open_run_directory`` returned.
        assignments: ``["learners.num_learners=8", "learners.zero_stage=3"]``; not ``learners.lora``, what is trained.

    Raises:
        ConfigError: another key is among them, or one of them cannot be.
        RunDirectoryError: the directory cannot be written.
    """
    for name in (assignment.partition("=")[0] for assignment in assignments):
        if not name.startswith("learners.") or name == "learners.lora":
            raise ConfigError(
                f"got {name}; a resumed run keeps its configuration but for learners.key=value, lora excepted: leave "
                "it out, or start another run"
            )
    changed = resolve(override(config.model_dump(), assignments))
    if changed != config:
        _write_config(changed, run_dir)
    return changed


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
    return resolve(sections)


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
