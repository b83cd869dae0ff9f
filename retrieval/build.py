"""Build and describe an index directory.

::

    passages ─► corpus.arrow ─► embeddings/ ─► shard-0000.faiss ... ─► manifest.json ─► rename to its name
                     └────────► bm25/ ─────────────────────────────────────▲

All steps write to ``<out>.building/``, one process at a time. Each step is whole or absent there, so an interrupted
build continues with the missing steps when it is started again with the same passages and arguments.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ragr1_actors.core.errors import ConfigError, DataError, UserError, nearest
from ragr1_actors.core.files import fingerprint_file, write_file
from retrieval.base import Passage
from retrieval.corpora.corpus import CORPUS_FILE, IDS_FILE, Corpus, write_corpus
from retrieval.corpora.text import valid_unicode
from retrieval.encoders.embedding import EmbeddingStore, StoreHeader, fill_store, publish
from retrieval.indexes.manifest import (
    BM25,
    BM25_FOLDER,
    ENCODER_FOLDER,
    FLAT,
    FORMAT_VERSION,
    HYBRID,
    INDEX_TYPES,
    FileRecord,
    Manifest,
    Shard,
    parse_options,
)

if TYPE_CHECKING:
    from retrieval.encoders.encoder import Encoder

STATIC = "static"
_STORE_FOLDER = "embeddings"
_PARTIAL = ".partial"
# The index keeps less of a number than half precision does.
_HALF_TYPES = ("fp16", "sq8", "pq", "ivf_pq")


@dataclass(frozen=True)
class _Workers:
    """The processes that encode the passages."""

    num_actors: int
    num_cpus_per_actor: float
    num_gpus_per_actor: float
    device: str
    dtype: str
    progress: bool


def build_index(
    passages: Iterable[Passage],
    out_dir: str | Path,
    *,
    encoder: str = STATIC,
    index_type: str = FLAT,
    vector_type: str = FLAT,
    num_shards: int = 1,
    options: Mapping[str, Any] | None = None,
    seed: int = 0,
    progress: bool = True,
    device: str = "cpu",
    dtype: str = "auto",
    num_actors: int = 0,
    num_cpus_per_actor: float = 1.0,
    num_gpus_per_actor: float | None = None,
    restart: bool = False,
) -> Path:
    """Index passages into ``out_dir``, which appears only once it is whole, and return it.

    After an interruption, a call with the same passages and arguments continues the build.

    Args:
        passages: with unique ids.
        out_dir: a new or empty directory.
        encoder: ``static`` makes one from the passages and keeps it with the index; else a folder or hub name.
        index_type: a key of ``INDEX_TYPES``, ``bm25`` or ``hybrid``.
        vector_type: a key of ``INDEX_TYPES``, of the dense part of ``hybrid``.
        num_shards: files the vectors are cut into, of as many rows each as the others.
        options: of the type; see ``INDEX_TYPES``.
        seed: of the static encoder.
        progress: show bars, and notes about the encoder.
        device: ``cpu`` or ``cuda``, of the encoder.
        dtype: of the encoder's weights; see ``Encoder.load``.
        num_actors: of the Ray session of this process, that encode; 0 encodes here.
        num_cpus_per_actor: of one of them.
        num_gpus_per_actor: of one of them; by default 1 where the device is a GPU.
        restart: remove what an earlier build left unfinished.

    Raises:
        DataError: ``out_dir`` holds something or is being built by another process, an unfinished build of other
            passages or arguments, no passages, an id twice, or an encoder that cannot be loaded.
        ConfigError: an unknown type or option, or more shards than passages.
        FleetError: the actors that encode die.
        UserError: no room on the disk.
    """
    out_dir = Path(out_dir)
    vector_type = {BM25: "", HYBRID: vector_type}.get(index_type, index_type)
    _check_types(index_type, vector_type, num_shards, options or {})
    check_free(out_dir)
    recorded = "" if index_type == BM25 else _recorded(encoder)
    arguments = BuildArguments(recorded, index_type, vector_type, num_shards, dict(options or {}), seed)
    num_gpus = (1.0 if device.startswith("cuda") else 0.0) if num_gpus_per_actor is None else num_gpus_per_actor
    workers = _Workers(num_actors, num_cpus_per_actor, num_gpus, device, dtype, progress)
    try:
        with work_directory(out_dir, arguments, restart) as directory:
            _build(passages, directory, arguments, workers)
    except OSError as error:
        raise _as_user_error(error, out_dir) from error
    return out_dir


def index_info(directory: str | Path) -> dict[str, Any]:
    """Return the manifest of an index, its ``version``, and the ``bytes`` of all its files.

    Raises:
        DataError: no index there.
    """
    directory = Path(directory)
    manifest = Manifest.read(directory)
    num_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    return {**asdict(manifest), "version": manifest.version, "bytes": num_bytes}


def _check_types(index_type: str, vector_type: str, num_shards: int, options: Mapping[str, Any]) -> None:
    known = (*INDEX_TYPES, BM25, HYBRID)
    if index_type not in known:
        raise ConfigError(f"unknown index type {index_type!r}{nearest(index_type, known)}")
    if index_type == HYBRID and vector_type not in INDEX_TYPES:
        raise ConfigError(f"unknown vector type {vector_type!r} of a hybrid index{nearest(vector_type, INDEX_TYPES)}")
    parse_options(vector_type or BM25, options)
    if num_shards < 1 or (num_shards > 1 and index_type == BM25):
        expected = "1, as it has no vectors" if index_type == BM25 else "at least 1"
        raise ConfigError(f"got {num_shards} shards for an index of type {index_type!r}, expected {expected}")


def _recorded(encoder: str) -> str:
    # A folder is recorded in full: the index may be opened from another working directory.
    is_folder = encoder not in ("", STATIC) and Path(encoder).is_dir()
    return str(Path(encoder).resolve()) if is_folder else encoder


def _as_user_error(error: OSError, out_dir: Path) -> UserError:
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
        return DataError(f"{out_dir} was created by another process meanwhile; choose another directory")
    cause = error.strerror or str(error)
    directory, kept = building_dir(out_dir), ""
    if has_costly_work(directory):
        kept = f"; what is done stays in {directory}, and the same build goes on with it"
    return UserError(
        f"the index could not be written to {out_dir} ({cause}); free some room or choose another disk{kept}"
    )


def _build(passages: Iterable[Passage], directory: Path, arguments: BuildArguments, workers: _Workers) -> None:
    encoder = None
    if arguments.vector_type and arguments.encoder != STATIC:
        encoder = _load(arguments.encoder, workers)  # before minutes are spent on a corpus
    _write_corpus(passages, directory, workers.progress)
    corpus = Corpus.open(directory)
    if arguments.vector_type:
        if len(corpus) < arguments.num_shards:
            raise ConfigError(f"got {arguments.num_shards} shards for {len(corpus)} passages; ask for fewer")
        encoder = encoder or _make_static(corpus, directory, arguments.seed, workers)
        _build_shards(corpus, directory, encoder, arguments, workers)
    if arguments.index_type in (BM25, HYBRID):
        _build_bm25(corpus, directory, workers.progress)
    _describe(directory, len(corpus), encoder, arguments).write(directory)
    shutil.rmtree(directory / _STORE_FOLDER, ignore_errors=True)


def _write_corpus(passages: Iterable[Passage], directory: Path, progress: bool) -> None:
    with progress_bar("reading passages", None, is_shown=progress) as advance:
        if not ((directory / CORPUS_FILE).is_file() and (directory / IDS_FILE).is_file()):
            write_corpus(_counted(passages, advance), directory)
            return
        # Reading is cheap beside encoding, and the vectors of another corpus would find the wrong passages.
        for row, (given, kept) in enumerate(zip_longest(_counted(passages, advance), Corpus.open(directory))):
            if given is None or kept is None or _texts(given) != _texts(kept):
                raise DataError(
                    f"{directory} is of a build of other passages: number {row + 1} differs; build to another "
                    "directory, or remove this one, or use restart"
                )


def _counted(passages: Iterable[Passage], advance: Any) -> Iterator[Passage]:
    for passage in passages:
        yield passage
        advance(1)


def _texts(passage: Passage) -> tuple[str, str, str]:
    return valid_unicode(passage.id), valid_unicode(passage.title), valid_unicode(passage.text)


def _load(name: str, workers: _Workers) -> Encoder:
    from retrieval.encoders.encoder import Encoder  # torch and sentence-transformers take seconds

    if workers.num_actors:  # only what it is matters here; the actors load it as they are told to
        encoder = Encoder.load(name, dtype="bfloat16")
    else:
        encoder = Encoder.load(name, device=workers.device, dtype=workers.dtype)
    if workers.progress:
        for note in encoder.notes:
            Console().print(f"encoder {name}: {note}", markup=False, highlight=False, soft_wrap=True)
    return encoder


def _make_static(corpus: Corpus, directory: Path, seed: int, workers: _Workers) -> Encoder:
    from retrieval.encoders.encoder import make_static_encoder, passage_text

    folder, partial = directory / ENCODER_FOLDER, directory / f"{ENCODER_FOLDER}{_PARTIAL}"
    if not folder.is_dir():
        shutil.rmtree(partial, ignore_errors=True)
        publish(make_static_encoder(partial, map(passage_text, corpus), seed=seed), folder)
    return _load(str(folder), workers)


def _build_shards(
    corpus: Corpus, directory: Path, encoder: Encoder, arguments: BuildArguments, workers: _Workers
) -> None:
    bounds = _bounds(len(corpus), arguments.num_shards)
    missing = [number for number in range(len(bounds)) if not (directory / _shard_name(number)).is_file()]
    header = StoreHeader(
        fingerprint_file(directory / CORPUS_FILE),
        encoder.fingerprint,
        encoder.dimension,
        len(corpus),
        "float16" if arguments.vector_type in _HALF_TYPES else "float32",
    )
    store = EmbeddingStore.create(directory / _STORE_FOLDER, header)
    if not missing:
        return
    done = len(corpus) - sum(len(store.rows(number)) for number in store.missing())
    with progress_bar("encoding passages", len(corpus), done, is_shown=workers.progress) as advance:
        fill_store(
            store,
            directory,
            str(directory / ENCODER_FOLDER) if arguments.encoder == STATIC else arguments.encoder,
            workers.num_actors,
            num_cpus_per_actor=workers.num_cpus_per_actor,
            num_gpus_per_actor=workers.num_gpus_per_actor,
            device=workers.device,
            dtype=workers.dtype,
            encoder=encoder,
            advance=advance,
        )
    from retrieval.indexes.vector_index import VectorIndex  # with faiss, which an inverted index does not need

    with progress_bar("building shards", len(bounds), len(bounds) - len(missing), is_shown=workers.progress) as advance:
        for number in missing:
            start, stop = bounds[number]
            partial = directory / f"{_shard_name(number)}{_PARTIAL}"
            VectorIndex.build(
                store.blocks(start, stop),
                encoder.dimension,
                arguments.vector_type,
                count=stop - start,
                options=arguments.options,
            ).save(partial)
            publish(partial, directory / _shard_name(number))
            advance(1)


def _build_bm25(corpus: Corpus, directory: Path, progress: bool) -> None:
    from retrieval.indexes.bm25 import bm25_text, build_bm25

    if (directory / BM25_FOLDER).is_dir():
        return
    partial = directory / f"{BM25_FOLDER}{_PARTIAL}"
    with progress_bar("indexing words", len(corpus), is_shown=progress) as advance:
        build_bm25(map(bm25_text, _counted(corpus, advance)), partial)
    publish(partial / BM25_FOLDER, directory / BM25_FOLDER)
    partial.rmdir()


def _describe(directory: Path, count: int, encoder: Encoder | None, arguments: BuildArguments) -> Manifest:
    words = sorted((directory / BM25_FOLDER).rglob("*")) if arguments.index_type in (BM25, HYBRID) else []
    names = [IDS_FILE, *(path.relative_to(directory).as_posix() for path in words if path.is_file())]
    manifest = Manifest(
        index_type=arguments.index_type,
        count=count,
        corpus=FileRecord.of(directory, CORPUS_FILE),
        files=tuple(FileRecord.of(directory, name) for name in names),
    )
    if encoder is None:
        return manifest
    return replace(
        manifest,
        metric="inner_product",
        vector_type=arguments.vector_type,
        encoder=ENCODER_FOLDER if arguments.encoder == STATIC else arguments.encoder,
        encoder_fingerprint=encoder.fingerprint,
        pooling=encoder.pooling,
        query_prompt=encoder.query_prompt,
        passage_prompt=encoder.passage_prompt,
        dimension=encoder.dimension,
        shards=tuple(
            Shard(start, stop - start, FileRecord.of(directory, _shard_name(number)))
            for number, (start, stop) in enumerate(_bounds(count, arguments.num_shards))
        ),
    )


def _shard_name(number: int) -> str:
    return f"shard-{number:04d}.faiss"


def _bounds(count: int, num_shards: int) -> list[tuple[int, int]]:
    """Return the first row of each shard and the one behind its last."""
    ends = [count * number // num_shards for number in range(num_shards + 1)]
    return list(pairwise(ends))


ARGUMENTS_FILE = "arguments.json"
_LOCK_FILE = "lock"


@dataclass(frozen=True)
class BuildArguments:
    """What an index depends on besides its passages."""

    encoder: str
    """``static``, a folder or a hub name; empty for ``bm25``."""
    index_type: str
    vector_type: str
    """Empty for ``bm25``."""
    num_shards: int
    options: dict[str, Any]
    seed: int


def building_dir(out_dir: str | Path) -> Path:
    """Return where ``out_dir`` is built: beside it, as a rename is atomic within one file system only."""
    absolute = Path(os.path.abspath(out_dir))
    return absolute.with_name(f"{absolute.name}.building")


def check_free(out_dir: Path) -> None:
    """Raise ``DataError`` unless ``out_dir`` is a new or an empty directory."""
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise DataError(f"{out_dir} exists already and is not overwritten; remove it or choose another directory")


def has_costly_work(directory: Path) -> bool:
    """Return whether a directory under construction holds work that takes long to repeat."""
    return any(any(directory.glob(pattern)) for pattern in ("embeddings/*.npy", "*.faiss", "bm25"))


@contextmanager
def work_directory(out_dir: Path, arguments: BuildArguments, restart: bool) -> Iterator[Path]:
    """Lock ``building_dir(out_dir)``, and rename it to ``out_dir`` once the block has filled it.

    If the block fails, a directory with vectors in it is kept, so that the next build continues. A directory with only
    the corpus is kept if the block was interrupted, and removed if the build was refused.

    Raises:
        DataError: another process builds there, it is of a build with other arguments, or ``out_dir`` holds something.
        OSError: no room, or no right to write.
    """
    directory = building_dir(out_dir)
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / _LOCK_FILE).open("a") as lock:
        _lock(lock.fileno(), directory, out_dir)
        is_begun = not restart and _is_begun(directory, arguments)
        try:
            check_free(out_dir)
            if not is_begun:
                _begin(directory, arguments)
            yield directory
            publish(directory, out_dir)
        except BaseException as error:
            is_refused = isinstance(error, UserError)
            has_corpus = (directory / CORPUS_FILE).is_file() and (directory / IDS_FILE).is_file()
            if not has_costly_work(directory) and (is_refused or not has_corpus):
                shutil.rmtree(directory, ignore_errors=True)
            raise
        for name in (ARGUMENTS_FILE, _LOCK_FILE):
            (out_dir / name).unlink()


def _lock(descriptor: int, directory: Path, out_dir: Path) -> None:
    """Take the lock, which ends with the process however it ends."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_there = os.path.samestat(os.fstat(descriptor), (directory / _LOCK_FILE).stat())
    except (BlockingIOError, FileNotFoundError) as error:
        raise DataError(f"another process builds {out_dir}; wait for it or choose another directory") from error
    if not is_there:
        raise DataError(f"another process has just built {out_dir}; choose another directory")


