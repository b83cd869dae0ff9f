"""The sides of ``bench learner``: our learner on packed rows, and the usual learner on padded ones.

Trajectories have log-normal lengths, their median the geometric mean of the shortest and the longest that are allowed,
sigma 0.8, clipped to the two: of 200-8,000 tokens, median 1,265 and mean about 1,700. 15 % of each is prompt, 30 % the
model's, 55 % observations, in 2 to 4 turns. Search-R1 and RAG-R1 publish no distribution; their limits are 500 tokens
per turn, 1,000 per observation and query, and 8,192 in all.
"""

from __future__ import annotations

import gc
import math
import time
import tracemalloc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from learners import packing
from learners.advantages import group_advantages
from learners.algorithms.grpo import GRPOLearner
from learners.algorithms.segments import taught
from learners.deepspeed.deepspeed_engine import init_distributed
from learners.packing import MicroBatch, assign_micro_batches, bundle, flatten, pack
from learners.train_batch import make_batch
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.schema import groups_from_record_batch
from ragr1_actors.core.types import Record, StopReason, Task, TokenKind, ToolCall, Trajectory, TrajectoryGroup, Turn
from ragr1_actors.training.algorithm_config import AlgorithmConfig

SIGMA = 0.8
PROMPT_SHARE, MODEL_SHARE = 0.15, 0.3
MIN_TURNS, MAX_TURNS = 2, 4
GROUP_SIZE = 4


def draw_lengths(count: int, shortest: int, longest: int, seed: int) -> list[int]:
    """Draw the lengths of trajectories, in tokens."""
    rng = np.random.default_rng(seed)
    drawn = np.exp(rng.normal(math.log(shortest * longest) / 2, SIGMA, count))
    lengths: list[int] = np.clip(np.rint(drawn), shortest, longest).astype(int).tolist()
    return lengths


def spread_lengths(count: int, shortest: int, longest: int) -> list[int]:
    """The middle of each of ``count`` equal parts of the distribution, in a random order.

    A few trajectories then have the shape of a batch of hundreds, whose longest is nearly always ``longest``.
    """
    normal = NormalDist(math.log(shortest * longest) / 2, SIGMA)
    middles = [math.exp(normal.inv_cdf((part + 0.5) / count)) for part in range(count)]
    lengths = np.clip(np.rint(middles), shortest, longest).astype(int)
    shuffled: list[int] = np.random.default_rng(0).permutation(lengths).tolist()
    return shuffled


def draw_groups(lengths: Sequence[int], vocab_size: int, seed: int) -> list[TrajectoryGroup]:
    """Draw trajectories of the given lengths, in groups in which half are rewarded."""
    rng = np.random.default_rng(seed)
    made = [_draw_trajectory(rng, length, vocab_size, number) for number, length in enumerate(lengths)]
    parts = (tuple(made[start : start + GROUP_SIZE]) for start in range(0, len(made), GROUP_SIZE))
    return [TrajectoryGroup(part[0].task, part) for part in parts]


def _draw_trajectory(rng: np.random.Generator, length: int, vocab_size: int, number: int) -> Trajectory:
    num_turns = int(rng.integers(MIN_TURNS, MAX_TURNS + 1))
    num_prompt, num_model = max(1, round(PROMPT_SHARE * length)), max(num_turns, round(MODEL_SHARE * length))
    written = [len(part) for part in np.array_split(np.arange(num_model), num_turns)]
    observed = [len(part) for part in np.array_split(np.arange(length - num_prompt - num_model), num_turns - 1)]
    kinds = [TokenKind.PROMPT] * num_prompt
    for count, following in zip(written, [*observed, 0], strict=True):
        kinds += [TokenKind.MODEL] * count + [TokenKind.OBSERVATION] * following
    is_model = np.asarray(kinds) == TokenKind.MODEL
    actions = ["search"] * (num_turns - 1) + ["answer"]
    return Trajectory(
        trajectory_id=str(number),
        task=Task(f"bench/{number // GROUP_SIZE}", "?", ("!",)),
        token_ids=rng.integers(0, vocab_size, length).astype(np.int32),
        kinds=np.asarray(kinds, dtype=np.uint8),
        logprobs=np.where(is_model, -math.log(vocab_size), 0).astype(np.float32),
        policy_versions=np.where(is_model, 0, -1).astype(np.int32),
        turns=tuple(Turn("", count, action) for count, action in zip(written, actions, strict=True)),
        stop_reason=StopReason.ANSWERED,
        reward=float(number % 2),
    )


