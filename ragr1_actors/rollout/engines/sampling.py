"""Sampling tokens from logits, reproducibly: a token depends on its own seed and step, not on its neighbours."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def uniform(seeds: NDArray[np.uint64], steps: NDArray[np.uint64]) -> NDArray[np.float64]:
    """One number in [0, 1) for each (seed, step) by splitmix64 (Steele et al. 2014).

    Args:
        seeds: ``[n]``.
        steps: ``[n]``, the index of the new token.
    """
    with np.errstate(over="ignore"):
        z = seeds * np.uint64(0xD1342543DE82EF95) + (steps + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    mantissas: NDArray[np.float64] = (z >> np.uint64(11)).astype(np.float64)
    return mantissas * np.float64(2.0**-53)


def sample(logits: Tensor, temperatures: Tensor, top_ps: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sample one token a row and return it with its log-prob under the distribution it was drawn from.

    Args:
        logits: ``[n, vocab]``.
        temperatures: ``[n]``; 0 is greedy, and its log-prob is that of temperature 1.
        top_ps: ``[n]``; 1 keeps the whole distribution.
        uniforms: ``[n]`` in [0, 1).

    Returns:
        token ids ``[n]`` int64 and log-probs ``[n]`` float32.
    """
    greedy = temperatures == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperatures).unsqueeze(1)
    logprobs = torch.log_softmax(scaled, dim=-1)
    if bool((top_ps < 1).any()):
        logprobs = _restrict(logprobs, top_ps)
    cumulative = logprobs.exp().cumsum(dim=-1)
    # the total is 1 only up to rounding: scaling the draw by it keeps the last token reachable and no further
    draws = (uniforms * cumulative[:, -1]).unsqueeze(1)
    sampled = torch.searchsorted(cumulative, draws, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)
    tokens = torch.where(greedy, logits.argmax(dim=-1), sampled)
    return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)


def _restrict(logprobs: Tensor, top_ps: Tensor) -> Tensor:
    """Keep the smallest set of tokens whose probability reaches top_p (Holtzman et al. 2020), renormalised."""
    ordered, order = logprobs.sort(dim=-1, descending=True)
    before = ordered.exp().cumsum(dim=-1) - ordered.exp()
    dropped = torch.zeros_like(before, dtype=torch.bool).scatter(1, order, before >= top_ps.unsqueeze(1))
    return torch.log_softmax(logprobs.masked_fill(dropped, float("-inf")), dim=-1)
