"""Every loss against its paper's formula, written plainly: loops over trajectories and tokens in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import learners_common
import numpy as np
import pytest
import torch
from references_common import (
    BASELINES,
    LIMIT,
    Rows,
    assert_same,
    expected_advantages,
    loss_of,
    make_batch,
    make_learner,
    plain_kl,
    random_groups,
    rows,
    sequence_lengths,
)

from learners.algorithms.dpo import DPOLearner, IPOLearner
from learners.algorithms.grpo import (
    CISPOLearner,
    DAPOLearner,
    DrGRPOLearner,
    GRPOLearner,
    GSPOLearner,
    PPOLearner,
    ReinforcePPLearner,
    RLOOLearner,
)
from learners.learner import Learner
from learners.losses import KL_ESTIMATORS, clipped_policy_loss, clipped_value_loss, k1_kl, k3_kl, ratios
from learners.train_batch import TrainBatch

# -- policy losses -----------------------------------------------------------------------------------------------------


def clip(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return torch.minimum(torch.maximum(ratio, torch.tensor(1 - low)), torch.tensor(1 + high))


def clipped(ratio: torch.Tensor, advantage: float, low: float = 0.2, high: float = 0.2) -> torch.Tensor:
    return torch.minimum(ratio * advantage, clip(ratio, low, high) * advantage)


def mean_of_tokens(new: Rows, old: Rows, advantages: list[float], high: float = 0.2) -> torch.Tensor:
    """1/sum |o_i| of the clipped surrogate of every token (DAPO, equation 8)."""
    terms = [
        clipped((n - o).exp(), a, high=high)
        for new_i, old_i, a in zip(new, old, advantages, strict=True)
        for n, o in zip(new_i, old_i, strict=True)
    ]
    return -sum(terms) / len(terms)


def mean_of_means(new: Rows, old: Rows, advantages: list[float]) -> torch.Tensor:
    """1/G sum of 1/|o_i| (GRPO, equation 3)."""
    terms = [mean_of_tokens([n], [o], [a]) for n, o, a in zip(new, old, advantages, strict=True)]
    return sum(terms) / len(terms)


def sums_by_constant(new: Rows, old: Rows, advantages: list[float]) -> torch.Tensor:
    """1/G sum of the sums over tokens, divided by the limit of tokens (Dr.GRPO; RLOO but for the constant)."""
    terms = [len(n) / LIMIT * mean_of_tokens([n], [o], [a]) for n, o, a in zip(new, old, advantages, strict=True)]
    return sum(terms) / len(terms)


def sequence_ratios(new: Rows, old: Rows, advantages: list[float], lengths: list[list[int]]) -> torch.Tensor:
    """GSPO, equations 5 and 7: s_i = (pi(y)/pi_old(y))^(1/|y|); a trajectory's rows have the weight of their tokens."""
    terms = []
    for new_i, old_i, a, of_rows in zip(new, old, advantages, lengths, strict=True):
        for n, o in zip(new_i.split(of_rows), old_i.split(of_rows), strict=True):
            if len(n):
                ratio = ((n.sum() - o.sum()) / len(n)).exp()
                terms.append(len(n) / len(new_i) * clipped(ratio, a, 3e-4, 4e-4))
    return -sum(terms) / len(new)


def clipped_weights(new: Rows, old: Rows, advantages: list[float]) -> torch.Tensor:
    """CISPO, equations 4 and 5: sg(clip(r)) A log pi."""
    terms = [
        clip((n - o).exp().detach(), 1.0, 0.3) * a * n
        for new_i, old_i, a in zip(new, old, advantages, strict=True)
        for n, o in zip(new_i, old_i, strict=True)
    ]
    return -sum(terms) / len(terms)


Objective = Callable[[Rows, Rows, list[float]], torch.Tensor]
OBJECTIVES: list[tuple[type[Learner], dict[str, object], dict[str, object], Objective]] = [
    (GRPOLearner, {}, {}, mean_of_tokens),
    (GRPOLearner, {"aggregation": "trajectory_mean"}, {}, mean_of_means),
    (DrGRPOLearner, {"max_model_tokens": LIMIT}, {}, sums_by_constant),
    (DAPOLearner, {"overlong_share": 0.0}, {}, lambda new, old, a: mean_of_tokens(new, old, a, high=0.28)),
    (RLOOLearner, {"max_model_tokens": LIMIT}, {}, sums_by_constant),
    (ReinforcePPLearner, {}, {}, mean_of_tokens),
    (CISPOLearner, {"clip_high": 0.3}, {}, clipped_weights),
]


