"""SmolLM2-135M-Instruct by its recipe, shortened: what only a real template, tokenizer and network show."""

from __future__ import annotations

from pathlib import Path

import pytest
import real_model
from real_model import ENCODER, trajectories

pytestmark = [pytest.mark.slow, pytest.mark.engine]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    real_model.require_models()
    folder = tmp_path_factory.mktemp("real")
    return real_model.train_shortened("smollm2_world", folder / "run", **{"retrieval.encoder": str(ENCODER)})


@pytest.mark.parametrize("name", ["demonstrations", "eval_start", "iteration_00001", "eval_rl"])
def test_kinds_of_tokens_are_those_of_their_text(run_dir: Path, name: str) -> None:
    real_model.check_masks(trajectories(run_dir, name))


def test_a_demonstration_searches_and_answers_in_the_real_tokens(run_dir: Path) -> None:
    demonstrations = trajectories(run_dir, "demonstrations")
    assert any(turn.calls and "<information>" in turn.observation for one in demonstrations for turn in one.turns)
    assert any(one.answer for one in demonstrations)


def test_the_end_of_turn_is_trained(run_dir: Path) -> None:
    real_model.check_end_of_turn(trajectories(run_dir, "iteration_00001"))


def test_engine_and_learner_agree(run_dir: Path) -> None:
    real_model.check_logprobs(run_dir, 1e-4)


def test_the_saved_policy_is_the_evaluated_one(run_dir: Path) -> None:
    real_model.check_saved_policy(run_dir, trajectories(run_dir, "eval_rl"))
