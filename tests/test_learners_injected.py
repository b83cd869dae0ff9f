"""What a learner may change of its groups, and tokens that code wrote into the policy's turns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from learners_common import Build, make_config, make_groups, own_logprobs

from learners.algorithms.grpo import GRPOLearner, PPOLearner, turn_ids
from learners.train_batch import Meter, make_batch
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.types import TokenKind, Trajectory, TrajectoryGroup

pytestmark = pytest.mark.engine


class Connected(GRPOLearner):
    """Leaves the first group out, and turns the rewards of the others round."""

    def connect(self, groups: Sequence[TrajectoryGroup]) -> Sequence[TrajectoryGroup]:
        turned = [tuple(replace(t, reward=1 - t.reward) for t in group.trajectories) for group in groups[1:]]
        return [replace(group, trajectories=of) for group, of in zip(groups[1:], turned, strict=True)]


class Nothing(GRPOLearner):
    """Returns no groups."""

    def connect(self, groups: Sequence[TrajectoryGroup]) -> Any:
        return None


def test_a_learner_changes_groups_and_leaves_some_out(build: Build) -> None:
    groups, config = make_groups(0), make_config()
    found = build(Connected, config)
    metrics = found.update(groups)
    assert metrics["trajectories_left_out"] == len(groups[0].trajectories)
    plain = build(GRPOLearner, config)
    assert plain.update(found.connect(groups))["loss"] == metrics["loss"]
    assert build(GRPOLearner, config).update(groups[1:])["loss"] != metrics["loss"]
    with pytest.raises(ConfigError, match=r"Nothing\.connect returned None, expected a list of TrajectoryGroup"):
        build(Nothing, config).update(groups)


BOTH = frozenset((TokenKind.MODEL, TokenKind.INJECTED))


class Both(GRPOLearner):
    """Learns what code wrote, too."""

    trained_kinds = BOTH


class BothPPO(PPOLearner):
    """The same with a critic."""

    trained_kinds = BOTH


def written(trajectory: Trajectory) -> Trajectory:
    """Code wrote the token in front of each turn."""
    kinds = trajectory.kinds.copy()
    is_model = kinds == TokenKind.MODEL
    kinds[np.flatnonzero(is_model[1:] & ~is_model[:-1])] = TokenKind.INJECTED
    kinds[0] = TokenKind.PROMPT
    return replace(trajectory, kinds=kinds)


def sampled(trajectory: Trajectory, logprobs: np.ndarray) -> Trajectory:
    """An engine with these log-probs sampled what code had written: the turn begins with it."""
    was_written = trajectory.kinds == TokenKind.INJECTED
    turns = tuple(replace(turn, num_model_tokens=turn.num_model_tokens + 1) for turn in trajectory.turns)
    return replace(
        trajectory,
        kinds=np.where(was_written, np.uint8(TokenKind.MODEL), trajectory.kinds),
        logprobs=np.where(was_written, logprobs, trajectory.logprobs),
        policy_versions=np.where(was_written, np.int32(0), trajectory.policy_versions),
        turns=turns,
    )


def scored(build: Build, config: Any, groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """The groups as if the learner's policy had sampled what code wrote."""
    zeros = [
        replace(g, trajectories=tuple(sampled(t, np.zeros(t.num_tokens, np.float32)) for t in g.trajectories))
        for g in groups
    ]
    own = own_logprobs(build(GRPOLearner, config), zeros).numpy()
    found, start = [], 0
    for group, plain in zip(groups, zeros, strict=True):
        members = []
        for one, as_model in zip(group.trajectories, plain.trajectories, strict=True):
            values = np.zeros(one.num_tokens, np.float32)
            values[as_model.kinds == TokenKind.MODEL] = own[start : start + as_model.num_model_tokens]
            start += as_model.num_model_tokens
            members.append(sampled(one, values))
        found.append(replace(group, trajectories=tuple(members)))
    return found


