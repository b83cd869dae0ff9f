"""``ragr1 rescore``: other rewards for trajectories that a run has kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from learners_common import make_groups
from small_world import invoke
from typer.testing import CliRunner

from envs.measures import RewardContext, RewardResult
from ragr1_actors.cli.main import app
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import ServiceError
from ragr1_actors.core.schema import groups_to_record_batch, read_trajectories, write_trajectories
from ragr1_actors.core.types import StopReason, Trajectory
from ragr1_actors.evaluation.evaluate import _compared, _rescored

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


def away(trajectory: Trajectory, context: RewardContext) -> float:
    """Its judge does not answer."""
    raise ServiceError("http://judge: no answer")


def only_of_shorter_files(trajectory: Trajectory, context: RewardContext) -> float:
    """Fails for the last file."""
    if context.split == "train":
        raise KeyError("judge")
    return 1.0


class Locked:
    """One at a time; the lock belongs to the event loop in which it was first waited for."""

    def __init__(self, options: Mapping[str, object]) -> None:
        self.loop = asyncio.get_running_loop()  # as a client's constructor asks for it
        self.lock = asyncio.Lock()

    async def __call__(self, trajectory: Trajectory, context: RewardContext) -> float:
        async with self.lock:
            await asyncio.sleep(0)
        return 1.0


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run whose trajectories have turn rewards; one failed."""
    config, folder = RunConfig.model_validate({"training": {"num_iterations": 10}}), tmp_path / "run"
    (folder / "trajectories").mkdir(parents=True)
    (folder / "config.yaml").write_text(config.to_yaml())
    (folder / "trajectories" / ".writing_1a2b3c4d_iteration_00007.arrow").write_text("half")
    for name in ("demonstrations", "iteration_00006", "eval_rl", "eval_iteration_00004", "eval_sft"):
        groups = make_groups(len(name))
        first = groups[0].trajectories
        rewarded = replace(first[0], turns=tuple(replace(turn, reward=0.25) for turn in first[0].turns))
        failed = replace(first[1], stop_reason=StopReason.ENGINE_ERROR, reward=0.0)
        groups[0] = replace(groups[0], trajectories=(rewarded, failed, *first[2:]))
        write_trajectories(folder / "trajectories" / f"{name}.arrow", [groups_to_record_batch(groups)])
    return folder


def rows(*arguments: str | Path) -> list[dict[str, float]]:
    done = CliRunner().invoke(app, ["rescore", *map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_rewards_are_computed_again(run_dir: Path, tmp_path: Path) -> None:
    SEEN.clear()
    out = tmp_path / "out"
    found = {row["file"]: row for row in rows(run_dir, "--reward", f"{HERE}:by_turns", "--out", out)}
    assert sorted(found) == sorted(path.name for path in (run_dir / "trajectories").glob("[!.]*"))
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
    assert " is there already; name another --out" in invoke(
        "rescore", str(run_dir), "--reward", "none", "--out", str(out)
    )


def test_what_is_written_is_whole_or_absent(run_dir: Path, tmp_path: Path) -> None:
    command, out = ["rescore", str(run_dir), "--out", str(tmp_path / "out"), "--reward"], tmp_path / "out"
    failed = invoke(*command, f"{HERE}:only_of_shorter_files")
    assert "the reward" in failed and "failed: " in failed
    assert [*out.iterdir()] == []
    assert "iteration_00006.arrow" in invoke(*command, "none")
    assert len([*(out / "trajectories").iterdir()]) == 5 and [*out.iterdir()] == [out / "trajectories"]


@pytest.mark.parametrize("inside", [".", "trajectories", "other/../new"])
def test_nothing_is_written_into_the_run_itself(run_dir: Path, inside: str) -> None:
    before = sorted(run_dir.rglob("*"))
    said = invoke("rescore", str(run_dir), "--reward", "none", "--out", str(run_dir / inside))
    assert (
        said
        == f"error: --out: got {run_dir / inside}, which is in the run's own folder; name a folder outside of {run_dir}"
    )
    assert sorted(run_dir.rglob("*")) == before


def test_one_event_loop_serves_all_files(run_dir: Path) -> None:
    assert {row["after"] for row in rows(run_dir, "--reward", f"{HERE}:Locked")} == {1.0}


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("environment.reward=none", "got environment.reward, which --reward replaces; leave it out"),
        ("training.lr=1", "got training.lr, which has no effect on rewards; leave it out"),
        ("environment.max_turns=3", "got environment.max_turns, which has no effect on rewards; leave it out"),
        ("learners.nope=1", "unknown key learners.nope"),
    ],
)
def test_an_override_without_effect_is_refused(run_dir: Path, override: str, problem: str) -> None:
    said = invoke("rescore", str(run_dir), "--reward", f"{HERE}:by_turns", override)
    assert said.startswith(f"error: {problem}")


def test_options_and_models_of_the_reward_are_taken(run_dir: Path) -> None:
    models = "environment.models.judge={url: http://nowhere.invalid/v1, model: m}"
    rows(run_dir, "--reward", f"{HERE}:Locked", "environment.reward_options.least=3", models)


def test_the_trajectory_is_named_where_a_service_is_away(run_dir: Path) -> None:
    done = CliRunner().invoke(app, ["rescore", str(run_dir), "--reward", f"{HERE}:away"])
    with pytest.raises(ServiceError, match=r"^made/\d#\d+: http://judge: no answer$"):
        raise done.exception or AssertionError


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


async def test_the_parts_of_the_new_reward_replace_those_of_the_old_one() -> None:
    async def reward(trajectory: Trajectory, context: RewardContext) -> RewardResult:
        assert "reward_right" not in trajectory.metrics and trajectory.metrics["time/trajectory_s"] == 2.0
        return RewardResult(0.7, parts={"format": 0.2, "style": 0.5})

    groups = [
        replace(one, trajectories=tuple(replace(t, metrics=OLD_METRICS, reward=0.1) for t in one.trajectories))
        for one in make_groups(0)
    ]
    found = await _rescored(groups, reward, RewardContext("train"))  # type: ignore[arg-type]
    expected = {"time/trajectory_s": 2.0, "reward_format": 0.2, "reward_style": 0.5}
    assert all(one.metrics == expected and one.reward == 0.7 for group in found for one in group.trajectories)
    before, after = ([replace(one[0], trajectories=one[0].trajectories[:3])] for one in (groups, found))
    assert np.full(3, 0.1).std() > 0  # by rounding, though all are equal
    assert _compared("mine", before, after).correlation is None


OLD_METRICS = {"time/trajectory_s": 2.0, "reward_format": 0.9, "reward_right": 0.9}
