"""Build and describe an index directory.

::

    passages ─► corpus.arrow ─► embeddings/ ─► shard-0000.faiss ... ─► manifest.json ─► rename to its name
                     └────────► bm25/ ─────────────────────────────────────▲

All steps write to ``<out>.building/``, one process at a time. Each step is whole or absent there, so an interrupted
build continues with the missing steps when it is started again with the same passages and arguments.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ragr1_actors.core.disk.files import WRITING, fingerprint_file, held_alone, publish, write_file
from ragr1_actors.core.disk.json_files import read_json_as, write_json
from ragr1_actors.core.errors import ConfigError, DataError, UserError, nearest, valid_unicode
from ragr1_actors.core.process.progress_bar import progress_bar
from ragr1_actors.core.resolve import STATIC, named_folder
from retrieval.base import Passage
from retrieval.corpora.corpus import CORPUS_FILE, SPILL_PREFIX, Corpus, write_corpus, write_titles
from retrieval.corpora.readers import PassageFile
from retrieval.corpora.report import CorpusReport
from retrieval.corpora.text import is_empty
from retrieval.encoders.embedding import EmbeddingStore, StoredVectors, StoreHeader, Workers, fill_store
from retrieval.indexes.manifest import (
    BM25,
    BM25_FOLDER,
    ENCODER_FOLDER,
    ENCODER_LIST,
    FLAT,
    FORMAT_VERSION,
    HYBRID,
    INDEX_TYPES,
    TITLES_FILE,
    FileRecord,
    Manifest,
    Shard,
    parse_options,
)

if TYPE_CHECKING:
    from retrieval.encoders.encoder import Encoder

ARGUMENTS_FILE = "arguments.json"
_LOCK_FILE = "lock"
_STORE_FOLDER = "embeddings"
_PARTIAL = ".partial"
# The index keeps fewer bits of a number than half precision.
_HALF_TYPES = ("fp16", "sq8", "pq", "ivf_pq")
_HERE = Workers()


@dataclass(frozen=True)
class BuildArguments:
    """Arguments on which an index depends, besides its passages."""

    encoder: str
    """Encoder: ``static``, a folder or a hub name; empty for ``bm25``."""
    index_type: str
    vector_type: str
    """Type of the vectors; empty for ``bm25``."""
    num_shards: int
    options: dict[str, Any]
    seed: int
    format_version: int = FORMAT_VERSION


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
    workers: Workers = _HERE,
    restart: bool = False,
    on_note: Callable[[str], None] | None = None,
) -> Path:
    """Index passages into ``out_dir``, which appears only once it is whole, and return it.

    After an interruption, a call with the same passages and arguments continues the build.

    Args:
        passages: passages with unique ids. Passages without a letter or a digit in title and text are left out: their
            vectors carry no meaning and may be near any query. The manifest keeps the report on a file.
        out_dir: a new or empty directory.
        encoder: a folder or hub name; ``static`` makes one from the passages and keeps it with the index.
        index_type: a key of ``INDEX_TYPES``, ``bm25`` or ``hybrid``.
        vector_type: a key of ``INDEX_TYPES``, for the dense part of ``hybrid``.
        num_shards: number of files for the vectors, with equal numbers of rows.
        options: options of the type; see ``INDEX_TYPES``.
        seed: seed of the static encoder.
        progress: show bars on a terminal.
        workers: processes that encode; the default is this process.
        restart: remove what an earlier build left unfinished.
        on_note: called with each note on encoder and passages. By default the notes are printed, if ``progress``.

    Raises:
        DataError: ``out_dir`` is not empty, is being built by another process or has an unfinished build of other
            passages or arguments; there are no passages; an id occurs twice; or the encoder cannot be loaded.
        ConfigError: a type or option is unknown, or there are more shards than passages.
        FleetError: the actors that encode die.
        UserError: the disk is full.
    """
    out_dir = Path(out_dir)
    vector_type = {BM25: "", HYBRID: vector_type}.get(index_type, index_type)
    _check_types(index_type, vector_type, num_shards, options or {})
    check_free(out_dir)
    encoder = "" if index_type == BM25 else encoder_name(encoder)
    arguments = BuildArguments(encoder, index_type, vector_type, num_shards, dict(options or {}), seed)
    try:
        with work_directory(out_dir, asdict(arguments), restart) as directory:
            _Build(directory, arguments, workers, progress, on_note or (_print if progress else lambda note: None)).run(
                passages
            )
    except OSError as error:
        raise as_user_error(error, out_dir) from error
    return out_dir


def index_info(directory: str | Path) -> dict[str, Any]:
    """Return the manifest of an index, its ``version``, and the ``bytes`` of all its files.

    Raises:
        DataError: the directory holds no index.
    """
    directory = Path(directory)
    manifest = Manifest.read(directory)
    num_bytes = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    return {**asdict(manifest), "version": manifest.version, "bytes": num_bytes}


def encoder_name(encoder: str) -> str:
    """Return an encoder's name for the manifest: the whole path of a folder, since an index is opened from anywhere."""
    folder = named_folder(encoder, STATIC)
    return encoder if folder is None else str(folder.resolve())


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


