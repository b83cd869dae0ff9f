"""Attention of one layer in a decoding step, with keys and values repeated for their heads and shared by them.

``OMP_NUM_THREADS=2 python -m benchmarks.rollout.grouped_attention``: 128 rows of 150 and 400 tokens, nine heads over
three, 64 wide (SmolLM2-135M's shape); the median of ten calls, in milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from ragr1_actors.core.models.huggingface import sdpa_attention_forward
from ragr1_actors.rollout.engines.decoding import grouped_attention

ROWS, HEADS, KV_HEADS, WIDTH = 128, 9, 3, 64


def main() -> None:
    """Print a line per dtype and length."""
    module = torch.nn.Module()
    module.num_key_value_groups = HEADS // KV_HEADS  # type: ignore[assignment]
    for dtype in (torch.bfloat16, torch.float32):
        for length in (150, 400):
            query = torch.randn(ROWS, HEADS, 1, WIDTH, dtype=dtype)
            key, value = (torch.randn(ROWS, KV_HEADS, 512, WIDTH, dtype=dtype)[:, :, :length] for _ in range(2))
            mask = torch.ones(ROWS, 1, 1, length, dtype=torch.bool)
            times = [milliseconds(partial(side, module, query, key, value, mask)) for side in SIDES]
            print(f"{dtype}, {length} tokens: repeated {times[0]:.1f} ms, shared {times[1]:.1f} ms")


SIDES = (sdpa_attention_forward, grouped_attention)


def milliseconds(call: Callable[[], object]) -> float:
    """The median of ten calls after one."""
    call()
    found = []
    for _ in range(10):
        started = time.perf_counter()
        call()
        found.append(1000 * (time.perf_counter() - started))
    return median(found)


if __name__ == "__main__":
    main()
