"""Scans by torch's matrix products, without faiss: over a block in memory, or over all vectors on a GPU.

``TorchFlatIndex`` needs the memory of one block of scores beside its matrix, for any number of queries.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ragr1_actors.core.errors import ConfigError, DataError
from retrieval.indexes.ranking import Ranking

_MAX_QUERIES = 1024
"""Limit of queries that are searched at once; more are searched in turns."""
_EXTRA_SHARE = 0.04
"""Size of a block of scores, as a share of the matrix. The selection of a block's best scores takes as much again."""
_LEAST_EXTRA_BYTES = 2**24


@torch.inference_mode()
def best_of_block(queries: NDArray[np.float32], block: NDArray[np.float32], k: int) -> Ranking:
    """Return the ``min(k, len(block))`` rows of ``block`` nearest to each query, in any order, by a product in float32.

    ``queries`` are ``[num_queries, dimension]``, and ``block`` is ``[num_rows, dimension]``, in writable memory. The
    number of threads is torch's setting for the process.
    """
    scores = torch.mm(torch.from_numpy(queries), torch.from_numpy(block).T)
    values, rows = torch.topk(scores, min(k, len(block)), dim=1)
    return Ranking(values.numpy(), rows.numpy())


class TorchFlatIndex:
    """Inner-product search over all rows of a matrix in half precision; row i is the i-th given vector.

    Scores are computed from the rounded vectors and summed in float32, so that a query's answer is the same in any
    batch, except for the order of rows whose scores differ by less than 1e-6.
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

        Without ``dtype`` the matrix is float16, or float32 on a CPU, which has no fast half precision.

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
        # CUDA sums half-precision products in float32 and can return float32; elsewhere the sums would be rounded.
        self._sum_dtype: dict[str, Any] = {} if is_cpu or dtype == torch.float32 else {"out_dtype": torch.float32}
        start = 0
        for block in blocks:
            stop = start + len(block)
            if stop > count:
                break
            # copy_ converts, so the device never holds all vectors in float32. The copy is of mapped, read-only
            # memory, which torch does not take as it is.
            self._matrix[start:stop].copy_(torch.from_numpy(np.array(block, np.float32)))
            start = stop
        if start != count:
            raise DataError(f"got {start} or more vectors, expected {count}; build the index again")

    @torch.inference_mode()
    def find(self, queries: NDArray[np.float32], k: int) -> Ranking:
        """Return the nearest ``k`` rows of each query ``[n, dimension]``, in any order.

        There is at least one query, and ``k`` is from 1 to the number of rows.
        """
        turns = range(0, len(queries), _MAX_QUERIES)
        found = [self._find(queries[start : start + _MAX_QUERIES], k) for start in turns]
        return Ranking(*map(np.concatenate, zip(*found, strict=True)))

    def _find(self, queries: NDArray[np.float32], depth: int) -> Ranking:
        exact = torch.from_numpy(queries).to(self._device)
        rounded = exact.to(self._matrix.dtype)
        # A block's scores for all queries must fit into the memory that is allowed beside the matrix.
        extra_bytes = max(_LEAST_EXTRA_BYTES, int(self._matrix.nbytes * _EXTRA_SHARE))
        step = max(depth, extra_bytes // (4 * len(queries)))
        best, candidates = exact.new_empty((len(queries), 0)), exact.new_empty((len(queries), 0), dtype=torch.int64)
        for start in range(0, len(self._matrix), step):
            scores = torch.mm(rounded, self._matrix[start : start + step].T, **self._sum_dtype)
            values, rows = torch.topk(scores, min(depth, scores.shape[1]), dim=1)
            del scores  # freed before the next block's scores are computed
            rows = rows + start
            if start:
                values, rows = torch.cat([best, values], 1), torch.cat([candidates, rows], 1)
                values, positions = torch.topk(values, min(depth, values.shape[1]), dim=1)
                rows = rows.gather(1, positions)
            best, candidates = values, rows
        return Ranking(self._rescore(exact, candidates).cpu().numpy(), candidates.cpu().numpy())

    def _rescore(self, queries: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Score candidates again, float32 ``[n, depth]``, a few queries at a time."""
        step = max(1, _LEAST_EXTRA_BYTES // (8 * self._matrix.shape[1] * rows.shape[1]))
        parts = [
            (self._matrix[rows[start : start + step]].float() * queries[start : start + step, None, :]).sum(-1)
            for start in range(0, len(queries), step)
        ]
        return torch.cat(parts)
