"""Builds and searches the inverted index of BM25 weights. The only module that imports bm25s.

The builder writes the same weights as bm25s's builder (a test compares them), in memory that hardly grows with the
corpus: bm25s holds every posting several times, about 2 KB per passage. It makes two passes: word counts into a file,
then each weight to its place in mapped arrays.

::

    bm25/
      settings.json     how words are found and weighted; see ``bm25_settings``; written last
      words.npy         uint64 [num_words]         hashes of the stems, ascending: a word's number is its position; stop
                                                   words have numbers too, and count in no length
      starts.npy        int64 [num_words + 1]      where the postings of a word begin
      rows.npy          int32 [num_postings]       corpus rows, ascending within a word
      weights.npy       float32 [num_postings]     what the word adds to the row's score
"""

from __future__ import annotations

import json
import os
import shutil
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import bm25s
import numpy as np
from numpy.typing import DTypeLike, NDArray

from ragr1_actors.core.disk.json_files import read_json
from ragr1_actors.core.errors import DataError
from retrieval.base import Passage
from retrieval.corpora.text import HashTable, hash_text, split_words, stem_word, stop_word_stem, word_settings
from retrieval.indexes.manifest import BM25_FOLDER, Manifest
from retrieval.indexes.ranking import ABSENT, Ranking


class BM25Ranker:
    """Ranker by BM25, Lucene's variant, from memory maps that all processes of a node share.

    A repeated word of a query counts once. Stop words count only in a query without other words, such as "The Who". The
    answer to a query does not depend on its batch.
    """

    def __init__(self, directory: str | Path, manifest: Manifest) -> None:
        """Open the folder ``bm25`` of an index directory whose files ``manifest`` has checked.

        Raises:
            DataError: it was made with other settings or over another corpus.
        """
        folder = Path(directory) / BM25_FOLDER
        _check_settings(folder / SETTINGS_FILE, manifest.count)
        # With numba installed "auto" would choose another backend, which is hardly faster.
        self._index = bm25s.BM25(method=METHOD, k1=K1, b=B, backend="numpy")
        self._index.nonoccurrence_array = None
        self._index.load_scores(
            folder,
            data_name=WEIGHTS_FILE,
            indices_name=ROWS_FILE,
            indptr_name=STARTS_FILE,
            num_docs=manifest.count,
            mmap=True,
        )
        # Plain arrays, since a slice of ``np.memmap`` takes ten times as long.
        scores = self._index.scores
        for name in ("data", "indices", "indptr"):
            scores[name] = scores[name].view(np.ndarray)
        self._words = np.load(folder / WORDS_FILE, mmap_mode="r").view(np.ndarray)
        self._count = manifest.count

    def rank(self, queries: list[str], k: int, vectors: NDArray[np.float32] | None = None) -> Ranking:
        """Return the best ``min(k, count)`` rows of each query that share a word with it; see ``Rank``.

        ``vectors`` are ignored.
        """
        depth = min(k, self._count)
        scores = np.full((len(queries), depth), -np.inf, np.float32)
        rows = np.full((len(queries), depth), ABSENT, np.int64)
        for position, query in enumerate(queries):
            words = self._find_words(query)
            if words.size:
                all_scores = self._index.get_scores_from_ids(words)
                best = _best_rows(all_scores, depth)
                rows[position, : best.size] = best
                scores[position, : best.size] = all_scores[best]
        return Ranking(scores, rows)

    def _find_words(self, query: str) -> NDArray[np.int64]:
        """Return the numbers of the query's words that the index knows, ascending."""
        words = split_words(query)
        # An index of format version 1 has no postings of stop words.
        stems = ({stem_word(word) for word in words} - {""}) or {stop_word_stem(word) for word in words}
        hashes = np.array([hash_text(stem) for stem in stems], np.uint64)
        positions = np.searchsorted(self._words, hashes)
        is_known = self._words[np.minimum(positions, len(self._words) - 1)] == hashes
        # Sorted, so that the additions give the same last bit for any order of the query's words.
        return np.sort(positions[is_known])


