"""The peak of an update on a CPU, as the system counts it, against what ``ragr1 plan`` predicts."""

from __future__ import annotations

import gc
from pathlib import Path

import psutil
import pytest
from learners_common import Build, make_config, make_groups
from transformers import AutoModelForCausalLM, LlamaConfig

from learners.algorithms.grpo import GRPOLearner
from learners.deepspeed.memory import rank_memory
from ragr1_actors.core.models.model_shape import ModelShape
from ragr1_actors.core.models.process_memory import trim_heap

pytestmark = pytest.mark.engine


def begin_peak() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system does not measure the peak of a part of a process")


def peak_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_prediction_is_near_the_peak(tmp_path: Path, build: Build, dtype: str) -> None:
    sizes = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 8, "vocab_size": 1024}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=6, num_key_value_heads=2))
    model.save_pretrained(tmp_path / "policy")
    (tmp_path / "policy/tokenizer.json").write_text("{}", encoding="utf-8")
    groups = make_groups(1, num_groups=2, group_size=8, max_run=128)
    tokens = sum(trajectory.num_tokens for group in groups for trajectory in group.trajectories)
    config = make_config(
        policy={"dtype": dtype},
        learners={"micro_batch_tokens": tokens},
        env_runners={"max_context_tokens": 1024},
        training={"train_batch_size": 2, "group_size": 8, "kl_coeff": 0.0},
    )
    build(GRPOLearner, config).update(make_groups(0))  # what libraries allocate once
    gc.collect()
    trim_heap()
    before = psutil.Process().memory_info().rss
    learner = build(GRPOLearner, config)
    begin_peak()
    learner.update(groups)
    measured = peak_bytes() - before
    expected = rank_memory(ModelShape.of(str(tmp_path / "policy")), config, has_critic=False, on_gpu=False)
    assert expected.peak_bytes == pytest.approx(measured, rel=0.2)
