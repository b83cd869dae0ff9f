"""Make an index directory around a FAISS file that was made elsewhere, without encoding its passages again.

::

    FAISS file ─► kind, metric, dimension, lengths ─┐
    corpus ─► corpus.arrow ─► count, ids ───────────┤
    some hundred passages ─► encoder, each layout ──┴─► compared with the file's vectors ─► link or copy, manifest.json

A wrong encoder, pooling, prompt or order of the passages raises no error in a search, which only finds less. So the
vectors of a sample are compared before the file is taken.
"""

from __future__ import annotations

import math
import os
import shutil
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ragr1_actors.core.disk.files import WRITING, stamp_of, write_file
from ragr1_actors.core.errors import ConfigError, DataError
from ragr1_actors.core.resolve import STATIC
from retrieval.base import Passage
from retrieval.build import (
    as_user_error,
    bar,
    check_free,
    counted,
    encoder_name,
    report_on,
    work_directory,
    write_or_compare,
)
from retrieval.corpora.corpus import CORPUS_FILE, Corpus, write_titles
from retrieval.corpora.report import CorpusReport
from retrieval.corpora.text import LAYOUTS, is_empty
from retrieval.indexes.manifest import EMPTY_FILE, ROWS_FILE, TITLES_FILE, FileRecord, Manifest, Shard

if TYPE_CHECKING:
    from retrieval.encoders.encoder import Encoder
    from retrieval.indexes.faiss_file import FaissFile

NUM_COMPARED = 256
"""Number of passages that are encoded, evenly spread, so that some come from a part in another order."""
LEAST_COSINE = 0.999
"""Least mean cosine of passages and their vectors, if the file has kept the vectors. Passages of the generated world by
all-MiniLM-L6-v2: .986 without their titles, .47 with each other's neighbour's vector
(``tests/test_real_encoder.py``)."""
LEAST_FIRST = 0.95
"""Least share of passages whose own vector is the nearest among those compared, if the file has kept codes only."""
_SHARD_FILE = "shard-0000.faiss"
_LENGTH_ERROR, _MEAN_LENGTH_ERROR = 0.01, 0.05

Rows = NDArray[np.int64]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Adoption:
    """Adopted file: agreement of its vectors with the vectors that the encoder makes of their passages."""

    kind: str
    """Kind of the file, as ``FaissFile.kind`` names it."""
    layout: str
    """Layout of ``LAYOUTS`` that agrees best."""
    num_compared: int
    """Number of compared passages."""
    cosine: float
    """Mean cosine over the compared passages."""
    first_share: float
    """Share of passages to which no other vector is as near as their own."""
    mean_length: float
    """Mean length of the vectors that the file was made from; 1 is the length of the encoder's vectors."""


def adopt_index(
    file: str | Path,
    passages: Iterable[Passage],
    out_dir: str | Path,
    *,
    encoder: str,
    copy: bool = False,
    progress: bool = True,
    restart: bool = False,
) -> Adoption:
    """Make an index of a FAISS file and its passages in ``out_dir``, which appears only once it is whole.

    Args:
        file: written by ``faiss.write_index``; it is read by faiss alone and not changed.
        passages: the passages of the file, with unique ids; its vectors are in their order, or have their ids.
        out_dir: a new or empty directory.
        encoder: folder or hub name of the encoder that made the vectors.
        copy: copy the file; if False it gets a second name, a hard link, on the same file system.
        progress: show a bar on a terminal.
        restart: remove what an earlier call left unfinished.

    Raises:
        DataError: the file is no FAISS index or has an unknown kind or metric, its vectors are not those of this
            encoder for these passages, or ``out_dir`` is not empty.
        ConfigError: no file can have been made with such an encoder.
        UserError: the disk is full.
    """
    from retrieval.encoders.encoder import Encoder  # torch and sentence-transformers take seconds to import
    from retrieval.indexes.faiss_file import FaissFile

    out_dir = Path(out_dir)
    check_free(out_dir)
    if encoder == STATIC:
        raise ConfigError(
            "got the encoder static, which `ragr1 index build` makes from a corpus; name the encoder that made the file"
        )
    opened = FaissFile.open(Path(file))
    ids = opened.ids()
    if opened.is_l2 and opened.keeps_lengths:  # before minutes are spent on a corpus
        some = opened.vectors(_spread(np.arange(opened.count) if ids is None else ids))
        if not np.isfinite(some).all():
            raise opened.not_finite()
        _check_lengths(opened, np.linalg.norm(some, axis=1), _LENGTH_ERROR)
    name = encoder_name(encoder)
    loaded = Encoder.load(name)
    if loaded.dimension != opened.dimension:
        raise DataError(
            f"{file}: got vectors of dimension {opened.dimension}, but those of encoder {encoder!r} have "
            f"{loaded.dimension}; name the encoder that the file was made with"
        )
    try:
        arguments = {"adopted": str(opened.path.resolve()), "encoder": name}
        with work_directory(out_dir, arguments, restart) as directory:
            return _Adopting(directory, opened, ids, loaded, progress).run(passages, copy=copy)
    except OSError as error:
        raise as_user_error(error, out_dir) from error