def _best_rows(scores: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Return the rows of the ``k`` highest positive scores, best first, equal scores by row; there may be fewer."""
    # The k-th largest maximum of blocks is at most the k-th largest score, and is found without sorting the scores.
    block = max(1, len(scores) // (4 * k))
    maxima = scores[: len(scores) // block * block].reshape(-1, block).max(axis=1)
    limit = np.partition(maxima, -k)[-k]
    candidates = np.flatnonzero(scores >= limit if limit > 0 else scores > 0)
    return candidates[np.lexsort((candidates, -scores[candidates]))[:k]]


def _check_settings(path: Path, count: int) -> None:
    found, expected = read_json(path), {**bm25_settings(), "num_passages": count}
    if found not in (expected, {**expected, "format_version": 1}):
        names = ", ".join(name for name in sorted({*found, *expected}) if found.get(name) != expected.get(name))
        raise DataError(f"{path}: made under other settings or over another corpus ({names}); build the index again")


SETTINGS_FILE, WORDS_FILE, STARTS_FILE = "settings.json", "words.npy", "starts.npy"
ROWS_FILE, WEIGHTS_FILE = "rows.npy", "weights.npy"
METHOD, K1, B = "lucene", 1.2, 0.75

_POSTING = np.dtype([("word", "<i4"), ("row", "<i4"), ("count", "<i4")])
_BLOCK_PASSAGES = 4096
_BLOCK_POSTINGS = 2**20
_CACHED_WORDS = 2**19
_ROW_BITS = 32


def bm25_text(passage: Passage) -> str:
    """Return the text that is indexed for a passage: its title twice (+.03 recall@2 on HotpotQA), and its text."""
    return f"{passage.title}\n{passage.title}\n{passage.text}"


def bm25_settings() -> dict[str, Any]:
    """Return the settings on which the weights depend, besides the passages. A query needs the same settings."""
    return {"format_version": 2, "method": METHOD, "k1": K1, "b": B, "words": word_settings()}


def build_bm25(texts: Iterable[str], directory: str | Path) -> list[str]:
    """Write the inverted index of ``texts``, one row each, into ``directory/bm25``; an existing folder is removed.

    It needs about 150 MB of memory, and 4 bytes per passage and 60 per distinct word. On disk it needs 20 bytes per
    posting, of which 8 stay; a passage of 100 words has about 70 postings, 15 of them of stop words.

    Args:
        texts: read once; see ``bm25_text``.
        directory: directory of the index.

    Returns:
        The files written, relative to ``directory``.

    Raises:
        DataError: ``texts`` has no word.
        OSError: the files could not be written.
    """
    folder = Path(directory) / BM25_FOLDER
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    counted = folder / "postings.tmp"
    try:
        with counted.open("w+b") as file:
            words = _count_words(texts, file)
            if not words.lengths.any():
                raise DataError("an inverted index needs texts with words in them that are no stop words; got none")
            file.seek(0)
            _write_index(words, file, folder)
    finally:
        counted.unlink(missing_ok=True)
    settings = {**bm25_settings(), "num_passages": len(words.lengths)}
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return [f"{BM25_FOLDER}/{name}" for name in (SETTINGS_FILE, WORDS_FILE, STARTS_FILE, ROWS_FILE, WEIGHTS_FILE)]


@dataclass(frozen=True)
class _Words:
    """Result of the first pass. Words are numbered in the order of their first occurrence."""

    hashes: NDArray[np.uint64]
    """Hashes of the words by ``hash_text``, ``[num_words]``."""
    frequencies: NDArray[np.int64]
    """Number of passages in which each word occurs, ``[num_words]``."""
    lengths: NDArray[np.int32]
    """Number of words of each passage, without stop words, ``[num_passages]``."""


class _Numbering:
    """Numbers stems from 0, in the order of their first occurrence, stop words included."""

    def __init__(self) -> None:
        self.hashes = array("Q")
        self._table = HashTable()
        # By word as written: number + 1, negative for a stop word. It only saves time, and is cleared when full.
        self._cache: dict[str, int] = {}

    def numbers(self, text: str) -> tuple[list[int], list[int]]:
        """Return the numbers of a text's words, in order: first of stop words, then of all others."""
        cache = self._cache
        stop_words, found = [], []
        for word in split_words(text):
            number = cache.get(word)
            if number is None:
                number = self._look_up(word)
            if number > 0:
                found.append(number - 1)
            else:
                stop_words.append(-number - 1)
        return stop_words, found

    def _look_up(self, word: str) -> int:
        if len(self._cache) >= _CACHED_WORDS:
            self._cache.clear()
        stem = stem_word(word)
        key = hash_text(stem or stop_word_stem(word))
        number = self._table.get(key)
        if not number:
            self.hashes.append(key)
            number = len(self.hashes)
            self._table.set(key, number)
        self._cache[word] = number if stem else -number
        return self._cache[word]


def _count_words(texts: Iterable[str], file: IO[bytes]) -> _Words:
    """Append the postings of all texts to ``file``; rows ascend from block to block."""
    numbering = _Numbering()
    frequencies = np.zeros(1024, np.int64)
    lengths = array("i")
    remaining = iter(texts)
    while block := list(islice(remaining, _BLOCK_PASSAGES)):
        start, flat, num_words = len(lengths), array("i"), array("i")
        for text in block:
            stop_words, numbers = numbering.numbers(text)
            flat.extend(stop_words)
            flat.extend(numbers)
            num_words.append(len(stop_words) + len(numbers))
            lengths.append(len(numbers))
        postings = _count_block(np.frombuffer(flat, np.int32), np.frombuffer(num_words, np.int32), start)
        if len(numbering.hashes) > len(frequencies):
            frequencies = np.concatenate([frequencies, np.zeros(len(numbering.hashes), np.int64)])
        np.add.at(frequencies, postings["word"], 1)
        postings.tofile(file)
    return _Words(
        np.frombuffer(numbering.hashes, np.uint64),
        frequencies[: len(numbering.hashes)],
        np.frombuffer(lengths, np.int32),
    )


def _count_block(numbers: NDArray[np.int32], lengths: NDArray[np.int32], start: int) -> NDArray[Any]:
    """Return the postings, by word and row, of passages from row ``start``; ``numbers`` are their words in a row."""
    rows = np.repeat(np.arange(start, start + len(lengths), dtype=np.int64), lengths)
    keys, counts = np.unique(numbers.astype(np.int64) << _ROW_BITS | rows, return_counts=True)
    postings = np.empty(len(keys), _POSTING)
    postings["word"], postings["row"], postings["count"] = keys >> _ROW_BITS, keys & (2**_ROW_BITS - 1), counts
    return postings


def _write_index(words: _Words, file: IO[bytes], folder: Path) -> None:
    """Write the arrays, words numbered by their hashes."""
    order = np.argsort(words.hashes)
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(len(order))
    frequencies = words.frequencies[order]
    starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(frequencies)])
    np.save(folder / WORDS_FILE, words.hashes[order])
    np.save(folder / STARTS_FILE, starts)

    rows = _allocate(folder / ROWS_FILE, np.int32, int(starts[-1]))
    weights = _allocate(folder / WEIGHTS_FILE, np.float32, int(starts[-1]))
    num_passages, mean_length = len(words.lengths), words.lengths.mean()
    idf = np.log1p((num_passages - frequencies + 0.5) / (frequencies + 0.5)).astype(np.float32)
    ends = starts[:-1].copy()
    """Position of the next posting of each word."""
    while len(postings := np.fromfile(file, _POSTING, _BLOCK_POSTINGS)):
        word = ranks[postings["word"]]
        # Stable, so that the rows of a word stay ascending.
        order = np.argsort(word, kind="stable")
        word, row, count = word[order], postings["row"][order], postings["count"][order]
        firsts = np.flatnonzero(np.diff(word, prepend=-1))
        run_lengths = np.diff(firsts, append=len(word))
        places = np.repeat(ends[word[firsts]] - firsts, run_lengths) + np.arange(len(word))
        ends[word[firsts]] += run_lengths
        rows[places] = row
        weights[places] = idf[word] * (count / (K1 * (1 - B + B * words.lengths[row] / mean_length) + count))
    assert np.array_equal(ends, starts[1:])
    rows.flush()
    weights.flush()


def _allocate(path: Path, dtype: DTypeLike, size: int) -> np.memmap[Any, Any]:
    """Map a new ``.npy`` file of zeros, written in full: a hole that a full disk cannot fill would kill the process."""
    mapped: np.memmap[Any, Any] = np.lib.format.open_memmap(path, "w+", dtype, (size,))
    with path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return mapped
