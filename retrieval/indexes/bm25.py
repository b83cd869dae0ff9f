"""BM25Ranker: rows by the words they share with a query; HybridRanker: several rankings made one.

The only door to bm25s.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bm25s
import numpy as np
from numpy.typing import NDArray

from ragr1_actors.core.errors import DataError
from retrieval.corpora.texts import hash_text
from retrieval.corpora.words import split_words, stem_word
from retrieval.indexes.bm25_build import (
    K1,
    METHOD,
    ROWS_FILE,
    SETTINGS_FILE,
    STARTS_FILE,
    WEIGHTS_FILE,
    WORDS_FILE,
    B,
    bm25_settings,
    bm25_text,
    build_bm25,
)
from retrieval.indexes.manifest import BM25_FOLDER, Manifest
from retrieval.indexes.ranking import ABSENT, Ranker, Ranking, fuse_rankings

__all__ = ["BM25Ranker", "HybridRanker", "bm25_text", "build_bm25"]


class BM25Ranker:
    """Ranks rows by BM25, Lucene's variant, from memory maps that all processes of a node share. A ``Ranker``.

    A word counts once, however often a query repeats it. A query is answered alone: in any batch alike, to the bit.
    """

    def __init__(self, directory: str | Path, manifest: Manifest) -> None:
        """Open ``directory/bm25``.

        Args:
            directory: made by ``build_index``.
            manifest: of the directory.

        Raises:
            DataError: the folder is missing, damaged, or made under other settings or over another corpus.
        """
        folder = Path(directory) / BM25_FOLDER
        _check_settings(folder / SETTINGS_FILE, manifest.count)
        # Given by name: with numba installed "auto" would be another backend, which scores little faster.
        self._index = bm25s.BM25(method=METHOD, k1=K1, b=B, backend="numpy")
        self._index.nonoccurrence_array = None
        try:
            self._index.load_scores(
                folder,
                data_name=WEIGHTS_FILE,
                indices_name=ROWS_FILE,
                indptr_name=STARTS_FILE,
                num_docs=manifest.count,
                mmap=True,
            )
            self._words = _plain(np.load(folder / WORDS_FILE, mmap_mode="r"))
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{folder}: cannot be read ({error}); build the index again") from error
        scores = self._index.scores
        for name in ("data", "indices", "indptr"):
            scores[name] = _plain(scores[name])
        _check_arrays(folder, self._words, scores["indptr"], scores["indices"], scores["data"])
        self._count = manifest.count

    def rank(self, queries: list[str], k: int, vectors: NDArray[np.float32] | None = None) -> Ranking:
        """Return the best ``min(k, count)`` rows of each query, absent where a row shares no word; see ``Ranker.rank``.

        ``vectors`` are not looked at.
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
        stems = {stem_word(word) for word in split_words(query)} - {""}
        hashes = np.array([hash_text(stem) for stem in stems], np.uint64)
        positions = np.searchsorted(self._words, hashes)
        is_known = self._words[np.minimum(positions, len(self._words) - 1)] == hashes
        # In one order whatever the order of the query's words: so are the additions, and the last bit of the sum.
        return np.sort(positions[is_known])


class HybridRanker:
    """Fuses the rankings of several rankers over the same rows by reciprocal rank. A ``Ranker``.

    A ranker that finds nothing for a query leaves it to the others.
    """

    def __init__(self, rankers: Sequence[Ranker], depth: int = 100) -> None:
        """Hold the rankers.

        Args:
            rankers: at least one, over the same corpus.
            depth: how deep their rankings are that are fused, or ``k`` where that is more.
        """
        self._rankers = tuple(rankers)
        self._depth = depth

    def rank(self, queries: list[str], k: int, vectors: NDArray[np.float32] | None = None) -> Ranking:
        """Return up to ``k`` rows of each query, scored by ``fuse_rankings``; see ``Ranker.rank``."""
        depth = max(k, self._depth)
        return fuse_rankings([ranker.rank(queries, depth, vectors) for ranker in self._rankers], k)


def _best_rows(scores: NDArray[np.float32], k: int) -> NDArray[np.int64]:
    """Return the ``k`` rows of the highest positive scores, best first, equal scores by row; fewer if there are."""
    # The k-th best of the maxima of some blocks is at most the k-th best score, and found without sorting the scores.
    block = max(1, len(scores) // (4 * k))
    maxima = scores[: len(scores) // block * block].reshape(-1, block).max(axis=1)
    limit = np.partition(maxima, -k)[-k]
    candidates = np.flatnonzero(scores >= limit if limit > 0 else scores > 0)
    return candidates[np.lexsort((candidates, -scores[candidates]))[:k]]


def _check_settings(path: Path, count: int) -> None:
    if not path.is_file():
        raise DataError(f"no inverted index: {path} is missing; copy the index as a whole or build it again")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error}); build the index again") from error
    expected = {**bm25_settings(), "num_passages": count}
    if not isinstance(found, dict):
        raise DataError(f"{path}: got {type(found).__name__}, expected settings; build the index again")
    if found != expected:
        names = ", ".join(name for name in sorted({*found, *expected}) if found.get(name) != expected.get(name))
        raise DataError(f"{path}: made under other settings or over another corpus ({names}); build the index again")


def _check_arrays(
    folder: Path, words: NDArray[Any], starts: NDArray[Any], rows: NDArray[Any], weights: NDArray[Any]
) -> None:
    """Check that four arrays are the parts of one index, without reading them whole: that is the manifest's affair."""
    found = [(array.dtype.name, array.shape) for array in (words, starts, rows, weights)]
    num_words = len(words) if words.ndim else 0
    num_postings = int(starts[-1]) if starts.ndim == 1 and starts.size else 0
    expected = [
        ("uint64", (num_words,)),
        ("int64", (num_words + 1,)),
        ("int32", (num_postings,)),
        ("float32", (num_postings,)),
    ]
    if found != expected or not num_words:
        raise DataError(f"{folder}: its arrays do not belong together (got {found}); build the index again")


def _plain(array: NDArray[Any]) -> NDArray[Any]:
    """Return the mapped memory as a plain array: a slice of ``np.memmap`` takes ten times as long."""
    return array.view(np.ndarray)