@pytest.mark.parametrize(("ours", "theirs"), [(Both, GRPOLearner), (BothPPO, PPOLearner)])
@pytest.mark.parametrize(("tis_clip", "num_steps"), [(0.0, 2), (2.0, 2), (2.0, 1)])
def test_written_tokens_are_learned_as_if_the_learner_had_sampled_them(
    build: Build, ours: type[GRPOLearner], theirs: type[GRPOLearner], tis_clip: float, num_steps: int
) -> None:
    options = {"llds_coeff": 0.5, "tis_clip": tis_clip}
    config = make_config(training={"lr": 1e-3, "num_minibatches": num_steps, "options": options})
    groups = [replace(g, trajectories=tuple(map(written, g.trajectories))) for g in make_groups(3)]
    groups = [
        replace(
            g,
            trajectories=tuple(
                replace(t, turns=tuple(replace(turn, reward=0.1) for turn in t.turns)) for t in g.trajectories
            ),
        )
        for g in groups
    ]
    expected, found = build(theirs, config), build(ours, config)
    theirs_metrics, metrics = expected.update(scored(build, config, groups)), found.update(groups)
    num_written = sum(int((t.kinds == TokenKind.INJECTED).sum()) for g in groups for t in g.trajectories)
    assert num_written > 10
    for name in ("tokens", "loss", "llds", "grad_norm", *(["tis_weight_mean"] if tis_clip else [])):
        assert metrics[name] == pytest.approx(theirs_metrics[name], abs=1e-5), name
    assert not tis_clip or abs(metrics["tis_weight_mean"] - 1) > 1e-3
    weights = expected.get_weights()
    for name, weight in found.get_weights().items():
        np.testing.assert_allclose(weight, weights[name], atol=1e-6, err_msg=name)


def test_the_gap_and_the_files_have_sampled_tokens_only(build: Build) -> None:
    groups = [replace(g, trajectories=tuple(map(written, g.trajectories))) for g in make_groups(3)]
    config = make_config(training={"lr": 1e-3})
    plain, learner = build(GRPOLearner, config), build(Both, config)
    expected, found = plain.update(groups), learner.update(groups)
    assert found["tokens"] > expected["tokens"]
    assert found["logprob_gap_mean"] == pytest.approx(expected["logprob_gap_mean"], rel=1e-5)
    assert learner.learned is not None and plain.learned is not None
    lengths = [t.num_model_tokens for g in groups for t in g.trajectories]
    assert [len(values) for values in learner.learned.column("ratios").to_pylist()] == lengths
    for ours, theirs in zip(
        learner.learned.column("advantages").to_pylist(), plain.learned.column("advantages").to_pylist(), strict=True
    ):
        assert ours == pytest.approx(theirs)


def test_what_code_wrote_behind_the_last_turn_belongs_to_it() -> None:
    """As in a fork whose text fills the context."""
    groups = make_groups(0, num_groups=2)
    first, *others = groups[0].trajectories
    full = replace(
        first,
        token_ids=np.append(first.token_ids, np.int32(7)),
        kinds=np.append(first.kinds, np.uint8(TokenKind.INJECTED)),
        logprobs=np.append(first.logprobs, np.float32(0)),
        policy_versions=np.append(first.policy_versions, np.int32(-1)),
    )
    groups[0] = replace(groups[0], trajectories=(full, *others))
    batch = make_batch(groups, lambda members: members, True, BOTH)
    assert batch is not None
    found = turn_ids(batch).tolist()
    before = turn_ids(make_batch(make_groups(0, num_groups=2), lambda members: members, True, BOTH)).tolist()  # type: ignore[arg-type]
    last = first.num_model_tokens
    assert found == [*before[:last], before[last - 1], *before[last:]]


def test_a_batch_without_written_tokens_is_the_same_for_both() -> None:
    batch = make_batch(make_groups(0), lambda members: members, True, BOTH)
    plain = make_batch(make_groups(0), lambda members: members, True)
    assert batch is not None and plain is not None and batch.columns.is_sampled is None
    np.testing.assert_array_equal(batch.flat.response_mask, plain.flat.response_mask)


def test_a_strategy_may_know_the_policy_that_acted(build: Build) -> None:
    """Its log-probs are the denominator of the ratio; the gap is that between learner and engine."""
    config = make_config(training={"lr": 1e-3, "options": {"clip_low": 1e3, "clip_high": 1e3}})
    groups = make_groups(3)
    plain = build(GRPOLearner, config).update(groups)
    first = groups[1].trajectories[0]
    known = np.where(first.kinds == TokenKind.MODEL, first.logprobs - 1, 0).astype(np.float32)
    acted = replace(first, behaviour_logprobs=known)
    changed = [*groups[:1], replace(groups[1], trajectories=(acted, *groups[1].trajectories[1:])), *groups[2:]]
    learner = build(GRPOLearner, config)
    found = learner.update(changed)
    assert found["logprob_gap_mean"] == pytest.approx(plain["logprob_gap_mean"], rel=1e-6)
    assert learner.learned is not None
    ids = learner.learned.column("trajectory_id").to_pylist()
    ratios = dict(zip(ids, learner.learned.column("ratios").to_pylist(), strict=True))
    other = build(GRPOLearner, config)
    other.update(groups)
    assert other.learned is not None
    before = dict(zip(ids, other.learned.column("ratios").to_pylist(), strict=True))
    expected = [math.e * ratio for ratio in before[acted.trajectory_id]]
    assert ratios[acted.trajectory_id] == pytest.approx(expected, rel=1e-4)
    assert all(ratios[name] == pytest.approx(before[name]) for name in ids if name != acted.trajectory_id)


