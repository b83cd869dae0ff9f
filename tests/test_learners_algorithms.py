"""Every registered algorithm: one mask, one mean, and the same result for any packing, order and number of ranks."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from learners_common import Build, fill_columns, make_batch, make_config, make_groups, make_policy, pickle_by_value

from learners.algorithms.grpo import PPOLearner
from learners.deepspeed.deepspeed_engine import Schedule
from learners.learner import Learner
from learners.models.scoring import TokenOutputs, packed_hidden_states
from learners.options import LEARNERS, OPTIONS, PolicyGradientOptions, PPOOptions, learner_options
from learners.packing import pack
from learners.ranks.learner_group import LearnerGroup
from ragr1_actors.core.config import RunConfig, TrainingSettings
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.resolve import load_object, recipe_files
from ragr1_actors.core.schema import groups_to_record_batch
from ragr1_actors.core.types import StopReason, TokenKind, TrajectoryGroup
from ragr1_actors.planning.preflight import check_classes, check_names
from ragr1_actors.training.algorithm_config import AlgorithmConfig

pytestmark = pytest.mark.engine

CPU = torch.device("cpu")


def config_for(name: str, **learners: object) -> RunConfig:
    """Every part of an algorithm switched on, and a second epoch, which is off-policy."""
    training: dict[str, Any] = {"algorithm": name, "lr": 1e-3, "num_epochs": 2}
    if issubclass(OPTIONS[name], PolicyGradientOptions):
        options = {"clip_low": 2.0, "clip_high": 2.0, "llds_coeff": 0.1}
        training |= {"kl_coeff": 0.1, "entropy_coeff": 0.01, "options": options}
    return make_config(training=training, learners=learners)


def unequal_groups(seed: int) -> list[TrajectoryGroup]:
    """Groups with two right trajectories, one or three, so that no two baselines are alike."""
    groups = []
    for number, group in enumerate(make_groups(seed)):
        members = (replace(t, reward=float(index < 1 + number % 3)) for index, t in enumerate(group.trajectories))
        groups.append(TrajectoryGroup(group.task, tuple(members)))
    return groups


def assert_same_update(one: dict[str, float], other: dict[str, float]) -> None:
    ignored = {"computed_tokens", "shared_tokens", "padding_waste", "attention_padding"}  # these are about packing
    assert one.keys() == other.keys()
    for name in one.keys() - ignored:
        assert math.isfinite(one[name]), name
        assert other[name] == pytest.approx(one[name], rel=1e-3, abs=2e-5), name


def assert_same_columns(one: dict[str, list[Any]] | None, other: dict[str, list[Any]] | None) -> None:
    """What was learned per token; None for demonstrations."""
    if one is None or other is None:
        assert one is other
        return
    assert one["trajectory_id"] == other["trajectory_id"]
    for name in ("advantages", "ratios"):
        for values, others in zip(one[name], other[name], strict=True):
            assert values == (None if others is None else pytest.approx(others, rel=1e-3, abs=1e-4)), name


def assert_same_weights(one: Learner, other: Learner) -> None:
    theirs = other.get_weights()
    for name, weight in one.get_weights().items():
        np.testing.assert_allclose(weight, theirs[name], atol=1e-4, rtol=0, err_msg=name)


@pytest.fixture
def build_named(build: Build) -> Callable[..., Learner]:
    """Build the learner of an algorithm by its name."""
    return lambda name, config=None: build(load_object(name, LEARNERS), config or config_for(name))


@pytest.mark.parametrize("name", LEARNERS)
def test_no_gradient_reaches_what_predicts_other_kinds(build_named: Callable[..., Learner], name: str) -> None:
    learner = build_named(name)
    batch = fill_columns(learner, make_batch(learner, unequal_groups(0)))
    indices = list(range(len(batch.trajectories)))
    micro_batch = pack(batch.flat, indices)
    seen: list[torch.Tensor] = []
    hook = learner.policy.module.model.get_output_embeddings().register_forward_pre_hook(  # type: ignore[union-attr]
        lambda _, inputs: seen.append(inputs[0])
    )
    model = learner.policy.module.get_submodule("model")
    hidden = packed_hidden_states(model.get_decoder(), micro_batch)  # type: ignore[operator]
    outputs = learner.policy(micro_batch)
    hook.remove()
    predicting = torch.zeros(micro_batch.num_tokens, dtype=torch.bool)
    predicting[micro_batch.predict_positions] = True
    kinds = np.concatenate([trajectory.kinds for trajectory in batch.trajectories])
    np.testing.assert_array_equal(np.flatnonzero(predicting.numpy()) + 1, np.flatnonzero(kinds == TokenKind.MODEL))
    torch.testing.assert_close(seen[0], hidden[predicting])  # the head sees these hidden states and no others
    leaf = hidden.detach().requires_grad_()
    head = model.get_output_embeddings()  # type: ignore[operator]
    scored = TokenOutputs(*head(leaf[micro_batch.predict_positions], micro_batch.target_ids, learner.temperature))
    columns = batch.columns.with_columns(learner.step_columns(batch, indices), "step_columns")
    learner.compute_loss(scored, columns.select(micro_batch.column_index, CPU)).loss.sum().backward()
    assert leaf.grad is not None
    assert not leaf.grad[~predicting].any(), "exactly zero"
    assert leaf.grad[predicting].abs().sum(-1).gt(0).any()
    assert torch.allclose(scored.logprobs, outputs.logprobs, atol=1e-5)


@pytest.mark.parametrize("name", LEARNERS)
def test_micro_batch_size_and_order_change_nothing(build_named: Callable[..., Learner], name: str) -> None:
    whole, cut = build_named(name), build_named(name, config_for(name, micro_batch_tokens=40))
    for seed in range(2):
        groups = unequal_groups(seed)
        shuffled = [TrajectoryGroup(group.task, group.trajectories[::-1]) for group in groups[::-1]]
        assert_same_update(whole.update(groups), cut.update(shuffled))
    assert_same_weights(whole, cut)


@pytest.mark.parametrize("name", LEARNERS)
def test_values_at_tokens_of_other_kinds_change_nothing(build_named: Callable[..., Learner], name: str) -> None:
    """Log-probs and versions of tokens that the policy did not sample: a broken number there is never read."""
    clean, dirty = build_named(name), build_named(name)
    groups = unequal_groups(0)
    first = clean.update(groups)
    for trajectory in (t for group in groups for t in group.trajectories):
        is_other = trajectory.kinds != TokenKind.MODEL
        trajectory.logprobs[is_other] = np.nan
        trajectory.policy_versions[is_other] = 99
    assert dirty.update(groups) == first
    theirs = dirty.get_weights()
    assert all(np.array_equal(weight, theirs[key]) for key, weight in clean.get_weights().items())


@pytest.mark.parametrize("aggregation", ["trajectory_mean", "constant"])
def test_a_mean_of_another_kind_is_that_of_each_minibatch(
    build_named: Callable[..., Learner], aggregation: str
) -> None:
    """The weights of a step add up to what the formula says, whichever trajectories the step has."""
    training = {"num_minibatches": 3, "options": {"aggregation": aggregation, "max_model_tokens": 20}}
    learner = build_named("grpo", make_config(training=training))
    batch = make_batch(learner, unequal_groups(1))
    parts = list(learner.minibatches(batch, np.random.default_rng(0)))
    assert len(parts) == 3
    assert sorted(index for part in parts for index in part) == list(range(len(batch.trajectories)))
    starts = batch.flat.model_offsets
    for part in parts:
        weights = learner.step_columns(batch, part)["loss_weights"]
        num_tokens = sum(batch.flat.model_lengths[index] for index in part)
        for index in part:
            length = batch.flat.model_lengths[index]
            share = 1 / len(part) / (length if aggregation == "trajectory_mean" else 20)
            own = weights[starts[index] : starts[index + 1]] / num_tokens
            np.testing.assert_allclose(own, share, rtol=1e-5)


def test_minibatches_of_pairs_keep_them_together(build_named: Callable[..., Learner]) -> None:
    learner = build_named("dpo", make_config(training={"num_minibatches": 3, "algorithm": "dpo"}))
    batch = make_batch(learner, unequal_groups(0))
    for right, wrong in zip(batch.trajectories[0::2], batch.trajectories[1::2], strict=True):
        assert (right.reward, wrong.reward) == (1.0, 0.0)
        assert right.task == wrong.task
    for part in learner.minibatches(batch, np.random.default_rng(0)):
        assert part[0::2] == [index - 1 for index in part[1::2]]
    metrics = learner.update(unequal_groups(0))
    assert metrics["num_steps"] == 3
    assert metrics["trajectories_left_out"] == 16 - len(batch.trajectories) > 0


def test_preferences_are_learned(build_named: Callable[..., Learner]) -> None:
    for name in ("dpo", "ipo"):
        learner = build_named(name, make_config(training={"algorithm": name, "lr": 3e-3}))
        metrics = [learner.update(unequal_groups(0)) for _ in range(6)]
        assert metrics[0]["margin"] == pytest.approx(0, abs=1e-4)  # policy and reference are one
        assert metrics[-1]["loss"] < 0.9 * metrics[0]["loss"]
        assert metrics[-1]["pair_accuracy"] > 0.9


def test_pairs_are_counted_as_pairs(build_named: Callable[..., Learner]) -> None:
    learner = build_named("dpo", make_config(training={"algorithm": "dpo", "num_epochs": 2}))
    learner.update(make_groups(0))
    batch = fill_columns(learner, make_batch(learner, make_groups(0)))
    pairs = learner.step_columns(batch, list(range(len(batch.trajectories))))
    margins = pairs["margin"][batch.flat.model_offsets[:-1:2]].tolist()
    learner.schedule = replace(learner.schedule, lr=0.0, num_epochs=1)
    found = learner.update(make_groups(0))
    assert found["margin"] == pytest.approx(sum(margins) / len(margins), rel=1e-4)
    assert found["pair_accuracy"] == pytest.approx(sum(m > 0 for m in margins) / len(margins))


def test_preferences_need_no_old_logprobs(build_named: Callable[..., Learner]) -> None:
    """With ``top_p`` below 1 a policy gradient scores the batch first; DPO does not."""
    passes = []
    for top_p in (1.0, 0.9):
        training = {"algorithm": "dpo", "num_epochs": 2}
        learner = build_named("dpo", make_config(training=training, env_runners={"top_p": top_p}))
        seen: list[object] = []
        learner.policy.module.register_forward_hook(lambda *_, seen=seen: seen.append(0))
        assert learner.update(make_groups(0))["logprob_gap_mean"] > 0
        passes.append(len(seen))
    assert passes[0] == passes[1] > 0


@pytest.mark.parametrize("algorithm", sorted(set(OPTIONS) - {"sft"}))
def test_what_compares_within_a_group_needs_two_trajectories(algorithm: str) -> None:
    of_one = TrainingSettings(algorithm=algorithm, group_size=1)
    learner_options(of_one.model_copy(update={"group_size": 2}))
    if algorithm in ("ppo", "reinforce_pp"):  # compared with a critic, and with the batch
        learner_options(of_one)
        return
    expected = rf"^training\.group_size: got 1 with training\.algorithm={algorithm}, expected at least 2: .*; raise it"
    with pytest.raises(ConfigError, match=expected):
        learner_options(of_one)


@pytest.mark.slow
@pytest.mark.ray
def test_two_ranks_are_one(ray_local: ModuleType, tmp_path: Path) -> None:
    pickle_by_value(ray_local, __name__)
    policy_dir = make_policy(tmp_path / "policy")
    config = config_for("grpo", micro_batch_tokens=64)
    ranks = LearnerGroup(config.model_copy(update={"learners": config.learners.model_copy(update={"num_learners": 2})}))

    def update(learner: Any, name: str) -> tuple[list[dict[str, float]], Any, Any]:
        made = load_object(name, LEARNERS)(
            config_for(name, micro_batch_tokens=64), policy_dir, learner.rank, learner.world_size
        )
        made.build()
        metrics = [made.update(unequal_groups(seed)) for seed in range(2)]
        weights = made.get_weights()
        made.close()
        return metrics, weights, made.learned.to_pydict() if made.learned else None

    ranks.build("sft", policy_dir)
    alone = LearnerGroup(config)
    alone.build("sft", policy_dir)
    try:
        for name in LEARNERS:
            metrics, weights, learned = ranks.foreach_learner(lambda learner, name=name: update(learner, name))[0]
            expected, theirs, other_learned = alone.foreach_learner(lambda learner, name=name: update(learner, name))[0]
            assert_same_columns(learned, other_learned)
            for ours, other in zip(metrics, expected, strict=True):
                assert_same_update(other, ours)
            for key, weight in weights.items():
                np.testing.assert_allclose(weight, theirs[key], atol=1e-4, rtol=0, err_msg=f"{name}: {key}")
    finally:
        ranks.stop()
        alone.stop()


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEARNERS)
def test_options_are_those_of_the_learner(name: str) -> None:
    assert OPTIONS.keys() == LEARNERS.keys()
    assert load_object(name, LEARNERS).options_class.model_json_schema() == OPTIONS[name].model_json_schema()


@pytest.mark.parametrize(
    ("algorithm", "options", "message"),
    [
        ("ppo", {"vf_clp": 1}, "training.algorithm=ppo: unknown key training.options.vf_clp; did you mean 'vf_clip'?"),
        ("grpo", {"vf_clip": 1}, "training.algorithm=grpo: unknown key training.options.vf_clip; "),
        ("sft", {}, "training.algorithm: got sft, which is stage 1"),
        ("dapo", {"overlong_share": 1.5}, "training.options.overlong_share: got 1.5; input should be less than 1"),
        ("grpo", {"kl_estimator": "k4"}, "training.options.kl_estimator: got 'k4'; input should be 'k1', 'k2' or 'k3'"),
        ("grpo", {"dual_clip": 0.5}, "training.options.dual_clip: got 0.5; expected more than 1"),
        ("cispo", {"dual_clip": 3}, "training.options.dual_clip: got 3"),
        ("ipo", {"beta": "x"}, "training.options.beta: got 'x'; input should be a valid number"),
    ],
)
def test_a_wrong_option_is_named(algorithm: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_names(AlgorithmConfig().training(algorithm=algorithm, options=options).freeze())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("algorithm", "options"), [("ppo", {"kl_in": "loss"}), ("grpo", {"kl_estimator": "k1"})])
def test_a_divergence_whose_gradient_is_0_is_refused(algorithm: str, options: dict[str, Any]) -> None:
    config = AlgorithmConfig().training(algorithm=algorithm, options=options, kl_coeff=0.01).freeze()
    with pytest.raises(ConfigError, match="kl_estimator: got k1 with kl_in: loss"):
        learner_options(config.training).check(config)
    without = config.model_copy(update={"training": config.training.model_copy(update={"kl_coeff": 0.0})})
    learner_options(without.training).check(without)


@pytest.mark.parametrize("name", list(recipe_files()))
def test_the_options_of_every_recipe_are_its_algorithms(name: str) -> None:
    training = AlgorithmConfig.from_recipe(name).freeze().training
    assert type(learner_options(training)) is load_object(training.algorithm, LEARNERS).options_class


SEARCH_R1 = {
    "lr": 1e-6,
    "lr_schedule": "constant",
    "grad_clip": 1.0,
    "weight_decay": 0.01,
    "kl_coeff": 0.001,
    "entropy_coeff": 0.001,
    "train_batch_size": 512,
    "num_epochs": 1,
    "max_policy_lag": 0,
}
"""What all four published runs share, as the next."""
CLIP = {"clip_low": 0.2, "clip_high": 0.2, "tis_clip": 0.0}
CRITIC = {"kl_in": "reward", "kl_estimator": "k1", "gamma": 1.0, "lambda_": 1.0, "vf_lr": 1e-5, "vf_clip": 0.5}
GRPO_OF_SEARCH_R1 = {"kl_in": "loss", "kl_estimator": "k3", "aggregation": "token_mean"}
PUBLISHED: dict[str, tuple[int, int, int, float, dict[str, Any]]] = {
    # group size, minibatch, iterations that shares are of, top_p; Search-R1's PPO script alone sets top_p
    "search_r1_7b": (1, 256, 1005, 1.0, CRITIC),
    "search_r1_grpo_7b": (5, 256, 1005, 0.95, GRPO_OF_SEARCH_R1),
    "ragr1_mq_7b": (1, 128, 500, 0.95, CRITIC),
    "ragr1_sq_7b": (1, 128, 500, 0.95, CRITIC),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_settings(name: str) -> None:
    """Warm-ups were given as shares of the run, 0.285 and 0.015, rounded down to iterations."""
    group_size, minibatch_size, num_iterations, top_p, expected = PUBLISHED[name]
    config = AlgorithmConfig.from_recipe(name).freeze()
    training, options = config.training, learner_options(config.training)
    assert SEARCH_R1.items() <= training.model_dump().items()
    assert (expected | CLIP).items() <= options.model_dump().items()
    assert training.group_size == group_size
    assert training.num_minibatches == 512 * group_size // minibatch_size
    assert training.warmup_steps == int(0.285 * num_iterations) * training.num_minibatches
    if isinstance(options, PPOOptions):
        assert options.vf_warmup_steps == int(0.015 * num_iterations) * training.num_minibatches
    assert (config.env_runners.temperature, config.env_runners.top_p) == (1.0, top_p)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_recipes_say_how_their_mean_differs_and_invent_no_hardware(name: str) -> None:
    text = recipe_files()[name].read_text(encoding="utf-8")
    comments = text.replace("\n# ", " ")
    assert "theirs is one over micro-batches of means over tokens" in comments
    assert re.search(r"8 (A100|H100)(?! of)", comments)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_recipes_correct_as_little_as_their_papers_and_say_so(name: str) -> None:
    config = AlgorithmConfig.from_recipe(name).freeze()
    assert not {"tis_clip", "sequence_correction"} & config.training.options.keys()
    text = recipe_files()[name].read_text(encoding="utf-8")
    paper = "RAG-R1" if name.startswith("ragr1") else "Search-R1"
    assert f"As in {paper}, nothing corrects for it" in text
    offered = re.findall(r"\{kind: \w+\}", text)
    assert offered
    for correction in offered:  # each is legal in this recipe
        check_classes(
            AlgorithmConfig.from_recipe(name).override([f"training.options.sequence_correction={correction}"]).freeze()
        )


@pytest.mark.parametrize(
    ("name", "training", "expected"),
    [
        *((name, {}, 8) for name in ("grpo", "dr_grpo", "gspo", "rloo", "dapo", "cispo")),
        *((name, {"kl_coeff": 0.1}, 4) for name in ("grpo", "dr_grpo", "gspo", "rloo")),
        ("grpo", {"entropy_coeff": 0.1}, 4),
        ("grpo", {"kl_coeff": 0.1, "options": {"drop_zero_variance": True}}, 8),
        ("grpo", {"options": {"drop_zero_variance": False}}, 4),
        *((name, {"kl_coeff": 0.1}, 8) for name in ("dapo", "cispo")),
        ("reinforce_pp", {}, 4),
    ],
)
def test_which_algorithm_leaves_flat_groups_out(
    tmp_path: Path, name: str, training: dict[str, Any], expected: int
) -> None:
    """``expected`` trajectories of a failed group of four and of a flat one are left out."""
    learner_class = load_object(name, LEARNERS)
    learner = learner_class(make_config(training={"algorithm": name, **training}), tmp_path)
    flat, other, failed = make_groups(0, num_groups=3)
    flat = replace(flat, trajectories=tuple(replace(t, reward=1.0) for t in flat.trajectories))
    failed = replace(
        failed, trajectories=tuple(replace(t, stop_reason=StopReason.ENV_ERROR) for t in failed.trajectories)
    )
    assert len(make_batch(learner, [flat, other, failed]).trajectories) == 12 - expected


def test_the_critic_has_its_own_schedule(tmp_path: Path) -> None:
    def schedule(**options: float) -> Schedule:
        config = make_config(training={"algorithm": "ppo", "lr": 1e-3, "warmup_steps": 4, "options": options})
        return PPOLearner(config, tmp_path).critic_schedule

    assert [schedule().lr_at(step) for step in (0, 9)] == pytest.approx([1e-2, 1e-2])
    assert [schedule(vf_lr=2e-3, vf_warmup_steps=2).lr_at(step) for step in (0, 1)] == pytest.approx([1e-3, 2e-3])


OWN_LEARNERS = '''
import torch
from learners.algorithms.grpo import GRPOLearner
from learners.learner import Learner
from learners.deepspeed.deepspeed_engine import Schedule
from learners.losses import TokenLoss
from learners.options import LearnerOptions


class Signs(GRPOLearner):
    """Own advantages; the loss, and everything that the options may add to it, is GRPO's."""

    def compute_advantages(self, batch):
        signs = torch.tensor([1.0 if t.reward > 0.5 else -1.0 for t in batch.trajectories])
        return {"advantages": batch.per_token(signs)}