@dataclass(frozen=True)
class _Adopting:
    """Steps of adopting a file, in a directory under construction."""

    directory: Path
    file: FaissFile
    ids: Rows | None
    """All ids of the file; None if they are the row numbers."""
    encoder: Encoder
    progress: bool

    def run(self, passages: Iterable[Passage], *, copy: bool) -> Adoption:
        empty = self._write_corpus(passages)
        corpus = Corpus.open(self.directory)
        row_ids = self._row_ids(corpus)
        match = compare(self.file, corpus, empty, row_ids, self.encoder)
        self._check(match)
        with bar("reading vectors", self.file.count, hidden=not self.progress) as advance:
            self.file.check_finite(advance)
        arrays = {EMPTY_FILE: empty} if empty.size else {}
        if row_ids is not None:
            order = np.argsort(row_ids)
            arrays[ROWS_FILE] = np.stack([row_ids[order], order])
        for name, rows in arrays.items():
            np.save(self.directory / name, rows)
        write_titles(corpus, self.directory / TITLES_FILE)
        self._take_file(copy=copy)
        self._describe([*arrays, TITLES_FILE], match.layout, report_on(passages)).write(self.directory)
        return match

    def _write_corpus(self, passages: Iterable[Passage]) -> Rows:
        """Write the corpus and return the rows of its empty passages."""
        empty = array("q")

        def noted() -> Iterator[Passage]:
            for row, passage in enumerate(passages):
                if is_empty(passage):
                    empty.append(row)
                yield passage

        with bar("reading passages", self.file.count, hidden=not self.progress) as advance:
            write_or_compare(counted(noted(), advance), self.directory)
        count = len(Corpus.open(self.directory))
        if count != self.file.count:
            raise DataError(
                f"{self.file.path}: got {self.file.count:,} vectors, but the corpus has {count:,} passages; give the "
                "corpus that the file was made from"
            )
        if len(empty) == count:
            raise DataError(f"none of the {count:,} passages has a letter or a digit; give another corpus")
        return np.array(empty, np.int64)

    def _row_ids(self, corpus: Corpus) -> Rows | None:
        """Return the file's id of each row, ``[len(corpus)]``; None if the ids are the row numbers."""
        if self.ids is None:
            return None
        named = corpus.whole_ids()
        if named is None or named.min() < 0 or not np.array_equal(np.sort(named), np.sort(self.ids)):
            raise DataError(
                f"{self.file.path}: its ids, {self.ids.min():,} to {self.ids.max():,}, are neither the numbers of the "
                f"passages, 0 to {len(corpus) - 1:,}, nor the ids that the corpus has; make the file with either"
            )
        return named

    def _check(self, match: Adoption) -> None:
        path, name = self.file.path, self.encoder.name
        where = f"{match.num_compared} passages in the best layout, {match.layout!r}"
        remedy = "give encoder (with its pooling and prompts) and corpus (in its order) of which the file was made"
        if self.file.is_lossless and not match.cosine >= LEAST_COSINE:
            shown = math.floor(match.cosine * 1e4) / 1e4  # never rounded to what is expected
            raise DataError(
                f"{path}: its vectors are not what encoder {name!r} makes of the passages: mean cosine {shown:.4f} of "
                f"{where}, expected {LEAST_COSINE}; {remedy}"
            )
        if not self.file.is_lossless and not match.first_share >= LEAST_FIRST:
            shown = math.floor(match.first_share * 1e3) / 1e3
            raise DataError(
                f"{path}: its vectors are not what encoder {name!r} makes of the passages: {shown:.1%} of {where}, are "
                f"nearest to their own vector, expected {LEAST_FIRST:.0%}; {remedy}"
            )
        if self.file.is_l2:
            _check_lengths(self.file, np.array([match.mean_length]), _MEAN_LENGTH_ERROR)

    def _take_file(self, *, copy: bool) -> None:
        target = self.directory / _SHARD_FILE
        for unfinished in (target, *self.directory.glob(f"{WRITING}*")):  # left by an interrupted call
            unfinished.unlink(missing_ok=True)
        source = self.file.path.resolve()  # a link to a symbolic link would break with it
        if copy:
            write_file(target, lambda writing: shutil.copyfile(source, writing))
        else:
            try:
                os.link(source, target)
            except OSError as error:
                raise DataError(
                    f"{source} cannot have a second name in {self.directory.parent} ({error.strerror}); add --copy, or "
                    "choose an --out on its file system"
                ) from error
        if stamp_of(source if copy else target) != self.file.stamp:
            target.unlink()
            raise DataError(
                f"{source} was changed or replaced while it was compared with the corpus; wait until it is whole, and "
                "adopt it again"
            )

    def _describe(self, names: list[str], layout: str, report: CorpusReport | None) -> Manifest:
        index_type = self.file.index_type(ids_are_rows=self.ids is None)
        plan = self.encoder.plan
        return Manifest(
            index_type=index_type,
            count=self.file.count,
            corpus=FileRecord.of(self.directory, CORPUS_FILE),
            files=tuple(FileRecord.of(self.directory, name) for name in names),
            metric="inner_product",
            vector_type=index_type,
            encoder=self.encoder.name,
            encoder_fingerprint=self.encoder.fingerprint,
            pooling=plan.pooling,
            query_prompt=plan.query_prompt,
            passage_prompt=plan.passage_prompt,
            dimension=self.file.dimension,
            shards=(Shard(0, self.file.count, FileRecord.of(self.directory, _SHARD_FILE)),),
            layout=layout,
            options=self.file.options(),
            corpus_report=report,
        )