def acting(trajectory: Trajectory, shift: float) -> Trajectory:
    """The policy that acted is known, and is not the engine's."""
    known = np.where(trajectory.kinds == TokenKind.MODEL, trajectory.logprobs - shift, 0).astype(np.float32)
    return replace(trajectory, behaviour_logprobs=known)


@pytest.mark.parametrize("options", [{}, {"tis_clip": 2.0}])
def test_the_divergence_in_the_reward_is_that_of_the_policy_whoever_acted(
    build: Build, options: dict[str, Any]
) -> None:
    config = make_config(training={"kl_coeff": 0.1, "options": {"kl_in": "reward", **options}, "num_minibatches": 2})
    groups = make_groups(3)
    acted = [replace(group, trajectories=tuple(acting(one, 1.0) for one in group.trajectories)) for group in groups]
    found, plain = (build(GRPOLearner, config).update(batch)["kl"] for batch in (acted, groups))
    assert found == pytest.approx(plain, rel=1e-6)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_a_policy_that_acted_in_one_trajectory_changes_no_correction_of_the_others(
    build: Build, num_steps: int
) -> None:
    config = make_config(training={"lr": 1e-9, "num_minibatches": num_steps, "options": {"tis_clip": 2.0}})
    groups = make_groups(3)
    plain = build(GRPOLearner, config)
    plain_metrics = plain.update(groups)
    first, *others = groups[1].trajectories
    changed = [groups[0], replace(groups[1], trajectories=(acting(first, 1.0), *others)), *groups[2:]]
    learner = build(GRPOLearner, config)
    found = learner.update(changed)
    assert plain.learned is not None and learner.learned is not None
    ids = plain.learned.column("trajectory_id").to_pylist()
    before = dict(zip(ids, plain.learned.column("ratios").to_pylist(), strict=True))
    ratios = dict(zip(ids, learner.learned.column("ratios").to_pylist(), strict=True))
    for name in ids:  # the learner's own log-probs are the denominator, but for those of the policy that acted
        is_other = name != first.trajectory_id
        assert (ratios[name] == pytest.approx(before[name], abs=1e-5)) == is_other
    num_tokens = sum(t.num_model_tokens for group in groups for t in group.trajectories)
    assert plain_metrics["tis_weight_mean"] != found["tis_weight_mean"]
    rest = [g if g is not groups[1] else replace(g, trajectories=tuple(others)) for g in groups]
    # the weights of the others are those that they had; that of a token whose policy is known is 1
    batch = make_batch(rest, lambda members: members, True)
    assert batch is not None
    own = own_logprobs(plain, rest)
    weights = torch.exp(own - torch.from_numpy(batch.flat.rollout_logprobs)).clamp(max=2.0)
    expected = (float(weights.sum()) + first.num_model_tokens) / num_tokens
    assert found["tis_weight_mean"] == pytest.approx(expected, rel=1e-4)


def test_written_tokens_beside_a_policy_that_acted_have_the_learners_log_probs(build: Build) -> None:
    groups = [replace(g, trajectories=tuple(map(written, g.trajectories))) for g in make_groups(3)]
    first, *others = groups[1].trajectories
    groups[1] = replace(groups[1], trajectories=(acting(first, 1.0), *others))
    learner = build(Both, make_config(training={"lr": 1e-9}))
    batch = make_batch(groups, lambda members: members, True, BOTH)
    assert batch is not None and batch.columns.is_sampled is not None
    columns = learner.fill_columns(batch, Meter()).columns
    is_other = columns.trajectory_ids != [t.trajectory_id for t in batch.trajectories].index(first.trajectory_id)
    is_written = ~batch.columns.is_sampled
    own_M = learner.score(learner.policy_logprobs, batch.flat)
    for values_M in (
        columns["old_logprobs"][is_other & is_written],
        columns["rollout_logprobs"][is_other & is_written],
    ):
        torch.testing.assert_close(values_M, own_M[is_other & is_written])
