"""Where a run is kept: in a folder of this machine, or at a URI that every node reaches.

::

    Place          path                     checkpoints                 what actors get
    LocalPlace     the run directory        folders, by rename          its paths; small folders by the object store
    StoredPlace    a folder of this process objects, by their listings  folders on the storage

Every writer of a run's files writes into ``Place.path``. A ``StoredPlace`` uploads there what changed: an object store
can neither append nor rename. The rest of a run does not know which place it has.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Protocol, Self
from urllib.parse import urlsplit

from cluster import leftovers
from cluster.node_cache import FileContent, NodeCache
from cluster.storage import Artifact, Storage, StorageSink, check_uri, is_uri, share, with_name
from ragr1_actors.core.digests import Digests, digest_files, write_list
from ragr1_actors.core.errors import UserError
from ragr1_actors.core.files import (
    POLICY_FILES,
    POLICY_FOLDER,
    WRITING,
    rank_part,
    write_folder,
    write_json,
)
from ragr1_actors.core.folders import AnyFolder, Sink
from ragr1_actors.core.schema import TRAJECTORIES
from ragr1_actors.runs.checkpoint import BEST, SCORE_FILE, Checkpoints, CheckpointStore, read_score
from ragr1_actors.runs.lease import Lease
from ragr1_actors.runs.telemetry.tensorboard import TENSORBOARD_DIRECTORY
from ragr1_actors.runs.telemetry.trackers import TRACKERS_FILE

UPLOAD_INTERVAL_S = 30.0
"""Between two uploads of what changed; a checkpoint uploads too."""
CHECKPOINTS = "checkpoints"
INDEX = "index"
POLICY = "policy"
"""The policy before training, if the run made it."""
SFT_POLICY = "policy_sft"
"""The policy at the end of SFT."""
FOLDERS = (INDEX, POLICY, SFT_POLICY, CHECKPOINTS)
"""What is whole or absent in a run; everything else is files that grow."""
MCP_FILE = "mcp_tools.json"
"""The tools that each server of ``environment.mcp`` listed before the run."""
_FIRST_FILES = ("config.yaml", MCP_FILE, "starts.jsonl", "metrics.jsonl", "report.json", "report.html", TRACKERS_FILE)
"""The files of an earlier process that this one reads, or goes on with."""
_DRIVER, _LIST = "driver", "list"
_LISTING = re.compile(rf"{CHECKPOINTS}/step_(\d+)\.json")

logger = logging.getLogger(__name__)


class Place(Protocol):
    """Where one run is kept. As a context manager it is kept up to date until the block ends."""

    path: Path
    """The folder of this machine into which the files of the run are written."""
    is_shared: bool
    """Whether learner ranks must see ``path``."""

    def __str__(self) -> str:
        """Return the path, or the URI without secrets."""
        ...

    def __enter__(self) -> Self:
        """Begin to keep the place up to date."""
        ...

    def __exit__(self, kind: type[BaseException] | None, /, *error: object) -> None:
        """Bring the place up to date a last time."""
        ...

    def checkpoints(self, num_to_keep: int = 2, best_metric: str = "") -> Checkpoints:
        """Return the checkpoints of the run."""
        ...

    def checkpoint_name(self, step: int) -> str:
        """Return the path or URI of a checkpoint, for people and ``ragr1 ask``."""
        ...

    def share(self, folder: str | Path, name: str = "") -> AnyFolder:
        """``core.folders.Share`` of the run; with a ``name`` the folder can be brought back by it."""
        ...

    def load(self) -> None:
        """Bring the files of an earlier process to ``path``; ``UserError`` if the place cannot be reached."""
        ...

    def bring(self, name: str) -> Path:
        """Return the path of a folder of the run, such as ``index``, on this machine; it may not be there yet."""
        ...

    def find(self, name: str) -> AnyFolder | None:
        """Return a whole folder of the run, such as ``policy_sft``, for actors; None if it is not there yet."""
        ...

    def write_policy(self, name: str, write: Callable[[Path | Sink], None]) -> AnyFolder:
        """Have the learners write a policy, which replaces a folder of that name, and return it."""
        ...

    def upload(self) -> None:
        """Bring the place up to date."""
        ...

    def remove(self, name: str) -> None:
        """Remove a file of the run, which is up to date."""
        ...

    def retry_for(self, duration_s: float) -> None:
        """Repeat a call to a storage that fails for so long before the run ends."""
        ...

    def open_lock(self) -> int:
        """Open what the process that works in the run locks by ``fcntl.flock``; the caller closes the descriptor."""
        ...


def find_place(run_dir: str | Path | Place) -> Place:
    """Return the place of a run for its path or URI; nothing is read or made there yet."""
    if isinstance(run_dir, str) and is_uri(run_dir):
        check_uri(run_dir)
        return StoredPlace(Storage(run_dir))
    return LocalPlace(Path(run_dir)) if isinstance(run_dir, str | Path) else run_dir


def below(run_dir: str, name: str) -> Place:
    """Return the place of a run inside a folder or URI."""
    return find_place(with_name(run_dir, name) if is_uri(run_dir) else Path(run_dir) / name)


def split_checkpoint(uri: str) -> tuple[str, str]:
    """Return the URI of a run and what is named in it: a checkpoint, ``policy_sft``, or nothing.

    ``split_checkpoint("s3://b/run/checkpoints/best?region=eu") == ("s3://b/run?region=eu", "checkpoints/best")``, also
    with ``/policy`` behind it.
    """
    check_uri(uri)
    parts = urlsplit(uri)
    path = parts.path.rstrip("/")
    run, separator, checkpoint = path.rpartition(f"/{CHECKPOINTS}/")
    if separator:
        return parts._replace(path=run).geturl(), f"{CHECKPOINTS}/{checkpoint.removesuffix(f'/{POLICY_FOLDER}')}"
    run, separator, _ = path.rpartition(f"/{SFT_POLICY}")
    if separator and path.endswith(f"/{SFT_POLICY}"):
        return parts._replace(path=run).geturl(), SFT_POLICY
    return uri, ""


class LocalPlace:
    """A folder of this machine, which learner ranks on other nodes share."""

    is_shared = True

    def __init__(self, path: Path) -> None:
        """Keep the run in ``path``."""
        self.path = path

    def __str__(self) -> str:
        """Return the path."""
        return str(self.path)

    def __enter__(self) -> Self:
        """Do nothing."""
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing."""

    def checkpoints(self, num_to_keep: int = 2, best_metric: str = "") -> CheckpointStore:
        """Return the checkpoints of the run."""
        return CheckpointStore(self.path / CHECKPOINTS, num_to_keep, best_metric)

    def checkpoint_name(self, step: int) -> str:
        """Return the path of a checkpoint."""
        return str(self.path / _name(step))

    def share(self, folder: str | Path, name: str = "") -> AnyFolder:
        """Share a folder by the object store if it is small, else by its path."""
        return share(folder)

    def load(self) -> None:
        """Do nothing."""

    def bring(self, name: str) -> Path:
        """Return the path of a folder of the run."""
        return self.path / name

    def find(self, name: str) -> AnyFolder | None:
        """Return a folder of the run if it is there."""
        folder = self.path.absolute() / name
        return self.share(folder) if folder.is_dir() else None

    def write_policy(self, name: str, write: Callable[[Path | Sink], None]) -> AnyFolder:
        """Have rank 0 write a policy where this process sees it."""
        folder = self.path.absolute() / name
        write_folder(folder, write, POLICY_FILES)
        return self.share(folder)

    def upload(self) -> None:
        """Do nothing."""

    def remove(self, name: str) -> None:
        """Remove a file or folder."""
        _remove(self.path / name)

    def retry_for(self, duration_s: float) -> None:
        """Do nothing."""

    def open_lock(self) -> int:
        """Open the folder."""
        return os.open(self.path, os.O_RDONLY)


