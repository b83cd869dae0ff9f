"""Run directory: it is made and opened here, its checkpoints are found, its trajectories, starts and orders written.

Imports neither torch nor Ray at the top, so that the command line reports a wrong path within a second.

``ragr1 scale`` and ``ragr1 chaos --run`` order a live run by two small files in its store, which are replaced as a
whole: ``scale.json`` holds the newest order, and ``scaled.json`` the answer to it.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import secrets
import shlex
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import pyarrow as pa
import yaml
from pydantic import BaseModel, ConfigDict, Field

from cluster.storage import is_uri
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.disk.files import INDEX, MCP_FILE, POLICY, POLICY_FOLDER, SFT_POLICY, WRITING, write_file
from ragr1_actors.core.disk.folders import AnyFolder, on_this_node, part_of, reply_to, warn_of_unlisted
from ragr1_actors.core.disk.json_files import read_json_as, read_json_lines, validated, write_json
from ragr1_actors.core.errors import ConfigError, DataError, RunDirectoryError, UserError, one_line, shortened
from ragr1_actors.core.process.imports import installed_version
from ragr1_actors.core.resolve import (
    RENAMED,
    TINY,
    named_folder,
    override,
    path_of,
    read_recipe,
    resolve,
    split_assignment,
)
from ragr1_actors.core.schema import TRAJECTORIES, add_learned, write_trajectories
from ragr1_actors.runs.checkpoint import Checkpoints, read_state
from ragr1_actors.runs.storage.store import RunStore, find_store, split_checkpoint
from ragr1_actors.runs.telemetry.events import FleetName
from ragr1_actors.runs.telemetry.metrics import METRICS_FILE

if TYPE_CHECKING:
    import ray

logger = logging.getLogger(__name__)
T = TypeVar("T", bound=BaseModel)
MAX_REPLICAS = 10_000
_ORDER_FILE, _ANSWER_FILE = "scale.json", "scaled.json"
CONFIG_FILE = "config.yaml"
_MADE_FIRST = (INDEX, POLICY, METRICS_FILE, MCP_FILE, CONFIG_FILE)
"""Files that a run makes before it learns; the configuration is removed last, or a next run would use this index."""
_SHARED = "a file system that all nodes share, or on a storage such as s3://bucket/runs/mine"
_RESTORE_FILE = "put the file back, or start a new run in another --run-dir"
STARTS_FILE = "starts.jsonl"
_PACKAGES = (
    "ragr1-actors",
    "torch",
    "ray",
    "vllm",
    "transformers",
    "deepspeed",
    "faiss-gpu",
    "faiss-cpu",
    "sentence-transformers",
    "numpy",
    "pyarrow",
)
_NONE_IF_EMPTY = {"env_runners.autoscaling", "retrieval.autoscaling", "retrieval.encoder_autoscaling", "learners.lora"}
"""Groups of keys that the last release turned off by ``{}``."""
_OF_SOME_ALGORITHMS = {"training.clip_low", "training.clip_high", "training.tis_clip"}


def create_run_directory(config: RunConfig, run_dir: Path | RunStore) -> None:
    """Make the directory of a new run; ``RunDirectoryError`` if it already holds a run, or cannot be made."""
    store = find_store(run_dir)
    try:
        store.load()
        if (store.path / CONFIG_FILE).exists():
            raise RunDirectoryError(
                f"{store} holds a run already; continue it with --resume, or choose another --run-dir"
            )
        store.path.mkdir(parents=True, exist_ok=True)
        if servers := config.environment.mcp:
            listed = {name: server.tools for name, server in servers.items()}
            write_file(store.path / MCP_FILE, lambda writing: write_json(writing, listed))
    except OSError as error:
        raise _cannot_write(store.path, error) from error
    _write_config(config, store)


def check_shared(run_dir: Path, ask_ranks: Callable[[Path], Collection[str]]) -> None:
    """Check that every learner rank sees the run directory, and that this process sees rank 0's files.

    ``ask_ranks`` is ``LearnerGroup.answer_probe``.
    """
    probe = run_dir / f"{WRITING}probe_{secrets.token_hex(4)}"
    try:
        probe.touch()
        nodes = set(ask_ranks(probe))
        has_reply = reply_to(probe).is_file()
    finally:
        probe.unlink(missing_ok=True)
        reply_to(probe).unlink(missing_ok=True)
    if blind := ", ".join(sorted(nodes - {""})):
        raise UserError(
            f"node {blind} does not see the run directory {run_dir}, or cannot write to it; put --run-dir on {_SHARED}"
        )
    if not has_reply:
        raise UserError(
            f"this node does not see what learner rank 0 writes into the run directory {run_dir}; put --run-dir on "
            f"{_SHARED}"
        )


def stored_tools(run_dir: Path | RunStore) -> dict[str, list[dict[str, Any]]]:
    """Return the tools that each server of ``environment.mcp`` listed before a run, by server; maybe empty."""
    store = find_store(run_dir)
    store.load()
    path = store.path / MCP_FILE
    return read_json_as(dict[str, list[dict[str, Any]]], path) if path.is_file() else {}


@contextmanager
def removed_if_unused(run_dir: Path | RunStore) -> Iterator[None]:
    """Remove the directory of a new run if the block raises ``UserError`` before anything was learned or measured.

    The corrected command can then use its name, and makes a new index and policy.
    """
    store = find_store(run_dir)
    try:
        yield
    except UserError:
        # a person may have removed the directory during the run
        if store.path.is_dir() and _is_unused(store.path):
            for name in _MADE_FIRST:
                if (store.path / name).exists():
                    store.remove(name)
            with suppress(OSError):  # it is a mount point, or another process writes there
                store.path.rmdir()
        raise


def _is_unused(run_dir: Path) -> bool:
    found = {path.name for path in run_dir.iterdir()}
    metrics = run_dir / METRICS_FILE
    return CONFIG_FILE in found and found.issubset(_MADE_FIRST) and not (metrics.exists() and metrics.stat().st_size)


def _write_config(config: RunConfig, store: RunStore) -> None:
    path = store.path / CONFIG_FILE
    try:
        write_file(path, lambda writing: writing.write_text(config.to_yaml(), encoding="utf-8"))
    except OSError as error:
        raise _cannot_write(store.path, error) from error
    store.upload()


def _cannot_write(run_dir: Path, error: OSError) -> RunDirectoryError:
    return RunDirectoryError(f"cannot write to {shortened(str(run_dir))}: {error.strerror}; choose another --run-dir")


def change_learners(run_dir: Path | RunStore, config: RunConfig, assignments: list[str]) -> RunConfig:
    """Change the stored configuration, as in ``["learners.num_learners=8"]``, and return it.

    Raises ``ConfigError`` for a changed key of another section, or ``learners.lora``, on which checkpoints depend.
    """
    for name in (assignment for assignment in assignments if split_assignment(assignment)[1] is None):
        raise _kept(name)
    changed = _with_its_policy(config, resolve(override(config.model_dump(), assignments)))
    for name in _differing(config, changed):
        raise _kept(name)
    if changed != config:
        _write_config(changed, find_store(run_dir))
    return changed


def start_again(store: RunStore, stored: RunConfig, asked: RunConfig) -> RunConfig:
    """Return the configuration of a run that is started again with the same recipe and overrides, and store it.

    Raises ``ConfigError`` as ``as_started``.
    """
    asked = as_started(store, stored, asked)
    if asked != stored:
        _write_config(asked, store)
    return asked


def as_started(store: RunStore, stored: RunConfig, asked: RunConfig) -> RunConfig:
    """Return the configuration that is asked for, with the values that the start of the run chose.

    Raises ``ConfigError`` if it differs from the stored one in more than ``change_learners`` may change.
    """
    if asked.learners.micro_batch_tokens is None:
        chosen = {"micro_batch_tokens": stored.learners.micro_batch_tokens}
        asked = asked.model_copy(update={"learners": asked.learners.model_copy(update=chosen)})
    asked = _with_its_policy(stored, asked)
    if fixed := _differing(stored, asked):
        raise ConfigError(
            f"{store} holds a run with another {' and '.join(fixed)}; give the recipe and overrides that it was "
            "started with, or another --run-dir"
        )
    return asked


def check_recipe(store: RunStore, stored: RunConfig, recipe: str) -> str:
    """Refuse to continue a run with a recipe other than its own; the overrides of its start need not be given again.

    Returns:
        A note for people if the run does not store the overrides of its start, else "".

    Raises:
        ConfigError: the recipe is unknown, or a different one; the message says what differs.
    """
    words = next((start.words for start in read_starts(store.path)), ())
    differing = _differing(stored, _with_its_policy(stored, resolve(override(read_recipe(recipe), words[1:]))))
    if not differing:
        return ""
    named = " and ".join(differing if len(differing) < 4 else [*differing[:3], f"{len(differing) - 3} other keys"])
    if not words:
        return f"{recipe} has another {named} than the run, which goes on with its own configuration"
    raise ConfigError(
        f"{store} was started by {shlex.join(words)}, and {recipe} has another {named}; name its own recipe, or start "
        "another run in another --run-dir"
    )


def _with_its_policy(stored: RunConfig, asked: RunConfig) -> RunConfig:
    """Return ``asked`` with the policy at the start of the run, if it names the run or checkpoint with that policy.

    Only paths are compared: the run has a copy, and the other policy may no longer exist.
    """
    named, began_with = path_of(asked.policy.model, *TINY), Path(stored.policy.model)
    if named is None or named.absolute() not in (began_with.parent, *began_with.parents[2:3]):
        return asked
    policy = asked.policy.model_copy(update={"model": stored.policy.model})
    return asked.model_copy(update={"policy": policy})


def _differing(stored: RunConfig, asked: RunConfig) -> list[str]:
    """Return the keys whose value differs, except those that a resumed run may change."""
    before = stored.model_dump()
    return [
        f"{section}.{key}"
        for section, keys in asked.model_dump().items()
        for key, value in keys.items()
        if value != before[section][key] and (section != "learners" or key == "lora")  # checkpoints depend on adapters
    ]


def _kept(name: str) -> ConfigError:
    return ConfigError(
        f"got {name}; a resumed run keeps its configuration, and takes only learners.key=value without lora: leave it "
        "out, or start another run"
    )


def holds_run(store: RunStore) -> bool:
    """Return whether a run was started in a place; raises ``UserError`` if it cannot be reached."""
    try:
        store.load()
        return (store.path / CONFIG_FILE).is_file()
    except OSError:  # for example the path is too long: making the directory says so
        return False


def open_run_directory(run_dir: Path | RunStore) -> RunConfig:
    """Return the configuration of the run in a directory; ``RunDirectoryError`` if it is missing or damaged."""
    store = find_store(run_dir)
    sections = as_this_release(_read_sections(store))
    if not _is_complete(sections):  # a missing key would silently get its default
        raise RunDirectoryError(
            f"{store.path / CONFIG_FILE} has other sections or keys than this version of ragr1 writes; {_RESTORE_FILE}"
        )
    return resolve(sections)


def refuse_last_release(store: RunStore) -> None:
    """Raise a ``RunDirectoryError`` if the last release began the run: it can be read, but not resumed."""
    if is_of_last_release(_read_sections(store)):
        raise RunDirectoryError(
            f"{store} is a run of the last release, which this one reads but does not resume; start another run from "
            f"its newest policy: policy.model={store}"
        )


def _read_sections(store: RunStore) -> Any:
    path = store.path / CONFIG_FILE
    store.load()
    try:
        if not path.is_file():
            raise RunDirectoryError(f"{store} holds no run (no {CONFIG_FILE}); give the directory that a run printed")
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RunDirectoryError(
            f"{shortened(str(path))} cannot be read: {error.strerror}; give the directory that a run printed"
        ) from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:  # ValueError: not UTF-8, or an impossible date
        raise RunDirectoryError(f"{path} is damaged ({one_line(error)}); {_RESTORE_FILE}") from error


def find_checkpoint(name: str | Path) -> tuple[RunStore, Path]:
    """Return a run and the folder of a policy, for the path or URI of the run, of a checkpoint, or of that folder.

    It takes the newest checkpoint of a run. Raises ``RunDirectoryError`` if there is none, or for another path.
    """
    store, folder, part = _find(name)
    policy_dir = Path(on_this_node(part_of(folder, part))) / part
    warn_of_unlisted(policy_dir)
    return store, policy_dir


def steps_in_sft(name: str | Path) -> tuple[int, int] | None:
    """Return how many steps of SFT a policy has learned, and of how many, such as ``(12, 300)``.

    ``name`` is as in ``find_checkpoint``. Return None if the stage had ended or is missing, or the state is damaged.
    """
    store, folder, part = _find(name)
    if not part:
        return None
    num_steps = open_run_directory(store).sft.num_steps
    try:
        done = read_state(folder).sft_step
    except DataError:  # no hindrance for the policy
        return None
    return (done, num_steps) if done < num_steps else None


def run_of_policy(folder: Path) -> Path | None:
    """Return the run to which a policy's folder belongs, as ``policy_sft`` or in a checkpoint; None without one."""
    absolute = folder.absolute()
    parents = (absolute.parent, *absolute.parents[2:3])
    return next((parent for parent in parents if (parent / CONFIG_FILE).is_file()), None)


