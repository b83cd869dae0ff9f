"""SmolLM2-135M-Instruct on questions of 2Wiki's form, sampled by vLLM's CPU build, and its saved policy in vLLM."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import real_model
from real_model import trajectories

from ragr1_actors.core.types import Completion, Sampling
from ragr1_actors.rollout.engines.base import EngineArguments, PolicyTokenizer
from ragr1_actors.rollout.engines.vllm_engine import VLLMEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    real_model.require_models()
    folder = tmp_path_factory.mktemp("real")
    overrides = {"env_runners.engine": "vllm", **real_model.write_two_wiki(folder)}
    return real_model.train_shortened("smollm2_2wiki", folder / "run", **overrides)


@pytest.mark.parametrize("name", ["demonstrations", "eval_start", "iteration_00001", "eval_rl"])
def test_kinds_of_tokens_are_those_of_their_text(run_dir: Path, name: str) -> None:
    real_model.check_masks(trajectories(run_dir, name))


def test_demonstrations_ask_round_by_round(run_dir: Path) -> None:
    for one in trajectories(run_dir, "demonstrations"):
        asked = [tuple(call.arguments["query"] for call in turn.calls) for turn in one.turns if turn.calls]
        assert asked == [*one.task.plan]
        assert one.answer == one.task.golden_answers[0]


def test_the_end_of_turn_is_trained(run_dir: Path) -> None:
    real_model.check_end_of_turn(trajectories(run_dir, "iteration_00001"))


def test_engine_and_learner_agree(run_dir: Path) -> None:
    real_model.check_logprobs(run_dir, 1e-3)


def test_the_saved_policy_is_the_evaluated_one(run_dir: Path) -> None:
    real_model.check_saved_policy(run_dir, trajectories(run_dir, "eval_rl"))


def test_vllm_loads_the_saved_policy(run_dir: Path) -> None:
    (_, prompt), (_, first_turn), *_ = real_model.parts(trajectories(run_dir, "eval_rl")[0])

    async def generate() -> Completion:
        policy_dir = real_model.newest_policy(run_dir)
        engine = VLLMEngine(
            policy_dir, PolicyTokenizer(policy_dir), EngineArguments(max_rows=2, max_context_tokens=512)
        )
        try:
            sampling = Sampling(max_new_tokens=len(first_turn), temperature=0.0)
            return await engine.generate(prompt, sampling, request_id="again")
        finally:
            await engine.close()

    assert list(asyncio.run(generate()).token_ids) == first_turn
