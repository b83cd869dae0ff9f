"""Build, describe and measure an index directory.

::

    passages ──► corpus.arrow ──► encoder ──► index.faiss ──► manifest.json ──► rename to its name
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from ragr1_actors.errors import DataError, UserError
from ragr1_actors.types import Task
from retrieval.base import Passage
from retrieval.corpus import Corpus, write_corpus
from retrieval.encoder import Encoder, make_static_encoder, passage_text
from retrieval.index import FORMAT_VERSION, INDEX_FILE, Manifest, VectorIndex, file_hash
from retrieval.retriever import LocalRetriever

STATIC = "static"
_STATIC_FOLDER = "encoder"
_BLOCK = 2048


def build_index(
    passages: Iterable[Passage],
    out_dir: str | Path,
    *,
    encoder: str = STATIC,
    index_type: str = "flat",
    seed: int = 0,
    progress: bool = True,
) -> Path:
    """Index passages into ``out_dir``, which appears only once it is whole.

    Args:
        passages: with unique ids.
        out_dir: a new or empty directory.
        encoder: ``static`` makes one from the passages and keeps it with the index; else a folder or hub name.
        index_type: ``flat``, exact search.
        seed: of the static encoder.
        progress: show a bar.

    Returns:
        ``out_dir``.

    Raises:
        DataError: ``out_dir`` holds something, no passages, an id twice, or an encoder that cannot be loaded.
        UserError: no room on the disk. Nothing is left behind.
    """
    out_dir = Path(out_dir)
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise DataError(f"{out_dir} exists already and is not overwritten; remove it or choose another directory")
    try:
        out_dir.parent.mkdir(parents=True, exist_ok=True)
        # Beside its final place: a rename is atomic within one file system only.
        work_dir = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}.building-", dir=out_dir.parent))
        try:
            _build(passages, work_dir, encoder, index_type, seed, progress)
            work_dir.chmod(0o755)  # mkdtemp makes it private
            work_dir.rename(out_dir)
        finally:
            shutil.rmtree(work_dir, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise DataError(f"{out_dir} was made by somebody else meanwhile; choose another directory") from error
        cause = error.strerror or str(error)
        raise UserError(
            f"the index could not be written to {out_dir} ({cause}); free some room or choose another disk"
        ) from error
    return out_dir


def index_info(directory: str | Path) -> dict[str, Any]:
    """Return the manifest of an index, with the ``bytes`` of all its files.

    Raises:
        DataError: no index there.
    """
    directory = Path(directory)
    manifest = Manifest.read(directory)
    return asdict(manifest) | {"bytes": sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())}


def evaluate_index(directory: str | Path, tasks: Iterable[Task], ks: Sequence[int] = (2, 3, 5, 10)) -> dict[str, float]:
    """Measure ``{"recall@2": 0.61, ...}``: the mean share of a task's supporting passages among the top k.

    The question is the query. Tasks without ``supporting_ids`` are left out.

    Raises:
        DataError: no index there, or no task with supporting ids.
    """
    known = [task for task in tasks if task.supporting_ids]
    if not known:
        raise DataError("no task names its supporting passages; recall cannot be measured without them")
    retriever = LocalRetriever(directory, num_threads=os.cpu_count() or 1)
    found = [
        [passage.id for passage in passages]
        for start in range(0, len(known), _BLOCK)
        for passages in retriever.search_batch([task.question for task in known[start : start + _BLOCK]], max(ks))
    ]
    return {
        f"recall@{k}": float(
            np.mean(
                [
                    len(set(ids[:k]) & set(task.supporting_ids)) / len(set(task.supporting_ids))
                    for task, ids in zip(known, found, strict=True)
                ]
            )
        )
        for k in ks
    }


def _build(
    passages: Iterable[Passage], directory: Path, encoder_name: str, index_type: str, seed: int, progress: bool
) -> None:
    corpus_path = write_corpus(passages, directory)
    corpus = Corpus.open(directory)
    if encoder_name == STATIC:
        folder = make_static_encoder(directory / _STATIC_FOLDER, map(passage_text, corpus), seed=seed)
        encoder, recorded = Encoder.load(folder), _STATIC_FOLDER
    else:
        encoder = Encoder.load(encoder_name)
        # A folder is recorded in full: the index may be opened from another working directory.
        recorded = str(Path(encoder_name).resolve()) if Path(encoder_name).is_dir() else encoder_name
    index_path = directory / INDEX_FILE
    VectorIndex.build(_vectors(corpus, encoder, progress), encoder.dimension, index_type).save(index_path)
    Manifest(
        format_version=FORMAT_VERSION,
        index_type=index_type,
        metric="inner_product",
        encoder=recorded,
        encoder_fingerprint=encoder.fingerprint,
        dimension=encoder.dimension,
        count=len(corpus),
        corpus_hash=file_hash(corpus_path),
        index_hash=file_hash(index_path),
        index_bytes=index_path.stat().st_size,
    ).write(directory)


def _vectors(corpus: Corpus, encoder: Encoder, progress: bool) -> Iterator[NDArray[np.float32]]:
    starts = range(0, len(corpus), _BLOCK)
    for start in track(starts, "encoding passages", disable=not progress):
        yield encoder.encode_passages(corpus[start : start + _BLOCK])
