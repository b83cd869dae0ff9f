"""Learners learn from MODEL tokens only, with any packing; states resume to the bit."""

from __future__ import annotations

import asyncio
import json
import math
import platform
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from learners_common import (
    STAGES_AND_DTYPES,
    Build,
    make_config,
    make_groups,
    make_policy,
    make_trajectory,
    own_logprobs,
    segments,
    with_rows,
)
from transformers import AutoModelForCausalLM

from learners.algorithms.grpo import GRPOLearner, PPOLearner
from learners.algorithms.segments import decisions
from learners.algorithms.sft import SFTLearner
from learners.deepspeed.deepspeed_engine import Schedule
from learners.learner import Learner
from learners.losses import TokenLoss
from learners.train_batch import Meter, TrainBatch, make_batch
from ragr1_actors.core.errors import ConfigError, DataError, LearnerError
from ragr1_actors.core.schema import add_learned, groups_from_record_batch, groups_to_record_batch
from ragr1_actors.core.types import Record, StopReason, Task, TokenKind, ToolCall, Trajectory, TrajectoryGroup
from ragr1_actors.planning.tiny_policy import make_tiny_policy
from ragr1_actors.rollout.engines.base import EngineArguments, PolicyTokenizer
from ragr1_actors.rollout.engines.transformers_engine import TransformersEngine
from ragr1_actors.training.batches import take_histograms

pytestmark = pytest.mark.engine


def logprob(learner: Learner, trajectory: Trajectory) -> float:
    """Log-prob of a trajectory's MODEL tokens under the learner's policy."""
    return own_logprobs(learner, [TrajectoryGroup(trajectory.task, (trajectory,))]).sum().item()


def one_group(trajectories: list[Trajectory]) -> list[TrajectoryGroup]:
    return [TrajectoryGroup(trajectories[0].task, tuple(trajectories))]


def assert_same_weights(one: Learner, other: Learner, atol: float) -> None:
    theirs = other.get_weights()
    for name, weight in one.get_weights().items():
        np.testing.assert_allclose(weight, theirs[name], atol=atol, rtol=0, err_msg=name)