def with_newest_policy(config: RunConfig) -> RunConfig:
    """Return the configuration with the folder of the policy, if ``policy.model`` is a run or one of its checkpoints.

    Raises ``RunDirectoryError`` if the run has no checkpoint yet.
    """
    try:
        folder = named_folder(config.policy.model, *TINY)
    except OSError:  # for example the name is too long: the checks of the configuration say so
        return config
    if folder is None or (folder / "config.json").is_file():
        return config
    if not (folder / CONFIG_FILE).is_file() and not (folder / POLICY_FOLDER / "config.json").is_file():
        return config
    model = str(find_checkpoint(folder)[1].absolute())
    return config.model_copy(update={"policy": config.policy.model_copy(update={"model": model})})


def _find(name: str | Path) -> tuple[RunStore, AnyFolder, str]:
    """Return a run, a folder in it, and the part with the policy: ``policy``, or "" for the whole folder."""
    return _find_stored(str(name)) if is_uri(str(name)) else _find_local(Path(name))


def _find_stored(uri: str) -> tuple[RunStore, AnyFolder, str]:
    run_uri, inside = split_checkpoint(uri)
    if inside and not holds_run(RunStore(run_uri)) and holds_run(RunStore(uri)):
        run_uri, inside = uri, ""  # a run in a folder of this name
    store = RunStore(run_uri)
    open_run_directory(store)
    found = store.find(inside) if inside else Checkpoints(store).latest()
    if found is None:
        kind = inside if inside == SFT_POLICY else f"checkpoint {inside.rpartition('/')[2]}"
        raise RunDirectoryError(
            f"{store} has no {kind}".rstrip()
            + (" yet; let the run continue until it has written one" if not inside else "; leave its name out")
        )
    return store, found, "" if inside == SFT_POLICY else POLICY_FOLDER


