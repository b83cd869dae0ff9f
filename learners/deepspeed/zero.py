"""Settings of DeepSpeed and of its AdamW, and the size of parameters that ZeRO has spread over the ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class AdamWSettings:
    """Of ``torch.optim.AdamW``; the learning rate is given with every step."""

    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    grad_clip: float = 1.0


def num_elements(parameters: Iterable[nn.Parameter]) -> int:
    """Elements of parameters when they are whole; ZeRO-3 leaves one of its own with none."""
    return sum(int(vars(parameter).get("ds_numel", parameter.numel())) for parameter in parameters)


def offload_config(offload: Collection[str]) -> dict[str, Any]:
    """Of ``learners.offload``, for ``zero_optimization``."""
    keys = {"optimizer": "offload_optimizer", "params": "offload_param"}
    return {key: {"device": "cpu"} for name, key in keys.items() if name in offload}


def deepspeed_config(stage: int, dtype: torch.dtype, grad_clip: float, bucket_elements: int) -> dict[str, Any]:
    """All settings but those of ``learners.offload``; ``bucket_elements`` are those of all that is trained."""
    return {
        "train_micro_batch_size_per_gpu": 1,  # bookkeeping only: micro-batches are ours
        "gradient_accumulation_steps": 1,
        "managed_gradient_accumulation": False,  # a step is where we call step()
        "gradient_clipping": grad_clip if stage > 0 else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "data_types": {"grad_accum_dtype": "fp32"},  # many small addends lose their bits in bf16
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "contiguous_gradients": True,
            # Buckets are allocated whole: the default of 5e8 elements is 2 GB for a model of any size.
            "reduce_bucket_size": min(bucket_elements, 200_000_000),
        },
        "steps_per_print": 2**31,
    }