@pytest.mark.parametrize(("learner_class", "options", "training", "objective"), OBJECTIVES)
@pytest.mark.parametrize("seed", range(3))
def test_policy_losses(
    learner_class: type[Learner],
    options: dict[str, object],
    training: dict[str, object],
    objective: Objective,
    seed: int,
) -> None:
    learner = make_learner(learner_class, options, **training)
    batch, new, entropy = make_batch(learner, seed)
    old = rows(batch.columns.old_logprobs, batch)
    theirs = objective(rows(new, batch), old, expected_advantages(learner_class, batch))
    assert_same(loss_of(learner, batch, new, entropy), theirs, new)


@pytest.mark.parametrize("seed", range(3))
def test_gspo_has_a_ratio_per_row(seed: int) -> None:
    learner = make_learner(GSPOLearner)
    batch, new, entropy = make_batch(learner, seed)
    small = 1e-3 * (new.detach() - batch.columns.old_logprobs)  # its clip is so narrow that others leave no gradient
    new = (batch.columns.old_logprobs + small).requires_grad_()
    old, lengths = rows(batch.columns.old_logprobs, batch), sequence_lengths(batch)
    assert any(len(of_rows) > 1 for of_rows in lengths)
    theirs = sequence_ratios(rows(new, batch), old, expected_advantages(GSPOLearner, batch), lengths)
    assert_same(loss_of(learner, batch, new, entropy), theirs, new)


@pytest.mark.parametrize("learner_class", [GRPOLearner, PPOLearner])
def test_dual_clip(learner_class: type[Learner]) -> None:
    """arXiv:1912.09729: max(min(r A, clip(r) A), c A) where A < 0."""
    learner = make_learner(learner_class, {"dual_clip": 1.3})
    batch, new, entropy = make_batch(learner, 0)
    terms, num_bounded = [], 0
    for n, o, a in zip(new, batch.columns.old_logprobs, batch.columns.advantages.tolist(), strict=True):
        term = clipped((n - o).exp(), a)
        num_bounded += bool(a < 0 and 1.3 * a > term)
        terms.append(torch.maximum(term, torch.tensor(1.3 * a)) if a < 0 else term)
    assert num_bounded > 2
    assert_same(loss_of(learner, batch, new, entropy), -sum(terms) / len(terms), new)


@pytest.mark.parametrize("learner_class", [DPOLearner, IPOLearner])
def test_preference_losses(learner_class: type[Learner]) -> None:
    """DPO: -log sigmoid(beta h); IPO: (h - 1/(2 beta))^2; h of the best and the worst, then of the second of each."""
    learner = make_learner(learner_class, {"beta": 0.3})
    batch, new, entropy = make_batch(learner, 0)
    owned = dict(zip((t.trajectory_id for t in batch.trajectories), rows(new - learner.reference, batch), strict=True))
    terms = []
    for group in random_groups(0):
        ranked = sorted(group.trajectories, key=lambda t: (-t.reward, t.trajectory_id))
        for right, wrong in ((ranked[0], ranked[3]), (ranked[1], ranked[2])):
            if right.reward > wrong.reward:
                h = owned[right.trajectory_id].sum() - owned[wrong.trajectory_id].sum()
                is_dpo = learner_class is DPOLearner
                terms.append((1 + (-0.3 * h).exp()).log() if is_dpo else (h - 1 / 0.6) ** 2)
    assert 2 * len(terms) == len(batch.trajectories) < 16
    assert_same(loss_of(learner, batch, new, entropy), sum(terms) / len(terms), new)


