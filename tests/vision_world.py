"""Tiny policies that read images, and made-up pages."""

from __future__ import annotations

import numpy as np
import PIL.Image

from ragr1_actors.core.content import Image
from ragr1_actors.core.images import encoded

TEXTS = ["What is on the page? Riga lies in Latvia. <search> Ana Bell</search>", "Look at the page again: x, y"]


def page(width: int = 24, height: int = 16, seed: int = 0) -> Image:
    """A page of random pixels; 24 x 16 are 2 rows of 3 placeholders for a tiny policy with patches of 4 pixels."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return encoded(PIL.Image.fromarray(values))
