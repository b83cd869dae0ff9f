"""Weights that correct for the engine, against plain loops over Python lists, and where the options allow them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from learners_common import make_config
from references_common import LIMIT, Rows, assert_same, loss_of, make_batch, make_learner, plain_kl, sequence_lengths

from learners.advantages import sequence_weights
from learners.algorithms.grpo import CISPOLearner, DrGRPOLearner, GRPOLearner, GSPOLearner
from learners.learner import Learner
from learners.options import CorrectionKind, GroupOptions, learner_options
from learners.train_batch import TrainBatch
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.planning.preflight import check_classes

BOUNDS: dict[CorrectionKind, tuple[float, float]] = {
    "truncate": (0.0, 1.5),
    "mask": (0.7, 1.5),
    "geometric_mask": (0.9, 1.1),
    "reject": (0.5, 2.0),
}
KINDS = list(BOUNDS)
LISTS = st.lists(st.lists(st.floats(-1.5, 1.5, width=32), min_size=1, max_size=8), max_size=8)


def plain_weight(log_ratios: list[float], kind: str, low: float, high: float) -> tuple[float, float, bool]:
    """Weight, reported ratio, and whether it is outside the bounds, of one sequence."""
    product, mean = math.exp(sum(log_ratios)), math.exp(sum(log_ratios) / len(log_ratios))
    if kind == "truncate":
        return min(product, high), product, product > high
    if kind == "mask":
        is_outside = not low <= product <= high
        return 0.0 if is_outside else product, product, is_outside
    tokens = [mean] if kind == "geometric_mask" else [math.exp(x) for x in log_ratios]
    is_outside = any(not low <= ratio <= high for ratio in tokens)
    return 0.0 if is_outside else 1.0, mean, is_outside


def weights_of(
    sequences: list[list[float]],
    kind: CorrectionKind,
    order: list[int] | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[list[float], list[float], list[bool]]:
    """What the function finds for sequences of log-ratios, their tokens in ``order``."""
    log_ratios = torch.tensor([x for sequence in sequences for x in sequence], dtype=dtype)
    ids = torch.tensor([7 * number for number, sequence in enumerate(sequences) for _ in sequence], dtype=torch.int64)
    index = torch.arange(len(ids)) if order is None else torch.tensor(order, dtype=torch.int64)
    found = sequence_weights(log_ratios[index], torch.zeros_like(log_ratios), ids[index], kind, *BOUNDS[kind])
    return found.weights_M.tolist(), found.ratios_S.tolist(), found.is_outside_S.tolist()


@pytest.mark.parametrize("kind", KINDS)
@given(sequences=LISTS, data=st.data())
def test_weights_are_those_of_a_loop(kind: CorrectionKind, sequences: list[list[float]], data: st.DataObject) -> None:
    bounds = [math.log(bound) for bound in BOUNDS[kind] if bound]
    sums = [x for sequence in sequences for x in (*sequence, sum(sequence), sum(sequence) / len(sequence))]
    # a sum in another order may fall on the other side of a bound
    assume(all(abs(x - bound) > 1e-9 for x in sums for bound in bounds))
    expected = [plain_weight(sequence, kind, *BOUNDS[kind]) for sequence in sequences]
    per_token = [number for number, sequence in enumerate(sequences) for _ in sequence]
    order = data.draw(st.permutations(range(len(per_token))))
    weights, ratios, is_outside = weights_of(sequences, kind, order)
    assert ratios == pytest.approx([ratio for _, ratio, _ in expected])
    assert is_outside == [outside for _, _, outside in expected]
    assert weights == pytest.approx([expected[per_token[at]][0] for at in order])


@pytest.mark.parametrize(
    ("kind", "kept", "masked"),
    [
        ("mask", [0.2, -0.1, 0.3], [0.2, 0.1, 0.2]),  # exp(.4) = 1.49, exp(.5) = 1.65
        ("mask", [-0.3], [-0.2, -0.2]),  # .74, .67
        ("geometric_mask", [0.5, -0.4], [0.5, -0.1]),  # exp(.05), exp(.2)
        ("geometric_mask", [-0.5, 0.4, -0.1], [-0.5, 0.1]),
        ("reject", [0.6, -0.6, 0.6], [0.0, 0.7, 0.0]),  # exp(.6) = 1.82, exp(.7) = 2.01
        ("reject", [-0.6], [0.6, -0.7]),
    ],
)
def test_masks_by_hand(kind: CorrectionKind, kept: list[float], masked: list[float]) -> None:
    weights, _, is_outside = weights_of([kept, masked], kind)
    assert is_outside == [False, True]
    product = math.exp(sum(kept)) if kind == "mask" else 1.0
    assert weights == pytest.approx([product] * len(kept) + [0.0] * len(masked))


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_gap_every_weight_is_one_to_the_bit(kind: CorrectionKind) -> None:
    for dtype in (torch.float32, torch.float64):
        assert weights_of([[0.0], [0.0] * 5], kind, dtype=dtype) == ([1.0] * 6, [1.0, 1.0], [False, False])


@pytest.mark.parametrize("kind", KINDS)
def test_no_sequence_has_no_weight(kind: CorrectionKind) -> None:
    assert weights_of([], kind) == ([], [], [])


@pytest.mark.parametrize("kind", KINDS)
def test_far_apart_is_finite(kind: CorrectionKind) -> None:
    weights, ratios, is_outside = weights_of([[1e30], [-1e30], [1e30, -1e30]], kind)
    assert ratios == pytest.approx([math.exp(20), math.exp(-20), 1.0])
    expected = {"truncate": [True, False, False], "reject": [True, True, True]}
    assert is_outside == expected.get(kind, [True, True, False])
    assert all(map(math.isfinite, weights))


@pytest.mark.parametrize("kind", KINDS)
def test_a_bound_is_legal(kind: CorrectionKind) -> None:
    old, rollout = torch.tensor([0.25, -0.25]), torch.zeros(2)
    bounds = torch.tensor([-0.25, 0.25], dtype=torch.float64).exp().tolist()
    found = sequence_weights(old, rollout, torch.arange(2), kind, *bounds)
    assert not found.is_outside_S.any() and (found.weights_M > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_nan_is_not_masked(kind: CorrectionKind) -> None:
    """Else a broken engine would be ignored silently; so the step is skipped and counted."""
    old, rollout = torch.tensor([9.0, math.nan, 0.0]), torch.zeros(3)
    found = sequence_weights(old, rollout, torch.tensor([0, 0, 1]), kind, *BOUNDS[kind])
    assert found.weights_M.isnan().tolist() == [True, True, False]
    assert found.is_outside_S.tolist() == [False, False]


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_flows_through_a_weight(kind: CorrectionKind) -> None:
    old = torch.zeros(3, requires_grad=True)
    assert not sequence_weights(old, torch.zeros(3), torch.arange(3), kind, *BOUNDS[kind]).weights_M.requires_grad


# -- in the loss -------------------------------------------------------------------------------------------------------


def with_engine(batch: TrainBatch, scale: float) -> TrainBatch:
    """The batch with an engine whose log-probs are ``scale`` nats from the learner's."""
    old = batch.columns.old_logprobs
    gap = scale * torch.randn(len(old), generator=torch.Generator().manual_seed(0), dtype=old.dtype)
    return replace(batch, columns=replace(batch.columns, rollout_logprobs=old - gap))


