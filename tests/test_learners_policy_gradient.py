"""Engine and learner agree on every token; where they do not, it is measured, and weights can correct for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learners_common import STAGES_AND_DTYPES, Build, make_batch, make_branches, make_config, make_groups
from learners_common import own_logprobs as scores_of
from transformers import AutoModelForCausalLM

from learners.advantages import truncated_importance_weights
from learners.algorithms.grpo import GRPOLearner, GSPOLearner, PPOLearner
from learners.algorithms.sft import SFTLearner
from learners.learner import Learner
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.types import Sampling, StopReason, Task, TokenKind, Trajectory, TrajectoryGroup
from ragr1_actors.planning.tiny_policy import make_tiny_policy
from ragr1_actors.rollout.engines.base import EngineArguments, PolicyTokenizer
from ragr1_actors.rollout.engines.transformers_engine import TransformersEngine

pytestmark = pytest.mark.engine


def config_for(tis_clip: float, **training: Any) -> RunConfig:
    """At ZeRO stage 0, where gradients stay with their parameters until the step."""
    options = {"tis_clip": tis_clip, **training.pop("options", {})}
    settings = {"lr": 1e-3, "options": options, **training}
    return make_config(training=settings, learners={"zero_stage": 0, "micro_batch_tokens": 64})


def own_logprobs(learner: Learner, groups: list[TrajectoryGroup]) -> tuple[torch.Tensor, torch.Tensor]:
    """The learner's log-probs of the MODEL tokens and the engine's, in the order of the trajectories."""
    return scores_of(learner, groups), torch.from_numpy(make_batch(learner, groups).flat.rollout_logprobs)


def with_gap(
    learner: Learner, groups: list[TrajectoryGroup], gap: Callable[[int], np.ndarray]
) -> list[TrajectoryGroup]:
    """Let the engine's log-probs be the learner's plus ``gap(number of tokens)``."""
    ours, _ = own_logprobs(learner, groups)
    left = (ours.numpy() + gap(len(ours))).astype(np.float32)
    changed = []
    for group in groups:
        members = []
        for trajectory in group.trajectories:
            count = trajectory.num_model_tokens
            logprobs = trajectory.logprobs.copy()
            logprobs[trajectory.kinds == TokenKind.MODEL], left = left[:count], left[count:]
            members.append(replace(trajectory, logprobs=logprobs))
        changed.append(TrajectoryGroup(group.task, tuple(members)))
    return changed


def noise(scale: float, seed: int = 0) -> Callable[[int], np.ndarray]:
    return lambda count: np.random.default_rng(seed).normal(0, scale, count)


def gradients(learner: Learner, groups: list[TrajectoryGroup]) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The gradient of the first step, which is then not taken, and the update's metrics."""
    found: dict[str, torch.Tensor] = {}

    def step(lr: float) -> float:
        for name, parameter in learner.policy.module.named_parameters():
            assert parameter.grad is not None
            found.setdefault(name, parameter.grad.clone())
            parameter.grad = None
        return 0.0

    learner.policy.step = step  # type: ignore[method-assign]
    metrics = learner.update(groups)
    return found, metrics


# -- the engine and the learner, at lag 0 in fp32 ----------------------------------------------------------------------

TEXTS = [" Ana Bell was born in 1931 in Riga. <search> Ana Bell</search>", " Bo Cole: x, y\n 1950 and more words here"]


@pytest.fixture(scope="module")
def two_policies(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two tiny policies with different weights; neither has flat distributions."""
    folders = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp(f"policy{seed}")
        make_tiny_policy(folder, TEXTS, seed=0, vocab_size=400, hidden_size=32, num_layers=2, num_heads=2)
        model = AutoModelForCausalLM.from_pretrained(folder)
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn_like(parameter))
        model.save_pretrained(folder)
        folders.append(folder)
    return folders


async def sample_trajectory(
    engine: TransformersEngine, tokenizer: PolicyTokenizer, index: int, temperature: float
) -> Trajectory:
    """Three turns with retrieved text of different lengths between them."""
    token_ids = tokenizer.encode(" Where was Ana Bell born" + " x" * index)
    kinds, logprobs, versions = [TokenKind.PROMPT] * len(token_ids), [0.0] * len(token_ids), [-1] * len(token_ids)
    for turn in range(3):
        sampling = Sampling(4 + index % 9, temperature, stop=("</search>",), seed=100 * index + turn)
        completion = await engine.generate(list(token_ids), sampling, request_id=str(index))
        observed = tokenizer.encode(" Riga. Ana" * (1 + index % 3))
        token_ids += completion.token_ids + observed
        kinds += [TokenKind.MODEL] * len(completion.token_ids) + [TokenKind.OBSERVATION] * len(observed)
        logprobs += completion.logprobs + [0.0] * len(observed)
        versions += completion.policy_versions + [-1] * len(observed)
    engine.release(str(index))
    return Trajectory(
        f"made/0#{index}",
        Task("made/0", "?", ("!",)),
        np.asarray(token_ids, np.int32),
        np.asarray(kinds, np.uint8),
        np.asarray(logprobs, np.float32),
        np.asarray(versions, np.int32),
        (),
        StopReason.ANSWERED,
        float(index % 2),
    )


async def sample_groups(engine: TransformersEngine, tokenizer: PolicyTokenizer, temperature: float) -> list[Trajectory]:
    return list(await asyncio.gather(*(sample_trajectory(engine, tokenizer, i, temperature) for i in range(12))))


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.3])
def test_engine_and_learner_agree_on_every_token_under_two_sets_of_weights(
    build: Build, two_policies: list[Path], temperature: float
) -> None:
    config = make_config(env_runners={"temperature": temperature}, learners={"micro_batch_tokens": 200})
    learners = [build(GRPOLearner, config, folder) for folder in two_policies]
    tokenizer = PolicyTokenizer(two_policies[0])

    async def sample_under_both() -> list[list[Trajectory]]:
        engine = TransformersEngine(two_policies[0], tokenizer, EngineArguments(max_rows=5, max_context_tokens=512))
        first = await sample_groups(engine, tokenizer, temperature)
        await engine.update_weights(learners[1].get_weights(), 1)
        second = await sample_groups(engine, tokenizer, temperature)
        await engine.close()
        return [first, second]

    sampled = asyncio.run(sample_under_both())
    for version, trajectories in enumerate(sampled):
        groups = [TrajectoryGroup(trajectories[0].task, tuple(trajectories))]
        ours, engines = own_logprobs(learners[version], groups)
        assert len(ours) > 150
        assert {v for t in trajectories for v in t.policy_versions[t.kinds == TokenKind.MODEL]} == {version}
        print(f"temperature {temperature}, version {version}: {(ours - engines).abs().max():.2e} of {len(ours)} tokens")
        assert (ours - engines).abs().max() < 1e-4
        others, _ = own_logprobs(learners[1 - version], groups)
        assert (others - engines).abs().mean() > 0.3, "the other weights would not have passed"
        metrics = learners[version].update(groups)
        assert metrics["logprob_gap_max"] < 1e-4
        assert metrics["ratio_outliers"] == 0 and abs(metrics["engine_kl"]) < 1e-9


# -- the gap as it is reported -----------------------------------------------------------------------------------------


def test_the_gap_is_the_engines_and_not_that_of_the_learners_own_steps(build: Build) -> None:
    learner = build(GRPOLearner, make_config(training={"lr": 0.1, "num_epochs": 3, "num_minibatches": 2}))
    groups = with_gap(learner, make_groups(0), lambda count: np.full(count, 0.2))
    metrics = learner.update(groups)
    assert metrics["ratio_max_deviation"] > 1, "the learner has moved far"
    assert metrics["logprob_gap_mean"] == pytest.approx(0.2, abs=1e-4)
    assert metrics["logprob_gap_max"] == pytest.approx(0.2, abs=1e-4)
    assert metrics["ratio_outliers"] == 1
    # KL(engine, learner) by k3, with x = log engine / learner = 0.2
    assert metrics["engine_kl"] == pytest.approx(np.exp(-0.2) - 1 + 0.2, abs=1e-4)


@pytest.mark.parametrize(("tis_clip", "num_minibatches"), [(0.0, 1), (2.0, 1), (2.0, 4)])
def test_the_gap_by_hand(build: Build, tis_clip: float, num_minibatches: int) -> None:
    learner = build(GRPOLearner, config_for(tis_clip, num_minibatches=num_minibatches))
    groups = with_gap(learner, make_groups(0), noise(0.3))
    ours, engines = own_logprobs(learner, groups)
    x = (engines - ours).double()
    metrics = learner.update(groups)
    assert metrics["logprob_gap_mean"] == pytest.approx(x.abs().mean().item(), abs=1e-5)
    assert metrics["logprob_gap_max"] == pytest.approx(x.abs().max().item(), abs=1e-5)
    outliers = ((-x).exp() < 0.9) | ((-x).exp() > 1.1)
    assert metrics["ratio_outliers"] == pytest.approx(outliers.double().mean().item(), abs=1e-6)
    assert metrics["engine_kl"] == pytest.approx(((-x).exp() - 1 + x).mean().item(), abs=1e-5)
    assert "logprob_gap_mean_fresh" not in metrics, "there is one version only"


@pytest.mark.parametrize("num_epochs", [1, 2])
def test_tokens_of_the_newest_version_are_reported_apart(build: Build, num_epochs: int) -> None:
    learner = build(GRPOLearner, config_for(2.0, num_epochs=num_epochs))
    old = with_gap(learner, make_groups(0, num_groups=2), lambda count: np.full(count, 0.5))
    new = with_gap(learner, make_groups(1, num_groups=2), lambda count: np.full(count, 0.01))
    newer = [
        TrajectoryGroup(
            group.task,
            tuple(
                replace(t, policy_versions=np.where(t.kinds == TokenKind.MODEL, 1, -1).astype(np.int32))
                for t in group.trajectories
            ),
        )
        for group in new
    ]
    metrics = learner.update(old + newer)
    assert metrics["logprob_gap_mean_fresh"] == pytest.approx(0.01, abs=1e-5)
    assert metrics["ratio_outliers_fresh"] == 0
    assert 0.1 < metrics["logprob_gap_mean"] < 0.5 and 0 < metrics["ratio_outliers"] < 1


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_gap_that_is_not_finite_counts_as_a_wide_one(build: Build, broken: float) -> None:
    def gap(count: int) -> np.ndarray:
        return np.where(np.arange(count) == 3, broken, 0.0)

    learner = build(GRPOLearner, config_for(0.0))
    groups = with_gap(learner, make_groups(0), gap)
    metrics = learner.update(groups)
    assert metrics["logprob_gap_max"] == pytest.approx(20)
    assert metrics["logprob_gap_mean"] == pytest.approx(20 / metrics["tokens"], abs=1e-5)
    assert metrics["ratio_outliers"] == pytest.approx(1 / metrics["tokens"])
    assert np.isfinite(metrics["engine_kl"])


def test_demonstrations_have_no_gap(build: Build) -> None:
    metrics = build(SFTLearner, config_for(2.0)).update(make_groups(0))
    assert not {"logprob_gap_mean", "engine_kl", "ratio_mean", "tis_weight_mean"} & set(metrics)


# -- truncated importance sampling -------------------------------------------------------------------------------------


def test_weights_by_hand() -> None:
    proximal = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    engine = torch.log(torch.tensor([1.0, 0.5, 0.25, 4.0])) - 1
    weights, truncated = truncated_importance_weights(proximal, engine, 3.0)
    torch.testing.assert_close(weights, torch.tensor([1.0, 2.0, 3.0, 0.25]))
    assert truncated.tolist() == [False, False, True, False]
    assert not weights.requires_grad


@pytest.mark.parametrize("num_minibatches", [1, 2])
@pytest.mark.parametrize("learner_class", [GRPOLearner, PPOLearner])
def test_without_a_gap_the_correction_changes_nothing(
    build: Build, learner_class: type[Learner], num_minibatches: int
) -> None:
    training = {"kl_coeff": 0.1, "entropy_coeff": 0.01, "num_minibatches": num_minibatches}
    off, on = (build(learner_class, config_for(clip, **training)) for clip in (0.0, 2.0))
    groups = with_gap(off, make_groups(0), np.zeros)
    (plain, plain_metrics), (corrected, metrics) = gradients(off, groups), gradients(on, groups)
    for name, gradient in plain.items():
        torch.testing.assert_close(corrected[name], gradient, atol=1e-6, rtol=0)
    assert max(gradient.abs().max().item() for gradient in plain.values()) > 1e-3
    assert metrics["tis_weight_mean"] == pytest.approx(1, abs=1e-5) and metrics["tis_truncated"] == 0
    assert "tis_weight_mean" not in plain_metrics


def plain_gradients(
    policy_dir: Path, groups: list[TrajectoryGroup], clip: float, entropy_coeff: float
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The corrected GRPO gradient by the book: one sequence at a time, eager attention, and the weights."""
    model = AutoModelForCausalLM.from_pretrained(policy_dir, attn_implementation="eager")
    count = sum(t.num_model_tokens for group in groups for t in group.trajectories)
    weights: list[float] = []
    for group in groups:
        rewards = np.array([t.reward for t in group.trajectories])
        for trajectory, reward in zip(group.trajectories, rewards, strict=True):
            advantage = (reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            ids = torch.from_numpy(trajectory.token_ids.copy()).long()
            at = torch.from_numpy(trajectory.kinds == TokenKind.MODEL).nonzero()[:, 0]
            everything = model(ids[None]).logits[0].log_softmax(-1)[at - 1]
            logprobs = everything[torch.arange(len(at)), ids[at]]
            proximal = logprobs.detach()
            ratio = (logprobs - proximal).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            weight = (proximal - torch.from_numpy(trajectory.logprobs)[at]).exp().clamp(max=clip)
            entropy = -(everything.exp() * everything).sum(-1)
            (-(weight * surrogate + entropy_coeff * entropy).sum() / count).backward()
            weights += weight.tolist()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}, weights


@pytest.mark.parametrize("num_epochs", [1, 2])
def test_the_corrected_gradient_is_that_of_plain_torch(build: Build, tmp_path: Path, num_epochs: int) -> None:
    learner = build(GRPOLearner, config_for(1.5, entropy_coeff=0.01, num_epochs=num_epochs))
    groups = with_gap(learner, make_groups(0), noise(0.5))
    expected, weights = plain_gradients(tmp_path / "policy", groups, 1.5, 0.01)
    found, metrics = gradients(learner, groups)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[f"model.{name}"], gradient, atol=1e-6, rtol=1e-4)
    assert metrics["tis_weight_mean"] == pytest.approx(np.mean(weights), abs=1e-5)
    at_clip = np.mean(np.isclose(weights, 1.5))
    assert 0.1 < at_clip < 0.4 and metrics["tis_truncated"] == pytest.approx(at_clip, abs=1e-6)
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5), "the clip bounds the update, not the engine's gap"


def test_the_proximal_policy_stays_over_epochs(build: Build) -> None:
    learner = build(GRPOLearner, config_for(2.0, num_epochs=2, num_minibatches=2))
    groups = with_gap(learner, make_groups(0), noise(0.5))
    ours, engines = own_logprobs(learner, groups)
    metrics = learner.update(groups)
    assert metrics["num_steps"] == 4 and metrics["ratio_max_deviation"] > 0.01
    assert metrics["tis_weight_mean"] == pytest.approx((ours - engines).exp().clamp(max=2).mean().item(), abs=1e-5)


def test_ppo_values_and_penalty_are_not_weighted(build: Build) -> None:
    training = {"kl_coeff": 0.1, "options": {"vf_lr": 1e-3}}
    off, on = (build(PPOLearner, config_for(clip, **training)) for clip in (0.0, 2.0))
    groups = with_gap(off, make_groups(0), noise(0.5))
    plain, corrected = off.update(groups), on.update(groups)
    for name in ("kl", "value_loss", "values", "returns", "critic_grad_norm", "logprob_gap_mean"):
        assert corrected[name] == pytest.approx(plain[name], rel=1e-5), name
    assert corrected["policy_loss"] != pytest.approx(plain["policy_loss"], rel=1e-2)


# -- corrections of whole trajectories ---------------------------------------------------------------------------------

