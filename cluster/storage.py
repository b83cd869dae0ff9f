"""Storage of a run: folders that reach any node by a URI of ``pyarrow.fs``, or by Ray's object store.

::

    driver                           storage URI                        any node
    put("index") ── every file ──►  index-3fa9c1d2/corpus.arrow ...
                 ── listing ─────►  index.json, written last  ──┐
    actor(StoredFolder) ────────────────────────────────────────────┴──► StoredFolder.fetch() ──► its cache, by content

An object store has no rename and no append, but replaces one object at once. So a folder is complete if its listing
exists: an object that names the files with their sizes and hashes, and is written after them. Processes of several
nodes write one folder by a ``StorageWriter``: each delivers its part.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

import pyarrow as pa
from pyarrow import fs
from pydantic.dataclasses import dataclass as checked_dataclass
from pydantic_core import to_json
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_delay, wait_exponential

from cluster.node_cache import FileContent, NodeCache, check_inside, has_files
from ragr1_actors.core.disk.files import WRITING, is_no_room
from ragr1_actors.core.disk.folders import AnyFolder
from ragr1_actors.core.disk.json_files import validated
from ragr1_actors.core.errors import ConfigError, DataError, UserError, one_line

SMALL_BYTES = 256 * 2**20
"""Limit of a folder, in bytes, that travels through Ray's object store if a run has no storage URI."""
RETRY_S = 120.0
"""Default of ``debugging.fault_tolerance.storage_retry_s``, in seconds."""
_CHUNK_BYTES = 8 * 2**20
_SHOWN_OPTIONS = ("scheme", "endpoint_override", "region", "allow_bucket_creation", "project_id")
"""Parameters of a URI that are shown and stored."""

_EXAMPLE = "such as s3://bucket/runs/mine"
_EXPECTED = f"expected one {_EXAMPLE}"

T = TypeVar("T")
logger = logging.getLogger(__name__)
_OPEN_SECRET = re.compile(r"[^/\s?#@:]*+:(?!\d+/)\S*@")
"""User and secret, where the secret has a ``/``, ``?`` or ``#`` that should have been ``%2F``, ``%3F`` or ``%23``."""


def is_uri(text: str) -> bool:
    """Return whether a text is a URI and not a path: ``s3://bucket/runs/mine``."""
    return "://" in text


def without_secrets(uri: str) -> str:
    """Return a URI that may be shown and stored: without user, password and unknown parameters.

    ``without_secrets("s3://KEY:SECRET@bucket/run?region=eu-1") == "s3://bucket/run?region=eu-1"``
    """
    parts = urlsplit(uri)
    shown = [(name, value) for name, value in parse_qsl(parts.query) if name in _SHOWN_OPTIONS]
    query = f"?{urlencode(shown, safe=':/')}" if shown else ""
    return f"{parts.scheme}://{_split_user(uri)[1].rstrip('/')}{query}"


def _split_user(uri: str) -> tuple[str, str]:
    """Return user and password of a URI, and what follows them up to its parameters."""
    parts = urlsplit(uri)
    user, at, host = parts.netloc.rpartition("@")
    if not at and _OPEN_SECRET.match(rest := uri.partition("://")[2]):
        user, _, rest = rest.rpartition("@")
        return user, re.split("[?#]", rest)[0]
    return user, f"{host}{parts.path}"


def with_name(uri: str, name: str) -> str:
    """Return the URI of ``name`` below another URI.

    ``with_name("s3://b/run?region=eu", "index") == "s3://b/run/index?region=eu"``
    """
    parts = urlsplit(uri)
    return parts._replace(path=f"{parts.path.rstrip('/')}/{name}").geturl()


