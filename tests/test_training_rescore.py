"""``ragr1 rescore``: other rewards for trajectories that a run has kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from learners_common import make_groups
from typer.testing import CliRunner

from envs.rewards import RewardContext, RewardResult
from ragr1_actors.cli.main import app
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.schema import groups_to_record_batch, read_trajectories, write_trajectories
from ragr1_actors.core.types import StopReason, Trajectory

HERE = __name__
SEEN: list[RewardContext] = []


def by_turns(trajectory: Trajectory, context: RewardContext) -> RewardResult:
    """Half for each turn; it sees none of the old rewards."""
    SEEN.append(context)
    assert trajectory.reward == 0.0 and not any(trajectory.turn_rewards)
    return RewardResult(0.5 * len(trajectory.turns), (0.5,) * len(trajectory.turns))


def broken(trajectory: Trajectory, context: RewardContext) -> float:
    """Fails."""
    raise KeyError("judge")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose trajectories have turn rewards; one failed."""
    config = RunConfig.model_validate({"training": {"num_iterations": 10}})
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    (tmp_path / "trajectories").mkdir()
    for name in ("demonstrations", "iteration_00006", "eval_rl", "eval_iteration_00004", "eval_sft"):
        groups = make_groups(len(name))
        first = groups[0].trajectories
        rewarded = replace(first[0], turns=tuple(replace(turn, reward=0.25) for turn in first[0].turns))
        failed = replace(first[1], stop_reason=StopReason.ENGINE_ERROR, reward=0.0)
        groups[0] = replace(groups[0], trajectories=(rewarded, failed, *first[2:]))
        write_trajectories(tmp_path / "trajectories" / f"{name}.arrow", [groups_to_record_batch(groups)])
    return tmp_path


def rows(*arguments: str | Path) -> list[dict[str, float]]:
    done = CliRunner().invoke(app, ["rescore", *map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_rewards_are_computed_again(run_dir: Path, tmp_path: Path) -> None:
    SEEN.clear()
    out = tmp_path / "out"
    found = {row["file"]: row for row in rows(run_dir, "--reward", f"{HERE}:by_turns", "--out", out)}
    assert sorted(found) == sorted(path.name for path in (run_dir / "trajectories").iterdir())
    splits = {(context.split, context.progress) for context in SEEN}
    assert splits == {("demonstration", 0.0), ("train", 0.5), ("eval", 0.0), ("eval", 0.4), ("eval", 1.0)}
    for name, row in found.items():
        old = [t for g in read_trajectories(run_dir / "trajectories" / name) for t in g.trajectories]
        new = [t for g in read_trajectories(out / "trajectories" / name) for t in g.trajectories]
        assert row["num_trajectories"] == len(old) - 1
        kept = [t for t in new if not t.stop_reason.is_failure]
        assert all(t.reward == 0.5 * len(t.turns) and set(t.turn_rewards) == {0.5} for t in kept)
        assert row["after"] == pytest.approx(sum(t.reward for t in kept) / len(kept))
        assert row["before"] == pytest.approx(sum(t.reward for t in old) / (len(old) - 1))
        (failed,) = (t for t in new if t.stop_reason.is_failure)
        assert failed.reward == 0.0
    again = CliRunner().invoke(app, ["rescore", str(run_dir), "--reward", "none", "--out", str(out)])
    assert again.exit_code == 1 or again.exception is not None


def test_how_two_rewards_agree_is_said(run_dir: Path) -> None:
    row = rows(run_dir, "--reward", "none")[0]
    assert (row["after"], row["correlation"]) == (0.0, None)
    assert 0 < row["changed"] < 1
    shown = CliRunner().invoke(app, ["rescore", str(run_dir), "--reward", f"{HERE}:by_turns"])
    assert "iteration_00006.arrow" in shown.stdout and "changed" in shown.stdout


@pytest.mark.parametrize(
    ("reward", "problem"),
    [
        (
            f"{HERE}:broken",
            r"made/\d#\d+: the reward .*broken failed: .*_rescore\.py, line \d+: KeyError: 'judge'; mend it",
        ),
        (f"{HERE}:missing", "missing"),
    ],
)
def test_a_reward_that_fails_is_named(run_dir: Path, reward: str, problem: str) -> None:
    done = CliRunner().invoke(app, ["rescore", str(run_dir), "--reward", reward])
    assert done.exit_code != 0
    with pytest.raises(Exception, match=problem):  # the command's main prints it as one line
        raise done.exception or AssertionError


def test_a_run_without_trajectories_is_said(run_dir: Path) -> None:
    for path in (run_dir / "trajectories").iterdir():
        path.unlink()
    done = CliRunner().invoke(app, ["rescore", str(run_dir), "--reward", "none"])
    assert "has no trajectories; rescore a run with checkpointing.keep_trajectories" in str(done.exception)
