"""Engines a recipe names by a word; any other is named ``my_module:MyEngine``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ragr1_actors.rollout.engines.base import Engine

EngineClass = Callable[..., Engine]
"""``(policy_dir, tokenizer, EngineSettings) -> Engine``."""

ENGINES: dict[str, EngineClass | Any] = {
    "transformers": "ragr1_actors.rollout.engines.transformers_engine:TransformersEngine",
    "vllm": "ragr1_actors.rollout.engines.vllm_engine:VLLMEngine",
}
"""Named, not imported: each pulls in a library that need not be installed."""