def _find_local(path: Path) -> tuple[RunStore, AnyFolder, str]:
    try:
        is_run = (path / CONFIG_FILE).is_file()
    except OSError as error:
        raise RunDirectoryError(
            f"{shortened(str(path))} cannot be read: {error.strerror}; give the directory that a run printed"
        ) from error
    if is_run:
        newest = Checkpoints(store := RunStore(path)).latest()
        if newest is None:
            raise RunDirectoryError(f"{path} has no checkpoint yet; let the run continue until it has written one")
        return store, newest, POLICY_FOLDER
    run_dir = path.absolute().parent.parent  # RUN/checkpoints/step_10, or best
    if (path / POLICY_FOLDER / "config.json").is_file() and (run_dir / CONFIG_FILE).is_file():
        return RunStore(run_dir), _behind_link(path), POLICY_FOLDER
    if (path / "config.json").is_file() and (found := run_of_policy(path)) is not None:
        folder, store = path.absolute().parent, RunStore(found)
        return (store, path, "") if folder == found else (store, _behind_link(folder), POLICY_FOLDER)
    raise RunDirectoryError(
        f"{path} is neither the directory of a run nor a checkpoint of one; give a folder such as runs/mine, "
        "runs/mine/checkpoints/best or runs/mine/policy_sft"
    )


