"""The reference of KL terms, the policy at the start of a stage: where its weights are, and how it scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

from learners.deepspeed_engine import DeepSpeedEngine, ShardedModule, shared_loading
from learners.models.scoring import PolicyModel
from learners.packing import MicroBatch
from ragr1_actors.core.config import LearnerSettings


class Reference(Protocol):
    """A reference; ``make_reference`` returns one."""

    def in_use(self) -> AbstractContextManager[None]:
        """Make the reference ready to score in this context."""

    def logprobs(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return log-probs of the MODEL tokens, ``[M]``. All ranks call together, equally often."""

    def close(self) -> None:
        """Release the reference."""


def make_reference(
    policy: DeepSpeedEngine, load: Callable[[], PolicyModel], device: torch.device, settings: LearnerSettings
) -> Reference:
    """Make the reference of a learner; ``load`` reads the policy at the start of the stage."""
    if settings.lora:
        return _PolicyWithoutAdapters(policy)
    stage, rests = settings.zero_stage, "reference" in settings.offload
    with shared_loading(stage, policy.dtype, on_host=rests):
        loaded = load()
    return _SecondPolicy(loaded, device, zero_stage=stage, rests=rests)


class _PolicyWithoutAdapters:
    """With ``learners.lora``, the policy with its adapters disabled: no second model."""

    def __init__(self, policy: DeepSpeedEngine) -> None:
        self._policy = policy

    def in_use(self) -> AbstractContextManager[None]:
        from learners.models.lora import adapters_disabled  # imports peft

        return adapters_disabled(self._policy.module)

    def logprobs(self, micro_batch: MicroBatch) -> torch.Tensor:
        logprobs_M: torch.Tensor = self._policy(micro_batch).logprobs
        return logprobs_M

    def close(self) -> None:
        """Do nothing: the learner closes the policy."""


class _SecondPolicy:
    """A policy that is not trained; if it rests, it is in the host's memory between two uses.

    It is whole on every rank, or at ZeRO stage 3 sharded over the ranks and gathered layer by layer.
    """

    def __init__(self, policy: PolicyModel, device: torch.device, *, zero_stage: int, rests: bool) -> None:
        self._policy = policy.eval().requires_grad_(False)
        self._device = device
        self._sharded: ShardedModule | None = None
        self._resting: list[tuple[torch.nn.Parameter, torch.Tensor]] = []
        if zero_stage == 3:
            self._sharded = ShardedModule(self._policy, device, on_host=rests)
        elif rests:
            self._resting = [(parameter, parameter.data) for parameter in self._policy.parameters()]
            for buffer in self._policy.buffers():
                buffer.data = buffer.data.to(device)
        else:
            self._policy.to(device)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        for parameter, on_host in self._resting:
            parameter.data = on_host.to(self._device, copy=True)
        yield  # nothing is copied back: the weights do not change
        for parameter, on_host in self._resting:
            parameter.data = on_host

    def logprobs(self, micro_batch: MicroBatch) -> torch.Tensor:
        outputs = self._policy(micro_batch) if self._sharded is None else self._sharded(micro_batch)
        logprobs_M: torch.Tensor = outputs.logprobs
        return logprobs_M

    def close(self) -> None:
        if self._sharded is not None:
            self._sharded.close()