def _is_begun(directory: Path, arguments: BuildArguments) -> bool:
    """Whether a build of these arguments left something there. Raises ``DataError`` where one of others did."""
    path = directory / ARGUMENTS_FILE
    if not path.is_file():  # it did not come far enough to say what it is
        return False
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        kept = None
    wanted = _to_json(arguments)
    if kept == wanted:
        return True
    kept = kept if isinstance(kept, dict) else {}
    differing = [f"{key} {kept.get(key)!r}, now {wanted[key]!r}" for key in wanted if kept.get(key) != wanted[key]]
    raise DataError(
        f"{directory} is of an unfinished build with other arguments ({'; '.join(differing)}); give those to go on, or "
        "remove it, or use restart"
    )


def _begin(directory: Path, arguments: BuildArguments) -> None:
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _LOCK_FILE:
            path.unlink()
    content = json.dumps(_to_json(arguments), indent=2) + "\n"
    write_file(directory / ARGUMENTS_FILE, lambda writing: writing.write_text(content, encoding="utf-8"))


def _to_json(arguments: BuildArguments) -> dict[str, Any]:
    return {"format_version": FORMAT_VERSION, **asdict(arguments)}


@contextmanager
def progress_bar(
    title: str, total: int | None, done: int = 0, *, is_shown: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show a bar, and yield what is to be called with the number of things that were done since the last call.

    ``total`` is None where it is not known; ``done`` of them were done before.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, TimeRemainingColumn(), disable=not is_shown) as progress:
        task = progress.add_task(title, total=total, completed=done)
        yield lambda number: progress.advance(task, number)