CORRECTIONS: dict[str, dict[str, object]] = {
    "truncate": {"kind": "truncate", "high": 1.5},
    "mask": {"kind": "mask"},
    "geometric_mask": {"kind": "geometric_mask", "low": 0.9, "high": 1.1},
    "reject": {"kind": "reject", "low": 0.6, "high": 1.7},
}


def corrected_config(kind: str, micro_batch_tokens: int = 64, **training: object) -> RunConfig:
    settings = {"lr": 1e-3, "options": {"sequence_correction": CORRECTIONS[kind]}, **training}
    learners = {"zero_stage": 0, "micro_batch_tokens": micro_batch_tokens}
    return make_config(training=settings, learners=learners)


def sequence_ratios(learner: Learner, groups: list[TrajectoryGroup]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Product and geometric mean of the ratios of every trajectory, and its ratio furthest from 1."""
    ours, engines = own_logprobs(learner, groups)
    lengths = [t.num_model_tokens for group in groups for t in group.trajectories]
    gaps = (ours - engines).double().split(lengths)
    means = torch.stack([gap.mean() for gap in gaps])
    extremes = torch.stack([gap[gap.abs().argmax()] for gap in gaps])
    return torch.stack([gap.sum() for gap in gaps]).exp(), means.exp(), extremes.exp()


@pytest.mark.parametrize("num_epochs", [1, 2])
@pytest.mark.parametrize("kind", CORRECTIONS)
def test_the_ratios_of_trajectories_by_hand(build: Build, kind: str, num_epochs: int) -> None:
    """Each sequence counts once per epoch, short or long; the learner is that of the start of the update."""
    learner = build(GRPOLearner, corrected_config(kind, num_epochs=num_epochs, num_minibatches=2, lr=0.01))
    groups = with_gap(learner, make_groups(0), noise(0.3))
    products, means, extremes = sequence_ratios(learner, groups)
    outside = {
        "truncate": products > 1.5,
        "mask": (products < 0.5) | (products > 2),
        "geometric_mask": (means < 0.9) | (means > 1.1),
        "reject": (extremes < 0.6) | (extremes > 1.7),
    }[kind]
    ratios = products if kind in ("truncate", "mask") else means
    metrics = learner.update(groups)
    assert 0 < outside.sum() < len(outside)
    assert metrics["sequences_outside"] == pytest.approx(outside.double().mean().item())
    assert metrics["sequence_ratio_mean"] == pytest.approx(ratios.mean().item(), rel=1e-4)
    assert metrics["sequence_ratio_max"] == pytest.approx(ratios.max().item(), rel=1e-4)
    assert metrics["sequence_ratio_min"] == pytest.approx(ratios.min().item(), rel=1e-4)


def test_without_a_correction_there_are_no_ratios_of_trajectories(build: Build) -> None:
    metrics = build(GRPOLearner, config_for(2.0)).update(make_groups(0))
    assert not any(name.startswith("sequence") for name in metrics)


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_a_trajectory_has_one_weight_whatever_the_row_holds(build: Build, kind: str) -> None:
    """Alone in a row, or packed with others that begin alike and share what is computed."""
    alone, packed = (build(GRPOLearner, corrected_config(kind, tokens)) for tokens in (32, 4096))
    branches = make_branches(0, count=8)
    groups = [TrajectoryGroup(branches[0].task, tuple(branches)), *make_groups(0)]
    groups = with_gap(alone, groups, noise(0.3))
    (one, one_metrics), (other, metrics) = gradients(alone, groups), gradients(packed, groups)
    assert metrics["shared_tokens"] > 0.1
    for name, gradient in one.items():
        torch.testing.assert_close(other[name], gradient, atol=1e-6, rtol=1e-4)
    assert 0 < metrics["sequences_outside"] < 1
    for name in ("sequence_ratio_mean", "sequence_ratio_min", "sequence_ratio_max", "sequences_outside"):
        assert metrics[name] == pytest.approx(one_metrics[name], rel=1e-4), name


@pytest.mark.parametrize("learner_class", [GRPOLearner, GSPOLearner, PPOLearner])
@pytest.mark.parametrize("kind", CORRECTIONS)
def test_without_a_gap_no_trajectory_is_corrected(build: Build, learner_class: type[Learner], kind: str) -> None:
    off, on = build(learner_class, config_for(0.0)), build(learner_class, corrected_config(kind))
    groups = with_gap(off, make_groups(0), np.zeros)
    (plain, _), (corrected, metrics) = gradients(off, groups), gradients(on, groups)
    for name, gradient in plain.items():
        torch.testing.assert_close(corrected[name], gradient, atol=1e-6, rtol=0)
    assert metrics["sequences_outside"] == 0 and metrics["sequence_ratio_min"] == pytest.approx(1, abs=1e-4)


def test_if_every_trajectory_is_masked_the_policy_stays(build: Build) -> None:
    learner = build(GRPOLearner, corrected_config("geometric_mask"))
    groups = with_gap(learner, make_groups(0), lambda count: np.full(count, 0.5))
    before, metrics = learner.get_weights(), learner.update(groups)
    assert metrics["sequences_outside"] == 1 and metrics["grad_norm"] == 0 and metrics["skipped_steps"] == 0
    for name, weight in learner.get_weights().items():
        np.testing.assert_array_equal(weight, before[name], err_msg=name)


def test_a_trajectory_whose_engine_said_nan_is_not_masked(build: Build) -> None:
    learner = build(GRPOLearner, corrected_config("reject"))
    groups = with_gap(learner, make_groups(0), lambda count: np.where(np.arange(count) == 3, np.nan, 0.0))
    assert learner.update(groups)["skipped_steps"] == 1


def test_values_are_learned_from_masked_trajectories_too(build: Build) -> None:
    off, on = build(PPOLearner, config_for(0.0)), build(PPOLearner, corrected_config("mask"))
    groups = with_gap(off, make_groups(0), noise(0.5))
    plain, corrected = off.update(groups), on.update(groups)
    assert corrected["sequences_outside"] > 0.2
    for name in ("value_loss", "values", "returns", "critic_grad_norm", "logprob_gap_mean"):
        assert corrected[name] == pytest.approx(plain[name], rel=1e-5), name
    assert corrected["policy_loss"] != pytest.approx(plain["policy_loss"], rel=1e-2)


def test_each_pass_of_the_critic_is_progress(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a long critic's half looks like a hang, and the group is ended."""
    learner = build(PPOLearner, make_config(learners={"micro_batch_tokens": 64}))
    progress: list[int] = []
    backward = learner.engines()["critic"].backward

    def noted(loss: torch.Tensor) -> None:
        progress.append(learner.num_micro_batches)
        backward(loss)

    monkeypatch.setattr(learner.engines()["critic"], "backward", noted)
    learner.update(make_groups(0))
    assert len(progress) > 2
    assert progress == list(range(progress[0], progress[0] + len(progress)))


@pytest.mark.parametrize(
    ("correction", "num_epochs", "num_passes"),
    [({}, 1, 1), ({"tis_clip": 2.0}, 1, 1), ({}, 2, 2), ({"tis_clip": 2.0}, 2, 3)]
    + [({"sequence_correction": {"kind": "mask"}}, epochs, passes) for epochs, passes in ((1, 1), (2, 3))],
)
def test_the_policy_runs_no_oftener_than_it_must(
    build: Build, correction: dict[str, object], num_epochs: int, num_passes: int
) -> None:
    training = {"num_epochs": num_epochs, "options": correction}
    learner = build(GRPOLearner, make_config(training=training, learners={"micro_batch_tokens": 4096}))
    passes: list[int] = []
    learner.policy.module.register_forward_hook(lambda module, batch, outputs: passes.append(len(outputs.logprobs)))
    groups = make_groups(0)
    learner.update(groups)
    assert passes == [sum(t.num_model_tokens for group in groups for t in group.trajectories)] * num_passes


# -- steps that are not taken ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "dtype"), STAGES_AND_DTYPES)
def test_a_step_that_is_not_finite_is_skipped_and_counted(build: Build, stage: int, dtype: str) -> None:
    config = make_config(learners={"zero_stage": stage}, policy={"dtype": dtype}, training={"lr": 1e-3})
    broken, plain = build(PPOLearner, config), build(PPOLearner, config)
    bad = [  # a reward of NaN reaches every advantage by the whitening, and the critic's returns
        TrajectoryGroup(group.task, tuple(replace(t, reward=float("nan")) for t in group.trajectories))
        for group in make_groups(7)
    ]
    for learner in (broken, plain):
        metrics = learner.update(make_groups(0))
        assert metrics["skipped_steps"] == 0 and metrics["grad_norm"] > 0
    metrics = broken.update(bad)
    assert metrics["skipped_steps"] == 2 and metrics["num_steps"] == 1, "the policy's step and the critic's"
    assert "grad_norm" not in metrics and np.isnan(metrics["loss"])
    plain.num_updates += 1
    for step in (1, 2):
        assert broken.update(make_groups(step)) == plain.update(make_groups(step))
    ours, theirs = broken.get_state(), plain.get_state()
    for name, value in ours.items():
        assert np.isfinite(value).all() and np.array_equal(value, theirs[name]), name


def test_one_bad_minibatch_does_not_stop_the_others(build: Build) -> None:
    learner = build(GRPOLearner, make_config(training={"num_minibatches": 4}))
    groups = make_groups(0)
    first = groups[0].trajectories[0]
    logprobs = np.where(first.kinds == TokenKind.MODEL, np.nan, 0).astype(np.float32)
    members = (replace(first, logprobs=logprobs), *groups[0].trajectories[1:])
    before = learner.get_weights()
    metrics = learner.update([TrajectoryGroup(first.task, members), *groups[1:]])
    assert metrics["num_steps"] == 4 and metrics["skipped_steps"] == 1
    assert np.isfinite(metrics["grad_norm"])
    for name, weight in learner.get_weights().items():
        assert np.isfinite(weight).all(), name
    assert any(not np.array_equal(weight, before[name]) for name, weight in learner.get_weights().items())


@pytest.mark.parametrize("learner_class", [GRPOLearner, GSPOLearner, PPOLearner])
def test_what_a_nucleus_was_sampled_with_is_no_ratio(build: Build, learner_class: type[Learner]) -> None:
    options = {"llds_coeff": 0.5}
    config = make_config(env_runners={"top_p": 0.95}, training={"kl_coeff": 0.1, "options": options})
    metrics = build(learner_class, config).update(make_groups(0))  # random log-probs, far from the policy's
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["clip_fraction"] == 0
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["llds"] == pytest.approx(0, abs=1e-6)
    assert metrics["logprob_gap_mean"] > 0.1, "the gap is measured all the same"