@dataclass(frozen=True)
class Storage:
    """Folder at a URI. It pickles as its arguments: every process opens its own connection."""

    uri: str = field(repr=False)
    """URI of ``pyarrow.fs``; it may hold credentials, so that only ``name`` is shown."""
    retry_s: float = RETRY_S
    """Seconds for which a failing call is repeated; 0 repeats none."""

    def __str__(self) -> str:
        """Return the URI without secrets."""
        return without_secrets(self.uri)

    def at(self, name: str) -> str:
        """Return the name of an object for people: ``s3://bucket/runs/mine/config.yaml``."""
        return f"{str(self).partition('?')[0]}/{name}".rstrip("/")

    def read(self, name: str) -> bytes | None:
        """Return the content of an object, or None if there is none."""

        def read() -> bytes:
            with self._fs.open_input_stream(self._path(name)) as stream:
                return bytes(stream.read())

        try:
            return self._try("read", name, read)
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write an object; readers see the old or the new one."""
        self._try("write", name, lambda: self._replace(name, lambda stream: stream.write(content)))

    def upload(self, name: str, file: Path) -> None:
        """Write a file, on S3 of at most 5 GB, as an object; readers see the old or the new one."""
        self._try("write", name, lambda: self._replace(name, partial(_copy, file)))

    def _replace(self, name: str, write: Callable[[pa.NativeFile], object]) -> None:
        """Fill an object of another name, and rename it, since a stream that ends early makes an object of its part."""
        writing = f"{name}{WRITING}{secrets.token_hex(4)}"
        try:
            self._fill(writing, write)
            self._fs.move(self._path(writing), self._path(name))
        except BaseException:
            with suppress(OSError):  # it was not made, or the connection is cut
                self._fs.delete_file(self._path(writing))
            raise

    def _fill(self, name: str, write: Callable[[pa.NativeFile], object]) -> None:
        path = self._path(name)
        if isinstance(self._fs, fs.LocalFileSystem):  # an object store has no folders
            self._fs.create_dir(path.rpartition("/")[0], recursive=True)
        with self._fs.open_output_stream(path) as stream:
            write(stream)

    def download(self, name: str, file: Path) -> str:
        """Write an object into a file and return the SHA-256 of what was written.

        Raises:
            UserError: there is no such object, or it cannot be read.
            OSError: the disk of the file is full.
        """

        def download() -> str:
            digest = hashlib.sha256()
            file.parent.mkdir(parents=True, exist_ok=True)
            with self._fs.open_input_stream(self._path(name)) as stream, file.open("wb") as target:
                while chunk := stream.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    target.write(chunk)
            return digest.hexdigest()

        try:
            return self._try("read", name, download)
        except FileNotFoundError as error:
            raise UserError(f"there is no {self.at(name)}; it was removed, or it is another storage") from error

    def names(self, folder: str = "") -> list[str]:
        """Return the names of all objects below a folder, relative to the storage, sorted."""

        def names() -> list[str]:
            selector = fs.FileSelector(self._path(folder), allow_not_found=True, recursive=True)
            start = len(self._path("")) + 1
            return sorted(found.path[start:] for found in self._fs.get_file_info(selector) if found.is_file)

        return self._try("list", folder, names)

    def remove(self, names: Collection[str]) -> None:
        """Remove objects; it is no error if they are missing."""
        for name in names:
            with suppress(FileNotFoundError):  # also if the answer to the first attempt was lost
                self._try("remove", name, lambda name=name: self._fs.delete_file(self._path(name)))  # type: ignore[misc]

    # -- folders -----------------------------------------------------------------------------------------------------

    def find(self, name: str) -> StoredFolder | None:
        """Return the folder of that name, such as ``checkpoints/step_10``; None if it is missing or incomplete."""
        listing = self._read_as(Listing, f"{name}.json")
        if listing is None:
            return None
        return StoredFolder(listing.files, self.at(name), storage=self, prefix=listing.folder)

    def put(self, folder: Path, name: str = "") -> StoredFolder:
        """Store a folder, by default under the name of its content; an existing one is not uploaded again."""
        files = read_contents(folder)
        name = name or f"artifacts/{content_name(files)}"
        found = self.find(name)
        if found is None or found.files != files:
            writer = self.writer(name)
            try:
                self.deliver(writer.prefix, "driver", folder, files)
            except BaseException:
                with suppress(OSError, pa.ArrowException):  # once: the storage may be what fails
                    self._fs.delete_dir(self._path(writer.prefix))
                raise
            found = self.finish(writer, [file.name for file in files], before=found)
        return replace(found, path=str(folder.absolute()))

    def writer(self, name: str) -> StorageWriter:
        """Return a writer with which processes write the parts of a folder; ``finish`` gives the folder its name."""
        return StorageWriter(self, name, f"{name}-{secrets.token_hex(4)}")

    def finish(self, writer: StorageWriter, files: Collection[str], before: StoredFolder | None = None) -> StoredFolder:
        """Write the listing of a folder once ``files`` were delivered, then remove its predecessor ``before``.

        Raises:
            UserError: a file is missing.
        """
        parts = [name for name in self.names(writer.prefix) if name.endswith(_PART_SUFFIX)]
        delivered = {file.name: file for part in parts for file in self._read_as(list[FileContent], part) or ()}
        if missing := [name for name in files if name not in delivered]:
            raise UserError(f"{self.at(writer.prefix)} lacks {missing[0]}; what was stored before is whole")
        content = tuple(sorted(delivered.values()))
        found = StoredFolder(content, self.at(writer.name), storage=self, prefix=writer.prefix)
        self.link(writer.name, found)
        if before is not None:
            self.remove(self.names(before.prefix))
        return found

    def link(self, name: str, folder: StoredFolder) -> None:
        """Write a listing for a folder of this storage: from then on ``find(name)`` returns it."""
        self.write(f"{name}.json", to_json(Listing(folder.prefix, folder.files), indent=1))

    def deliver(self, prefix: str, part: str, folder: Path, files: Sequence[FileContent]) -> None:
        """Upload the files of a part, then the list of them; a reader that comes earlier finds no part."""
        for file in files:
            name = f"{prefix}/{file.name}"
            self._try("write", name, partial(self._fill, name, partial(_copy, folder / file.name)))
        self.write(f"{prefix}/{part}{_PART_SUFFIX}", to_json(list(files)))

    def _read_as(self, kind: type[T], name: str) -> T | None:
        """Read an object of JSON; None if there is none, ``DataError`` if it is damaged."""
        content = self.read(name)
        return None if content is None else validated(kind, content, self.at(name), "delete it")

    # -- one call ------------------------------------------------------------------------------------------------------

    @property
    def _fs(self) -> fs.FileSystem:
        return _connect(self.uri)[0]

    def _path(self, name: str) -> str:
        root = _connect(self.uri)[1]
        return f"{root}/{name}" if name else root

    def _try(self, verb: str, name: str, call: Callable[[], T]) -> T:
        """Repeat a call that fails for ``retry_s``; then ``UserError``.

        ``FileNotFoundError`` and the ``OSError`` of a full disk are raised at once.
        """

        def tell(state: RetryCallState) -> None:
            if state.attempt_number == 1:
                error = state.outcome.exception() if state.outcome is not None else None
                reason = self._reason(error) if error is not None else ""
                logger.warning(
                    "cannot %s %s: %s; it is tried again for %g s", verb, self.at(name), reason, self.retry_s
                )

        try:
            return Retrying(
                stop=stop_after_delay(self.retry_s),
                wait=wait_exponential(0.5, 10),
                retry=retry_if_exception(_may_pass),
                before_sleep=tell,
                reraise=True,
            )(call)
        except FileNotFoundError:
            raise
        except (OSError, pa.ArrowException) as error:
            if verb == "read" and is_no_room(error):  # the disk of this node is full
                raise
            raise UserError(
                f"cannot {verb} {self.at(name)}: {self._reason(error)}; look at the network, the name and the "
                "credentials of the storage"
            ) from None  # the error before may hold the URI

    def _reason(self, error: BaseException) -> str:
        return _without(one_line(error, 300), self.uri)


def _copy(file: Path, stream: pa.NativeFile) -> None:
    with file.open("rb") as source:
        while chunk := source.read(_CHUNK_BYTES):
            stream.write(chunk)


def check_uri(uri: str) -> None:
    """Refuse, with a ``ConfigError``, a URI that names no file system of ``pyarrow.fs``, or no bucket.

    It makes no connection. For S3 it checks only the form, as pyarrow would ask Amazon for region and credentials.
    """
    try:
        parts = urlsplit(uri)
    except ValueError as error:
        raise ConfigError(f"got a URI that cannot be read ({error}); {_EXPECTED}") from None
    if re.search(r"\s", uri):
        raise ConfigError(f"{without_secrets(uri)!r} has white space; {_EXPECTED}")
    if parts.fragment:
        raise ConfigError(f"{without_secrets(uri)!r} has a #, behind which a URI names no place; write %23")
    if uri.startswith("s3://"):
        if not parts.hostname:
            raise ConfigError(f"{without_secrets(uri)} names no bucket; {_EXPECTED}")
    elif parts.scheme not in ("hdfs", "viewfs"):  # pyarrow starts a Java machine for these
        _connect(uri)


@cache
def _connect(uri: str) -> tuple[fs.FileSystem, str]:
    try:
        found, path = fs.FileSystem.from_uri(uri)
    except (pa.ArrowInvalid, ImportError) as error:  # ImportError: pyarrow was built without this file system
        reason = _without(one_line(error, 300), uri)
        raise ConfigError(f"{without_secrets(uri)}: {reason}; expected a URI of pyarrow.fs, {_EXAMPLE}") from None
    return found, path.rstrip("/")


def _without(message: str, uri: str) -> str:
    """Return a message without the user and password of a URI."""
    user = _split_user(uri)[0]
    for secret in sorted({user, *user.split(":")} - {""}, key=len, reverse=True):
        message = message.replace(secret, "...")
    return message


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, OSError) and not isinstance(error, FileNotFoundError) and not is_no_room(error)


@checked_dataclass(frozen=True)
class Listing:
    """Object that makes a folder complete."""

    folder: str
    """Folder of the files, relative to the storage: ``checkpoints/step_10-3fa9c1d2``."""
    files: tuple[FileContent, ...]

    def __post_init__(self) -> None:
        """Refuse a folder outside of the storage, as it may be removed with its files."""
        check_inside(self.folder)


@checked_dataclass(frozen=True)
class Reference:
    """``StoredFolder`` as data."""

    name: str
    path: str
    uri: str = field(repr=False)
    listing: Listing


_PART_SUFFIX = ".part.json"


@dataclass(frozen=True)
class StoredFolder:
    """Folder with known content, at up to three places: a path, a storage, the object store. It is a ``Folder``."""

    files: tuple[FileContent, ...]
    name: str
    """Name for people: a path, or a URI without secrets."""
    path: str = ""
    """Path on the node that made it, and on every node that has the same content there."""
    storage: Storage | None = None
    prefix: str = ""
    """Prefix of the objects in the storage."""
    blobs: Any = None
    """Reference, ``ray.ObjectRef``, of ``{file name: array of uint8}``."""

    def __str__(self) -> str:
        """Return the name for people."""
        return self.name

    @property
    def content(self) -> str:
        """Name of the content, 32 hexadecimal digits."""
        return content_name(self.files)

    def only(self, *prefixes: str) -> StoredFolder:
        """Return the part whose file names start with one of ``prefixes``."""
        return replace(self, files=tuple(file for file in self.files if file.name.startswith(prefixes)))

    def fetch(self) -> Path:
        """Return the folder: at its path, if this node has the content there, else in this node's cache."""
        if self.path and has_files(Path(self.path), self.files):
            return Path(self.path)
        return NodeCache.of_this_node().get(self.content, self.files, self._download)

    def read(self, file: str) -> bytes | None:
        """Return a file from the storage; None if the folder has no such file, ``DataError`` if it is damaged."""
        wanted = next((found for found in self.files if found.name == file), None)
        if wanted is None or self.storage is None:
            return None
        content = self.storage.read(f"{self.prefix}/{file}")
        if content is None or hashlib.sha256(content).hexdigest() != wanted.sha256:
            raise self._damaged(self.storage, file)
        return content

    def reference(self) -> str:
        """Return a text for ``of``, with the secrets of the storage; empty if the folder is on no storage."""
        if self.storage is None:
            return ""
        found = Reference(self.name, self.path, self.storage.uri, Listing(self.prefix, self.files))
        return to_json(found).decode()

    @classmethod
    def of(cls, reference: str) -> StoredFolder:
        """Return the folder of a ``reference``."""
        found = validated(Reference, reference.encode(), "a reference")
        return cls(found.listing.files, found.name, found.path, Storage(found.uri), found.listing.folder)

    def _download(self, folder: Path) -> None:
        if self.storage is None:
            self._unpack(folder)
            return
        for file in self.files:
            if self.storage.download(f"{self.prefix}/{file.name}", folder / file.name) != file.sha256:
                raise self._damaged(self.storage, file.name)

    def _damaged(self, storage: Storage, file: str) -> DataError:
        return DataError(
            f"{storage.at(self.prefix)}/{file} is damaged: its SHA-256 is not that of its listing; delete "
            f"{self.name}.json, and store the folder again"
        )

    def _unpack(self, folder: Path) -> None:
        import ray

        if self.blobs is None:
            raise DataError(f"{self.name} is on no storage; give --run-dir a URI that all nodes reach")
        for name, content in ray.get(self.blobs).items():  # the references are ready, so this waits for no actor
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)  # tofile() has no errno


