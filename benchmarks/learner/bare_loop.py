"""The least that an update needs: a loop of torch over packed rows that are there already.

``python -m benchmarks.learner.bare_loop ours|selective|lean|bare DIR DTYPE`` is one side of ``update_memory`` in a
process apart. It prints the bytes by which a policy and two updates raised the peak of the process's memory above what
it held before. ``selective`` and ``lean`` are our learner with ``learners.gradient_checkpointing``, selective and true.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy, linear

from benchmarks.learner import sides
from benchmarks.learner.head_memory import memory_bytes
from learners.algorithms.grpo import GRPOLearner
from learners.learner import DTYPES
from learners.models.scoring import load_causal_lm, packed_hidden_states
from learners.packing import MicroBatch
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.models.model_shape import ModelShape
from ragr1_actors.core.section import Checkpointing
from ragr1_actors.core.types import TrajectoryGroup

# Read by DeepSpeed when it is imported; it would say on stdout what it found.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

LENGTHS = (50, 512)
MICRO_BATCH_TOKENS = 1024
NUM_TRAJECTORIES = 4
CLIP = 0.2
CHECKPOINTING: dict[str, Checkpointing] = {"ours": False, "selective": "selective", "lean": True}


def make_config(dtype: str, *, checkpointing: Checkpointing = False) -> RunConfig:
    """The learner's settings."""
    config = sides.make_config(MICRO_BATCH_TOKENS, dtype)
    changed = config.learners.model_copy(update={"gradient_checkpointing": checkpointing})
    return config.model_copy(update={"learners": changed})


def state_bytes(policy_dir: Path, dtype: str) -> int:
    """Bytes of weights, gradients and moments; in bf16 also of weights in fp32, as gradients and moments are."""
    num_parameters = ModelShape.of(str(policy_dir)).num_parameters
    return num_parameters * (16 if dtype == "float32" else 18)


def draw(policy_dir: Path) -> list[TrajectoryGroup]:
    """Trajectories of the vocabulary of a policy that have no tokens in common."""
    from transformers import AutoConfig

    lengths = sides.spread_lengths(NUM_TRAJECTORIES, *LENGTHS)
    return sides.draw_groups(lengths, AutoConfig.from_pretrained(policy_dir).vocab_size, seed=0)


class BareLoop:
    """A model with AdamW, in bf16 over weights in fp32 as DeepSpeed has them, and PPO's loss without what it reports.

    Attention is ours, as torch has none for packed rows on a CPU; the head makes the logits of all MODEL tokens.
    """

    def __init__(self, policy_dir: Path, dtype: str) -> None:
        """Load the model."""
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = load_causal_lm(policy_dir, DTYPES[dtype]).to(self.device)
        self.parameters = list(self.model.parameters())
        self.masters = self.parameters
        if DTYPES[dtype] != torch.float32:
            self.masters = [one.detach().float() for one in self.parameters]
        self.adamw = torch.optim.AdamW(self.masters, lr=1e-6, weight_decay=0.0, fused=True)

    def clock(self, rows: Sequence[MicroBatch], groups: Sequence[TrajectoryGroup]) -> float:
        """Seconds of an update on rows of some trajectories, half of them good and half bad."""
        started = time.perf_counter()
        num_tokens = sum(trajectory.num_model_tokens for group in groups for trajectory in group.trajectories)
        for row in rows:
            self._loss(row.to(self.device)).div(num_tokens).backward()
        for master, parameter in zip(self.masters, self.parameters, strict=True):
            if master is not parameter and parameter.grad is not None:
                master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.masters, 1.0)
        self.adamw.step()
        self.adamw.zero_grad()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.parameters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
        sides.wait_for_device()
        return time.perf_counter() - started

    def _loss(self, row: MicroBatch) -> torch.Tensor:
        hidden_PC = packed_hidden_states(self.model.get_decoder(), row).index_select(0, row.predict_positions)
        logits_PV = linear(hidden_PC, self.model.get_output_embeddings().weight).float()
        logprobs_P = -cross_entropy(logits_PV, row.target_ids, reduction="none")
        advantages_P = 1.0 - 2.0 * (row.predict_positions % 2)
        ratios_P = (logprobs_P - logprobs_P.detach()).exp()
        clipped_P = ratios_P.clamp(1 - CLIP, 1 + CLIP)
        return -torch.minimum(ratios_P * advantages_P, clipped_P * advantages_P).sum()


def make_side(side: str, policy_dir: Path, dtype: str, groups: list[TrajectoryGroup]) -> Any:
    """Return a function that makes an update and returns its seconds."""
    if side in CHECKPOINTING:
        config = make_config(dtype, checkpointing=CHECKPOINTING[side])
        learner = sides.build_learner(GRPOLearner, policy_dir, config)
        return lambda: sides.clock(learner, groups)[0]
    rows = sides.packed_rows(sides.members(groups), 1, MICRO_BATCH_TOKENS, 0.0)
    loop = BareLoop(policy_dir, dtype)
    return lambda: loop.clock(rows, groups)


def measure_memory(side: str, policy_dir: Path, dtype: str) -> float:
    """Return the bytes of a side, measured in a new process."""
    command = [sys.executable, "-m", "benchmarks.learner.bare_loop", side, str(policy_dir), dtype]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def main(side: str, policy_dir: Path, dtype: str) -> None:
    """Print the bytes of two updates."""
    groups = draw(policy_dir)
    before = memory_bytes("VmRSS")
    update = make_side(side, policy_dir, dtype, groups)
    built = memory_bytes("VmRSS")
    for _ in range(2):
        print(update(), (built - before) / 1e6, (memory_bytes("VmRSS") - before) / 1e6, file=sys.stderr)
    print(memory_bytes("VmHWM") - before)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
