"""LoRA: adapters alone are trained and stored, merged weights are published and saved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from learners_common import make_config, make_groups, make_policy
from transformers import AutoModelForCausalLM

from learners.grpo import GRPOLearner
from learners.learner import Learner
from learners.ppo import PPOLearner
from ragr1_actors.config import RunConfig
from ragr1_actors.engines.transformers_engine import TransformersEngine
from ragr1_actors.env_runner import engine_settings
from ragr1_actors.errors import ConfigError, EngineError
from ragr1_actors.tiny_policy import make_tiny_policy
from ragr1_actors.tokenizer import PolicyTokenizer

Build = Callable[..., Learner]
LORA = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Build]:
    """Build learners in this process on one tiny policy, and close them afterwards."""
    policy_dir = make_policy(tmp_path / "policy", tied=False)
    made: list[Learner] = []

    def build(config: RunConfig, learner_class: type[Learner] = GRPOLearner, folder: Path = policy_dir) -> Learner:
        learner = learner_class(config, folder)
        learner.build()
        made.append(learner)
        return learner

    yield build
    for learner in made:
        learner.close()


def lora_config(stage: int = 1, lora: dict[str, object] | None = None, **sections: dict[str, object]) -> RunConfig:
    learners = {"lora": LORA if lora is None else lora, "zero_stage": stage} | sections.pop("learners", {})
    training = {"lr": 1e-2, "kl_coeff": 0.1} | sections.pop("training", {})
    return make_config(learners=learners, training=training, **sections)


def is_adapted(name: str) -> bool:
    return name.endswith(("q_proj.weight", "v_proj.weight", "down_proj.weight"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_only_adapters_are_trained_and_kept(build: Build, tmp_path: Path, stage: int, dtype: str) -> None:
    learner = build(lora_config(stage, policy={"dtype": dtype}))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=dtype).state_dict()
    start = learner.get_weights()
    assert start.keys() == base.keys()
    for name, weight in start.items():
        np.testing.assert_array_equal(weight, base[name].float().numpy(), err_msg="B is zero at first")
    assert learner.update(make_groups(0))["kl"] == pytest.approx(0, abs=1e-6), "the reference is the base"
    assert learner.update(make_groups(1))["kl"] > 1e-4
    assert learner._reference is not None and not hasattr(learner._reference, "_resting"), "no second model"
    for name, weight in learner.get_weights().items():
        assert np.array_equal(weight, start[name]) != is_adapted(name), name
    state = learner.get_state()
    assert all(".lora_A." in name or ".lora_B." in name for name in state if name not in ("num_updates", "policy/step"))
    # A, B and two moments of each: 2 layers of q 32x32, v 16x32, down 32x64
    num_numbers = sum(value.size for name, value in state.items() if "lora_" in name)
    assert num_numbers == 3 * 2 * 4 * ((32 + 32) + (16 + 32) + (32 + 64))


@pytest.mark.parametrize(
    ("stage", "learner_class"),
    [(0, GRPOLearner), (1, PPOLearner), (2, GRPOLearner), pytest.param(3, PPOLearner, marks=pytest.mark.slow)],
)
def test_a_run_with_adapters_resumes_bitwise(build: Build, stage: int, learner_class: type[Learner]) -> None:
    has_critic = learner_class is PPOLearner
    learners = {"offload": ["critic"] if has_critic else [], "gradient_checkpointing": True}
    training = {"algorithm": "ppo" if has_critic else "grpo", "num_minibatches": 2}
    config = lora_config(stage, training=training, learners=learners)
    straight = build(config, learner_class)
    for seed in range(2):
        straight.update(make_groups(seed))
    resumed = build(config, learner_class)
    resumed.set_state(straight.get_state())
    assert straight.update(make_groups(2)) == resumed.update(make_groups(2))
    ours, theirs = straight.get_state(), resumed.get_state()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_saved_policy_is_merged_and_scores_as_the_one_with_adapters(
    build: Build, tmp_path: Path, stage: int
) -> None:
    learner = build(lora_config(stage))
    for seed in range(3):
        learner.update(make_groups(seed))
    batch = learner._select(make_groups(5))
    assert batch is not None
    scores = learner.score(lambda micro_batch: learner.policy(micro_batch).logprobs, batch.flat)
    learner.save_policy(tmp_path / "saved")
    merged = build(make_config(), GRPOLearner, tmp_path / "saved")
    theirs = merged.score(lambda micro_batch: merged.policy(micro_batch).logprobs, batch.flat)
    torch.testing.assert_close(scores, theirs, atol=1e-4, rtol=1e-4)
    before = build(make_config())
    unlike = before.score(lambda micro_batch: before.policy(micro_batch).logprobs, batch.flat)
    assert (scores - unlike).abs().max() > 0.1, "there was something to merge"


def test_what_is_published_is_adapted_and_an_engine_keeps_the_rest(build: Build, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    make_tiny_policy(folder, [" Riga is a city"], seed=0, vocab_size=400, hidden_size=32, num_layers=2, num_heads=2)
    config = lora_config(env_runners={"max_context_tokens": 400})
    learner = build(config, GRPOLearner, folder)
    learner.update(make_groups(0))
    published = learner.published_weights()
    assert published and all(is_adapted(name) for name in published)
    streamed = {name: tuple(tensor.shape) for name, tensor in learner.stream_weights()}
    assert list(learner.weight_shapes().items()) == list(streamed.items())
    assert streamed.keys() == published.keys()
    engine = TransformersEngine(folder, PolicyTokenizer(folder), engine_settings(config, 0))
    asyncio.run(engine.update_weights(published, 1))
    whole = learner.get_weights()
    for name, parameter in engine._model.named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), whole[name], err_msg=name)
    published.pop(next(iter(published)))
    with pytest.raises(EngineError, match="lacks 1 parameters"):
        asyncio.run(engine.update_weights(published, 2))


def test_an_engine_that_may_not_keep_weights_is_sent_all_of_them(build: Build) -> None:
    learner = build(lora_config(env_runners={"engine": "vllm"}))
    learner.update(make_groups(0))
    assert learner.published_weights().keys() == learner.get_weights().keys()
    assert engine_settings(learner.config, 0).adapted_modules == ()


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"ranks": 4}, r"unknown key learners\.lora\.ranks; did you mean 'rank'\?"),
        ({"dropout": 0.1}, r"learners\.lora\.dropout: got 0\.1; .*less than or equal to 0"),
        ({"rank": 0}, r"learners\.lora\.rank: got 0; .*greater than or equal to 1"),
        ({"target_modules": ["lm_head"]}, r"'lm_head' is none of a decoder layer's linear layers"),
    ],
)
def test_settings_that_cannot_be_are_refused(lora: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lora_config(lora=lora)


def test_a_layer_that_the_policy_lacks_is_told_with_the_nearest(build: Build) -> None:
    with pytest.raises(ConfigError, match=r"has no linear layer 'query_proj'; did you mean '\w+_proj'\?"):
        build(lora_config(lora={"target_modules": ["query_proj"]}))


def test_a_resting_reference_is_refused_as_there_is_none() -> None:
    with pytest.raises(ConfigError, match=r"learners\.offload: got reference with learners\.lora.*take reference out"):
        lora_config(learners={"offload": ["reference"]})