def correction(kind: CorrectionKind) -> dict[str, Any]:
    low, high = BOUNDS[kind]
    return {"kind": kind, "high": high} | ({} if kind == "truncate" else {"low": low})


def plain_weights(batch: TrainBatch, kind: CorrectionKind) -> list[float]:
    """One per row of a trajectory with MODEL tokens."""
    columns = batch.columns
    lengths = [length for of_rows in sequence_lengths(batch) for length in of_rows if length]
    gaps: Rows = list((columns.old_logprobs - columns.rollout_logprobs).double().split(lengths))
    return [plain_weight(gap.tolist(), kind, *BOUNDS[kind])[0] for gap in gaps]


@pytest.mark.parametrize("tis_clip", [0.0, 1.2])
@pytest.mark.parametrize("kind", KINDS)
def test_the_mean_is_over_all_tokens_and_kl_and_entropy_are_not_weighted(kind: CorrectionKind, tis_clip: float) -> None:
    options = {"sequence_correction": correction(kind), "tis_clip": tis_clip}
    learner = make_learner(GRPOLearner, options, kl_coeff=0.1, entropy_coeff=0.01)
    batch, new, entropy = make_batch(learner, 5)
    batch = with_engine(batch, 0.3)
    weights = plain_weights(batch, kind)
    outside = sum(weight == 0 for weight in weights)
    assert kind == "truncate" or 0 < outside < len(weights)
    terms = []
    columns = (new, batch.columns.old_logprobs, batch.columns.rollout_logprobs, batch.columns.ref_logprobs)
    lengths = [length for of_rows in sequence_lengths(batch) for length in of_rows if length]
    assert len(lengths) > len(batch.trajectories)
    per_row = zip(*(column.split(lengths) for column in (*columns, batch.columns.advantages, entropy)), strict=True)
    for weight, (n, o, e, r, a, h) in zip(weights, per_row, strict=True):
        for at in range(len(n)):
            token = min(math.exp(o[at] - e[at]), tis_clip) if tis_clip else 1.0
            ratio = (n[at] - o[at]).exp()
            policy = -torch.minimum(ratio * a[at], ratio.clamp(0.8, 1.2) * a[at])
            terms.append(weight * token * policy - 0.01 * h[at] + 0.1 * plain_kl("k3", n[at], r[at]))
    assert_same(loss_of(learner, batch, new, entropy), sum(terms) / len(terms), new)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("learner_class", [GRPOLearner, GSPOLearner, CISPOLearner, DrGRPOLearner])
