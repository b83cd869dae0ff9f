"""What the package uses of transformers' model classes, imported without scikit-learn and SciPy.

transformers imports both where they are installed, for assisted generation and for the losses of object detection.
Nothing here uses these, and they are a fifth of the CPU time that an env runner needs until it can load a policy:
`time python -c "import ray, ragr1_actors.rollout.engines.transformers_engine"` has 8.9 s with them and 7.1 s without
(medians of three, two cores).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils.import_utils import is_scipy_available, is_sklearn_available

__all__ = [
    "AttentionInterface",
    "AutoModelForCausalLM",
    "Cache",
    "CacheLayerMixin",
    "PreTrainedModel",
    "PretrainedConfig",
    "Qwen2Config",
    "Qwen2ForCausalLM",
]


@contextmanager
def _without(*answers: Any) -> Iterator[None]:
    """Have ``is_scipy_available`` and the like answer that their package, which is not loaded yet, is not installed."""
    absent = [name for answer in answers if (name := answer.__name__.split("_")[1]) not in sys.modules]
    sys.modules |= dict.fromkeys(absent)  # None: not to be found
    for answer in answers:
        answer.cache_clear()
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
        for answer in answers:
            answer.cache_clear()


with _without(is_sklearn_available, is_scipy_available):
    from transformers import (
        AttentionInterface,
        AutoModelForCausalLM,
        Cache,
        PretrainedConfig,
        PreTrainedModel,
        Qwen2Config,
        Qwen2ForCausalLM,
    )
    from transformers.cache_utils import CacheLayerMixin
