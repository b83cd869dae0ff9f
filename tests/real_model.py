"""The recipes of the real language model, shortened, and what their runs must hold. They need `models/`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from small_world import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.real.two_wiki import demonstration
from ragr1_actors.core.schema import read_trajectories
from ragr1_actors.core.types import TokenKind, Trajectory
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from ragr1_actors.training.training_run import TrainingRun

POLICY, ENCODER = ROOT / "models/SmolLM2-135M-Instruct", ROOT / "models/all-MiniLM-L6-v2"
END_OF_TURN = "<|im_end|>"
FILMS = [
    ("Red Dawn (film)", "Ana Bell", "Riga"),
    ("The Cup", "Bo Cole", "Oslo"),
    ("Night Road", "Cy Dow", "Bonn"),
    ("Salt", "Dora Falk", "Lyon"),
    ("The Lamp", "Emil Gray", "Turin"),
]


def require_models() -> None:
    """Skip where the folders were not made."""
    for folder in (POLICY, ENCODER):
        if not (folder / "config.json").is_file():
            pytest.skip(f"no {folder.relative_to(ROOT)}: make .venv/.installed-real, python -m benchmarks.real.models")


def write_two_wiki(folder: Path) -> dict[str, str]:
    """Write questions and passages in 2Wiki's form; return the overrides that name them."""
    questions, passages = [], []
    for film, director, city in FILMS:
        name = film.removesuffix(" (film)")
        questions.append(
            {
                "_id": name,
                "type": "compositional",
                "question": f"Where was the director of film {film} born?",
                "answer": city,
                "supporting_facts": [[film, 0], [director, 0]],
                "evidences": [[name, "director", director], [director, "place of birth", city]],
                "context": [],
            }
        )
        passages.append({"title": film, "text": f"{name} is a film of 1999 by {director}."})
        passages.append({"title": director, "text": f"{director} (1950\N{EN DASH}2020) was born in {city}."})
    demonstrations = [demonstration(question, "lines") for question in questions[:4]]
    contents = {"train": questions[:4], "test": questions[4:], "corpus": passages, "demonstrations": demonstrations}
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return {
        "environment.tasks": str(folder / "train.json"),
        "sft.demonstrations": str(folder / "demonstrations.json"),
        "environment.eval_tasks": str(folder / "test.json"),
        "retrieval.corpus": str(folder / "corpus.json"),
    }


def train_shortened(recipe: str, run_dir: Path, **overrides: str) -> Path:
    """Train a recipe of the real model for a step of SFT and an iteration of RL, in this process and in float32."""
    short = {
        "policy.model": str(POLICY),
        "env_runners.num_env_runners": "0",
        "env_runners.weight_transport": "auto",
        "retrieval.num_retrievers": "0",
        "sft.num_steps": "1",
        "sft.batch_size": "2",
        "sft.num_demonstrations": "4",
        "sft.warmup_steps": "0",
        "sft.lr": "1e-5",
        "training.num_iterations": "1",
        "training.train_batch_size": "2",
        "training.group_size": "2",
        "training.num_minibatches": "1",
        "training.lr_schedule": "constant",
        "learners.num_learners": "0",
        "environment.max_turns": "3",
        "training.entropy_coeff": "0.01",  # every group has a gradient, also one whose rewards are equal
        "evaluation.num_tasks": "1",
        "debugging.num_threads": "1",
        **overrides,
    }
    config = AlgorithmConfig.from_recipe(recipe).override([f"{key}={value}" for key, value in short.items()]).freeze()
    run_dir.mkdir()
    TrainingRun(config, run_dir, console=Console(quiet=True)).execute()
    return run_dir


def trajectories(run_dir: Path, name: str) -> list[Trajectory]:
    groups = read_trajectories(run_dir / "trajectories" / f"{name}.arrow")
    return [trajectory for group in groups for trajectory in group.trajectories]


def parts(trajectory: Trajectory) -> list[tuple[TokenKind, list[int]]]:
    """The runs of tokens of one kind, in order."""
    cuts = np.flatnonzero(np.diff(trajectory.kinds)) + 1
    kinds = trajectory.kinds[np.concatenate([[0], cuts])]
    ids = np.split(trajectory.token_ids, cuts)
    return [(TokenKind(kind), part.tolist()) for kind, part in zip(kinds.tolist(), ids, strict=True)]


def check_masks(found: list[Trajectory]) -> None:
    """Every token has the kind of the text that it spells, by Hugging Face's own template and tokenizer."""
    tokenizer = AutoTokenizer.from_pretrained(POLICY)
    for trajectory in found:
        (kind, prompt), *rest = parts(trajectory)
        messages = [{"role": "user", "content": trajectory.task.question}]
        assert kind is TokenKind.PROMPT
        assert prompt == tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        sampled: list[str] = []
        told: list[str] = []
        for kind, ids in rest:
            if kind is TokenKind.MODEL:
                sampled.append(tokenizer.decode(ids).removesuffix(END_OF_TURN))
                told.append("")
            else:
                told[-1] += tokenizer.decode(ids)
        assert sampled == [turn.completion_text for turn in trajectory.turns]
        for turn, text in zip(trajectory.turns, told, strict=True):
            assert turn.observation.strip() in text and text.count("<information>") == bool(turn.calls)


def check_end_of_turn(found: list[Trajectory]) -> None:
    """The end-of-turn token that the policy sampled is its last MODEL token, with a log-prob: it is trained."""
    (end,) = AutoTokenizer.from_pretrained(POLICY).encode(END_OF_TURN)
    places = [(one, at) for one in found for at in np.flatnonzero(one.token_ids == end) if at >= len(parts(one)[0][1])]
    sampled = [(one, at) for one, at in places if one.kinds[at] != TokenKind.NOTICE]
    assert sampled
    for one, at in sampled:
        assert one.kinds[at] == TokenKind.MODEL and one.logprobs[at] < 0 <= one.policy_versions[at]
    framed = [one.kinds[at - 1] for one, at in places if one.kinds[at] == TokenKind.NOTICE]
    assert set(framed) <= {TokenKind.NOTICE}  # behind the notice in a user's message, not behind the turn


def check_logprobs(run_dir: Path, limit: float) -> None:
    """Engine and learner agree on the log-probs of the sampled tokens."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["learner/logprob_gap_mean"] for line in lines if "learner/logprob_gap_mean" in line]
    assert gaps and max(gaps) < limit


def newest_policy(run_dir: Path) -> Path:
    return max(run_dir.glob("checkpoints/step_*/policy"), key=lambda path: int(path.parent.name.removeprefix("step_")))


def check_saved_policy(run_dir: Path, found: list[Trajectory]) -> None:
    """The saved policy is a Hugging Face folder that was trained, and whose best tokens are those it evaluated with."""
    saved = AutoModelForCausalLM.from_pretrained(newest_policy(run_dir), dtype=torch.float32).eval()
    before = AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    assert any(
        not torch.equal(ours, theirs) for ours, theirs in zip(saved.parameters(), before.parameters(), strict=True)
    )
    same: list[bool] = []
    for trajectory in found:
        ids = torch.from_numpy(trajectory.token_ids.copy()).long()
        with torch.no_grad():
            best = saved(ids[None]).logits[0].argmax(-1)
        at = torch.from_numpy(trajectory.kinds == TokenKind.MODEL).nonzero()[:, 0]
        same += (best[at - 1] == ids[at]).tolist()
    assert np.mean(same) > 0.95  # all but near ties