def test_a_weight_multiplies_whatever_the_algorithms_loss_is(
    learner_class: type[Learner], kind: CorrectionKind
) -> None:
    """The corrected loss is that of the advantages times the weights: every policy loss is linear in them."""
    options = {"max_model_tokens": LIMIT}
    plain = make_learner(learner_class, options)
    corrected = make_learner(learner_class, options | {"sequence_correction": correction(kind)})
    batch, new, entropy = make_batch(plain, 3)
    batch = with_engine(batch, 0.3)
    index = batch.columns.sequence_ids.unique(return_inverse=True)[1]
    weights = torch.tensor(plain_weights(batch, kind), dtype=torch.float64)[index]
    weighted = replace(batch, columns=replace(batch.columns, advantages=batch.columns.advantages * weights))
    assert_same(loss_of(corrected, batch, new, entropy), loss_of(plain, weighted, new, entropy), new)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("learner_class", [GRPOLearner, GSPOLearner])
def test_without_a_gap_the_loss_is_the_same_to_the_bit(learner_class: type[Learner], kind: CorrectionKind) -> None:
    plain = make_learner(learner_class)
    corrected = make_learner(learner_class, {"sequence_correction": correction(kind)})
    batch, new, entropy = make_batch(plain, 3)
    assert torch.equal(loss_of(corrected, batch, new, entropy), loss_of(plain, batch, new, entropy))