def as_user_error(error: OSError, out_dir: Path) -> UserError:
    """Return the error for people if a file of an index could not be written."""
    if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
        return DataError(f"{out_dir} was created by another process meanwhile; choose another directory")
    cause = error.strerror or str(error)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG):
        return UserError(
            f"the index could not be written to {out_dir} ({cause}); choose another directory, one that this user may "
            "write to"
        )
    directory, kept = building_dir(out_dir), ""
    if _has_costly_work(directory):
        kept = f"; what is done stays in {directory}, and the same build goes on with it"
    return UserError(
        f"the index could not be written to {out_dir} ({cause}); free some room or choose another disk{kept}"
    )


def _print(note: str) -> None:
    Console(emoji=False).print(note, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class _Build:
    """Steps of a build; ``directory`` has each step whole or not at all."""

    directory: Path
    arguments: BuildArguments
    workers: Workers
    progress: bool
    note: Callable[[str], None]

    def run(self, passages: Iterable[Passage]) -> None:
        arguments = self.arguments
        encoder = None
        if arguments.vector_type and arguments.encoder != STATIC:
            encoder = self._load(arguments.encoder)  # before minutes are spent on a corpus
        self._write_corpus(passages)
        report = report_on(passages)
        if report is not None:
            self.note(str(report))
        corpus = Corpus.open(self.directory)
        write_file(self.directory / TITLES_FILE, partial(write_titles, corpus))
        if arguments.vector_type:
            if len(corpus) < arguments.num_shards:
                raise ConfigError(f"got {arguments.num_shards} shards for {len(corpus)} passages; ask for fewer")
            encoder = encoder or self._make_static(corpus)
            self._build_shards(corpus, encoder)
        if arguments.index_type in (BM25, HYBRID):
            self._build_bm25(corpus)
        replace(self._describe(len(corpus), encoder), corpus_report=report).write(self.directory)
        shutil.rmtree(self.directory / _STORE_FOLDER, ignore_errors=True)

    def _write_corpus(self, passages: Iterable[Passage]) -> None:
        num_empty = num_filled = 0

        def filled() -> Iterator[Passage]:
            nonlocal num_empty, num_filled
            for passage in passages:
                if is_empty(passage):
                    num_empty += 1
                else:
                    num_filled += 1
                    yield passage
            if num_empty and not num_filled:
                raise DataError(f"none of the {num_empty:,} passages has a letter or a digit; give another corpus")

        with bar("reading passages", None, hidden=not self.progress) as advance:
            write_or_compare(counted(filled(), advance), self.directory)
        if num_empty and report_on(passages) is None:
            self.note(f"{num_empty:,} passages without a letter or a digit are left out")

    def _load(self, name: str) -> Encoder:
        from retrieval.encoders.encoder import Encoder  # torch and sentence-transformers take seconds to import

        if self.workers.num_actors:  # only its identity matters here; the actors load it in the given dtype
            encoder = Encoder.load(name, dtype="bfloat16")
        else:
            encoder = Encoder.load(name, device=self.workers.device, dtype=self.workers.dtype)
        for note in encoder.plan.notes:
            self.note(f"encoder {name}: {note}")
        return encoder

    def _make_static(self, corpus: Corpus) -> Encoder:
        from retrieval.encoders.encoder import passage_text
        from retrieval.encoders.families import make_static_encoder

        folder = self.directory / ENCODER_FOLDER
        if not folder.is_dir():
            partial = folder.with_suffix(_PARTIAL)
            shutil.rmtree(partial, ignore_errors=True)
            publish(make_static_encoder(partial, map(passage_text, corpus), seed=self.arguments.seed), folder)
        return self._load(str(folder))

    def _build_shards(self, corpus: Corpus, encoder: Encoder) -> None:
        vector_type, options = self.arguments.vector_type, self.arguments.options
        header = StoreHeader(
            fingerprint_file(self.directory / CORPUS_FILE),
            encoder.fingerprint,
            encoder.dimension,
            len(corpus),
            "float16" if vector_type in _HALF_TYPES else "float32",
        )
        store = EmbeddingStore.create(self.directory / _STORE_FOLDER, header)
        shards = self._shards(len(corpus))
        missing = [(path, rows) for path, rows in shards if not path.is_file()]
        if not missing:
            return  # the vectors may be removed already
        done = len(corpus) - sum(len(store.rows(number)) for number in store.missing())
        with bar("encoding passages", len(corpus), done, hidden=not self.progress) as advance:
            fill_store(store, self.directory, encoder, self.workers, advance)
        from retrieval.indexes.vector_index import VectorIndex  # imports faiss, which an inverted index does not need

        with bar("building shards", len(shards), len(shards) - len(missing), hidden=not self.progress) as advance:
            for path, rows in missing:
                vectors = StoredVectors(store, rows.start, rows.stop)
                partial = path.with_name(f"{path.name}{_PARTIAL}")
                index = VectorIndex.build(vectors, encoder.dimension, vector_type, count=len(rows), options=options)
                index.save(partial)
                publish(partial, path)
                advance(1)

    def _build_bm25(self, corpus: Corpus) -> None:
        from retrieval.indexes.bm25 import bm25_text, build_bm25

        folder = self.directory / BM25_FOLDER
        if folder.is_dir():
            return
        partial = folder.with_suffix(_PARTIAL)
        with bar("indexing words", len(corpus), hidden=not self.progress) as advance:
            build_bm25(map(bm25_text, counted(corpus, advance)), partial)
        publish(partial / BM25_FOLDER, folder)
        partial.rmdir()

    def _describe(self, count: int, encoder: Encoder | None) -> Manifest:
        files = sorted(path for path in (self.directory / BM25_FOLDER).rglob("*") if path.is_file())
        files += [path for path in [self.directory / ENCODER_LIST] if path.is_file()]
        manifest = Manifest(
            index_type=self.arguments.index_type,
            count=count,
            corpus=self._record(self.directory / CORPUS_FILE),
            files=tuple(map(self._record, [*files, self.directory / TITLES_FILE])),
        )
        if encoder is None:
            return manifest
        return replace(
            manifest,
            metric="inner_product",
            vector_type=self.arguments.vector_type,
            encoder=ENCODER_FOLDER if self.arguments.encoder == STATIC else self.arguments.encoder,
            encoder_fingerprint=encoder.fingerprint,
            pooling=encoder.plan.pooling,
            query_prompt=encoder.plan.query_prompt,
            passage_prompt=encoder.plan.passage_prompt,
            dimension=encoder.dimension,
            shards=tuple(Shard(rows.start, len(rows), self._record(path)) for path, rows in self._shards(count)),
        )

    def _record(self, path: Path) -> FileRecord:
        return FileRecord.of(self.directory, path.relative_to(self.directory).as_posix())

    def _shards(self, count: int) -> list[tuple[Path, range]]:
        """Return the file and the rows of each shard."""
        ends = [count * number // self.arguments.num_shards for number in range(self.arguments.num_shards + 1)]
        return [
            (self.directory / f"shard-{number:04d}.faiss", range(start, stop))
            for number, (start, stop) in enumerate(pairwise(ends))
        ]


@contextmanager
def bar(title: str, total: int | None, done: int = 0, *, hidden: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a bar, and yield a function that takes the number of things done since its last call.

    ``total`` is None if it is not known; ``done`` things were done before.
    """
    with progress_bar(Console(emoji=False), hidden=hidden) as progress:
        task = progress.add_task(title, total=total, completed=done)
        yield lambda number: progress.advance(task, number)


def write_or_compare(passages: Iterator[Passage], directory: Path) -> None:
    """Write the corpus of an index under construction; if an interrupted call wrote it, compare the passages.

    Raises:
        DataError: as ``write_corpus``, or the passages differ.
    """
    if not (directory / CORPUS_FILE).is_file():
        write_corpus(passages, directory)
        return
    # Reading is cheap beside encoding, and the vectors of another corpus would find wrong passages.
    pairs = zip_longest(passages, Corpus.open(directory))
    for row, (given, kept) in enumerate(pairs):
        if given is None or kept is None or _texts(given) != _texts(kept):
            raise DataError(
                f"{directory} is of a build of other passages: number {row + 1} differs; build to another directory, "
                "or remove this one, or use restart"
            )


def report_on(passages: Iterable[Passage]) -> CorpusReport | None:
    """Return the report on the file of the passages, once they are read; None if they are not read from a file."""
    return passages.report if isinstance(passages, PassageFile) else None


def counted(passages: Iterable[Passage], advance: Callable[[int], None]) -> Iterator[Passage]:
    """Yield the passages, and call ``advance(1)`` for each."""
    for passage in passages:
        yield passage
        advance(1)


def _texts(passage: Passage) -> tuple[str, str, str]:
    return valid_unicode(passage.id), valid_unicode(passage.title), valid_unicode(passage.text)


def building_dir(out_dir: str | Path) -> Path:
    """Return the directory in which ``out_dir`` is built, beside it: a rename is atomic within one file system only.

    For a symbolic link it is beside the target.
    """
    absolute = Path(os.path.realpath(out_dir))
    return absolute.with_name(f"{absolute.name}.building")


def check_free(out_dir: Path) -> None:
    """Raise ``DataError`` unless ``out_dir`` is new or an empty directory, so that a directory can be renamed to it."""
    try:
        is_taken = out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir()))
    except OSError as error:
        raise as_user_error(error, out_dir) from error
    if is_taken:
        raise DataError(f"{out_dir} exists already and is not overwritten; remove it or choose another directory")
    if os.path.ismount(out_dir):
        raise DataError(
            f"{out_dir} is where a file system is mounted, and cannot be replaced by a finished index; choose a new "
            "directory in it"
        )


def _has_costly_work(directory: Path) -> bool:
    """Return whether a directory under construction holds work that takes long to repeat."""
    return any(any(directory.glob(pattern)) for pattern in ("embeddings/*.npy", "*.faiss", "bm25"))


@contextmanager
def work_directory(out_dir: Path, arguments: Mapping[str, Any], restart: bool = False) -> Iterator[Path]:
    """Lock ``building_dir(out_dir)``, and rename it to ``out_dir`` once the block has filled it.

    ``arguments``, as JSON, are everything besides the passages on which the content depends. If the block fails, a
    directory with vectors in it is kept, so that the next build continues. A directory with only the corpus is kept if
    the block was interrupted, and removed if the build was refused.
    """
    directory = building_dir(out_dir)
    out_dir = Path(os.path.realpath(out_dir))  # a directory cannot be renamed to a symbolic link
    directory.mkdir(parents=True, exist_ok=True)
    taken = DataError(f"another process builds {out_dir}; wait for it or choose another directory")
    with ExitStack() as held:
        try:
            held.enter_context(held_alone(directory / _LOCK_FILE, taken))
        except FileNotFoundError as error:
            raise DataError(f"another process has just built {out_dir}; choose another directory") from error
        is_begun = not restart and _is_begun(directory, arguments)
        try:
            check_free(out_dir)
            # Unfinished files of a killed process would become parts of the index.
            patterns = (f"{SPILL_PREFIX}*", f"{WRITING}*") if is_begun else ("*",)
            for pattern in patterns:
                _remove(path for path in directory.glob(pattern) if path.name != _LOCK_FILE)
            if not is_begun:
                write_file(directory / ARGUMENTS_FILE, lambda writing: write_json(writing, dict(arguments)))
            yield directory
            publish(directory, out_dir)
        except BaseException as error:
            is_refused = isinstance(error, UserError)
            if not _has_costly_work(directory) and (is_refused or not (directory / CORPUS_FILE).is_file()):
                shutil.rmtree(directory, ignore_errors=True)
            raise
        for name in (ARGUMENTS_FILE, _LOCK_FILE):
            (out_dir / name).unlink()


def _is_begun(directory: Path, wanted: Mapping[str, Any]) -> bool:
    """Return whether an unfinished build with these arguments is there; ``DataError`` if it has others."""
    path = directory / ARGUMENTS_FILE
    if not path.is_file():  # it was interrupted before it wrote its arguments
        return False
    try:
        kept = read_json_as(dict[str, Any], path)
    except DataError:
        kept = {}
    if kept == wanted:
        return True
    differing = [f"{key} {kept.get(key)!r}, now {wanted[key]!r}" for key in wanted if kept.get(key) != wanted[key]]
    raise DataError(
        f"{directory} is of an unfinished build with other arguments ({'; '.join(differing)}); give those to go on, or "
        "remove it, or use restart"
    )


def _remove(paths: Iterable[Path]) -> None:
    for path in list(paths):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
