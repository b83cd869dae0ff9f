"""A tiny policy and made-up trajectories for the learner tests."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from learners.algorithms.segments import taught
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.types import MALFORMED, StopReason, Task, TokenKind, Trajectory, TrajectoryGroup, Turn
from ragr1_actors.training.algorithm_config import AlgorithmConfig

if TYPE_CHECKING:
    from learners.learner import Learner
    from learners.train_batch import TrainBatch

VOCAB = 64
Build = Callable[..., "Learner"]
State = dict[str, np.ndarray]


STAGES_AND_DTYPES = [
    (0, "float32"),
    (1, "float32"),
    (2, "float32"),
    (1, "bfloat16"),
    pytest.param(3, "float32", marks=pytest.mark.slow),
    pytest.param(3, "bfloat16", marks=pytest.mark.slow),
]


def make_policy(directory: Path, *, tied: bool = True, kv_heads: int = 2, seed: int = 0) -> Path:
    """Save a two-layer Qwen2 with random weights, large enough that its distributions are not flat."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        initializer_range=0.2,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}", encoding="utf-8")
    return directory


def make_trajectory(
    rng: np.random.Generator,
    *,
    turns: tuple[str, ...] = ("search", "answer"),
    reward: float = 0.0,
    task_id: str = "made/0",
    stop_reason: StopReason = StopReason.ANSWERED,
    max_run: int = 9,
) -> Trajectory:
    """Make a trajectory of random tokens: a prompt, and after each turn but the last an observation."""
    kinds: list[int] = [TokenKind.PROMPT] * int(rng.integers(2, max_run))
    made: list[Turn] = []
    for number, action in enumerate(turns):
        count = int(rng.integers(1, max_run))
        kinds += [TokenKind.MODEL] * count
        made.append(Turn("", count, action))
        if number < len(turns) - 1:
            kinds += [TokenKind.OBSERVATION] * int(rng.integers(1, max_run))
    is_model = np.asarray(kinds) == TokenKind.MODEL
    return Trajectory(
        trajectory_id=f"{task_id}#{rng.integers(1 << 30)}",
        task=Task(task_id, "?", ("Riga",)),
        token_ids=rng.integers(0, VOCAB, len(kinds)).astype(np.int32),
        kinds=np.asarray(kinds, dtype=np.uint8),
        logprobs=np.where(is_model, -4 - rng.random(len(kinds)), 0).astype(np.float32),
        policy_versions=np.where(is_model, 0, -1).astype(np.int32),
        turns=tuple(made),
        stop_reason=stop_reason,
        reward=reward,
    )


def with_rows(trajectory: Trajectory, rng: np.random.Generator) -> Trajectory:
    """The trajectory with its conversation rewritten at some of its observations, whose tokens are then a prompt."""
    is_model = trajectory.kinds == TokenKind.MODEL
    starts = 1 + np.flatnonzero(is_model[:-1] & ~is_model[1:])
    chosen = starts[rng.random(len(starts)) < 0.5].tolist()
    ends = [*chosen, trajectory.num_tokens]
    lengths = tuple(int(n) for n in np.diff([0, *ends]))
    return replace(trajectory, row_lengths=lengths if chosen else ())


def make_groups(seed: int, num_groups: int = 4, group_size: int = 4, max_run: int = 9) -> list[TrajectoryGroup]:
    """Make groups with rewards of 0 and 1, both in every group."""
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(num_groups):
        task_id = f"made/{number}"
        members = tuple(
            make_trajectory(
                rng,
                turns=("search",) * int(rng.integers(0, 3)) + ("answer",),
                reward=float(member % 2),
                task_id=task_id,
                max_run=max_run,
            )
            for member in range(group_size)
        )
        groups.append(TrajectoryGroup(members[0].task, members))
    return groups


def make_branches(seed: int, count: int = 6, max_run: int = 9) -> list[Trajectory]:
    """Make trajectories that leave the first one at different tokens; the second is equal to it."""
    rng = np.random.default_rng(seed)
    first = make_trajectory(rng, turns=("search", "search", "answer"), max_run=max_run)
    cuts = rng.integers(int((first.kinds == TokenKind.PROMPT).sum()), first.num_tokens, count)
    branches = [first]
    for number, cut in enumerate([first.num_tokens, *cuts[2:].tolist()]):
        token_ids = first.token_ids.copy()
        token_ids[cut:] = rng.integers(0, VOCAB, first.num_tokens - cut)
        branches.append(replace(first, token_ids=token_ids, trajectory_id=f"branch/{number}", reward=float(number % 2)))
    return branches


def make_config(**sections: dict[str, object]) -> RunConfig:
    """A configuration that learns in the driver, with large steps."""
    builder = AlgorithmConfig({"learners": {"num_learners": 0}, "training": {"lr": 1e-3}, "sft": {"lr": 1e-3}})
    builder.debugging(fault_tolerance={"hang_timeout_s": 300})  # a busy machine is no hang
    for section, settings in sections.items():
        builder = getattr(builder, section)(**settings)
    return builder.freeze()


def segments(trajectory: Trajectory) -> list[Trajectory]:
    """A trajectory per turn that is not malformed: its context, and the tokens that the model wrote."""
    turns = enumerate(zip(trajectory.turns, trajectory.turn_positions, strict=True))
    return [taught(trajectory, [at], int(own[-1]) + 1) for at, (turn, own) in turns if turn.action != MALFORMED]


def make_batch(learner: Learner, groups: list[TrajectoryGroup]) -> TrainBatch:
    """The batch that an update on ``groups`` learns from, without columns that need a model."""
    from learners import train_batch

    batch = train_batch.make_batch(groups, learner.select_members, learner.has_rollout_logprobs)
    assert batch is not None
    return batch


def fill_columns(learner: Learner, batch: TrainBatch) -> TrainBatch:
    """All columns that do not depend on the minibatch."""
    from learners.train_batch import Meter

    return learner.fill_columns(batch, Meter())


def own_logprobs(learner: Learner, groups: list[TrajectoryGroup]) -> torch.Tensor:
    """Log-probs of the MODEL tokens under the learner's policy, ``[M]``."""
    flat = make_batch(learner, groups).flat
    return learner.score(learner.policy_logprobs, flat)


def pickle_by_value(ray: ModuleType, *modules: str) -> None:
    """Send functions of test modules to actors, which cannot import them."""
    for name in (__name__, *modules):
        ray.cloudpickle.register_pickle_by_value(sys.modules[name])


def assert_same_arrays(found: Any, expected: Any, atol: float = 0.0) -> None:
    """Two dicts of arrays have the same names, and values within ``atol``."""
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_allclose(value, expected[name], atol=atol, rtol=0, err_msg=name)