def test_the_loss_is_a_plain_mean_over_tokens(build: Build, tmp_path: Path) -> None:
    """Under the plain softmax: no engine sampled the demonstrations at a temperature."""
    groups = with_rows_in(make_groups(4))
    loss = build(SFTLearner, make_config(env_runners={"temperature": 0.5})).update(groups)["loss"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", attn_implementation="eager")
    total, count = 0.0, 0
    for trajectory, row in ((t, row) for group in groups for t in group.trajectories for row in t.rows):
        ids = torch.from_numpy(trajectory.token_ids[row]).long()
        at = torch.from_numpy(trajectory.kinds[row] == TokenKind.MODEL).nonzero()[:, 0]
        with torch.no_grad():
            total -= model(ids[None]).logits[0].double().log_softmax(-1)[at - 1, ids[at]].sum().item()
        count += len(at)
    assert loss == pytest.approx(total / count, abs=1e-5)


def with_rows_in(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """The groups, of which some trajectories have several rows."""
    rng = np.random.default_rng(1)
    found = [replace(group, trajectories=tuple(with_rows(t, rng) for t in group.trajectories)) for group in groups]
    assert sum(len(t.rows) > 1 for group in found for t in group.trajectories) > 3
    return found


def test_a_failure_and_a_flat_group_are_left_out(build: Build) -> None:
    groups = make_groups(0, num_groups=2)
    rng = np.random.default_rng(9)
    failed = make_trajectory(rng, task_id="made/0", reward=9.0, stop_reason=StopReason.RETRIEVAL_FAILED)
    flat_group = one_group([replace(t, reward=1.0) for t in make_groups(5, num_groups=1)[0].trajectories])
    plain, other = build(GRPOLearner), build(GRPOLearner)
    first = plain.update(groups)
    with_failure = [TrajectoryGroup(groups[0].task, (*groups[0].trajectories, failed)), groups[1]]
    second = other.update(with_failure + flat_group)
    assert first["loss"] == pytest.approx(second["loss"], abs=1e-6)
    assert second["trajectories_left_out"] == 5
    assert_same_weights(plain, other, atol=1e-6)


def test_tasks_of_two_sources_with_one_local_id_are_two_groups() -> None:
    groups = [
        TrajectoryGroup(task, tuple(replace(t, task=task) for t in group.trajectories))
        for group, task in zip(
            make_groups(0, 2), (Task("nq/0", "?", ("a",)), Task("hotpotqa/0", "?", ("b",))), strict=True
        )
    ]
    decoded = groups_from_record_batch(groups_to_record_batch(groups))
    assert [group.task.task_id for group in decoded] == ["nq/0", "hotpotqa/0"]
    batch = make_batch(decoded, lambda members: members, has_rollout_logprobs=True)
    assert batch is not None
    assert batch.group_ids == [0] * 4 + [1] * 4


def test_nothing_to_learn_is_no_step(build: Build) -> None:
    learner = build(GRPOLearner)
    before = learner.get_weights()
    group = make_groups(0, num_groups=1)[0]
    metrics = learner.update(one_group([replace(t, reward=0.5) for t in group.trajectories]))
    assert metrics["num_steps"] == 0 and metrics["tokens"] == 0
    assert all(np.array_equal(before[name], weight) for name, weight in learner.get_weights().items())
    assert learner.update([])["num_steps"] == 0


def test_sft_lowers_the_loss(build: Build) -> None:
    learner = build(SFTLearner, make_config(sft={"lr": 1e-2}))
    losses = [learner.update(make_groups(0))["loss"] for _ in range(25)]
    assert losses[-1] < 0.5 * losses[0]


def test_segments_train_as_the_whole_trajectory_does(build: Build) -> None:
    groups = make_groups(6)
    cuts = [s for group in groups for t in group.trajectories for s in segments(t)]
    counts = [t.num_model_tokens for group in groups for t in group.trajectories]
    assert sum(s.num_model_tokens for s in cuts) == sum(counts)
    whole, cut = build(SFTLearner), build(SFTLearner)
    for _ in range(3):
        first = whole.update(groups)
        second = cut.update(one_group(cuts))
        assert first["loss"] == pytest.approx(second["loss"], abs=1e-5)
    assert_same_weights(whole, cut, atol=1e-4)


def test_segments_fall_into_four_categories() -> None:
    rng = np.random.default_rng(0)
    direct = decisions(make_trajectory(rng, turns=("answer",)))
    searched = decisions(with_hits(make_trajectory(rng, turns=("search", "search", "malformed", "answer"))))
    in_vain = decisions(make_trajectory(rng, turns=("search", "search", "answer")))
    assert [s.value for s in direct] == ["internal_answer"]
    malformed = decisions(make_trajectory(rng, turns=("malformed", "answer")))
    assert [s.value for s in malformed] == ["internal_answer"]
    mended = decisions(with_hits(make_trajectory(rng, turns=("malformed", "search", "answer"))))
    assert [s.value for s in mended] == ["first_search", "evidence_answer"]
    assert [s.value for s in searched] == ["first_search", "further_search", "evidence_answer"]
    assert [s.value for s in in_vain] == ["first_search", "first_search", "internal_answer"]
    named = decisions(make_trajectory(rng, turns=("fetch", "answer")))  # an environment names its actions
    assert [s.value for s in named] == ["first_search", "internal_answer"]


def with_hits(trajectory: Trajectory) -> Trajectory:
    """The trajectory with a passage found in every search."""
    call = ToolCall("search", {"query": "?", "k": 1}, records=(Record("p", "", ""),))
    turns = (replace(t, calls=(call,)) if t.action == "search" else t for t in trajectory.turns)
    return replace(trajectory, turns=tuple(turns))


def test_malformed_turns_are_context_as_in_segments(build: Build) -> None:
    rng = np.random.default_rng(3)
    trajectory = make_trajectory(rng, turns=("search", "malformed", "answer"))
    only_malformed = make_trajectory(rng, turns=("malformed",))
    batch = make_batch(one_group([trajectory, only_malformed]), build(SFTLearner).select_members, False)
    assert batch is not None
    (taught,) = batch.trajectories
    first, malformed, last = trajectory.turn_lengths
    assert taught.num_model_tokens == first + last == sum(s.num_model_tokens for s in segments(trajectory))
    at = np.flatnonzero(trajectory.kinds == TokenKind.MODEL)[first : first + malformed]
    assert (taught.kinds[at] == TokenKind.PROMPT).all()
    np.testing.assert_array_equal(taught.token_ids, trajectory.token_ids)


def test_grpo_moves_probability_to_the_rewarded(build: Build) -> None:
    rng = np.random.default_rng(0)
    learner = build(GRPOLearner, make_config(training={"lr": 1e-3, "options": {"clip_low": 1e3, "clip_high": 1e3}}))
    good, bad = (make_trajectory(rng, reward=reward) for reward in (1.0, 0.0))
    before = logprob(learner, good), logprob(learner, bad)
    for _ in range(5):
        learner.update(one_group([good, bad]))
    assert logprob(learner, good) > before[0] + 1
    assert logprob(learner, bad) < before[1]


def test_histograms_count_every_token(build: Build) -> None:
    rng = np.random.default_rng(0)
    options = {"tis_clip": 2.0}  # scores before the step
    learner = build(GRPOLearner, make_config(training={"lr": 1e-3, "options": options}))
    good, bad = (make_trajectory(rng, reward=reward) for reward in (1.0, 0.0))
    metrics, histograms = take_histograms(learner.update(one_group([good, bad])))
    assert not any(name.startswith("histogram") for name in metrics)
    counts = {name: [bucket for bucket in buckets if bucket[2]] for name, buckets in histograms.items()}
    num_good, num_bad = ((one.kinds == TokenKind.MODEL).sum() for one in (good, bad))
    assert metrics["tokens"] == num_good + num_bad
    assert counts["ratio"] == [(0.995, 1.005, num_good + num_bad)], "the policy has not moved before the first step"
    assert counts["advantage"] == [(-1.0, -0.5, num_bad), (0.5, 1.0, num_good)]


def test_advantages_and_ratios_of_every_token_are_recorded(build: Build) -> None:
    groups = make_groups(0)
    failed = replace(groups[0].trajectories[0], stop_reason=StopReason.RETRIEVAL_FAILED, trajectory_id="failed")
    groups[0] = replace(groups[0], trajectories=(*groups[0].trajectories, failed))
    learner = build(GRPOLearner, make_config(training={"lr": 1e-12, "num_epochs": 2, "num_minibatches": 2}))
    learner.update(groups)
    assert learner.learned is not None
    (batch,) = add_learned([groups_to_record_batch(groups)], learner.learned)
    members = [trajectory for group in groups for trajectory in group.trajectories]
    for row, trajectory in enumerate(members):
        advantages, ratios = (batch.column(name)[row].as_py() for name in ("advantages", "ratios"))
        if trajectory is failed:
            assert (advantages, ratios) == (None, None)
            continue
        rewards = [t.reward for t in members if t.task == trajectory.task and t is not failed]
        sign = np.sign(trajectory.reward - np.mean(rewards))
        at = trajectory.kinds == TokenKind.MODEL
        assert (np.sign(advantages) == sign).all() and len(set(advantages)) == 1
        new = own_logprobs(learner, one_group([trajectory])).numpy()
        assert ratios == pytest.approx(np.exp(new - trajectory.logprobs[at]), rel=1e-3)


@pytest.mark.parametrize("changes", [{"num_epochs": 1}, {"num_epochs": 2}])
def test_the_ratio_recorded_is_that_of_the_last_pass(build: Build, changes: dict[str, int]) -> None:
    groups = make_groups(0)
    learner = build(GRPOLearner, make_config(training={"lr": 1e-2} | changes))
    learner.update([replace(g, trajectories=tuple(sampled_by(learner, t) for t in g.trajectories)) for g in groups])
    assert learner.learned is not None
    ratios = np.concatenate(learner.learned.column("ratios").to_pylist())
    assert np.allclose(ratios, 1.0, atol=1e-4) == (changes["num_epochs"] == 1)  # the pass of the only step is before it


def sampled_by(learner: Learner, trajectory: Trajectory) -> Trajectory:
    logprobs = trajectory.logprobs.copy()
    logprobs[trajectory.kinds == TokenKind.MODEL] = own_logprobs(learner, one_group([trajectory])).numpy()
    return replace(trajectory, logprobs=logprobs)


def test_nothing_is_recorded_where_no_trajectories_are_kept(build: Build) -> None:
    config = make_config()
    checkpointing = config.checkpointing.model_copy(update={"keep_trajectories": False})
    learner = build(GRPOLearner, config.model_copy(update={"checkpointing": checkpointing}))
    learner.update(make_groups(0))
    assert learner.learned is None


def test_ppo_learns_policy_and_values(build: Build) -> None:
    rng = np.random.default_rng(0)
    options = {"vf_lr": 1e-2, "vf_clip": 10.0}
    training = {"lr": 1e-3, "options": {"clip_low": 1e3, "clip_high": 1e3, **options}}
    learner = build(PPOLearner, make_config(training=training))
    good, bad = (make_trajectory(rng, reward=reward) for reward in (1.0, 0.0))
    before = logprob(learner, good) - logprob(learner, bad)
    metrics = [learner.update(one_group([good, bad])) for _ in range(10)]
    assert logprob(learner, good) - logprob(learner, bad) > before + 1
    assert metrics[-1]["value_loss"] < 0.5 * metrics[0]["value_loss"]


def test_epochs_and_minibatches_are_steps(build: Build) -> None:
    learner = build(GRPOLearner, make_config(training={"num_epochs": 2, "num_minibatches": 3, "lr": 1e-3}))
    metrics = learner.update(make_groups(0))
    assert metrics["num_steps"] == 6
    assert metrics["tokens"] == 2 * sum(t.num_model_tokens for group in make_groups(0) for t in group.trajectories)


@pytest.mark.parametrize(("stage", "dtype"), STAGES_AND_DTYPES)
def test_a_resumed_run_is_bitwise_the_same(build: Build, stage: int, dtype: str) -> None:
    config = make_config(
        training={"lr": 1e-3, "num_minibatches": 2, "weight_decay": 0.01},
        learners={"zero_stage": stage},
        policy={"dtype": dtype},
    )
    straight = build(PPOLearner, config)
    for seed in range(2):
        straight.update(make_groups(seed))
    state = straight.get_state()
    assert all(isinstance(value, np.ndarray) for value in state.values())
    resumed = build(PPOLearner, config)
    resumed.set_state(state)
    for seed in range(2, 4):
        assert straight.update(make_groups(seed)) == resumed.update(make_groups(seed))
    ours, theirs = straight.get_state(), resumed.get_state()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_a_row_that_is_a_prompt_only_may_be_alone_in_a_micro_batch(build: Build) -> None:
    learner = build(GRPOLearner, make_config(learners={"micro_batch_tokens": 32}))
    groups = make_groups(1)
    first, *others = groups[0].trajectories
    num_before = 40
    before = {"token_ids": 3, "kinds": TokenKind.PROMPT, "logprobs": 0, "policy_versions": -1}
    arrays = {name: getattr(first, name) for name in before}
    longer = {name: np.r_[np.full(num_before, before[name], one.dtype), one] for name, one in arrays.items()}
    prompted = replace(first, **longer, row_lengths=(num_before, first.num_tokens))
    found = learner.update([replace(groups[0], trajectories=(prompted, *others)), *groups[1:]])
    assert found["num_steps"] == 1 and math.isfinite(found["loss"])


@pytest.mark.parametrize("stage", [0, 1])
def test_ten_skipped_steps_in_a_row_end_the_run(build: Build, stage: int) -> None:
    learner = build(GRPOLearner, make_config(learners={"zero_stage": stage}))
    broken, whole = (make_groups(0) for _ in range(2))
    for group in broken:
        for trajectory in group.trajectories:
            trajectory.logprobs.fill(np.nan)  # like an engine with broken weights
    for _ in range(9):
        assert learner.update(broken)["skipped_steps"] == 1
    assert learner.update(whole)["skipped_steps"] == 0
    for _ in range(9):  # a step that is taken resets the count
        learner.update(broken)
    with pytest.raises(LearnerError, match=r"10 optimizer steps in a row .* lower training\.lr"):
        learner.update(broken)


def test_half_a_state_is_refused(build: Build) -> None:
    learner = build(SFTLearner)
    state = learner.get_state()
    for missing in ("num_updates", "policy/step", next(name for name in state if name.startswith("policy/exp_avg/"))):
        with pytest.raises(
            DataError, match=missing.removeprefix("policy/").partition("/")[0].replace("step", "step count")
        ):
            learner.set_state({name: value for name, value in state.items() if name != missing})


def test_a_state_of_another_model_is_refused(build: Build, tmp_path: Path) -> None:
    learner = build(SFTLearner)
    state = learner.get_state() | {"policy/exp_avg/model.model.norm.weight": np.zeros(5, np.float32)}
    with pytest.raises(ValueError, match=r"norm\.weight"):
        learner.set_state(state)


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_policy_loads_and_scores_alike(build: Build, tmp_path: Path, tied: bool) -> None:
    learner = build(SFTLearner, None, make_policy(tmp_path / "source", tied=tied))
    learner.update(make_groups(0))
    learner.save_policy(tmp_path / "saved")
    assert "lm_head.weight" in learner.get_weights()
    assert (tmp_path / "saved" / "tokenizer.json").is_file()
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["dtype"] == "float32"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    for name, tensor in model.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), learner.get_weights()[name])


