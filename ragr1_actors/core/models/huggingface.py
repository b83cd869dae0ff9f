"""Model classes of transformers, imported without scikit-learn, SciPy and boto3.

transformers imports the first two if they are installed, for assisted generation and for the losses of object
detection. boto3 comes with accelerate, which can start a training on SageMaker. Nothing here uses these, and the first
two are a fifth of the CPU time that an env runner needs until it can load a policy: `time python -c "import ray,
ragr1_actors.rollout.engines.transformers_engine"` has 8.9 s with them and 7.1 s without (medians of three, two cores).
"""

from __future__ import annotations

from ragr1_actors.core.process.imports import hidden, quick_imports

with quick_imports():
    from transformers.utils.import_utils import is_scipy_available, is_sklearn_available

__all__ = [
    "AttentionInterface",
    "AttentionMaskInterface",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "Cache",
    "CacheLayerMixin",
    "PreTrainedModel",
    "PretrainedConfig",
    "Qwen2Config",
    "Qwen2ForCausalLM",
    "sdpa_attention_forward",
    "sdpa_mask",
]

with quick_imports(), hidden("scipy", "sklearn", "boto3", checks=(is_scipy_available, is_sklearn_available)):
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        Cache,
        PretrainedConfig,
        PreTrainedModel,
        Qwen2Config,
        Qwen2ForCausalLM,
    )
    from transformers.cache_utils import CacheLayerMixin
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask
