"""The learners of recipes, against the formulas of their papers in plain loops."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from learners_common import Build, fill_columns, make_config, make_groups, make_policy, make_trajectory, pickle_by_value

from learners.algorithms.grpo import GRPOLearner
from learners.ranks.learner_group import LearnerGroup
from learners.train_batch import TrainBatch, make_batch
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.types import TokenKind, Trajectory, TrajectoryGroup, Turn
from ragr1_actors.recipes.leret.leret import DistillLearner, LeretLearner, with_prompt_of
from ragr1_actors.recipes.rex_rag.rex_rag import RexLearner

pytestmark = pytest.mark.engine

HINTS = [[5, 6, 9], [5, 6, 10], [5, 7]]


class Rex(RexLearner):
    """Has hints of made-up tokens: the made-up policy has no tokenizer."""

    def build(self) -> None:
        GRPOLearner.build(self)
        self.hints, self.keep_rate = HINTS, self.options.keep_rate


def rex_config(**options: object) -> RunConfig:
    algorithm = "ragr1_actors.recipes.rex_rag.rex_rag:RexLearner"
    return make_config(training={"algorithm": algorithm, "num_minibatches": 2, "options": options})


def probe(parent: Trajectory, hint: list[int], reward: float, number: int) -> Trajectory:
    """The parent's first turn with its observation, a hint, and a turn of three tokens."""
    cut = int(parent.turn_positions[1][0])
    added = {
        "token_ids": [*hint, 11, 12, 13],
        "kinds": [TokenKind.INJECTED] * len(hint) + [TokenKind.MODEL] * 3,
        "logprobs": [0.0] * len(hint) + [-1.0, -2.0, -0.5],
        "policy_versions": [-1] * len(hint) + [0, 0, 0],
    }
    arrays = {
        name: np.concatenate([getattr(parent, name)[:cut], np.array(values, getattr(parent, name).dtype)])
        for name, values in added.items()
    }
    turns = (parent.turns[0], Turn("", 3, "answer"))
    name = f"{parent.trajectory_id}/probe{number}"
    copied = parent.turns[0].num_model_tokens
    parts = {"trajectory_id": name, "parent": parent.trajectory_id, "turns": turns, "num_copied_tokens": copied}
    return replace(parent, **arrays, **parts, reward=reward)


def explored(seed: int = 0) -> list[TrajectoryGroup]:
    """Three groups of four plain attempts, one of them right, and a probe with each hint."""
    rng, groups = np.random.default_rng(seed), []
    for number in range(3):
        plain = [make_trajectory(rng, task_id=f"made/{number}", reward=float(index == 0)) for index in range(4)]
        probes = [probe(plain[1 + n], hint, float(n == number), n) for n, hint in enumerate(HINTS)]
        groups.append(TrajectoryGroup(plain[0].task, (*plain, *probes)))
    return groups


def batch_of(learner: RexLearner, groups: list[TrajectoryGroup]) -> tuple[TrainBatch, list[float]]:
    """The batch of an update, and its tokens' log-probs under the learner's policy."""
    batch = make_batch(groups, learner.select_members, True, learner.trained_kinds)
    assert batch is not None
    return batch, learner.score(learner.policy_logprobs, batch.flat).tolist()


def test_rex_rag_divides_by_the_mixture_of_policy_and_probes(build: Build) -> None:
    stuck = make_groups(7, num_groups=1, group_size=3)[0]  # has no gradient, and counts in the shares
    stuck = replace(stuck, trajectories=tuple(replace(one, reward=0.0) for one in stuck.trajectories))
    learner, groups = build(Rex, rex_config(keep_rate=1.0)), [*explored(), stuck]
    batch, own = batch_of(learner, list(learner.connect(groups)))
    batch = fill_columns(learner, batch)
    share, found, start = 9 / 24, batch.columns["mixture_logprobs"].tolist(), 0
    frequencies = {(5,): 1.0, (5, 6): 2 / 3, (5, 7): 1 / 3, (5, 6, 9): 0.5, (5, 6, 10): 0.5}
    for one in batch.trajectories:
        kinds = [(kind, at) for at, kind in enumerate(one.kinds.tolist()) if kind in (1, 4)]
        hint: tuple[int, ...] = ()
        for place, (kind, at) in enumerate(kinds):
            old = math.exp(own[start + place] if kind == TokenKind.INJECTED else one.logprobs[at])
            mu = 0.0
            if one.parent and kind == TokenKind.INJECTED:
                hint = (*hint, int(one.token_ids[at]))
                mu = frequencies[hint]
            elif one.parent:
                is_before = place < one.num_copied_tokens
                mu = old / 0.8 ** (1 / one.num_copied_tokens) if is_before else old
            assert found[start + place] == pytest.approx(math.log((1 - share) * old + share * mu), abs=1e-4)
        start += len(kinds)
    assert start == len(found)


def test_rex_rag_keeps_the_probes_with_the_likeliest_hints(build: Build) -> None:
    learner, groups = build(Rex, rex_config(keep_rate=0.25)), explored()
    batch, own = batch_of(learner, groups)
    start, means = 0, {}
    for one in batch.trajectories:
        kinds = [kind for kind in one.kinds.tolist() if kind in (1, 4)]
        hint = [own[start + place] for place, kind in enumerate(kinds) if kind == TokenKind.INJECTED]
        start += len(kinds)
        if one.parent:
            means[one.trajectory_id] = sum(hint) / len(hint)
    kept = [one for group in learner.connect(groups) for one in group.trajectories]
    best = sorted(means, key=lambda name: -means[name])[:3]  # a quarter of the twelve plain attempts
    assert {one.trajectory_id for one in kept if one.parent} == set(best)
    assert len(kept) == 15
    share = sum(one.reward == 1 for one in kept if one.parent) / 3
    assert learner.keep_rate == pytest.approx(0.9 * 0.25 + 0.1 * share)
    assert learner.probe_share == 3 / 15


@pytest.mark.slow
@pytest.mark.ray
def test_rex_rag_learns_the_same_on_two_ranks(ray_local: ModuleType, tmp_path: Path) -> None:
    pickle_by_value(ray_local, __name__)
    policy_dir = make_policy(tmp_path / "policy")

    def update(learner: Any) -> tuple[list[dict[str, float]], Any, float]:
        made = Rex(rex_config(keep_rate=0.25), policy_dir, learner.rank, learner.world_size)
        made.build()
        metrics = [made.update(explored(seed)) for seed in range(3)]
        weights, keep_rate = made.get_weights(), made.keep_rate
        made.close()
        return metrics, weights, keep_rate

    found = []
    for num_learners in (0, 2):
        group = LearnerGroup(make_config(learners={"num_learners": num_learners}))
        group.build("sft", policy_dir)
        found.append(group.foreach_learner(update))
        group.stop()
    (metrics, weights, keep_rate), ranks = found[0][0], found[1]
    assert [rank[2] for rank in ranks] == [keep_rate, keep_rate]
    for theirs, ours in zip(ranks[0][0], metrics, strict=True):
        assert theirs["trajectories_left_out"] == ours["trajectories_left_out"]
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-3)
        assert theirs["policy_loss"] == pytest.approx(ours["policy_loss"], rel=1e-3, abs=1e-6)
    for name, weight in ranks[0][1].items():
        np.testing.assert_allclose(weight, weights[name], atol=1e-4, rtol=0, err_msg=name)


def test_leret_pairs_each_attempt_with_those_of_the_next_lower_score(build: Build) -> None:
    (group,) = make_groups(0, num_groups=1, group_size=6)
    scores, written = (
        [0.5, 1.0, 0.0, 0.5, 1.0, 0.25],
        ["a", "b", "c", "d", "b", "e"],
    )  # the second "b" is no new attempt
    members = [
        replace(one, reward=score, turns=tuple(replace(turn, completion_text=text) for turn in one.turns))
        for one, score, text in zip(group.trajectories, scores, written, strict=True)
    ]
    config = make_config(training={"algorithm": "ragr1_actors.recipes.leret.leret:LeretLearner"})
    found = build(LeretLearner, config).select_members([replace(one, turns=one.turns[-1:]) for one in members])
    texts = [one.turns[0].completion_text for one in found]
    pairs = list(zip(texts[::2], texts[1::2], strict=True))
    assert sorted(pairs) == [("a", "e"), ("b", "a"), ("b", "d"), ("d", "e"), ("e", "c")]
    assert all(better.reward > worse.reward for better, worse in zip(found[::2], found[1::2], strict=True))


def test_leret_makes_the_better_attempts_likelier_under_the_bare_prompt(build: Build) -> None:
    groups = make_groups(2, num_groups=2, group_size=3)
    scored = [
        replace(
            group,
            trajectories=tuple(
                replace(one, reward=0.5 * n, turns=tuple(replace(turn, completion_text=f"{n}") for turn in one.turns))
                for n, one in enumerate(group.trajectories)
            ),
        )
        for group in groups
    ]
    for learner_class in (DistillLearner, LeretLearner):
        name = f"ragr1_actors.recipes.leret.leret:{learner_class.__name__}"
        learner = build(learner_class, make_config(training={"algorithm": name, "lr": 1e-2}))
        best = [[with_prompt_of(group.trajectories[0], group.trajectories[2])] for group in scored]
        batch = make_batch([replace(g, trajectories=tuple(b)) for g, b in zip(scored, best, strict=True)], list, True)
        assert batch is not None
        before = learner.score(learner.policy_logprobs, batch.flat).sum()
        for _ in range(3):
            metrics = learner.update(scored)
        assert metrics["num_steps"] == 1
        assert learner.score(learner.policy_logprobs, batch.flat).sum() > before


def test_leret_learns_an_attempt_under_the_bare_prompt() -> None:
    bare, other = make_groups(1, num_groups=1, group_size=2)[0].trajectories
    found = with_prompt_of(bare, other)
    num_bare, num_other = ((one.kinds == TokenKind.PROMPT).sum() for one in (bare, other))
    assert found.token_ids.tolist() == [*bare.token_ids[:num_bare], *other.token_ids[num_other:]]
    assert found.kinds.tolist() == [*bare.kinds[:num_bare], *other.kinds[num_other:]]
    assert found.turn_lengths == other.turn_lengths
    assert found.num_model_tokens == other.num_model_tokens