# -- what may be added -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("learner_class", [GRPOLearner, PPOLearner])
def test_kl_in_the_loss_and_entropy(learner_class: type[Learner], estimator: str) -> None:
    options = {"kl_in": "loss", "kl_estimator": estimator}
    learner = make_learner(learner_class, options, kl_coeff=0.2, entropy_coeff=0.05)
    batch, new, entropy = make_batch(learner, 3)
    entropy.requires_grad_()
    terms = []
    for n, o, a, ref, h in zip(
        new,
        batch.columns.old_logprobs,
        batch.columns.advantages.tolist(),
        learner.reference,
        entropy,
        strict=True,
    ):
        terms.append(-clipped((n - o).exp(), a) + 0.2 * plain_kl(estimator, n, ref) - 0.05 * h)
    ours, theirs = loss_of(learner, batch, new, entropy), sum(terms) / len(terms)
    (of_entropy,) = torch.autograd.grad(ours, entropy, retain_graph=True)
    np.testing.assert_allclose(of_entropy, -0.05 / len(terms), atol=1e-9)
    assert_same(ours, theirs, new)


@pytest.mark.parametrize("learner_class", [*BASELINES, PPOLearner])
def test_every_policy_gradient_adds_kl_and_entropy(learner_class: type[Learner]) -> None:
    options: dict[str, object] = {"kl_in": "loss", "kl_estimator": "k2"}
    if learner_class is not PPOLearner:
        options["max_model_tokens"] = LIMIT
    learner = make_learner(learner_class, options, kl_coeff=0.2, entropy_coeff=0.05)
    batch, new, entropy = make_batch(learner, 3)
    without = replace(batch, columns=replace(batch.columns, ref_logprobs=None))
    added = loss_of(learner, batch, new, entropy) - loss_of(make_learner(learner_class, options), without, new, entropy)
    columns = learner.step_columns(batch, list(range(len(batch.trajectories))))
    weights = columns.get("loss_weights", torch.ones(len(new)))
    assert_same(added, (weights * (0.2 * plain_kl("k2", new, learner.reference) - 0.05 * entropy)).mean(), new)


def test_the_mean_gradient_of_every_estimator_is_what_its_docstring_says() -> None:
    """Exactly, as a sum over a distribution of eight tokens: nothing, of KL(policy, ref), of KL(ref, policy)."""
    generator = torch.Generator().manual_seed(0)
    # close enough that no estimate of k3 reaches its bound
    logits = (0.5 * torch.randn(8, dtype=torch.float64, generator=generator)).requires_grad_()
    ref = (0.5 * torch.randn(8, dtype=torch.float64, generator=generator)).log_softmax(0)
    policy = logits.log_softmax(0)
    divergences = {
        "k1": torch.zeros((), dtype=torch.float64) * logits.sum(),
        "k2": (policy.exp() * (policy - ref)).sum(),
        "k3": (ref.exp() * (ref - policy)).sum(),
    }
    for name, divergence in divergences.items():
        loss = (policy.exp().detach() * KL_ESTIMATORS[name](policy, ref)).sum()  # sampled tokens carry no gradient
        ours, theirs = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, divergence))
        np.testing.assert_allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize("gate", ["turn", "trajectory"])
def test_displacement_regulariser(gate: str) -> None:
    """LLDS: max(0, log old - log new) where the advantage is not negative and the turn as a whole is less likely."""
    learner = make_learner(GRPOLearner, {"llds_coeff": 0.5, "llds_gate": gate})
    plain = make_learner(GRPOLearner)
    batch, new, entropy = make_batch(learner, 4)
    terms, num_gated = [], 0
    for trajectory, of_rows, n, o, a in zip(
        batch.trajectories,
        sequence_lengths(batch),
        rows(new, batch),
        rows(batch.columns.old_logprobs, batch),
        rows(batch.columns.advantages, batch),
        strict=True,
    ):
        sizes = [turn.num_model_tokens for turn in trajectory.turns] if gate == "turn" else of_rows
        for new_s, old_s, a_s in zip(n.split(sizes), o.split(sizes), a.split(sizes), strict=True):
            has_fallen = new_s.sum().item() < old_s.sum().item()
            num_gated += not has_fallen
            for x, y, adv in zip(new_s, old_s, a_s, strict=True):
                is_active = has_fallen and adv >= 0 and x < y
                terms.append(y - x if is_active else 0.0 * x)
    assert num_gated > 1
    ours = loss_of(learner, batch, new, entropy) - loss_of(plain, batch_without_segments(batch), new, entropy)
    assert_same(ours, 0.5 * sum(terms) / len(terms), new)


