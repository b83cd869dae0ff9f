"""Builds an inverted index of BM25 weights, in memory that hardly grows with the corpus.

bm25s's own builder holds every posting several times over, about 2 KB a passage. This one writes the same weights (a
test compares them) in two passes: word counts into a file, then each weight to its place in mapped arrays.

::

    bm25/
      settings.json     how words are found and weighted; see ``bm25_settings``; written last
      words.npy         uint64 [num_words]         hashes of the stems, ascending: a word's number is its position
      starts.npy        int64 [num_words + 1]      where the postings of a word begin
      rows.npy          int32 [num_postings]       corpus rows, ascending within a word
      weights.npy       float32 [num_postings]     what the word adds to the row's score
"""

from __future__ import annotations

import json
import shutil
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ragr1_actors.core.errors import DataError
from retrieval.base import Passage
from retrieval.corpora.texts import HashTable, hash_text
from retrieval.corpora.words import split_words, stem_word, word_settings
from retrieval.indexes.manifest import BM25_FOLDER

SETTINGS_FILE, WORDS_FILE, STARTS_FILE = "settings.json", "words.npy", "starts.npy"
ROWS_FILE, WEIGHTS_FILE = "rows.npy", "weights.npy"
METHOD, K1, B = "lucene", 1.2, 0.75

_POSTING = np.dtype([("word", "<i4"), ("row", "<i4"), ("count", "<i4")])
_BLOCK_PASSAGES = 4096
_BLOCK_POSTINGS = 2**20
_CACHED_WORDS = 2**19
_ROW_BITS = 32


def bm25_text(passage: Passage) -> str:
    """Return what is indexed of a passage: its title twice, which gains .03 recall@2 on HotpotQA, and its text."""
    return f"{passage.title}\n{passage.title}\n{passage.text}"


def bm25_settings() -> dict[str, Any]:
    """Return what the weights depend on beside the passages. A query is answered only under the same settings."""
    return {"format_version": 1, "method": METHOD, "k1": K1, "b": B, "words": word_settings()}


def build_bm25(texts: Iterable[str], directory: str | Path) -> list[str]:
    """Write the inverted index of ``texts``, each a row, into ``directory/bm25``; what was there is removed.

    Needs about 150 MB, and 4 bytes a passage and 60 a distinct word; on disk, while it runs, 20 bytes a posting (a
    passage of 100 words has about 55), of which 8 stay.

    Args:
        texts: read once; see ``bm25_text``.
        directory: of the index.

    Returns:
        The files written, relative to ``directory``.

    Raises:
        DataError: no word in ``texts``.
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
            if not words.frequencies.size:
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
    """What the first pass has learnt. Words are numbered in the order they were met."""

    hashes: NDArray[np.uint64]
    """``[num_words]``, of ``hash_text``."""
    frequencies: NDArray[np.int64]
    """``[num_words]``: in how many passages the word stands."""
    lengths: NDArray[np.int32]
    """``[num_passages]``, in words that are no stop words."""


class _Numbering:
    """Numbers stems from 0, in the order they are met."""

    def __init__(self) -> None:
        self.hashes = array("Q")
        self._table = HashTable()
        # By word as written, number + 1, 0 for a stop word. Begun anew when full: it is there for speed alone.
        self._cache: dict[str, int] = {}

    def numbers(self, text: str) -> list[int]:
        """Return the number of each word of a text, in order, without stop words."""
        cache = self._cache
        found = []
        for word in split_words(text):
            number = cache.get(word)
            if number is None:
                number = self._look_up(word)
            if number:
                found.append(number - 1)
        return found

    def _look_up(self, word: str) -> int:
        if len(self._cache) >= _CACHED_WORDS:
            self._cache.clear()
        stem = stem_word(word)
        number = 0
        if stem:
            key = hash_text(stem)
            number = self._table.get(key)
            if not number:
                self.hashes.append(key)
                number = len(self.hashes)
                self._table.set(key, number)
        self._cache[word] = number
        return number


def _count_words(texts: Iterable[str], file: IO[bytes]) -> _Words:
    """Append the postings of all texts to ``file``, ascending by row from block to block."""
    numbering = _Numbering()
    frequencies = np.zeros(1024, np.int64)
    lengths = array("i")
    for block in _blocks(texts):
        start, flat = len(lengths), array("i")
        for text in block:
            numbers = numbering.numbers(text)
            flat.extend(numbers)
            lengths.append(len(numbers))
        postings = _count_block(np.frombuffer(flat, np.int32), np.frombuffer(lengths[start:], np.int32), start)
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
    """Return the postings of consecutive passages, sorted by word and row.

    Args:
        numbers: the words of all passages, one passage after the other.
        lengths: of the passages.
        start: row of the first passage.
    """
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
    """Where the next posting of each word goes."""
    while len(postings := np.fromfile(file, _POSTING, _BLOCK_POSTINGS)):
        word = ranks[postings["word"]]
        # Stable: within a word the rows stay ascending.
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
    """Map a new ``.npy`` file of zeros that is there in full: a hole that a full disk cannot fill kills the process."""
    zeros = np.zeros(min(size, _BLOCK_POSTINGS), dtype)
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": np.lib.format.dtype_to_descr(zeros.dtype), "fortran_order": False, "shape": (size,)}
        )
        for start in range(0, size, len(zeros)):
            zeros[: size - start].tofile(file)
    mapped = np.load(path, mmap_mode="r+")
    assert isinstance(mapped, np.memmap)
    return mapped


def _blocks(texts: Iterable[str]) -> Iterator[list[str]]:
    block: list[str] = []
    for text in texts:
        block.append(text)
        if len(block) == _BLOCK_PASSAGES:
            yield block
            block = []
    if block:
        yield block
