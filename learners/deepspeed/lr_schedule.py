"""Settings of the optimizer: AdamW and the learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AdamWSettings:
    """Settings of ``torch.optim.AdamW``; the learning rate is given with every step."""

    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    """Largest norm of the gradient of one step."""


@dataclass(frozen=True)
class Schedule:
    """How many optimizer steps an update takes, and how far each moves the weights."""

    lr: float
    warmup_steps: int = 0
    num_steps: int = 0
    """Optimizer steps over which the rate falls to zero along a cosine; 0 keeps it constant after the warm-up."""
    num_epochs: int = 1
    num_minibatches: int = 1
    adamw: AdamWSettings = field(default_factory=AdamWSettings)

    @property
    def steps_per_update(self) -> int:
        """Optimizer steps of one update."""
        return self.num_epochs * self.num_minibatches

    def lr_at(self, step: int) -> float:
        """Return the learning rate of optimizer step ``step``, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if not self.num_steps:
            return self.lr
        progress = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        return self.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
