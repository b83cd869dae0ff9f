"""``ragr1 bench learner``: packed rows against padded batches.

================= ======================================================================= =======
metric            ratio                                                                   goal
================= ======================================================================= =======
padding_waste     tokens of dummies ÷ computed tokens, 512 trajectories, one rank         <= 0.01
padding_waste_2   the same on two ranks
padding_waste_8   the same on eight
in_step_loss      time lost by 8 ranks in step, balanced by cost ÷ balanced by tokens
attention_padding share of the pairs in SDPA's blocks that is padding (a GPU's kernel has none)
prefix_sharing    computed tokens ÷ those of a learner with a row for every turn
record_decode     time of a rank to read a batch ÷ the same with all texts decoded; 512 trajectories
record_heap       peak bytes of Python objects of the two
vs_padded         useful tokens/s of an update ÷ padded to the longest of the batch       >= 2.5
vs_padded_micro   the same ÷ padded to the longest of each micro-batch
vs_whole          useful tokens/s of an update ÷ the same where no token is computed once for several trajectories
peak_memory       peak of whole logits ÷ ours; 8,192 tokens, a vocabulary of 150,000      >= 3
vs_bare_fp32      tokens/s of an update of SmolLM2-135M ÷ a bare loop of torch, same rows >= 0.9
vs_bare_bf16      the same in bf16                                                        >= 0.9
update_memory     peak of it in float32 ÷ weights, gradients and moments                  <= 1.3
selective_memory  the same with selective gradient checkpointing                          <= 1.3
lean_memory       the same with gradient checkpointing                                    <= 1.3
================= ======================================================================= =======

``benchmarks/learner/sides.py`` says how trajectories are drawn and what the padded side is. Plans are made for lengths
of 200-8,000 tokens and micro-batches of 16,384. Updates are run a quarter as long, 50-2,000 tokens in micro-batches of
4,096, with a model of 3.1 million parameters and a vocabulary of 4,096, on 24 trajectories whose lengths are spread as
those of a large batch (the longest has 1,613 tokens): two cores are done in minutes. The sides follow each other within
a repeat; a small update of each does not count. Useful tokens are the trajectories' own. stderr shows the seconds of
each side: where its CPU seconds are fewer, another process had the cores.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.learner import bare_loop, head_memory, sides
from benchmarks.learner.shapes import SMALL, SMOLLM2, make_shape, write_policy
from benchmarks.measurement import HIGHER, LOWER, Goal, Measurement, Repeats, Sample, choose, log, measure, quotient
from learners.algorithms.grpo import GRPOLearner
from ragr1_actors.core.schema import groups_to_record_batch
from ragr1_actors.core.types import TrajectoryGroup

# Read by DeepSpeed when it is imported; it would say on stdout what it found.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

GOALS: dict[str, Goal] = {
    "padding_waste": Goal(0.01, at_least=False),
    "padding_waste_2": Goal(0.01, at_least=False),
    "padding_waste_8": Goal(0.01, at_least=False),
    "in_step_loss": LOWER,
    "attention_padding": LOWER,
    "prefix_sharing": LOWER,
    "record_decode": LOWER,
    "record_heap": LOWER,
    "vs_padded": Goal(2.5, at_least=True),
    "vs_padded_micro": HIGHER,
    "vs_whole": HIGHER,
    "peak_memory": Goal(3, at_least=True),
    "vs_bare_fp32": Goal(0.9, at_least=True),
    "vs_bare_bf16": Goal(0.9, at_least=True),
    "update_memory": Goal(1.3, at_least=False),
    "selective_memory": Goal(1.3, at_least=False),
    "lean_memory": Goal(1.3, at_least=False),
}
UNITS = {
    "padding_waste": "tokens of dummies, computed",
    "padding_waste_2": "tokens of dummies, computed",
    "padding_waste_8": "tokens of dummies, computed",
    "in_step_loss": "share of the mean rank's time",
    "attention_padding": "query-key pairs",
    "prefix_sharing": "tokens",
    "record_decode": "s, 9 passages of 600 characters per trajectory",
    "record_heap": "bytes",
    "vs_padded": "useful tokens/s, lengths 50-2,000",
    "vs_padded_micro": "useful tokens/s, lengths 50-2,000",
    "vs_whole": "useful tokens/s, groups of 8 that leave one trajectory at a token anywhere",
    "peak_memory": "bytes",
    "vs_bare_fp32": "tokens/s, SmolLM2-135M",
    "vs_bare_bf16": "tokens/s, SmolLM2-135M",
    "update_memory": "bytes, SmolLM2-135M",
    "selective_memory": "bytes, SmolLM2-135M",
    "lean_memory": "bytes, SmolLM2-135M",
}
METRICS = tuple(GOALS)
NUM_RANKS = {"padding_waste": 1, "padding_waste_2": 2, "padding_waste_8": 8}
_UPDATES = {"vs_padded", "vs_padded_micro"}
_BARE = {"vs_bare_fp32": "float32", "vs_bare_bf16": "bfloat16"}
_STATES = {"update_memory": "ours", "selective_memory": "selective", "lean_memory": "lean"}

SHORTEST, LONGEST, MICRO_BATCH_TOKENS = 200, 8000, 16384
PAIR_COST = 1 / 30_500
"""The pair cost of Qwen2.5-1.5B, by ``learners.models.scoring.pair_cost``."""
NUM_PLANNED = 512
SCALE = 4
"""By which updates on a CPU are shorter."""
NUM_TRAJECTORIES, NUM_TRAJECTORIES_QUICK = 24, 8
SHAPE = make_shape(256, 1024, 2, 4, 4, vocab_size=4096, has_qkv_bias=True)
HEAD_SHAPE = make_shape(64, 64, 1, 4, 4, vocab_size=150_000, has_qkv_bias=True)
HEAD_SHAPE_QUICK = replace(HEAD_SHAPE, vocab_size=50_000)
HEAD_TOKENS, HEAD_TOKENS_QUICK = 8192, 4096

Samples = dict[str, list[Sample]]


def describe() -> str:
    """The workload, in one line."""
    return f"learner: log-normal lengths of {SHORTEST}-{LONGEST} tokens, sigma {sides.SIGMA}, 30 % of the model's"


def run(only: str | None = None, repeats: int | None = None, quick: bool = False) -> Iterator[Measurement]:
    """Measure, and yield what is found.

    Raises:
        UserError: ``only`` is no metric.
    """
    wanted, times = choose(only, METRICS), Repeats(repeats or (1 if quick else None))
    with tempfile.TemporaryDirectory(prefix="ragr1-bench-") as directory:
        for part in (plans, records, updates, memory, bare, states):
            for metric, samples in part(Path(directory), wanted, times, quick).items():
                if samples and metric in wanted:
                    yield measure(metric, samples, UNITS[metric], GOALS[metric])


def plans(directory: Path, wanted: set[str], repeats: Repeats, quick: bool) -> Samples:
    """What needs no model: a repeat is another draw of the trajectories."""
    found: Samples = {metric: [] for metric in (*NUM_RANKS, "in_step_loss", "attention_padding", "prefix_sharing")}
    if not wanted & found.keys():
        return {}
    for seed in repeats:
        lengths = sides.draw_lengths(NUM_PLANNED, SHORTEST, LONGEST, seed)
        trajectories = sides.members(sides.draw_groups(lengths, 1000, seed))
        rows = {}
        for metric, num_ranks in NUM_RANKS.items():
            rows[num_ranks] = sides.packed_rows(trajectories, num_ranks, MICRO_BATCH_TOKENS, PAIR_COST)
            of_dummies = sides.num_tokens(row for row in rows[num_ranks] if not row.weight)
            found[metric].append(quotient(of_dummies, sides.num_tokens(rows[num_ranks])))
        lost = [sides.in_step_loss(lengths, 8, MICRO_BATCH_TOKENS, PAIR_COST, balance) for balance in (PAIR_COST, 0.0)]
        found["in_step_loss"].append(quotient(*lost))
        pairs = sum(row.layout.padded_cells for row in rows[1])
        found["attention_padding"].append(quotient(pairs - sum(row.layout.useful_cells for row in rows[1]), pairs))
        of_turns = sum(trajectory.num_tokens for trajectory in sides.by_turn(trajectories))
        found["prefix_sharing"].append(quotient(sides.num_tokens(rows[1]), of_turns))
    return found


def records(directory: Path, wanted: set[str], repeats: Repeats, quick: bool) -> Samples:
    """Reading of a record batch, up to the flat tokens, with texts decoded on demand and with all texts decoded."""
    if not wanted & {"record_decode", "record_heap"}:
        return {}
    lengths = sides.draw_lengths(NUM_PLANNED, SHORTEST, LONGEST, 0)
    batch = groups_to_record_batch(sides.with_passages(sides.draw_groups(lengths, 1000, 0)))
    log(f"record batch: {batch.nbytes} bytes, {batch.drop_columns(['turns', 'metrics']).nbytes} of them read")
    found: Samples = {"record_decode": [], "record_heap": []}
    for _ in repeats:
        found["record_decode"].append(quotient(*(sides.read_batch(batch, texts)[0] for texts in (False, True))))
    found["record_heap"].append(quotient(*(sides.read_batch(batch, texts, heap=True)[1] for texts in (False, True))))
    return found


def updates(directory: Path, wanted: set[str], repeats: Repeats, quick: bool) -> Samples:
    """Updates of our learner and of the padded ones, in turns."""
    if not wanted & {*_UPDATES, "vs_whole"}:
        return {}
    policy_dir = write_policy(directory / "policy", SHAPE)
    config = sides.make_config(MICRO_BATCH_TOKENS // SCALE)
    num = NUM_TRAJECTORIES_QUICK if quick else NUM_TRAJECTORIES
    lengths = sides.spread_lengths(num, SHORTEST // SCALE, LONGEST // SCALE)
    groups = sides.draw_groups(lengths, SHAPE.vocab_size, seed=0)
    ours = sides.build_learner(GRPOLearner, policy_dir, config)
    others = {
        "vs_padded": sides.build_learner(sides.PaddedLearner, policy_dir, config),
        "vs_padded_micro": sides.build_learner(sides.TrimmedLearner, policy_dir, config),
    }
    others = {metric: learner for metric, learner in others.items() if metric in wanted}
    found: Samples = {metric: [] for metric in others}
    for learner in (ours, *others.values()):
        sides.clock(learner, groups[:1])
    for _ in repeats if others else ():
        our_rate = _rate("packed", ours, groups)
        for metric, other in others.items():
            found[metric].append(quotient(our_rate, _rate(metric, other, groups)))
    if "vs_whole" in wanted:
        branches = sides.draw_branches(lengths[:: sides.GROUP_SIZE], SHAPE.vocab_size, seed=0)
        found["vs_whole"] = []
        for _ in repeats:
            our_rate = _rate("shared", ours, branches)
            with sides.every_trajectory_whole():
                found["vs_whole"].append(quotient(our_rate, _rate("whole", ours, branches)))
    return found


def _rate(name: str, learner: Any, groups: list[TrajectoryGroup]) -> float:
    """Useful tokens per second."""
    useful = sum(trajectory.num_tokens for trajectory in sides.members(groups))
    before = time.process_time()
    seconds, metrics = sides.clock(learner, groups)
    cpu_s = time.process_time() - before
    log(f"{name}: {seconds:.1f} s, CPU {cpu_s:.1f} s, {useful} useful of {metrics['computed_tokens']:.0f} tokens")
    return useful / seconds


def memory(directory: Path, wanted: set[str], repeats: Repeats, quick: bool) -> Samples:
    """The head, once: memory does not depend on the load of the machine."""
    if "peak_memory" not in wanted:
        return {}
    shape, num_tokens = (HEAD_SHAPE_QUICK, HEAD_TOKENS_QUICK) if quick else (HEAD_SHAPE, HEAD_TOKENS)
    needed, available = head_memory.room_needed(num_tokens, shape.vocab_size), psutil.virtual_memory().available
    if available < needed:
        log(f"peak_memory skipped: whole logits need {needed / 1e9:.0f} GB, {available / 1e9:.0f} GB are available")
        return {}
    policy_dir = write_policy(directory / "head", shape)
    ours, whole = (head_memory.measure_side(side, policy_dir, num_tokens) for side in ("ours", "whole"))
    return {"peak_memory": [Sample(whole / ours, ours, whole)]}


def bare(directory: Path, wanted: set[str], repeats: Repeats, quick: bool) -> Samples:
    """Updates of our learner and of a bare loop, in turns."""
    found: Samples = {}
    for metric, dtype in _BARE.items():
        if metric in wanted and (policy_dir := _smollm2(directory, metric, quick)):
            groups = bare_loop.draw(policy_dir)
            tokens = sum(trajectory.num_tokens for trajectory in sides.members(groups))
            made = [bare_loop.make_side(side, policy_dir, dtype, groups) for side in ("ours", "bare")]
            for update in made:
                update()
            found[metric] = []
            for _ in repeats:
                found[metric].append(quotient(*(tokens / _clocked(metric, update) for update in made)))
    return found


def states(directory: Path, wanted: set[str], repeats: Repeats, quick: bool) -> Samples:
    """The memory of an update, once, each side in a new process."""
    found: Samples = {}
    for metric, side in _STATES.items():
        if metric in wanted and (policy_dir := _smollm2(directory, metric, quick)):
            reached = bare_loop.measure_memory(side, policy_dir, "float32")
            found[metric] = [quotient(reached, bare_loop.state_bytes(policy_dir, "float32"))]
    return found


def _smollm2(directory: Path, metric: str, quick: bool) -> Path | None:
    """The folder of SmolLM2, with ``quick`` of a small model; None, with a line that says so, where it is missing."""
    if quick:
        return write_policy(directory / metric, SMALL)
    if SMOLLM2.is_dir():
        return SMOLLM2
    log(f"{metric} skipped: {SMOLLM2} is missing; python -m benchmarks.real.models makes it")
    return None


def _clocked(metric: str, update: Callable[[], float]) -> float:
    before = time.process_time()
    seconds = update()
    log(f"{metric}: {seconds:.1f} s, CPU {time.process_time() - before:.1f} s")
    return seconds
