"""TorchFlatIndex: every vector in half precision on a GPU, scanned by matrix products, without faiss.

Beside the matrix it needs the memory of one block of scores, for any number of queries.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from ragr1_actors.core.errors import ConfigError, DataError
from retrieval.indexes.ranking import SPARE, best_of

_MAX_QUERIES = 1024
"""Searched at once; more are searched in turns."""
_EXTRA_SHARE = 0.04
"""Size of a block of scores, as a share of the matrix. Selecting the best of a block takes as much again."""
_LEAST_EXTRA_BYTES = 2**24


class TorchFlatIndex:
    """Inner-product search over all rows of a matrix in half precision; row i is the i-th vector given.

    Scores are those of the rounded vectors, summed in float32, so that a query's answer is the same in any batch but
    for the order of rows whose scores differ by less than 1e-6. Equal scores are ordered by row.
    """

    def __init__(
        self,
        blocks: Iterable[NDArray[np.float32]],
        count: int,
        dimension: int,
        *,
        device: str = "cuda",
        dtype: torch.dtype | None = None,
    ) -> None:
        """Copy ``count`` vectors to a device, block by block: float32 ``[n, dimension]`` each.

        The matrix is float16, and float32 on a CPU, which has no fast half precision, unless ``dtype`` says otherwise.

        Raises:
            ConfigError: there is no such device.
            DataError: the blocks do not hold ``count`` rows.
        """
        self._device = torch.device(device)
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise ConfigError(f"device {device!r}: torch sees no GPU; give num_gpus_per_retriever or use device 'cpu'")
        is_cpu = self._device.type == "cpu"
        self._matrix = torch.empty(
            (count, dimension), dtype=dtype or (torch.float32 if is_cpu else torch.float16), device=self._device
        )
        # CUDA sums half-precision products in float32 and can keep the sums so; elsewhere they would be rounded.
        self._keeps_sums = not is_cpu and self._matrix.dtype != torch.float32
        start = 0
        for block in blocks:
            stop = start + len(block)
            if stop > count:
                break
            # copy_ converts on the way: float32 is never on the device as a whole. The copy is of mapped, read-only
            # memory, which torch does not take as it is.
            self._matrix[start:stop].copy_(torch.from_numpy(np.array(block, np.float32)))
            start = stop
        if start != count:
            raise DataError(f"got {start} or more vectors, expected {count}; build the index again")

    @property
    def count(self) -> int:
        """Number of vectors."""
        return len(self._matrix)

    @property
    def num_bytes(self) -> int:
        """Bytes of the matrix on the device."""
        return self._matrix.numel() * self._matrix.element_size()

    @torch.inference_mode()
    def search(self, queries: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Find the ``min(k, count)`` nearest rows of each query ``[n, dimension]``, best first, equal scores by row.

        Returns scores float32 ``[n, min(k, count)]`` and rows int64 of the same shape.
        """
        k = min(k, self.count)
        if not len(queries) or k == 0:
            return np.zeros((len(queries), k), np.float32), np.zeros((len(queries), k), np.int64)
        turns = [queries[start : start + _MAX_QUERIES] for start in range(0, len(queries), _MAX_QUERIES)]
        found = [self._search(np.ascontiguousarray(turn, np.float32), k) for turn in turns]
        return np.concatenate([scores for scores, _ in found]), np.concatenate([rows for _, rows in found])

    def _search(self, queries: NDArray[np.float32], k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        exact = torch.from_numpy(queries).to(self._device)
        rounded = exact.to(self._matrix.dtype)
        depth = min(k + SPARE, self.count)
        best: tuple[torch.Tensor, torch.Tensor] | None = None
        step = self._block_rows(len(queries), depth)
        for start in range(0, self.count, step):
            scores = self._products(rounded, self._matrix[start : start + step])
            values, rows = torch.topk(scores, min(depth, scores.shape[1]), dim=1)
            del scores  # before the next block's are made
            rows = rows + start
            if best is not None:
                values, rows = torch.cat([best[0], values], 1), torch.cat([best[1], rows], 1)
                values, positions = torch.topk(values, min(depth, values.shape[1]), dim=1)
                rows = rows.gather(1, positions)
            best = values, rows
        assert best is not None
        candidates = best[1]
        ranking = best_of(self._rescore(exact, candidates).cpu().numpy(), candidates.cpu().numpy(), k)
        return ranking.scores, ranking.rows

    def _products(self, queries: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
        if self._keeps_sums:
            return torch.mm(queries, block.T, out_dtype=torch.float32)
        return queries @ block.T

    def _block_rows(self, num_queries: int, depth: int) -> int:
        """Rows of which the scores of all queries fit into the memory there may be beside the matrix."""
        extra = max(_LEAST_EXTRA_BYTES, int(self.num_bytes * _EXTRA_SHARE))
        return max(depth, extra // (4 * num_queries))

    def _rescore(self, queries: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Score candidates again, float32 ``[n, depth]``, a few queries at a time."""
        dimension = self._matrix.shape[1]
        step = max(1, _LEAST_EXTRA_BYTES // (8 * dimension * rows.shape[1]))
        parts = [
            (self._matrix[rows[start : start + step]].float() * queries[start : start + step, None, :]).sum(-1)
            for start in range(0, len(queries), step)
        ]
        return torch.cat(parts)