def _behind_link(checkpoint: Path) -> Path:
    """Return the checkpoint that ``best`` names now: a training moves the link."""
    return checkpoint.resolve() if checkpoint.is_symlink() else checkpoint


def keep_trajectories(
    run_dir: Path,
    name: str,
    batches: Sequence[pa.RecordBatch | ray.ObjectRef[pa.RecordBatch]],
    learned: pa.RecordBatch | None = None,
) -> None:
    """Write record batches, or references to them, as ``trajectories/<name>.arrow``, whole or not at all.

    ``learned`` has the learner's values per token, in ``LEARNED_SCHEMA``.
    """
    directory = run_dir / TRAJECTORIES
    directory.mkdir(exist_ok=True)
    fetched = fetch_batches(batches)
    if learned is not None:
        fetched = add_learned(fetched, learned)
    write_file(directory / f"{name}.arrow", lambda writing: write_trajectories(writing, fetched))


def fetch_batches(batches: Sequence[pa.RecordBatch | ray.ObjectRef[pa.RecordBatch]]) -> list[pa.RecordBatch]:
    """Return record batches; if they are given as references, fetch all but those that a node took with it."""
    if not batches or isinstance(batches[0], pa.RecordBatch):  # sampled in the driver
        return list(batches)
    import ray
    from ray.exceptions import ObjectLostError

    try:
        return ray.get(list(batches))  # of calls that have ended: no actor is waited for
    except ObjectLostError as error:
        logger.warning("a lost node held trajectories that are not written: %s", one_line(error))
    here = []
    for batch in batches:
        with suppress(ObjectLostError):
            here.append(ray.get(batch))
    return here


