"""The comparison with TRL: what each side is told, what is read of it, and a small pair where TRL is installed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.peers import ratios
from ragr1_actors.core.errors import UserError
from ragr1_actors.core.types import StopReason, Task, TokenKind, Trajectory
from ragr1_actors.training.algorithm_config import AlgorithmConfig

P, M, FOUND, NOTE = (int(kind) for kind in (TokenKind.PROMPT, TokenKind.MODEL, TokenKind.OBSERVATION, TokenKind.NOTICE))


def trajectory(kinds: list[int]) -> Trajectory:
    """Ids 0, 1, 2, ... of these kinds."""
    zeros, ids = np.zeros(len(kinds), np.float32), np.arange(len(kinds), dtype=np.int32)
    kinds_array = np.array(kinds, np.uint8)
    return Trajectory("t/0", Task("t", "t?", ("a",)), ids, kinds_array, zeros, ids, (), StopReason.ANSWERED, 0.0)


def test_trl_is_given_our_prompts_and_what_our_searches_found() -> None:
    workload = replace(ratios.WORKLOADS["search_tiny"], num_tasks=1, group_size=2)
    searched, answered = trajectory([P, P, M, M, FOUND, M, M, FOUND, NOTE, M]), trajectory([P, M])
    work = ratios.work_of(workload, Path("policy"), [[[searched, searched]], [[answered, answered]]])
    assert work["tasks"] == [
        {"prompt_ids": [0, 1], "observations": [[4], [7, 8]]},
        {"prompt_ids": [0], "observations": []},
    ]
    assert (work["batch_size"], work["num_iterations"], work["dtype"]) == (2, 2, "float32")


def peer_line(seconds: float, num_tokens: int) -> str:
    parts = {"generate_s": seconds / 2, "learn_s": seconds / 4}
    return json.dumps({"iteration_s": seconds, **parts, "num_tokens": num_tokens, "num_sampled": 5}) + "\n"


def test_the_iterations_of_both_sides_are_read_but_for_the_first() -> None:
    printed = (
        f"Loading weights: 100%\n{peer_line(9.0, 1)}{peer_line(2.0, 20)}a warning\n{peer_line(4.0, 30)}{{'loss': 1}}"
    )
    theirs = ratios.peer_side(printed, 7.0)
    assert (theirs.tokens, theirs.iteration_s, theirs.peak_bytes) == ([(20, 5), (30, 5)], 3.0, 7.0)
    assert theirs.parts == {"generate": 1.5, "learn": 0.75}
    with pytest.raises(UserError, match=r"got no second iteration from trl_grpo\.py, .*no memory"):
        ratios.peer_side(peer_line(9.0, 1) + "no memory", 7.0)

    rows = [
        {"stage": "eval"},
        *({"time/iteration_s": s, "time/sample_s": s / 2, "time/learn_s": 1.0} for s in (9, 2, 4)),
    ]
    batch = [[trajectory([P, M]), trajectory([P, M, M])]]
    ours = ratios.our_side(rows, [batch, batch, batch], 8.0)
    assert (ours.tokens, ours.iteration_s) == ([(5, 3), (5, 3)], 3.0)
    assert ours.parts == {"sample": 1.5, "learn": 1.0, "publish": 0.0, "write": 0.0}


@pytest.mark.parametrize("name", list(ratios.WORKLOADS))
def test_our_command_is_a_run_of_the_recipe_in_one_process(name: str) -> None:
    workload = ratios.WORKLOADS[name]
    *start, option, run_dir = ratios.our_command(workload, Path("runs/pair"))
    assert (start[1:5], option, run_dir) == (
        ["-m", "ragr1_actors", "train", workload.recipe],
        "--run-dir",
        "runs/pair",
    )
    config = AlgorithmConfig.from_recipe(workload.recipe).override(start[5:]).freeze()
    fleets = config.env_runners.num_env_runners, config.learners.num_learners, config.retrieval.num_retrievers
    assert fleets == (0, 0, 0)
    assert config.training.train_batch_size * config.training.group_size == workload.batch_size


def test_every_metric_is_described() -> None:
    assert all(metric.replace("_memory", "") in (ratios.__doc__ or "") for metric in ratios.METRICS)
    with pytest.raises(UserError, match="got --only no_such"):
        next(ratios.run(only="no_such"))


def test_a_missing_environment_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(ratios, "PYTHON", tmp_path / "python")
    with pytest.raises(UserError, match=r"needs .*python: make \.venv-trl/\.installed"):
        ratios.compare(ratios.WORKLOADS["single_tiny"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single_tiny", "search_tiny"])
def test_both_sides_compute_the_same_tokens(name: str) -> None:
    if not ratios.PYTHON.exists():
        pytest.skip("no .venv-trl: make .venv-trl/.installed")
    (found,) = ratios.run(only=f"vs_trl_{name}", quick=True)  # fails if the tokens differ
    assert found.ours > 0 and found.theirs > 0