def batch_without_segments(batch: TrainBatch) -> TrainBatch:
    return replace(batch, columns=replace(batch.columns, segment_ids=None))


def test_displacement_needs_turns_that_add_up() -> None:
    learner = make_learner(GRPOLearner, {"llds_coeff": 0.5})
    batch = learners_common.make_batch(learner, random_groups(0))
    batch.trajectories[0] = replace(batch.trajectories[0], turns=())
    with pytest.raises(ValueError, match=r"its turns have 0 MODEL tokens, expected \d+"):
        learner.prepare(batch)


def test_truncated_importance_sampling() -> None:
    learner = make_learner(GRPOLearner, {"tis_clip": 1.2})
    batch, new, entropy = make_batch(learner, 5)
    engine = batch.columns.old_logprobs + 0.3 * torch.randn(len(new), generator=torch.Generator().manual_seed(0))
    batch = replace(batch, columns=replace(batch.columns, rollout_logprobs=engine))
    terms = [
        -clipped((n - o).exp(), a) * min(math.exp(o - e), 1.2)
        for n, o, e, a in zip(new, batch.columns.old_logprobs, engine, batch.columns.advantages.tolist(), strict=True)
    ]
    assert_same(loss_of(learner, batch, new, entropy), sum(terms) / len(terms), new)


def test_value_loss() -> None:
    rng = np.random.default_rng(0)
    values, old, returns = (torch.from_numpy(x) for x in rng.normal(size=(3, 60)))
    values.requires_grad_()
    terms = []
    for v, o, r in zip(values, old, returns, strict=True):
        bounded = torch.minimum(torch.maximum(v, o - 0.5), o + 0.5)
        terms.append(0.5 * torch.maximum((v - r) ** 2, (bounded - r) ** 2))
    assert_same(clipped_value_loss(values, old, returns, 0.5).mean(), sum(terms) / len(terms), values)


# -- single functions -------------------------------------------------------------------------------------------------


def test_a_clipped_token_has_no_gradient() -> None:
    new = torch.tensor([0.0, -5.0, 0.0, -5.0], requires_grad=True)
    old = torch.tensor([-5.0, 0.0, -5.0, 0.0])
    loss, clipped = clipped_policy_loss(new, old, torch.tensor([1.0, -1.0, -1.0, 1.0]), 0.2, 0.2)
    loss.sum().backward()
    assert clipped.tolist() == [True, True, False, False]
    assert new.grad is not None
    assert (new.grad == 0).tolist() == [True, True, False, False]


def test_a_ratio_is_finite_however_far_apart_the_policies_are() -> None:
    assert torch.isfinite(ratios(torch.tensor([0.0, -1e30]), torch.tensor([-1e30, 0.0]))).all()


def test_k3_is_bounded_as_in_verl_and_a_token_beyond_has_no_gradient() -> None:
    """verl: clamp(exp(d) - d - 1, -10, 10) of d = reference - policy, itself clamped to 20."""
    differences = torch.tensor([-30.0, -11.1, -10.9, 0.0, 2.6, 2.7, 30.0], dtype=torch.float64)
    policy = (-differences).requires_grad_()
    found = k3_kl(policy, torch.zeros_like(policy))
    inner = differences.clamp(-20, 20)
    torch.testing.assert_close(found.detach(), (inner.exp() - inner - 1).clamp(-10, 10))
    found.sum().backward()
    assert policy.grad is not None
    assert (policy.grad != 0).tolist() == [False, False, True, False, True, False, False]


def test_k3_has_the_mean_of_the_divergence() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 8, dtype=torch.float64, generator=generator) / 2  # no log-ratio near the bound
    policy, reference = logits.log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum()
    # Expectation over the policy, exactly: the weighted mean over all tokens.
    assert (policy.exp() * k1_kl(policy, reference)).sum().item() == pytest.approx(exact.item(), abs=1e-9)
    assert (policy.exp() * k3_kl(policy, reference)).sum().item() == pytest.approx(exact.item(), abs=1e-9)
    assert (k3_kl(policy, reference) >= 0).all()