def test_schedules() -> None:
    assert [Schedule(1.0, warmup_steps=4).lr_at(step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    cosine = Schedule(1.0, warmup_steps=2, num_steps=12)
    assert [round(cosine.lr_at(step), 3) for step in (0, 1, 2, 7, 12, 20)] == [0.5, 1.0, 1.0, 0.5, 0.0, 0.0]


def test_a_meter_without_steps_reports_zeros() -> None:
    assert Meter().reduce(torch.device("cpu"))["tokens"] == 0


@pytest.mark.parametrize(
    ("method", "returned", "message"),
    [
        ("compute_advantages", None, r"compute_advantages returned NoneType, expected a dict"),
        ("compute_advantages", {"advantages": torch.ones(3)}, r"advantages is \[3\], expected a tensor of \[\d+\]"),
        ("compute_advantages", {"advantages": [1.0]}, r"advantages is list, expected a tensor"),
        ("compute_advantages", {"other": torch.ones(0)}, r"other is \[0\], expected a tensor of \[\d+\]"),
        ("compute_advantages", {}, r"the loss reads the column 'advantages', which is not set; got trajectory_ids, "),
        ("compute_loss", torch.zeros(()), r"compute_loss returned Tensor, expected a learners\.losses\.TokenLoss"),
        ("compute_loss", TokenLoss(torch.zeros(())), r"compute_loss: loss is \[\], expected a tensor"),
    ],
)
def test_a_custom_learner_that_returns_something_else_raises(
    build: Build, method: str, returned: object, message: str
) -> None:
    custom = type("MyLearner", (GRPOLearner,), {method: lambda *_: returned})
    with pytest.raises(ConfigError, match=message):
        build(custom).update(make_groups(0))


def test_a_column_is_set_once(build: Build) -> None:
    def compute_advantages(_: Learner, batch: TrainBatch) -> dict[str, torch.Tensor]:
        return {"rollout_logprobs": torch.zeros(len(batch.columns.trajectory_ids))}

    custom = type("MyLearner", (GRPOLearner,), {"compute_advantages": compute_advantages})
    with pytest.raises(ConfigError, match=r"MyLearner\.compute_advantages: rollout_logprobs is set already"):
        build(custom).update(make_groups(0))


@pytest.mark.parametrize(("zero_stage", "dtype"), STAGES_AND_DTYPES)
def test_weights_are_published_in_the_dtype_of_the_policy(
    build: Build, tmp_path: Path, zero_stage: int, dtype: str
) -> None:
    folder = tmp_path / "tiny"
    make_tiny_policy(folder, [" Riga"], seed=0, vocab_size=400, hidden_size=32, num_layers=2, num_heads=2)
    config = make_config(learners={"zero_stage": zero_stage}, policy={"dtype": dtype})
    learner = build(GRPOLearner, config, folder)
    learner.update(make_groups(4))
    published = learner.published_weights()
    expected = learner.get_weights()
    size = 2 if dtype == "bfloat16" else 4
    assert published.keys() == expected.keys()
    assert all(weight.nbytes == size * expected[name].size for name, weight in published.items())
    settings = EngineArguments(max_rows=1, max_context_tokens=64, dtype=dtype)
    engine = TransformersEngine(folder, PolicyTokenizer(folder), settings)
    asyncio.run(engine.update_weights(published, 1))
    for name, parameter in engine.model.named_parameters():
        np.testing.assert_array_equal(parameter.detach().float().numpy(), expected[name], err_msg=name)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries give memory back by themselves")
def test_after_an_update_freed_memory_is_the_systems_again(build: Build) -> None:
    learner = build(GRPOLearner)
    learner.update(make_groups(0))
    large = torch.ones(2**24, dtype=torch.uint8)
    del large  # glibc takes blocks of up to this size from its heap now
    blocks = [torch.ones(2**20, dtype=torch.uint8) for _ in range(400)]
    last = blocks.pop()  # lies behind the others: glibc frees nothing before it by itself
    blocks.clear()
    process = psutil.Process()
    before = process.memory_info().rss
    learner.update(make_groups(1))
    assert last.sum() == 2**20
    assert before - process.memory_info().rss > 200 * 2**20
