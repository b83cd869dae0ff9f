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
def _without(**checks: Any) -> Iterator[None]:
    """Hide packages that are not loaded yet; ``checks`` are transformers' cached functions that look for each."""
    absent = [name for name in checks if name not in sys.modules]
    # Python takes a module that is None for one that is not installed.
    sys.modules |= dict.fromkeys(absent)  # type: ignore[arg-type]
    for check in checks.values():
        check.cache_clear()
    try:
        yield
    finally:
        for name in absent:
            del sys.modules[name]
        for check in checks.values():
            check.cache_clear()


with _without(sklearn=is_sklearn_available, scipy=is_scipy_available):
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