class Margins(LearnerOptions):
    margin: float = 1.0


class Hinge(Learner):
    """Custom advantages, a custom loss and a custom option."""

    options_class = Margins

    def compute_advantages(self, batch):
        rewards = torch.tensor([t.reward for t in batch.trajectories])
        return {"rewards": rewards.repeat_interleave(torch.tensor(batch.flat.model_lengths))}

    def compute_loss(self, outputs, columns):
        wanted = columns["rewards"] * 2 - 1
        loss = torch.relu(self.options.margin - wanted * (outputs.logprobs + 3))
        return TokenLoss(loss, {"hinge": loss})
'''


@pytest.mark.parametrize(
    ("name", "options", "metric"),
    [("Signs", {"llds_coeff": 0.1}, "llds"), ("Signs", {}, "clip_fraction"), ("Hinge", {"margin": 2.0}, "hinge")],
)
def test_a_custom_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any], metric: str
) -> None:
    (tmp_path / "own_learners.py").write_text(OWN_LEARNERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_learners", raising=False)
    training = {"algorithm": f"own_learners:{name}", "options": options, "lr": 3e-3, "num_epochs": 2}
    config = make_config(training=training)
    check_names(config)
    group = LearnerGroup(config)
    group.build(config.training.algorithm, make_policy(tmp_path / "policy"))
    batches = [groups_to_record_batch(unequal_groups(0))]
    before = group.get_weights()
    metrics = [group.update(batches) for _ in range(6)]
    assert metrics[0]["num_steps"] == 2
    assert all(math.isfinite(m[metric]) and m["grad_norm"] > 0 for m in metrics)
    assert any(not np.array_equal(weight, before[key]) for key, weight in group.get_weights().items())
    if name == "Hinge":
        assert metrics[-1]["hinge"] < metrics[0]["hinge"]
    group.stop()
    with pytest.raises(
        ConfigError, match=r"training\.algorithm=own_learners:.*: unknown key training\.options\.nothing"
    ):
        check_names(make_config(training={**training, "options": {"nothing": 1}}))