def _is_complete(sections: object) -> bool:
    if not isinstance(sections, dict) or not all(isinstance(keys, dict) for keys in sections.values()):
        return False
    expected = {name: keys.keys() for name, keys in RunConfig().model_dump().items()}
    return {name: keys.keys() for name, keys in sections.items()} == expected


def is_of_last_release(sections: Any) -> bool:
    """Return whether the last release wrote the content of a ``config.yaml``; False if it is damaged."""
    is_whole = isinstance(sections, dict) and all(isinstance(keys, dict) for keys in sections.values())
    return is_whole and "world_seed" in sections.get("environment", {})


def as_this_release(sections: Any) -> Any:
    """Return the content of a ``config.yaml`` in the keys of this release, to which it may already belong."""
    if not is_of_last_release(sections):
        return sections
    now: dict[str, dict[str, Any]] = RunConfig().model_dump()
    old = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    for name in sorted(old, key=RENAMED.__contains__):  # keys that move into options follow the options
        if name in _OF_SOME_ALGORITHMS and not old[name]:
            continue  # the default, which other algorithms do not have
        moved_to, *path = RENAMED.get(name, name).split(".")
        inner = now.setdefault(moved_to, {})
        for part in path[:-1]:
            inner = inner[part]
        inner[path[-1]] = None if name in _NONE_IF_EMPTY and not old[name] else old[name]
    environment = now["environment"]
    if environment["env"] in ("direct", "rag"):
        environment["options"]["mode"], environment["env"] = environment["env"], "search"
    seed = environment.pop("world_seed")
    if seed and environment["tasks"] == "world":
        environment["tasks"] = [{"source": "world", "options": {"seed": seed}}]
    return now


