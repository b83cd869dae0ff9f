"""Where the learner's numbers would be quietly wrong: a cut distribution, sums in bf16, attention of another kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from learners_common import VOCAB, make_config, make_groups, make_policy
from transformers import GraniteConfig, GraniteForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from learners.algorithms.dpo import DPOLearner
from learners.algorithms.grpo import GRPOLearner
from learners.algorithms.gspo import GSPOLearner
from learners.algorithms.ppo import PPOLearner
from learners.batches.packing import flatten, pack
from learners.deepspeed.deepspeed_engine import DeepSpeedEngine, init_distributed
from learners.deepspeed.zero import AdamWSettings
from learners.learner import Learner
from learners.models.scoring import PolicyModel
from ragr1_actors.core.config import LearnerSettings
from ragr1_actors.core.errors import ConfigError, LearnerError

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("learner_class", [GRPOLearner, GSPOLearner, PPOLearner])
def test_what_a_nucleus_was_sampled_with_is_no_ratio(tmp_path: Path, learner_class: type[Learner]) -> None:
    options = {"llds_coeff": 0.5}
    config = make_config(env_runners={"top_p": 0.95}, training={"kl_coeff": 0.1, "options": options})
    learner = learner_class(config, make_policy(tmp_path))
    learner.build()
    metrics = learner.update(make_groups(0))  # made up: far from what the policy says
    learner.close()
    assert metrics["ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["clip_fraction"] == 0
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert metrics["llds"] == pytest.approx(0, abs=1e-6)
    assert metrics["logprob_gap_mean"] > 0.1, "the gap is measured all the same"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_many_gradients_in_bf16_add_up(stage: int) -> None:
    torch.manual_seed(0)
    count = 128
    device = init_distributed(0, 1)
    module = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False)).bfloat16()
    weight_CC = module[0].weight.detach().clone()
    engine = DeepSpeedEngine(module, AdamWSettings(grad_clip=1e9), LearnerSettings(zero_stage=stage), device)
    expected_CC = torch.zeros(64, 64)
    for _ in range(count):
        rows_BC = (1 + 0.3 * torch.randn(32, 64)).bfloat16()
        engine.backward(engine(rows_BC).float().square().sum() / count)
        alone_CC = weight_CC.clone().requires_grad_()
        (torch.nn.functional.linear(rows_BC, alone_CC).float().square().sum() / count).backward()
        assert alone_CC.grad is not None
        expected_CC += alone_CC.grad.float()
    assert engine.step(1e-3) == pytest.approx(float(expected_CC.norm()), rel=1e-3)
    found_CC = torch.from_numpy(engine.get_state()["exp_avg/0.weight"]) / 0.1  # 1 - beta_1
    engine.close()
    assert (found_CC - expected_CC).norm() < 2e-3 * expected_CC.norm()


def save(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def test_a_sliding_window_shorter_than_a_trajectory_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = pack(flatten([t for group in make_groups(0) for t in group.trajectories]), range(4))
    for window, is_refused in ((max(batch.lengths), False), (max(batch.lengths) - 1, True)):
        config = MistralConfig(**SIZES, sliding_window=window)
        folder = save(MistralForCausalLM(config), tmp_path / f"window{window}")
        policy = PolicyModel(folder, torch.float32, 1.0, False)
        if is_refused:
            with pytest.raises(LearnerError, match="sliding window shorter than a trajectory"):
                policy(batch)
        else:
            policy(batch)


def test_logits_that_are_changed_behind_the_head_are_refused(tmp_path: Path) -> None:
    folder = save(GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=8.0)), tmp_path)
    with pytest.raises(ConfigError, match=r"changes its logits by logits_scaling=8\.0"):
        PolicyModel(folder, torch.float32, 1.0, False)


def test_checkpointing_brings_no_dropout_into_attention(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = MistralConfig(**SIZES, sliding_window=None, attention_dropout=0.5)
    folder = save(MistralForCausalLM(config), tmp_path)
    batch = pack(flatten([t for group in make_groups(0) for t in group.trajectories]), range(4))
    plain, checkpointed = (PolicyModel(folder, torch.float32, 1.0, on)(batch).logprobs for on in (False, True))
    torch.testing.assert_close(checkpointed, plain)


def test_pairs_are_counted_as_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = DPOLearner(
        make_config(training={"algorithm": "dpo", "tis_clip": 2.0, "num_epochs": 2}), make_policy(tmp_path)
    )
    learner.build()
    asked: list[object] = []
    monkeypatch.setattr(learner, "_decouple", lambda *_: asked.append("scored anew"))
    before = learner.update(make_groups(0))
    batch = learner._select(make_groups(0))
    assert batch is not None
    batch.columns.update(learner.compute_advantages(batch))
    pairs = learner.step_columns(batch, list(range(len(batch.trajectories))))
    starts = batch.flat.model_offsets[:-1:2]
    margins = pairs["margin"][starts].tolist()
    learner.schedule = replace(learner.schedule, lr=0.0, num_epochs=1)
    found = learner.update(make_groups(0))
    learner.close()
    assert found["margin"] == pytest.approx(sum(margins) / len(margins), rel=1e-4)
    assert found["pair_accuracy"] == pytest.approx(sum(m > 0 for m in margins) / len(margins))
    assert asked == [], "nothing that is read would come of it"
    assert before["logprob_gap_mean"] > 0


def test_a_pair_needs_a_group_of_two() -> None:
    with pytest.raises(ConfigError, match=r"training\.group_size: got 1 with training\.algorithm=dpo"):
        make_config(training={"algorithm": "dpo", "group_size": 1})