def compare(file: FaissFile, corpus: Corpus, empty: Rows, row_ids: Rows | None, encoder: Encoder) -> Adoption:
    """Encode ``NUM_COMPARED`` passages in every layout, and return the match of the layout that fits the file best.

    Args:
        file: has as many vectors as ``corpus`` has passages.
        empty: rows that are not compared, ascending; not all.
        row_ids: the file's id of each row; None if the ids are the row numbers.

    Raises:
        DataError: the file holds NaN or infinity.
    """
    spread = _spread(np.delete(np.arange(len(corpus)), empty))
    texts = {p.text or p.title: row for row, p in zip(spread.tolist(), corpus.take(spread.tolist()), strict=True)}
    rows = np.array(list(texts.values()))  # each text once: equal texts may have equal vectors
    passages = corpus.take(rows.tolist())
    vectors = file.vectors(rows if row_ids is None else row_ids[rows])
    if not np.isfinite(vectors).all():
        raise file.not_finite()
    expected = {layout: file.transformed(encoder.encode_passages(passages, layout)) for layout in LAYOUTS}
    if not all(np.isfinite(each).all() for each in expected.values()):
        raise DataError(
            f"{file.path}: its {file.kind} makes NaN or infinity of the vectors of encoder {encoder.name!r}; make the "
            "file again"
        )
    matches = [_match(file.kind, each, vectors, layout) for layout, each in expected.items()]
    return max(matches, key=lambda match: match.cosine)


def _match(kind: str, expected: Floats, vectors: Floats, layout: str) -> Adoption:
    """Compare ``expected``, the vectors of an encoder, with the vectors of the file, both ``[num_compared, width]``."""
    expected_lengths, lengths = (np.linalg.norm(each, axis=1) for each in (expected, vectors))
    cosines = _unit(expected, expected_lengths) @ _unit(vectors, lengths).T
    own = cosines.diagonal().copy()
    np.fill_diagonal(cosines, -np.inf)
    # A code is the mean of the vectors it stands for, so it is shorter than them by its cosine with them.
    mean_length = lengths.sum() / max((expected_lengths * own).sum(), np.finfo(np.float32).tiny)
    first_share = float((own > cosines.max(axis=1)).mean())
    return Adoption(kind, layout, len(own), float(own.mean()), first_share, float(mean_length))


def _unit(vectors: Floats, lengths: Floats) -> Floats:
    return np.asarray(vectors / np.where(lengths > 0, lengths, 1)[:, None], np.float32)


def _spread(rows: Rows) -> Rows:
    """Return ``NUM_COMPARED`` of ``rows``, evenly spread, with the first and the last; all rows if they are fewer."""
    return rows[np.unique(np.linspace(0, len(rows) - 1, NUM_COMPARED).astype(np.int64))]


def _check_lengths(file: FaissFile, lengths: Floats, tolerance: float) -> None:
    """Refuse L2 over vectors whose length is not 1, because L2 then orders them differently from the inner product."""
    if not np.all(np.abs(lengths - 1) <= tolerance):
        raise DataError(
            f"{file.path}: got the metric L2 over vectors of length {lengths.min():.3f} to {lengths.max():.3f}, "
            "expected length 1, or the metric inner product; normalise the vectors and make the file again"
        )
