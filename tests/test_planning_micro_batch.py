"""The budget of a micro-batch is chosen so that the learner fits, and is shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ragr1_actors.cli.main import app
from ragr1_actors.core.config import RunConfig
from ragr1_actors.planning.machine import GIB, GPUS, Machine
from ragr1_actors.planning.plan import learner_fits, make_plan
from ragr1_actors.planning.preflight import choose_micro_batch, fit_micro_batch
from ragr1_actors.training.algorithm_config import AlgorithmConfig

SMOLLM2 = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMOLLM2 |= {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}
LAPTOP = Machine(None, 0, 2, 24 * GIB, 12 * GIB, 500 * GIB)
NUM_PASSAGES = 4400


@pytest.fixture
def smollm2(tmp_path: Path) -> RunConfig:
    (tmp_path / "config.json").write_text(json.dumps(SMOLLM2))
    unset = [f"policy.model={tmp_path}", "policy.dtype=bfloat16", "learners.micro_batch_tokens=null"]
    more = ["learners.num_learners=1", "training.num_minibatches=1", "env_runners.max_context_tokens=1024"]
    more.append("env_runners.max_concurrent_trajectories=32")
    return AlgorithmConfig.from_recipe("quickstart").override([*unset, *more]).freeze()


def test_less_memory_means_shorter_rows_that_fit(smollm2: RunConfig) -> None:
    chosen = []
    for gib in (64, 20, 14):
        machine = replace(LAPTOP, host_bytes=gib * GIB)
        config = choose_micro_batch(smollm2, machine, NUM_PASSAGES)
        assert learner_fits(config, machine, NUM_PASSAGES), gib
        chosen.append(config.learners.micro_batch_tokens)
        assert make_plan(config, machine, NUM_PASSAGES).micro_batch_tokens == chosen[-1]
    assert chosen[0] == 16384
    assert sorted(set(chosen), reverse=True) == chosen


def test_a_row_is_never_shorter_than_the_longest_trajectory(smollm2: RunConfig) -> None:
    tiny = replace(LAPTOP, host_bytes=GIB)
    assert choose_micro_batch(smollm2, tiny, NUM_PASSAGES).learners.micro_batch_tokens == 1024
    problem = next(
        found for found in make_plan(smollm2, tiny, NUM_PASSAGES).problems if found.startswith("host memory")
    )
    assert problem


def test_what_is_set_stays(smollm2: RunConfig, tmp_path: Path) -> None:
    config = AlgorithmConfig(smollm2.model_dump()).learners(micro_batch_tokens=2048).freeze()
    assert choose_micro_batch(config, LAPTOP, NUM_PASSAGES) is config
    assert fit_micro_batch(config, tmp_path) is config


def test_gpus_of_a_cluster_are_not_judged_by_this_machine(tmp_path: Path) -> None:
    config = AlgorithmConfig.from_recipe("search_r1_grpo_7b").override(["learners.micro_batch_tokens=null"]).freeze()
    assert fit_micro_batch(config, tmp_path) is config
    assert config.learners.row_tokens == 16384
    node = Machine(GPUS["a100-80gb"], 8, 96, 1000 * GIB, 500 * GIB, 2000 * GIB)
    chosen = choose_micro_batch(config, node, NUM_PASSAGES).learners.micro_batch_tokens
    assert chosen is not None
    assert chosen in (8192, 16384)


def test_where_rows_do_not_suffice_the_plan_offers_to_compute_activations_again(smollm2: RunConfig) -> None:
    few = {"max_context_tokens": 24576, "max_concurrent_trajectories": 2}
    narrow = AlgorithmConfig(smollm2.model_dump()).env_runners(**few).freeze()
    problem = make_plan(narrow, LAPTOP, NUM_PASSAGES).problems[0]
    assert problem.startswith("host memory: ")
    assert problem.endswith("it fits with learners.gradient_checkpointing=selective")
    sharded = AlgorithmConfig(narrow.model_dump()).learners(zero_stage=3).freeze()
    assert make_plan(sharded, LAPTOP, NUM_PASSAGES).problems[0].endswith("gradient_checkpointing=True")


def test_the_plan_shows_what_it_chose() -> None:
    asked = ["plan", "quickstart", "learners.micro_batch_tokens=null", "--gpus", "0", "--memory", "24"]
    done = CliRunner().invoke(app, [*asked, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["micro_batch_tokens"] == 16384
    assert "learners.micro_batch_tokens" in CliRunner().invoke(app, asked).stdout
