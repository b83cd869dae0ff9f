"""One side of ``peak_memory``, in a separate process.

``python -m benchmarks.learner.head_memory ours|whole DIR NUM_TOKENS``

Prints the bytes by which forward and backward of a policy over ``NUM_TOKENS`` tokens, all of them predicted, raised the
peak of the process's memory above what it held before. The policy in ``DIR`` has one layer, narrow: nearly all of it is
the head. ``ours`` is ``PolicyModel`` on a packed row; ``whole`` takes the whole logits from transformers and their
cross-entropy, as a padded learner does.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

NUM_SEQUENCES = 4
WHOLE_COPIES = 3.5
"""Tensors of the size of the logits that must find room: log-softmax, the gradients of both, and some to spare."""


def room_needed(num_tokens: int, vocab_size: int) -> float:
    """Bytes that ``whole`` may take."""
    return WHOLE_COPIES * num_tokens * vocab_size * 4


def measure_side(side: str, policy_dir: Path, num_tokens: int) -> float:
    """Return the bytes of a side, measured in a new process."""
    command = [sys.executable, "-m", "benchmarks.learner.head_memory", side, str(policy_dir), str(num_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def _ours(policy_dir: Path, num_tokens: int) -> None:
    import torch

    from learners.models.scoring import PolicyModel
    from learners.packing import MicroBatch, packed_layout

    length = num_tokens // NUM_SEQUENCES
    ids = torch.randint(0, 1000, (NUM_SEQUENCES, length), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(num_tokens).view(NUM_SEQUENCES, length)
    batch = MicroBatch(
        token_ids=ids.flatten(),
        position_ids=torch.arange(length).repeat(NUM_SEQUENCES),
        predict_positions=positions[:, :-1].flatten(),
        target_ids=ids[:, 1:].flatten(),
        column_index=torch.arange(NUM_SEQUENCES * (length - 1)),
        layout=packed_layout([length] * NUM_SEQUENCES),
        weight=1.0,
    )
    policy = PolicyModel(policy_dir, torch.float32, 1.0, gradient_checkpointing=False)
    before = memory_bytes("VmRSS")
    policy(batch).logprobs.sum().backward()
    _report(before)


def _whole(policy_dir: Path, num_tokens: int) -> None:
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import AutoModelForCausalLM

    length = num_tokens // NUM_SEQUENCES
    ids = torch.randint(0, 1000, (NUM_SEQUENCES, length), generator=torch.Generator().manual_seed(0))
    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32, attn_implementation="sdpa")
    before = memory_bytes("VmRSS")
    logits = model(ids, use_cache=False).logits.flatten(0, 1)
    targets = torch.cat([ids[:, 1:], torch.full((NUM_SEQUENCES, 1), -100)], dim=1).flatten()
    loss = cross_entropy(logits, targets, reduction="none")
    del logits  # in its favour: only what autograd keeps
    loss.sum().backward()
    _report(before)


def memory_bytes(name: str) -> int:
    """Bytes of ``VmRSS``, what is held now, or ``VmHWM``, the most that was.

    Not ``ru_maxrss``, which a child of Linux takes over from its parent.
    """
    found = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"no {name} in /proc/self/status; peak_memory is measured on Linux only")
    return int(found[1]) * 1024


def _report(before: int) -> None:
    print(memory_bytes("VmHWM") - before)


if __name__ == "__main__":
    Path("/proc/self/oom_score_adj").write_text("1000")  # where memory runs out, the kernel ends this process
    {"ours": _ours, "whole": _whole}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