@dataclass(frozen=True)
class StorageWriter:
    """Writer with which processes deliver the parts of a folder of a ``Storage``. It is a ``FolderWriter``."""

    storage: Storage
    name: str
    prefix: str

    @contextmanager
    def part(self, name: str) -> Iterator[Path]:
        """Return a context with an empty folder on this node; its files are uploaded at the end."""
        with NodeCache.of_this_node().scratch(f"{self.prefix.replace('/', '_')}_{name}") as folder:
            yield folder
            self.storage.deliver(self.prefix, name, folder, read_contents(folder))


def share(folder: str | Path, storage: Storage | None = None, name: str = "") -> AnyFolder:
    """Return the form in which any node gets a folder of this node: a path, or a ``Folder``.

    The folder is put on the storage, if there is one, as ``name``; else into Ray's object store, if it is small and
    there may be other nodes; else it stays a path, which they must see. A name on a model hub is returned unchanged.
    """
    path = Path(folder)
    if not path.is_dir():
        return folder
    if storage is not None:
        return storage.put(path, name)
    names = _file_names(path)
    if sum((path / name).stat().st_size for name in names) > SMALL_BYTES or not _may_have_other_nodes():
        return folder
    import numpy as np
    import ray

    blobs = ray.put({name: np.fromfile(path / name, np.uint8) for name in names})
    return StoredFolder(read_contents(path), str(folder), path=str(path.absolute()), blobs=blobs)


def _may_have_other_nodes() -> bool:
    import ray

    return ray.is_initialized() and (bool(os.environ.get("RAY_ADDRESS")) or len(ray.nodes()) > 1)


def read_contents(folder: Path) -> tuple[FileContent, ...]:
    """Read all files of a folder, in parallel, and return their contents by name."""
    with ThreadPoolExecutor() as pool:  # hashlib releases the interpreter's lock
        return tuple(pool.map(lambda name: FileContent.of(folder, name), _file_names(folder)))


def content_name(files: Sequence[FileContent]) -> str:
    """Return the name of a content: 32 hexadecimal digits over file names, sizes and bytes."""
    lines = (f"{file.num_bytes} {file.sha256} {file.name}\n" for file in sorted(files))
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def _file_names(folder: Path) -> list[str]:
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in found if WRITING not in name)