def test_if_all_are_masked_only_the_other_terms_are_left() -> None:
    options = {"sequence_correction": {"kind": "reject", "low": 0.999, "high": 1.001}}
    masked = make_learner(GRPOLearner, options, kl_coeff=0.1, entropy_coeff=0.01)
    batch, new, entropy = make_batch(masked, 5)
    batch = with_engine(batch, 0.3)
    n, r = new, batch.columns.ref_logprobs
    assert_same(loss_of(masked, batch, new, entropy), (0.1 * plain_kl("k3", n, r) - 0.01 * entropy).mean(), new)


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "given_bounds", "bounds"),
    [
        ("truncate", {}, (0.0, 2.0)),
        ("truncate", {"high": 5}, (0.0, 5.0)),
        ("mask", {}, (0.5, 2.0)),
        ("mask", {"low": 0}, (0.0, 2.0)),
        ("geometric_mask", {}, (0.99, 1.01)),
        ("reject", {"high": 50}, (1e-4, 50.0)),
    ],
)
def test_bounds(kind: str, given_bounds: dict[str, float], bounds: tuple[float, float]) -> None:
    options = {"sequence_correction": {"kind": kind, **given_bounds}}
    found = learner_options(make_config(training={"options": options}).training)
    assert isinstance(found, GroupOptions) and found.sequence_correction is not None
    assert found.sequence_correction.bounds == bounds


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kind": "icepop"}, r"sequence_correction\.kind: got 'icepop'; input should be 'truncate', 'mask',"),
        ({"low": 0.5}, r"sequence_correction\.kind: .*field required"),
        (
            {"kind": "mask", "clip": 2},
            r"unknown key training\.options\.sequence_correction\.clip; expected one of: kind",
        ),
        ({"kind": "mask", "low": 1}, r"sequence_correction\.low: got 1; input should be less than 1"),
        ({"kind": "mask", "low": -0.1}, r"sequence_correction\.low: got -0\.1"),
        ({"kind": "mask", "high": 0.9}, r"sequence_correction\.high: got 0\.9; input should be greater than or equal"),
        ({"kind": "reject", "high": 1e7}, r"sequence_correction\.high: got 10000000\.0; input should be less than or"),
        ({"kind": "truncate", "low": 0.5}, "truncate has no low, .*; leave low out, or take kind: mask"),
        ("mask", r"sequence_correction: got 'mask'"),
    ],
)
def test_a_bad_correction_is_one_sentence(options: Any, said: str) -> None:
    training = make_config(training={"options": {"sequence_correction": options}}).training
    with pytest.raises(ConfigError, match=said):
        learner_options(training)


@pytest.mark.parametrize("algorithm", ["dpo", "ipo"])
def test_preferences_have_no_correction(algorithm: str) -> None:
    config = make_config(training={"algorithm": algorithm, "options": {"sequence_correction": {"kind": "mask"}}})
    with pytest.raises(ConfigError, match=r"unknown key training\.options\.sequence_correction"):
        learner_options(config.training)


def test_a_correction_needs_its_kind() -> None:
    with pytest.raises(ConfigError, match=r"sequence_correction\.kind: got .*; field required"):
        learner_options(make_config(training={"algorithm": "ppo", "options": {"sequence_correction": {}}}).training)


@pytest.mark.parametrize(
    ("settings_of", "tis_clip", "top_p", "said"),
    [
        ({"kind": "truncate"}, 2.0, 1.0, r"kind: truncate with tis_clip=2, which counts every ratio twice"),
        ({"kind": "mask"}, 2.0, 1.0, "kind: mask with tis_clip=2"),
        ({"kind": "truncate"}, 0.0, 0.95, r"kind: truncate with env_runners\.top_p=0\.95"),
        ({"kind": "mask"}, 0.0, 0.95, r"kind: mask with env_runners\.top_p=0\.95"),
        ({"kind": "geometric_mask"}, 0.0, 0.95, "expected top_p of 1, or kind: reject with low below top_p"),
        ({"kind": "reject", "low": 0.96}, 0.0, 0.95, r"kind: reject with env_runners\.top_p=0\.95"),
        ({"kind": "geometric_mask"}, 2.0, 1.0, ""),
        ({"kind": "reject"}, 2.0, 1.0, ""),
        ({"kind": "reject"}, 0.0, 0.95, ""),
        ({"kind": "mask"}, 0.0, 1.0, ""),
        (None, 2.0, 0.95, ""),
    ],
)
def test_what_goes_together(settings_of: dict[str, Any] | None, tis_clip: float, top_p: float, said: str) -> None:
    training = {"options": {"sequence_correction": settings_of, "tis_clip": tis_clip}}
    config = make_config(training=training, env_runners={"top_p": top_p})
    if not said:
        check_classes(config)
        return
    with pytest.raises(ConfigError, match=said):
        check_classes(config)
