"""LoRA: adapters alone are trained, stored and published; engines and saved policies have them merged."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from learners_common import Build, make_config, make_groups, own_logprobs
from peft import PeftModel
from transformers import AutoModelForCausalLM

from learners.algorithms.grpo import GRPOLearner, PPOLearner
from learners.learner import Learner
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import ConfigError, EngineError
from ragr1_actors.planning.tiny_policy import make_tiny_policy
from ragr1_actors.rollout.engines.base import EngineArguments, PolicyTokenizer
from ragr1_actors.rollout.engines.transformers_engine import TransformersEngine

pytestmark = pytest.mark.engine

LORA = {"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def lora_config(stage: int = 1, lora: dict[str, object] | None = None, **sections: dict[str, object]) -> RunConfig:
    learners = {"lora": LORA if lora is None else lora, "zero_stage": stage} | sections.pop("learners", {})
    training = {"lr": 1e-2, "kl_coeff": 0.1} | sections.pop("training", {})
    return make_config(learners=learners, training=training, **sections)


def is_adapted(name: str) -> bool:
    return name.endswith(("q_proj.weight", "v_proj.weight", "down_proj.weight"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 3])
def test_only_adapters_are_trained_and_kept(build: Build, tmp_path: Path, stage: int, dtype: str) -> None:
    learner = build(GRPOLearner, lora_config(stage, policy={"dtype": dtype}))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "policy", dtype=dtype).state_dict()
    start = learner.get_weights()
    assert start.keys() == base.keys()
    for name, weight in start.items():
        np.testing.assert_array_equal(weight, base[name].float().numpy(), err_msg="B is zero at first")
    assert learner.update(make_groups(0))["kl"] == pytest.approx(0, abs=1e-6), "the reference is the base"
    assert learner.update(make_groups(1))["kl"] > 1e-4
    for name, weight in learner.get_weights().items():
        assert np.array_equal(weight, start[name]) != is_adapted(name), name
    state = learner.get_state()
    numbers = ("num_updates", "lr_factor", "policy/step")
    assert all(".lora_A." in name or ".lora_B." in name for name in state if name not in numbers)
    # A, B and two moments of each: 2 layers of q 32x32, v 16x32, down 32x64
    num_numbers = sum(value.size for name, value in state.items() if "lora_" in name)
    assert num_numbers == 3 * 2 * 4 * ((32 + 32) + (16 + 32) + (32 + 64))


@pytest.mark.parametrize("stage", [0, 2])
def test_the_value_head_of_a_critic_with_adapters_is_trained_whole(build: Build, stage: int) -> None:
    training = {"algorithm": "ppo", "options": {"vf_lr": 1e-2}}
    learner = build(PPOLearner, lora_config(stage, training=training))
    start = learner.get_state()
    assert not start["critic/weight/head.weight"].any() and start["critic/weight/head.weight"].shape == (1, 32)
    learner.update(make_groups(0))
    state = learner.get_state()
    for name in ("critic/weight/head.weight", "critic/weight/head.bias", "critic/exp_avg/head.weight"):
        assert state[name].all(), name
    heads = {name for name in state if name.startswith("critic/weight/") and "lora_" not in name}
    assert heads == {"critic/weight/head.weight", "critic/weight/head.bias"}


@pytest.mark.parametrize(
    ("stage", "learner_class"),
    [(0, GRPOLearner), (1, PPOLearner), (2, GRPOLearner), pytest.param(3, PPOLearner, marks=pytest.mark.slow)],
)
def test_a_run_with_adapters_resumes_bitwise(build: Build, stage: int, learner_class: type[Learner]) -> None:
    has_critic = learner_class is PPOLearner
    learners = {
        "offload": ["critic"] if has_critic else [],
        "gradient_checkpointing": "selective" if stage < 3 else True,
    }
    training = {"algorithm": "ppo" if has_critic else "grpo", "num_minibatches": 2}
    config = lora_config(stage, training=training, learners=learners)
    straight = build(learner_class, config)
    for seed in range(2):
        straight.update(make_groups(seed))
    resumed = build(learner_class, config)
    resumed.set_state(straight.get_state())
    assert straight.update(make_groups(2)) == resumed.update(make_groups(2))
    ours, theirs = straight.get_state(), resumed.get_state()
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_saved_policy_is_merged_and_scores_as_the_one_with_adapters(
    build: Build, tmp_path: Path, stage: int
) -> None:
    learner = build(GRPOLearner, lora_config(stage))
    for seed in range(3):
        learner.update(make_groups(seed))
    scores = own_logprobs(learner, make_groups(5))
    learner.save_policy(tmp_path / "saved")
    merged = build(GRPOLearner, make_config(), tmp_path / "saved")
    theirs = own_logprobs(merged, make_groups(5))
    torch.testing.assert_close(scores, theirs, atol=1e-4, rtol=1e-4)
    before = build(GRPOLearner, make_config())
    unlike = own_logprobs(before, make_groups(5))
    assert (scores - unlike).abs().max() > 0.1, "there was something to merge"


def tiny_folder(folder: Path) -> Path:
    make_tiny_policy(folder, [" Riga is a city"], seed=0, vocab_size=400, hidden_size=32, num_layers=2, num_heads=2)
    return folder


def load_engine(folder: Path, config: RunConfig) -> TransformersEngine:
    return TransformersEngine(folder, PolicyTokenizer(folder), EngineArguments.of(config, 0))


def assert_engine_has(engine: TransformersEngine, learner: Learner) -> None:
    expected = learner.get_weights()
    for name, parameter in engine.model.named_parameters():
        np.testing.assert_array_equal(parameter.detach().float().numpy(), expected[name], err_msg=name)


@pytest.mark.parametrize(("dtype", "stage"), [("float32", 1), ("float32", 3), ("bfloat16", 2)])
def test_adapters_alone_are_published_and_an_engine_merges_them(
    build: Build, tmp_path: Path, dtype: str, stage: int
) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    config = lora_config(stage, env_runners={"max_context_tokens": 400}, policy={"dtype": dtype})
    learner = build(GRPOLearner, config, folder)
    engine = load_engine(folder, config)
    for version in range(1, 4):
        learner.update(make_groups(version))
        published = learner.published_weights()
        asyncio.run(engine.update_weights(published, version))
        assert_engine_has(engine, learner)
    assert published.pop("lora_base").item() == learner.adapter_base
    shapes = {name: tensor.shape for name, tensor in published.items()}
    assert [(tensor.name, tensor.shape) for tensor in learner.published_tensors()] == list(shapes.items())
    adapted = [tuple(p.shape) for name, p in engine.model.named_parameters() if is_adapted(name)]
    assert sum(tensor.size for tensor in published.values()) == sum(4 * (rows + columns) for rows, columns in adapted)
    published.pop(next(iter(published)))
    with pytest.raises(EngineError, match="lacks 1 adapters"):
        asyncio.run(engine.update_weights({**published, "lora_base": np.asarray(learner.adapter_base)}, 4))
    assert_engine_has(engine, learner)


def test_an_engine_follows_to_the_policy_that_a_stage_begins_with(build: Build, tmp_path: Path) -> None:
    """Also one that was loaded, or restarted, from the policy before it."""
    folder = tiny_folder(tmp_path / "tiny")
    config = lora_config(env_runners={"max_context_tokens": 400})
    first = build(GRPOLearner, config, folder)
    engine = load_engine(folder, config)
    first.update(make_groups(0))
    asyncio.run(engine.update_weights(first.published_weights(), 1))
    first.save_policy(tmp_path / "policy_sft")
    second = build(GRPOLearner, config, tmp_path / "policy_sft")
    second.update(make_groups(1))
    for one in (engine, load_engine(folder, config)):
        asyncio.run(one.update_weights(second.published_weights(), 2))
        assert_engine_has(one, second)
    shutil.rmtree(tmp_path / "policy_sft")
    with pytest.raises(EngineError, match=r"policy_sft, which adapters .* put --run-dir and policy\.model on a file"):
        asyncio.run(engine.update_weights(second.published_weights(), 3))


def test_a_custom_engine_is_sent_merged_weights(build: Build) -> None:
    learner = build(GRPOLearner, lora_config(env_runners={"engine": "my_engine:MyEngine"}))
    learner.update(make_groups(0))
    assert learner.published_weights().keys() == learner.get_weights().keys()


def test_peft_loads_the_adapter_of_a_checkpoint(build: Build, tmp_path: Path) -> None:
    learner = build(GRPOLearner, lora_config())
    learner.update(make_groups(0))
    learner.update(make_groups(1))
    copy = learner.take_policy()
    assert copy.adapter is not None
    copy.write(tmp_path / "merged")
    copy.adapter.write(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "policy")
    ids = torch.arange(1, 20)[None]
    before = base(ids).logits
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(ids).logits
    adapted = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    torch.testing.assert_close(adapted(ids).logits, merged, atol=1e-4, rtol=1e-4)
    assert (before - merged).abs().max() > 0.1
    config = adapted.peft_config["default"]
    assert config.base_model_name_or_path == str(tmp_path / "policy") and config.r == 4


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"ranks": 4}, r"unknown key learners\.lora\.ranks; did you mean 'rank'\?"),
        ({"rank": 0}, r"learners\.lora\.rank: got 0; .*greater than or equal to 1"),
        ({"target_modules": ["lm_head"]}, r"'lm_head' is none of a decoder layer's linear layers"),
    ],
)
def test_wrong_settings_are_refused(lora: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lora_config(lora=lora)


def test_a_layer_that_the_policy_lacks_is_named_with_the_nearest(build: Build) -> None:
    with pytest.raises(ConfigError, match=r"has no linear layer 'query_proj'; did you mean '\w+_proj'\?"):
        build(GRPOLearner, lora_config(lora={"target_modules": ["query_proj"]}))


def test_an_offloaded_reference_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"learners\.offload: got reference with learners\.lora.*take reference out"):
        lora_config(learners={"offload": ["reference"]})