def draw_branches(lengths: Sequence[int], vocab_size: int, seed: int, group_size: int = 8) -> list[TrajectoryGroup]:
    """Draw groups, one for each length, whose members leave the first one at a token anywhere behind the prompt."""
    rng = np.random.default_rng(seed)
    groups = []
    for number, length in enumerate(lengths):
        first = _draw_trajectory(rng, length, vocab_size, number * group_size)
        num_prompt = int((first.kinds == TokenKind.PROMPT).sum())
        members = [first]
        for member in range(1, group_size):
            token_ids = first.token_ids.copy()
            cut = int(rng.integers(num_prompt, length))
            token_ids[cut:] = rng.integers(0, vocab_size, length - cut)
            name = str(number * group_size + member)
            members.append(replace(first, trajectory_id=name, token_ids=token_ids, reward=float(member % 2)))
        groups.append(TrajectoryGroup(first.task, tuple(members)))
    return groups


@contextmanager
def every_trajectory_whole() -> Iterator[None]:
    """Learners compute the tokens with which trajectories begin alike once per trajectory."""
    least, packing.MIN_SHARED = packing.MIN_SHARED, math.inf
    try:
        yield
    finally:
        packing.MIN_SHARED = least


def with_passages(groups: Sequence[TrajectoryGroup], num_searches: int = 3, k: int = 3) -> list[TrajectoryGroup]:
    """Add ``num_searches`` searches to every trajectory, each with ``k`` passages of 600 characters."""
    passages = [f"{number:04d} " * 120 for number in range(1000)]
    rng = np.random.default_rng(0)

    def search() -> Turn:
        texts = [passages[at] for at in rng.integers(0, len(passages), k)]
        records = tuple(Record(text[:20], text[:20], text, 1.0) for text in texts)
        call = ToolCall("search", {"query": "who?", "k": k}, records=records, latency_s=0.01)
        return Turn("<search>who?</search>", 10, "search", (call,), "\n".join(texts))

    return [
        TrajectoryGroup(
            group.task,
            tuple(replace(t, turns=tuple(search() for _ in range(num_searches))) for t in group.trajectories),
        )
        for group in groups
    ]


def read_batch(batch: pa.RecordBatch, decode_texts: bool, *, heap: bool = False) -> tuple[float, int]:
    """Read a record batch as a learner rank does; return seconds and, with ``heap``, peak bytes of Python objects."""
    gc.collect()
    if heap:
        tracemalloc.start()
    start = time.perf_counter()
    read = make_batch(groups_from_record_batch(batch, decode_texts=decode_texts), lambda found: found, True)
    seconds = time.perf_counter() - start
    peak = tracemalloc.get_traced_memory()[1] if heap else 0
    tracemalloc.stop()
    assert read is not None
    return seconds, peak


def members(groups: Sequence[TrajectoryGroup]) -> list[Trajectory]:
    """The trajectories of all groups."""
    return [trajectory for group in groups for trajectory in group.trajectories]


