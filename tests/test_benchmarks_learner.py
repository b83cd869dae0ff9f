"""``bench learner``: what it draws, both sides of an update, and a small run of what needs neither time nor GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.learner import bare_loop, head_memory, sides
from benchmarks.learner import ratios as learner
from benchmarks.learner.shapes import SMALL, make_shape, write_policy
from benchmarks.measurement import Repeats
from learners.algorithms.grpo import GRPOLearner
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import UserError
from ragr1_actors.core.types import TokenKind
from ragr1_actors.training.algorithm_config import AlgorithmConfig

pytestmark = pytest.mark.engine

SHAPE = make_shape(32, 64, 2, 4, 2, vocab_size=64, has_qkv_bias=True)
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def make_config() -> RunConfig:
    config = AlgorithmConfig().training(group_size=4, lr=1e-2).learners(num_learners=0, micro_batch_tokens=256)
    return config.freeze()


@pytest.fixture
def learners(tmp_path: Path) -> Iterator[list[Any]]:
    """Our learner and the padded ones on one policy."""
    policy_dir = write_policy(tmp_path, SHAPE)
    classes = (GRPOLearner, sides.PaddedLearner, sides.TrimmedLearner)
    made = [sides.build_learner(one, policy_dir, make_config()) for one in classes]
    yield made
    for one in made:
        one.close()


def test_lengths_are_the_stated_ones() -> None:
    lengths = sides.draw_lengths(2000, 200, 8000, seed=0)
    assert lengths == sides.draw_lengths(2000, 200, 8000, seed=0) != sides.draw_lengths(2000, 200, 8000, seed=1)
    assert (min(lengths), max(lengths)) == (200, 8000)
    assert median(lengths) == pytest.approx(1265, rel=0.05)
    assert np.mean(lengths) == pytest.approx(1700, rel=0.05)


def test_spread_lengths_have_the_shape_of_many() -> None:
    drawn, spread = sides.draw_lengths(2000, 200, 8000, seed=0), sides.spread_lengths(24, 200, 8000)
    assert len(spread) == 24 and spread != sorted(spread)
    assert np.mean(spread) == pytest.approx(np.mean(drawn), rel=0.05)
    assert max(drawn) * 0.75 < max(spread) < max(drawn)


def test_trajectories_are_as_long_as_drawn_and_have_turns() -> None:
    lengths = [7, 50, 333, 2000]
    (group,) = sides.draw_groups(lengths, 64, seed=0)
    assert [t.num_tokens for t in group.trajectories] == lengths
    assert sorted(t.reward for t in group.trajectories) == [0, 0, 1, 1]
    for trajectory in group.trajectories:
        assert trajectory.kinds[0] == TokenKind.PROMPT and trajectory.kinds[-1] == TokenKind.MODEL
        assert trajectory.num_model_tokens == sum(turn.num_model_tokens for turn in trajectory.turns)
        assert sides.MIN_TURNS <= len(trajectory.turns) <= sides.MAX_TURNS
    assert group.trajectories[-1].num_model_tokens == 600
    turns = sides.by_turn(group.trajectories)
    assert len(turns) == sum(len(trajectory.turns) for trajectory in group.trajectories)
    assert sum(turn.num_model_tokens for turn in turns) == sum(t.num_model_tokens for t in group.trajectories)
    assert [turn.num_tokens for turn in turns if turn.turns[0].action == "answer"] == lengths


def test_both_sides_learn_the_same(learners: list[Any]) -> None:
    groups = sides.draw_groups(sides.draw_lengths(8, 10, 90, seed=0), SHAPE.vocab_size, seed=0)
    lengths = [t.num_tokens for t in sides.members(groups)]
    losses = set()
    for _ in range(3):  # a step that differs would change the next loss
        ours, padded, trimmed = (sides.clock(one, groups)[1] for one in learners)
        losses.add(round(ours["loss"], 4))
        assert padded["loss"] == pytest.approx(ours["loss"], abs=1e-5)
        assert trimmed["loss"] == pytest.approx(ours["loss"], abs=1e-5)
    assert len(losses) == 3, "the steps were large enough to show"
    assert ours["computed_tokens"] == sum(lengths)
    assert padded["computed_tokens"] == len(lengths) * max(lengths)
    assert sum(lengths) < trimmed["computed_tokens"] < padded["computed_tokens"]


def test_tokens_in_common_change_no_step(tmp_path: Path) -> None:
    policy_dir = write_policy(tmp_path, SHAPE)
    groups = sides.draw_branches([60, 80, 50], SHAPE.vocab_size, seed=0)
    shared, whole = (sides.build_learner(GRPOLearner, policy_dir, make_config()) for _ in range(2))
    losses = set()
    for _ in range(3):
        ours = sides.clock(shared, groups)[1]
        with sides.every_trajectory_whole():
            theirs = sides.clock(whole, groups)[1]
        losses.add(round(ours["loss"], 4))
        for metric in ("loss", "entropy", "grad_norm", "tokens"):
            assert ours[metric] == pytest.approx(theirs[metric], abs=1e-5, rel=1e-4), metric
    assert len(losses) == 3, "the steps were large enough to show"
    useful = sum(trajectory.num_tokens for trajectory in sides.members(groups))
    assert (theirs["computed_tokens"], theirs["shared_tokens"]) == (useful, 0)
    assert ours["computed_tokens"] < 0.7 * useful
    assert ours["shared_tokens"] == pytest.approx(1 - ours["computed_tokens"] / useful)
    for one in (shared, whole):
        one.close()


def test_plans_waste_no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(learner, "NUM_PLANNED", 64)
    found = learner.plans(tmp_path, set(learner.METRICS), Repeats(2), quick=True)
    assert all(len(samples) == 2 for samples in found.values())
    assert all(sample.ratio <= 0.01 for metric in learner.NUM_RANKS for sample in found[metric])
    assert all(sample.ours < sample.theirs for sample in found["in_step_loss"])
    assert all(0 < sample.ratio < 0.2 for sample in found["attention_padding"])
    assert all(0.4 < sample.ratio < 0.7 for sample in found["prefix_sharing"])


def test_dummies_count_as_padding() -> None:
    trajectories = sides.members(sides.draw_groups([40, 30], 64, seed=0))
    rows = sides.packed_rows(trajectories, 3, 1000, 0.001)
    assert sides.num_tokens(rows) == 40 + 30 + 30
    assert sides.num_tokens(row for row in rows if not row.weight) == 30


def test_ranks_in_step_wait_for_the_costliest() -> None:
    assert sides.in_step_loss([10, 10, 10, 10], 2, 20, 0.0, 0.0) == 0
    assert sides.in_step_loss([30, 10], 2, 30, 0.0, 0.0) == pytest.approx(0.5)
    assert sides.in_step_loss([30, 10], 2, 30, 0.1, 0.0) == pytest.approx(120 / ((120 + 20) / 2) - 1)


def test_every_metric_has_a_goal_or_says_that_it_has_none() -> None:
    assert set(learner.GOALS) == set(learner.UNITS) == set(learner.METRICS)
    assert all(metric in (learner.__doc__ or "") for metric in learner.METRICS)
    with pytest.raises(UserError, match="got --only no_such, expected one of padding_waste, "):
        next(learner.run(only="no_such"))


def test_whole_logits_without_room_are_not_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(learner, "HEAD_TOKENS", 2**40)
    assert list(learner.run(only="peak_memory")) == []
    assert "peak_memory skipped: whole logits need " in capsys.readouterr().err


@pytest.mark.slow
def test_updates_of_all_sides_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learner, "SHAPE", SHAPE)
    found = {m.metric: m for only in ("vs_padded", "vs_padded_micro") for m in learner.run(only, 1, quick=True)}
    assert found.keys() == {"vs_padded", "vs_padded_micro"}
    assert all(m.ours > 0 and m.theirs > 0 and m.repeats == 1 for m in found.values())


@pytest.mark.slow
def test_the_head_in_chunks_takes_less_than_whole_logits(tmp_path: Path) -> None:
    policy_dir = write_policy(tmp_path, learner.HEAD_SHAPE_QUICK)
    ours, whole = (head_memory.measure_side(side, policy_dir, learner.HEAD_TOKENS_QUICK) for side in ("ours", "whole"))
    logits = 4 * learner.HEAD_TOKENS_QUICK * learner.HEAD_SHAPE_QUICK.vocab_size
    assert 2 * logits < whole < head_memory.WHOLE_COPIES * logits
    assert ours < whole / 1.5
    with pytest.raises(RuntimeError, match=r"ended with 1: (.|\n)*no_such"):
        head_memory.measure_side("no_such", policy_dir, 8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bare_loop_learns_from_the_rows_that_a_learner_makes(tmp_path: Path, dtype: str) -> None:
    policy_dir = write_policy(tmp_path, SHAPE)
    groups = bare_loop.draw(policy_dir)
    rows = sides.packed_rows(sides.members(groups), 1, bare_loop.MICRO_BATCH_TOKENS, 0.0)
    assert sides.num_tokens(rows) == sum(t.num_tokens for t in sides.members(groups))
    loop = bare_loop.BareLoop(policy_dir, dtype)
    before = [parameter.clone() for parameter in loop.masters]
    assert loop.clock(rows, groups) > 0
    assert all(not torch.equal(old, new) for old, new in zip(before, loop.masters, strict=True))
    (found,) = learner.run("vs_bare_fp32", 1, quick=True)
    assert found.repeats == 1 and found.ratio > 0


@pytest.mark.slow
def test_a_lean_update_needs_less_memory(tmp_path: Path) -> None:
    policy_dir = write_policy(tmp_path, SMALL)
    ours, lean = (bare_loop.measure_memory(side, policy_dir, "float32") for side in ("ours", "lean"))
    assert lean < ours
