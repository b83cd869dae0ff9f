"""Engines a recipe names by a word; any other is named ``my_module:MyEngine``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ragr1_actors.engines.base import Engine
from ragr1_actors.engines.transformers_engine import TransformersEngine

EngineClass = Callable[..., Engine]
"""``(policy_dir, tokenizer, *, max_rows, dtype, device, version) -> Engine``."""

ENGINES: dict[str, EngineClass | Any] = {"transformers": TransformersEngine}
