"""The transformers engine keeps the sliding windows of a model, and refuses attention that it cannot run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ragr1_actors.core.errors import EngineError
from ragr1_actors.core.types import Sampling
from ragr1_actors.planning.tiny_policy import make_tiny_policy
from ragr1_actors.rollout.engines.base import EngineArguments, PolicyTokenizer
from ragr1_actors.rollout.engines.transformers_engine import TransformersEngine

pytestmark = pytest.mark.engine

SIZES: dict[str, Any] = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8}
BOTH = {"layer_types": ["sliding_attention", "full_attention"]}


def make_engine(folder: Path, family: str, **settings: Any) -> TransformersEngine:
    """An engine over a small model of a family."""
    make_tiny_policy(folder, ["a b"], seed=0, vocab_size=400, hidden_size=32, num_layers=2, num_heads=2)
    torch.manual_seed(0)
    text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")(**(SIZES | settings), initializer_range=0.2)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    return TransformersEngine(folder, PolicyTokenizer(folder), EngineArguments(8, 512))


@pytest.mark.parametrize(
    ("family", "settings"),
    [("Gemma3", BOTH), ("Mistral", {}), ("Qwen2", {"use_sliding_window": True, "max_window_layers": 1})],
)
@pytest.mark.parametrize("kv_heads", [2, 4])
async def test_a_token_is_sampled_from_the_window_of_its_layer(
    tmp_path: Path, family: str, settings: dict[str, Any], kv_heads: int
) -> None:
    engine = make_engine(tmp_path, family, **settings, num_key_value_heads=kv_heads)
    rng = np.random.default_rng(0)
    prompts: list[list[int]] = [rng.integers(3, 400, length).tolist() for length in (30, 5, 60)]
    turns = (engine.generate(prompt, Sampling(12, seed=1), request_id=str(len(prompt))) for prompt in prompts)
    completions = await asyncio.gather(*turns)
    await engine.close()
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.tensor([prompt + completion.token_ids])
        with torch.no_grad():
            logprobs = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0].tolist()
        assert completion.logprobs == pytest.approx(expected, abs=1e-4)


def test_attention_with_sinks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"scaled_dot_product_attention.*set env_runners\.engine to vllm"):
        make_engine(tmp_path, "GptOss", num_local_experts=2)
