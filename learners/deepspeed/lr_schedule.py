"""When and how far an optimizer moves the weights."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from learners.deepspeed.zero import AdamWSettings


@dataclass(frozen=True)
class Schedule:
    """When and how far the weights move."""

    lr: float
    warmup_steps: int = 0
    num_steps: int = 0
    """Optimizer steps over which the cosine falls to zero; 0 keeps the rate constant after the warm-up."""
    num_epochs: int = 1
    num_minibatches: int = 1
    adamw: AdamWSettings = field(default_factory=AdamWSettings)

    def lr_at(self, step: int) -> float:
        """Learning rate of optimizer step ``step``, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if not self.num_steps:
            return self.lr
        progress = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        return self.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
