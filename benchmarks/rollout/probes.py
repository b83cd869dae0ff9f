"""Small measurements on one engine: tokens behind a stop string, and the pause of a weight update."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.measurement import Sample, quotient
from benchmarks.rollout import workload
from envs.grammars.tags import STOP_TAGS
from ragr1_actors.core.types import Completion, Message, Sampling
from ragr1_actors.rollout.engines.base import Engine, PolicyTokenizer

Weights = Mapping[str, NDArray[Any]]
SPELLED_STOPS = ("a b", "e k", "z q", "o m")
"""Stop strings that only two tokens together make up, the end of a word and the beginning of the next."""
TAG_SCALE = 3.0
"""What the embedding of a closing tag is scaled by, so that a random policy writes some."""


def read_weights(policy_dir: Path) -> Weights:
    """Every parameter by name, a tied ``lm_head.weight`` included."""
    from transformers import AutoModelForCausalLM

    state = AutoModelForCausalLM.from_pretrained(policy_dir).float().state_dict()
    return {name: tensor.numpy() for name, tensor in state.items()}


def fond_of_tags(weights: Weights, tokenizer: PolicyTokenizer) -> Weights:
    """The same weights, more likely to close a tag."""
    embedding = weights["model.embed_tokens.weight"].copy()
    for tag in STOP_TAGS:
        embedding[tokenizer.encode(tag)] *= TAG_SCALE
    return {**weights, "model.embed_tokens.weight": embedding, "lm_head.weight": embedding}


def tokens_past_stop(token_ids: Sequence[int], stop: Sequence[str], tokenizer: PolicyTokenizer) -> int | None:
    """Tokens after the one that completes a stop string; ``None`` where no stop string is in the text."""
    if not _holds(tokenizer.decode(token_ids), stop):
        return None
    end = next(n for n in range(1, len(token_ids) + 1) if _holds(tokenizer.decode(token_ids[:n]), stop))
    return len(token_ids) - end


async def overrun(engine: Engine, tokenizer: PolicyTokenizer, num_completions: int, first_seed: int) -> Sample:
    """Sample turns that end at stop strings; return tokens past them ÷ stopped completions.

    What the engine computes and drops by itself before the stop has reached it is seen nowhere, and not counted.
    """
    stop = (*STOP_TAGS, *SPELLED_STOPS)

    async def one(index: int) -> Completion:
        prompt = tokenizer.prompt_ids([Message("user", workload.task(f"overrun/{index}").question)])
        sampling = Sampling(workload.MAX_TURN_TOKENS, stop=stop, seed=first_seed + index)
        return await engine.generate(prompt, sampling, request_id=f"overrun/{index}", on_text=lambda text: None)

    completions = await asyncio.gather(*map(one, range(num_completions)))
    past = [tokens_past_stop(completion.token_ids, stop, tokenizer) for completion in completions]
    counts = [count for count in past if count is not None]
    return quotient(sum(counts), len(counts))


async def sync_pause(engine: Any, weights: Weights, version: int) -> Sample:
    """Pause of one weight update ÷ a warm copy of the same bytes, in seconds."""
    await engine.update_weights(weights, version)
    pause_s: float = engine.last_pause_s
    tied = "lm_head.weight" if "model.embed_tokens.weight" in weights else ""
    source = [weight for name, weight in weights.items() if name != tied]
    target = [np.zeros_like(weight) for weight in source]
    _copy(target, source)  # warm
    started = time.perf_counter()
    _copy(target, source)
    return quotient(pause_s, time.perf_counter() - started)


def _copy(target: Sequence[NDArray[Any]], source: Sequence[NDArray[Any]]) -> None:
    for to, of in zip(target, source, strict=True):
        np.copyto(to, of)


def _holds(text: str, stop: Sequence[str]) -> bool:
    return any(one in text for one in stop)