def by_turn(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """One trajectory per turn, with its context: what a learner that trains on turns computes."""
    return [
        taught(trajectory, [index], int(own[-1]) + 1)
        for trajectory in trajectories
        for index, own in enumerate(trajectory.turn_positions)
    ]


def make_config(max_tokens: int, dtype: str = "float32") -> RunConfig:
    """GRPO with micro-batches of ``max_tokens``, in this process."""
    config = AlgorithmConfig().training(algorithm="grpo", group_size=GROUP_SIZE).policy(dtype=dtype)
    num_gpus = float(torch.cuda.is_available())
    return config.learners(num_learners=0, num_gpus_per_learner=num_gpus, micro_batch_tokens=max_tokens).freeze()


def packed_rows(
    trajectories: Sequence[Trajectory], num_ranks: int, max_tokens: int, pair_cost: float
) -> list[MicroBatch]:
    """The rows of all ranks."""
    flat = flatten(trajectories)
    bundles = bundle(flat, range(len(flat.lengths)), num_ranks, max_tokens)
    shares = assign_micro_batches(flat.lengths, bundles, num_ranks, max_tokens, pair_cost)
    return [pack(flat, micro_batch, max_tokens) for share in shares for micro_batch in share]


def num_tokens(rows: Iterable[MicroBatch]) -> int:
    """Tokens that are computed."""
    return sum(row.num_tokens for row in rows)


def in_step_loss(lengths: Sequence[int], num_ranks: int, max_tokens: int, pair_cost: float, balance: float) -> float:
    """How much longer than the mean rank alone ranks take that run each micro-batch in step (ZeRO-3), as a share.

    By cost with ``pair_cost``; the plan is balanced with the pair cost ``balance``, of which 0 is by tokens.
    """
    bundles = [{index: 0} for index in range(len(lengths))]
    shares = assign_micro_batches(lengths, bundles, num_ranks, max_tokens, balance)
    costs = [[sum(lengths[i] + pair_cost * lengths[i] ** 2 for i in one) for one in share] for share in shares]
    return sum(map(max, zip(*costs, strict=True))) / (sum(map(sum, costs)) / num_ranks) - 1


def build_learner(learner_class: type[GRPOLearner], policy_dir: Path, config: RunConfig) -> Any:
    """Make a learner that is ready to update."""
    learner = learner_class(config, policy_dir)
    learner.build()
    return learner


def clock(learner: Any, groups: list[TrajectoryGroup]) -> tuple[float, dict[str, float]]:
    """Seconds of an update, forward, backward and step, and what it reports."""
    wait_for_device()
    started = time.perf_counter()
    metrics: dict[str, float] = learner.update(groups)
    wait_for_device()
    return time.perf_counter() - started, metrics


def wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class PaddedLearner(GRPOLearner):
    """The usual layout: right-padded ``[B, L]`` batches with a mask through transformers' own SDPA attention.

    As verl without ``use_remove_padding``, from which Search-R1 and RAG-R1 descend: whole logits, sliced where
    responses begin; L is the longest of the whole batch. A micro-batch has as many rows as fit into
    ``micro_batch_tokens``. The same weights, DeepSpeed engine, optimizer and loss as ours. Left out, in its favour: the
    entropy, metrics, and the tokens between the longest trajectory and verl's fixed maximum.
    """

    pads_to_batch = True
    """Else L is the longest of the micro-batch, as in a loop that trims every micro-batch. Nothing is sorted."""

    def build(self) -> None:
        self.device = init_distributed(self.rank, self.world_size, self.config.learners.num_gpus_per_learner)
        model = AutoModelForCausalLM.from_pretrained(self.policy_dir, dtype=self.dtype, attn_implementation="sdpa")
        model.config.use_cache = False
        self.policy = self.make_engine(model, model)

    def update(self, groups: list[TrajectoryGroup]) -> dict[str, float]:
        trajectories = members(groups)
        rewards = torch.tensor([t.reward for t in trajectories], dtype=torch.float64)
        group_ids = torch.tensor([number for number, group in enumerate(groups) for _ in group.trajectories])
        advantages = group_advantages(rewards, group_ids).float()
        num_tokens = sum(t.num_model_tokens for t in trajectories)
        longest = max(t.num_tokens for t in trajectories)
        num_rows = max(1, self.config.learners.row_tokens // longest)
        total, computed = 0.0, 0
        for start in range(0, len(trajectories), num_rows):
            rows = trajectories[start : start + num_rows]
            width = longest if self.pads_to_batch else max(t.num_tokens for t in rows)
            loss = self._loss(rows, advantages[start : start + num_rows], width) / num_tokens
            self.policy.backward(loss)
            total, computed = total + loss.item(), computed + width * len(rows)
        self.policy.step(self.schedule.lr_at(0))
        return {"loss": total, "computed_tokens": float(computed)}

    def _loss(self, rows: Sequence[Trajectory], advantages_B: torch.Tensor, width: int) -> torch.Tensor:
        ids_BL = torch.zeros(len(rows), width, dtype=torch.long)
        seen_BL, model_BL = torch.zeros_like(ids_BL), torch.zeros(len(rows), width, dtype=torch.bool)
        old_BL = torch.zeros(len(rows), width)
        for row, trajectory in enumerate(rows):
            end = trajectory.num_tokens
            ids_BL[row, :end] = torch.from_numpy(trajectory.token_ids)
            seen_BL[row, :end] = 1
            model_BL[row, :end] = torch.from_numpy(trajectory.kinds == TokenKind.MODEL)
            old_BL[row, :end] = torch.from_numpy(trajectory.logprobs)
        first = int(model_BL.any(0).nonzero()[0])  # where the first response begins
        device = self.device
        logits_BRV = self.policy(ids_BL.to(device), seen_BL.to(device)).logits[:, first - 1 : -1]
        targets_BR = ids_BL[:, first:].to(device)
        logprobs_BR = -cross_entropy(logits_BRV.flatten(0, 1).float(), targets_BR.flatten(), reduction="none")
        ratios_BR = (logprobs_BR.view_as(targets_BR) - old_BL[:, first:].to(device)).exp()
        clip_low, clip_high = self.clip
        clipped_BR = ratios_BR.clamp(1 - clip_low, 1 + clip_high)
        advantages_BR = advantages_B.to(device).unsqueeze(1)
        loss_BR = -torch.minimum(ratios_BR * advantages_BR, clipped_BR * advantages_BR)
        return (loss_BR * model_BL[:, first:].to(device)).sum()


class TrimmedLearner(PaddedLearner):
    """The padded layout, each micro-batch trimmed to its own longest row."""

    pads_to_batch = False