@dataclass(frozen=True, slots=True)
class Start:
    """Process that trained: ``Start(1790000000.0, "node-7", "Linux-6.8 x86_64", 16, "3.11.7", {"torch": "2.13.0"})``.

    The machine is the driver's; runners, retrievers and learners may be on others.
    """

    time_s: float
    """Unix time."""
    host: str
    system: str
    num_cpus: int
    python: str
    versions: dict[str, str]
    """Versions of the installed packages, by name."""
    words: tuple[str, ...] = ()
    """Recipe and overrides that began the run, as given; empty if the run began earlier, or without them."""


def this_start(words: Sequence[str] = ()) -> Start:
    """Return a description of this process and its machine; ``words`` are the recipe and overrides of the run."""
    versions = {name: version for name in _PACKAGES if (version := installed_version(name))}
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    machine = (socket.gethostname(), system, os.cpu_count() or 1, platform.python_version())
    return Start(time.time(), *machine, versions, tuple(words))


def append_start(run_dir: Path, start: Start) -> None:
    """Append a line to ``starts.jsonl``."""
    with (run_dir / STARTS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(start)) + "\n")


def read_starts(run_dir: Path) -> tuple[Start, ...]:
    """Return the starts of a run, without a line that a crash cut off; empty if the run has no such file.

    Raises:
        DataError: a line is damaged.
    """
    path = run_dir / STARTS_FILE
    return tuple(read_json_lines(Start, path, "delete the file")) if path.is_file() else ()


class ScaleOrder(BaseModel):
    """Order of a person to a live run."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    order_id: str
    """Unique id."""
    sizes: dict[FleetName, Annotated[int, Field(ge=1, le=MAX_REPLICAS)]] = {}
    """Sizes of the named fleets; the others keep theirs. Empty gives all fleets back to their autoscalers."""
    kill: FleetName | Literal["learners"] | None = None
    """Kind of which an actor is killed; then nothing else is done."""


class ScaleAnswer(BaseModel):
    """Answer of the run to the order with the same id."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    order_id: str
    message: str
    """Text ``runners 2 -> 8``, or the reason of a refusal."""
    is_refused: bool = False


def write_order(store: RunStore, order: ScaleOrder) -> None:
    """Replace the order of a run; raises ``UserError`` or ``OSError`` if its store cannot be written to."""
    store.write_now(_ORDER_FILE, order.model_dump_json())


def read_order(store: RunStore) -> ScaleOrder | None:
    """Return the newest order of a run, or None.

    Raises:
        DataError: it is damaged.
        UserError: the store cannot be reached.
    """
    return _read(ScaleOrder, store, _ORDER_FILE)


def order_in_force(store: RunStore) -> ScaleOrder | None:
    """Return the newest order if it has sizes that were not refused, which the run takes when it is continued."""
    try:
        order, answer = read_order(store), read_answer(store)
    except DataError:  # it is replaced
        return None
    if order is None or not order.sizes:
        return None
    return None if answer is not None and answer.order_id == order.order_id and answer.is_refused else order


def withdraw_order(store: RunStore, order_id: str) -> None:
    """Remove the order if it is still the newest, so that a run that continues later does not find it."""
    newest = read_order(store)
    if newest is not None and newest.order_id == order_id:
        store.remove_now(_ORDER_FILE)


def write_answer(store: RunStore, answer: ScaleAnswer) -> None:
    """Replace the answer of a run; errors as in ``write_order``."""
    store.write_now(_ANSWER_FILE, answer.model_dump_json())


def read_answer(store: RunStore) -> ScaleAnswer | None:
    """Return the newest answer of a run, or None; errors as in ``read_order``."""
    return _read(ScaleAnswer, store, _ANSWER_FILE)


def _read(kind: type[T], store: RunStore, name: str) -> T | None:
    content = store.read_now(name)
    return None if content is None else validated(kind, content, f"{store}/{name}")