class StoredPlace:
    """A URI. The files of the run are written into a folder of this process, which ends with it."""

    is_shared = False

    def __init__(self, storage: Storage) -> None:
        """Keep the run at ``storage``."""
        self.storage = storage
        parent, self._lock = leftovers.make_scratch()
        last = str(storage).partition("?")[0].rpartition("/")[2]
        self.path = parent / (re.sub(r"[^\w-]+", "_", last).strip("_") or "run")
        self.path.mkdir()
        atexit.register(self._clean_up)
        self._shared: dict[Path, AnyFolder] = {}
        self._uploaded: dict[str, tuple[int, int]] = {}
        self._recorded: dict[str, FileContent] = {}  # files of trajectories, which other runs may replay
        self._listed: dict[str, FileContent] = {}  # those that the listing on the storage has
        self._is_loaded = False
        self._lease = Lease(storage, UPLOAD_INTERVAL_S)
        self._uploading = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)

    def __str__(self) -> str:
        """Return the URI without secrets."""
        return str(self.storage)

    def __enter__(self) -> Self:
        """Upload in the background; ``RunDirectoryError`` if another machine works in the run."""
        self._lease.take()
        try:
            self._bring_curves()
        except BaseException:
            self._lease.give_back()
            raise
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, /, *error: object) -> None:
        """Upload what is left; ``UserError`` if that fails, but not instead of another error."""
        self._stop.set()
        self._thread.join()
        try:
            self._upload(self.storage if kind is None else replace(self.storage, retry_s=0))
        except UserError as problem:
            atexit.unregister(self._clean_up)
            kept = self.path.parent.name.replace(leftovers.SCRATCH, leftovers.KEPT)
            self.path = self.path.parent.rename(self.path.parent.with_name(kept)) / self.path.name
            message = f"{problem}; what was not uploaded is in {self.path}"
            if kind is None:
                raise UserError(message) from None
            logger.warning("%s", message)
        finally:
            self._lease.give_back()

    def _clean_up(self) -> None:
        shutil.rmtree(self.path.parent, ignore_errors=True)
        os.close(self._lock)

    def _run(self) -> None:
        while not self._stop.wait(UPLOAD_INTERVAL_S):
            self._lease.renew()
            try:
                self._upload(replace(self.storage, retry_s=0))
            except UserError as error:
                logger.warning("%s; it is tried again in %g s", error, UPLOAD_INTERVAL_S)

    def checkpoints(self, num_to_keep: int = 2, best_metric: str = "") -> StoredCheckpoints:
        """Return the checkpoints of the run."""
        return StoredCheckpoints(self, num_to_keep, best_metric)

    def checkpoint_name(self, step: int) -> str:
        """Return the URI of a checkpoint."""
        return with_name(str(self.storage), _name(step))

    def share(self, folder: str | Path, name: str = "") -> AnyFolder:
        """Put a folder on the storage: under a name or its name in the run, any other under its content."""
        path = Path(folder).absolute()
        with self._uploading:  # not twice
            if path not in self._shared:
                name = name or (path.name if path.parent == self.path else "")
                self._shared[path] = share(folder, self.storage, name)
            return self._shared[path]

    def find(self, name: str) -> AnyFolder | None:
        """Return a folder of the run if it is whole."""
        return self.storage.find(name)

    def write_policy(self, name: str, write: Callable[[Path | Sink], None]) -> AnyFolder:
        """Have rank 0 upload a policy."""
        before, sink = self.storage.find(name), self.storage.sink(name)
        write(sink)
        return self.storage.finish(sink, [rank_part(0)], before)

    def upload(self) -> None:
        """Upload the files that changed; ``UserError`` if that fails."""
        self._upload(self.storage)

    def remove(self, name: str) -> None:
        """Remove a file or folder here and on the storage."""
        _remove(self.path / name)
        found = self.storage.find(name) if name in FOLDERS else None
        self.storage.remove([name] if found is None else [f"{name}.json", *self.storage.names(found.prefix)])

    def retry_for(self, duration_s: float) -> None:
        """Repeat a call that fails for so long."""
        self.storage = replace(self.storage, retry_s=duration_s)

    def open_lock(self) -> int:
        """Open a file of this machine's cache; a process on another machine is noticed by its ``Lease``."""
        return NodeCache.of_this_node().open_lock(f"run_{hashlib.sha256(str(self).encode()).hexdigest()}")

    def load(self) -> None:
        """Bring the files of an earlier process to ``path``, of which this one reads some and goes on with others."""
        if self._is_loaded:
            return
        storage = replace(self.storage, retry_s=0)  # a wrong name or credential is said at once
        for name in _FIRST_FILES:
            if (content := storage.read(name)) is not None:
                (self.path / name).write_bytes(content)
                self._uploaded[name] = _version(self.path / name)
        if (found := storage.find(TRAJECTORIES)) is not None:
            self._recorded = {file.name: file for file in found.files}
            self._listed = dict(self._recorded)
        self._is_loaded = True

    def _bring_curves(self) -> None:
        """Bring the event files of earlier processes, which TensorBoard would forget at the first of this one.

        Only a process that works in the run needs them, so ``load`` does not bring them.
        """
        for name in self.storage.names(TENSORBOARD_DIRECTORY):
            if WRITING not in name and name not in self._uploaded:
                self.storage.download(name, self.path / name)
                self._uploaded[name] = _version(self.path / name)

    def bring(self, name: str) -> Path:
        """Return where a folder of the run is on this machine, if the run has it."""
        path = self.path / name
        if not path.exists() and (found := self.storage.find(name)) is not None:
            path.symlink_to(found.fetch())
        return path

    def _upload(self, storage: Storage) -> None:
        with self._uploading:
            for name in (INDEX, POLICY):
                if name not in self._uploaded and (self.path / name).is_dir():
                    storage.put(self.path / name, name)
                    self._uploaded[name] = _version(self.path / name)
            for path in self._files():
                with contextlib.suppress(FileNotFoundError):  # it was renamed meanwhile
                    name, version = path.relative_to(self.path).as_posix(), _version(path)
                    if self._uploaded.get(name) != version:
                        storage.upload(name, path)
                        if path.parent.name == TRAJECTORIES:
                            self._recorded[path.name] = FileContent.of(path.parent, path.name)
                        self._uploaded[name] = version
            if self._listed != self._recorded:
                storage.link(TRAJECTORIES, Artifact(tuple(sorted(self._recorded.values())), "", prefix=TRAJECTORIES))
                self._listed = dict(self._recorded)
            for path in sorted(self.path.glob(f"{TRAJECTORIES}/iteration_*.arrow"))[:-1]:
                if path.name in self._listed:
                    path.unlink()  # of a long run they would fill the disk

    def _files(self) -> Iterator[Path]:
        for path in sorted(self.path.rglob("*")):
            first, *_ = path.relative_to(self.path).parts
            if path.is_file() and first not in FOLDERS and WRITING not in str(path):
                yield path


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _version(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns


class StoredCheckpoints:
    """The checkpoints of a run on a storage: one counts once its listing exists, ``checkpoints/step_<n>.json``.

    Each learner rank uploads its part from its node. ``checkpoints/best.json`` is another listing of the best one.
    """

    def __init__(self, place: StoredPlace, num_to_keep: int, best_metric: str) -> None:
        """Keep the newest ``num_to_keep`` checkpoints, and that with the best metric if one is named."""
        self._place = place
        self._num_to_keep, self._best_metric = num_to_keep, best_metric
        self._sink: StorageSink | None = None
        self._digests: Digests = {}
        """Of the driver's part."""

    @property
    def _storage(self) -> Storage:
        return self._place.storage

    def begin(self, step: int, write: Callable[[Path], None], score: float | None = None) -> Sink:
        """Upload the driver's part of a checkpoint; the ranks deliver theirs to what is returned."""
        before = self._storage.find(_name(step))
        self._sink = self._storage.sink(_name(step))
        with self._sink.part(_DRIVER) as folder:
            if score is not None and self._best_metric:
                write_json(folder / SCORE_FILE, {"metric": self._best_metric, "value": score})
            elif before is not None and (content := self._storage.read(f"{before.prefix}/{SCORE_FILE}")) is not None:
                (folder / SCORE_FILE).write_bytes(content)
            write(folder)
            self._digests = digest_files(folder, [path.name for path in sorted(folder.iterdir())])
        return self._sink

    def commit(self, step: int, finish: Callable[[], Digests] = dict, num_ranks: int = 0) -> AnyFolder:
        """Call ``finish``, upload what the checkpoint refers to, such as the metrics so far, and then its listing."""
        assert self._sink is not None, "begin() first"
        digests = finish()
        with self._sink.part(_LIST) as folder:
            write_list(folder, digests | self._digests)
        self._place.upload()
        found = self._storage.finish(self._sink, [_DRIVER, _LIST, *map(rank_part, range(num_ranks))])
        self._prune(step)
        return found

    def is_best(self, score: float) -> bool:
        """Return whether a checkpoint with this score would be the best; False without a ``best_metric``."""
        best = self._best(self._whole())
        return bool(self._best_metric) and (best is None or score > best[0])

    def latest(self) -> Artifact | None:
        """Return the newest whole checkpoint; None if there is none."""
        return max(self._whole().items(), default=(0, None))[1]

    def best_until(self, step: int) -> Artifact | None:
        """Return the best checkpoint up to ``step``, the newest if none has a score; None if there is none."""
        earlier = {number: found for number, found in self._whole().items() if number <= step}
        best = self._best(earlier)
        return earlier[best[1]] if best else max(earlier.items(), default=(0, None))[1]

    def without(self, checkpoint: AnyFolder) -> str:
        """Return the end of a message on a damaged checkpoint."""
        before = [step for step, found in self._whole().items() if str(found) != str(checkpoint)]
        rest = f"goes on from step_{max(before)}" if before else "starts again: there is no other checkpoint"
        return f"delete {checkpoint}.json and --resume {rest}"

    def _whole(self) -> dict[int, Artifact]:
        steps = [int(match[1]) for name in self._storage.names(CHECKPOINTS) if (match := _LISTING.fullmatch(name))]
        return {step: found for step in sorted(steps) if (found := self._storage.find(_name(step))) is not None}

    def _best(self, whole: dict[int, Artifact]) -> tuple[float, int] | None:
        """Return the highest score and the newest checkpoint with it."""
        scores = []
        for step, found in whole.items():
            content = self._storage.read(f"{found.prefix}/{SCORE_FILE}") if self._best_metric else None
            if content is not None and (score := read_score(content, self._best_metric, str(found))) is not None:
                scores.append((score, step))
        return max(scores, default=None)

    def _prune(self, saved: int) -> None:
        """Remove the checkpoints that are not kept, and what checkpoints left that did not become whole."""
        whole = self._whole()
        best = self._best({step: found for step, found in whole.items() if step <= saved})
        newest = sorted(step for step in whole if step <= saved)[-self._num_to_keep :]
        kept = {step: whole[step] for step in {*newest, *([best[1]] if best else [])}}
        listings = {f"{_name(step)}.json" for step in kept}
        if best is not None:
            self._storage.link(f"{CHECKPOINTS}/{BEST}", whole[best[1]])
            listings.add(f"{CHECKPOINTS}/{BEST}.json")
        prefixes = tuple(f"{found.prefix}/" for found in kept.values())
        others = [
            name for name in self._storage.names(CHECKPOINTS) if name not in listings and not name.startswith(prefixes)
        ]
        self._storage.remove(sorted(others, key=lambda name: _LISTING.fullmatch(name) is None))  # listings first


def _name(step: int) -> str:
    return f"{CHECKPOINTS}/step_{step}"
