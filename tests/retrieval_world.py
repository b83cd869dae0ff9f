"""Vectors that are hard to search, and five passages."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.base import Passage

NAMES = ["Ana Bell", "Bo Cole", "Çelik Öz", "Dana Fox 1902", "李 明"]
PASSAGES = [Passage(f"p{i}", name, f"{name} was born in town{i}.") for i, name in enumerate(NAMES)]


def hard_vectors(count: int, dimension: int, num_queries: int, seed: int = 0) -> tuple[NDArray[Any], NDArray[Any]]:
    """Vectors and queries of length 1 around 2,000 centres so weak that an approximate index misses neighbours."""
    rng = np.random.default_rng(seed)
    centres = _unit(rng.standard_normal((2000, dimension), dtype=np.float32))

    def draw(size: int) -> NDArray[np.float32]:
        noise = _unit(rng.standard_normal((size, dimension), dtype=np.float32))
        return _unit(0.5 * centres[rng.integers(0, len(centres), size)] + np.float32(0.75**0.5) * noise)

    return draw(count), draw(num_queries)


def _unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    scaled: NDArray[np.float32] = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return scaled
