"""What the claims say of runs: made-up run directories, whose figures are known."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_world import wait_for

from envs.checker import made_up
from ragr1_actors.core.errors import ConfigError, DataError, RagR1Error
from ragr1_actors.core.schema import groups_to_record_batch, write_trajectories
from ragr1_actors.core.types import TrajectoryGroup
from ragr1_actors.lab import claim as claims
from ragr1_actors.lab.claim import Claim, ClaimCheck, ClaimTest, EvaluatedRun, RunPlan, judge, make_runs, read_claim
from ragr1_actors.runs.report import EvalResult, RunReport, StageReport, TaskCounts, write_report
from ragr1_actors.training.algorithm_config import AlgorithmConfig

KEYS: dict[str, Any] = {
    "claim": "better",
    "paper": "by much",
    "differs": "all",
    "hours": 1.5,
    "runs": {"start": {"recipe": "quickstart"}, "ours": {"recipe": "quickstart", "set": {"policy.model": "{start}"}}},
    "checks": [{"measure": "em", "of": "ours", "minus": "start", "at_least": 0}],
}


def write_run(path: Path, right: Sequence[bool], ndcg: float = 0.5, rewards: Sequence[float] = ()) -> EvaluatedRun:
    """Write a run whose evaluation answered tasks rightly or not, after iterations with mean ``rewards``."""
    groups = []
    for number, is_right in enumerate(right):
        task = replace(made_up("").task, task_id=f"t/{number}")
        answer = task.golden_answers[0] if is_right else "Oslo"
        one = replace(made_up(answer), task=task, metrics={"ndcg": ndcg})
        groups.append(TrajectoryGroup(task, (one,)))
    em = sum(right) / len(right)
    result = EvalResult(em, em, 1.0, 1.0, 1.0, 2.0, len(right), measures={"ndcg": ndcg})
    path.mkdir(parents=True)
    write_report(path, RunReport((StageReport("rl", result, 1.0),), 1.0, 1, TaskCounts(1, 1, 0, 0, 0)))
    (path / "trajectories").mkdir()
    write_trajectories(path / "trajectories" / "eval_rl.arrow", [groups_to_record_batch(groups)])
    rows = [
        {"stage": "rl", "iteration": number, "time/iteration_s": 1.0, "rollout/reward": reward}
        for number, reward in enumerate(rewards, start=1)
    ]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return EvaluatedRun(path)


def check(**keys: Any) -> ClaimCheck:
    return ClaimCheck.read({"measure": "em", "of": "ours", **keys}, "checks")


def runs_of(folder: Path, **right: Sequence[Sequence[bool]]) -> Mapping[str, list[EvaluatedRun]]:
    return {
        name: [write_run(folder / name / str(seed), answers) for seed, answers in enumerate(seeds)]
        for name, seeds in right.items()
    }


def test_a_number_has_a_limit(tmp_path: Path) -> None:
    found = runs_of(tmp_path, ours=[[True, True], [True, False]])
    assert judge(check(at_least=0.75), found).holds and not judge(check(at_least=0.76), found).holds
    assert judge(check(at_most=0.75), found).holds and not judge(check(at_most=0.74), found).holds
    verdict = judge(check(at_least=0.75), found)
    assert (verdict.value, verdict.per_seed, verdict.interval) == (0.75, (1.0, 0.5), None)
    assert verdict.check == "em of ours ≥ 0.75"
    assert judge(check(measure="ndcg", at_least=0.5), found).holds  # of the environment


def test_a_ratio_is_that_of_the_means(tmp_path: Path) -> None:
    found = runs_of(tmp_path, ours=[[True, False], [False, False]], base=[[True, True], [False, True]])
    verdict = judge(check(over="base", at_most=0.34), found)
    assert verdict.value == pytest.approx(0.25 / 0.75) and verdict.holds
    assert verdict.per_seed == (0.5, 0.0)
    none = runs_of(tmp_path / "none", ours=[[True]], base=[[False]])
    assert not judge(check(over="base", at_most=0.34), none).holds


def test_a_difference_is_paired_by_task_and_seed(tmp_path: Path) -> None:
    ours, base = [True] * 60 + [False] * 20, [False] * 30 + [True] * 30 + [False] * 20
    found = runs_of(tmp_path, ours=[ours, base], base=[base, base])
    verdict = judge(check(minus="base", at_least=0.1, counts="interval"), found)
    assert verdict.value == pytest.approx(30 / 160) and verdict.per_seed == (0.375, 0.0)
    assert verdict.interval is not None and 0.1 < verdict.interval.low < 30 / 160 < verdict.interval.high < 0.3
    assert verdict.holds
    assert not judge(check(minus="base", at_least=0.18, counts="interval"), found).holds
    assert judge(check(minus="base", at_least=0.18), found).holds
    assert judge(check(minus="base", at_most=0.26, counts="interval"), found).holds
    assert not judge(check(minus="base", at_most=0.2, counts="interval"), found).holds


def test_runs_without_a_common_task_are_refused(tmp_path: Path) -> None:
    found = runs_of(tmp_path, ours=[[True]], base=[[True]])
    (tmp_path / "base" / "0" / "trajectories" / "eval_rl.arrow").unlink()
    task = replace(made_up("").task, task_id="t/other")
    group = TrajectoryGroup(task, (replace(made_up("Oslo"), task=task, metrics={"ndcg": 0.5}),))
    write_trajectories(tmp_path / "base/0/trajectories/eval_rl.arrow", [groups_to_record_batch([group])])
    with pytest.raises(DataError, match="no evaluated task in common"):
        judge(check(minus="base", at_least=0), found)


def test_iterations_until_a_metric_has_a_value(tmp_path: Path) -> None:
    found = {
        "ours": [write_run(tmp_path / "ours", [True], rewards=[0.0, 0.9, 0.9, 0.9, 0.2])],
        "base": [write_run(tmp_path / "base", [True], rewards=[0.0, 0.1, 0.9, 0.1, 0.2, 0.1, 0.1, 0.1])],
    }
    until = check(measure="rollout/reward", reaches=0.85, over="base", at_most=0.5)
    assert (
        judge(until, found).value == 4 / 9 and judge(until, found).holds
    )  # a single 0.9 does not count; never: all and one
    assert str(until) == "iterations until rollout/reward is 0.85 of ours ÷ base ≤ 0.5"


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"at_least": 1, "at_most": 2}, "expected one of at_least and at_most"),
        ({}, "expected one of at_least and at_most"),
        ({"at_least": 1, "minus": "a", "over": "b"}, "expected one of minus and over"),
        ({"at_least": 1, "counts": "interval"}, "give minus"),
        ({"at_least": 1, "minus": "a", "reaches": 1.0, "counts": "interval"}, "no reaches"),
    ],
)
def test_a_check_that_cannot_be_is_refused(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        check(**keys)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"checks": [{"measure": "em", "of": "our", "at_least": 0}]}, "there is no run our; did you mean .ours"),
        ({"hours": 0}, "hours"),
        ({"cliam": "x"}, "unknown key .*cliam"),
        (
            {"checks": [{"measure": "em", "of": "ours", "at_lest": 0}]},
            "unknown key x.checks.0.at_lest; did you mean .at_l",
        ),
        ({"checks": [{"measure": "em", "of": "our", "at_least": 0}]}, "^x: there is no run our"),
        (
            {"runs": KEYS["runs"] | {"../other": {"recipe": "quickstart"}}},
            "the run '../other' cannot be a folder's name",
        ),
    ],
)
def test_a_claim_that_cannot_be_is_refused(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        Claim.read(KEYS | keys, "x")


def test_an_unknown_method_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown method 'rag_r2'; did you mean 'rag_r1'"):
        read_claim("rag_r2")
    with pytest.raises(ConfigError, match=r"has no claim.yaml; write it as"):
        read_claim(str(tmp_path))


def test_a_folder_has_a_claim_of_its_own_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("mine", "rag_r1"):
        Path(folder).mkdir()
        Path(folder, "claim.yaml").write_text(json.dumps(KEYS))
    assert {plan.recipe for plan in read_claim("mine").runs.values()} == {"quickstart"}
    Path("mine", "quickstart.yaml").write_text("{}")
    assert {plan.recipe for plan in read_claim("mine").runs.values()} == {"mine/quickstart.yaml"}
    assert ClaimTest.plan("./mine", tmp_path / "runs", []).runs[0].run_dir == tmp_path / "runs/mine/seed0/start"
    assert read_claim("rag_r1").claim != KEYS["claim"]  # the project's, since a folder of this name is ambiguous
    with pytest.raises(ConfigError, match="the project has a method of this name; rename the folder"):
        read_claim("./rag_r1")
    Path("mine", "claim.yaml").write_text(
        json.dumps(KEYS | {"runs": KEYS["runs"] | {"other": {"recipe": "quickstrat"}}})
    )
    with pytest.raises(ConfigError, match=r"mine/claim.yaml: there is no recipe quickstrat; did you mean .quickstart"):
        read_claim("mine")
    Path("mine", "claim.yaml").write_text(json.dumps(KEYS | {"runs": KEYS["runs"] | {"other": {"recipe": "claim"}}}))
    with pytest.raises(ConfigError, match=r"there is no recipe claim"):
        read_claim("mine")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", r"^mine/claim.yaml: got nothing, expected claim, paper, .*; write it as the docstring"),
        ("- claim", r"^mine/claim.yaml: got \['claim'\], expected claim, paper"),
        ("hours: [1\nruns: 2", "at line 2, column 5: .*; mend it there"),
        ({"training.lrr": 1}, "^claim.yaml of mine, run ours: unknown key training.lrr; did you mean 'lr'"),
        (
            {"policy.model": "{strat}"},
            r'run ours: policy.model: got \{strat\}, expected .* such as "\{start\}", in quotes',
        ),
        ({"policy.model": "{ours}"}, r"run ours: policy.model: got \{ours\}, expected a model or an earlier run"),
        (
            {"environment.env": "nowhere:Mine"},
            "run ours: environment.env.*put nowhere.py beside the recipe or into the folder",
        ),
        (
            '{"runs": {"a": {"recipe": "quickstart", "set": {"policy.model": 2020-01-01}}}}',
            "model: got 2020-01-01, a date",
        ),
    ],
)
def test_a_claim_is_checked_before_its_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | dict[str, Any], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").mkdir()
    if isinstance(content, dict):
        runs = {"start": {"recipe": "quickstart"}, "ours": {"recipe": "quickstart", "set": content}}
        content = json.dumps(KEYS | {"runs": runs})
    Path("mine", "claim.yaml").write_text(content)
    with pytest.raises(ConfigError, match=problem):
        ClaimTest.plan("./mine", tmp_path / "runs", [])
    assert not Path("runs").exists()


def test_a_wrong_word_of_the_command_is_not_the_claims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^unknown key training.lrr"):
        ClaimTest.plan("rag_r1", tmp_path, ["training.lrr=1"])
    monkeypatch.setattr(claims, "read_claim", lambda method: Claim.read(KEYS | {"checks": [WRONG]}, method))
    with pytest.raises(ConfigError, match="run ours: there is no measure rouns; did you mean 'rounds'"):
        ClaimTest.plan("mine", tmp_path, [])


WRONG = {"measure": "rouns", "of": "ours", "at_least": 0}


def test_a_run_of_another_configuration_is_not_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test = planned(monkeypatch, tmp_path)
    run = test.runs[0]
    write_run(run.run_dir, [True])
    (run.run_dir / "config.yaml").write_text(
        AlgorithmConfig.from_recipe("quickstart").override(["training.lr=1"]).freeze().to_yaml()
    )
    assert ClaimTest.plan("mine", tmp_path, ["training.lr=1"]) == test
    with pytest.raises(ConfigError, match=r"run start: .*/seed0/start holds a run with another training.lr; give"):
        ClaimTest.plan("mine", tmp_path, ["training.lr=0.5"])


def test_a_measure_that_no_run_has_names_the_nearest(tmp_path: Path) -> None:
    found = runs_of(tmp_path, ours=[[True]], base=[[True]])
    for keys in ({}, {"minus": "base"}):
        with pytest.raises(DataError, match=r"no ndgc; did you mean .ndcg"):
            judge(check(measure="ndgc", at_least=0, **keys), found)


def planned(monkeypatch: pytest.MonkeyPatch, root: Path) -> ClaimTest:
    monkeypatch.setattr(claims, "read_claim", lambda method: Claim.read(KEYS | {"seeds": 2}, method))
    return ClaimTest.plan("mine", root, ["training.lr=1"])


def test_each_seed_starts_from_its_own_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    test = planned(monkeypatch, tmp_path)
    assert [run.run_dir for run in test.runs] == [
        tmp_path / "mine" / seed / name for seed in ("seed0", "seed1") for name in ("start", "ours")
    ]
    words = test.runs[3].command
    assert f'policy.model="{tmp_path}/mine/seed1/start"' in words and "--auto-resume" in words
    assert words.index("training.lr=1") > 0 and words.index("debugging.seed=1") > 0


def test_directories_of_runs_are_put_into_lists_and_mappings() -> None:
    keys = {"environment.tasks": [{"source": "my:Explored", "options": {"run": "{start}/x", "k": 3}}]}
    filled = RunPlan(recipe="quickstart", set=keys).overrides({"start": Path("/runs/a")})
    assert filled == {"environment.tasks": [{"source": "my:Explored", "options": {"run": "/runs/a/x", "k": 3}}]}


def test_runs_that_are_done_are_not_made_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    test = planned(monkeypatch, tmp_path)
    assert test.hours_left == 1.5
    for run in test.runs[:3]:
        write_run(run.run_dir, [True])
    assert test.hours_left == 1.5 / 4
    made: list[str] = []
    monkeypatch.setattr(claims, "_train", lambda run, output: made.append(run.name) or 3)
    seen: list[str] = []
    with pytest.raises(RagR1Error, match="the run ours of mine ended with exit status 3"):
        make_runs(test, lambda run: seen.append(str(run.run_dir)))
    assert seen == [str(test.runs[3].run_dir)] and len(made) == 1
    write_run(test.runs[3].run_dir, [True])
    make_runs(test, lambda run: seen.append(run.name))
    assert len(made) == 1 and [verdict.holds for verdict in test.verdicts()] == [True]


def test_an_interrupt_is_given_on_and_its_checkpoint_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    begun, saved = tmp_path / "begun", tmp_path / "saved"
    program = tmp_path / "python"
    program.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, signal, sys, time\n"
        "def end(number, frame):\n"
        "    time.sleep(0.5)\n"
        f"    pathlib.Path({str(saved)!r}).touch()\n"
        "    sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, end)\n"
        f"pathlib.Path({str(begun)!r}).touch()\n"
        "signal.pause()\n"
    )
    program.chmod(0o755)

    class Interrupted(subprocess.Popen[bytes]):
        waits = 0

        def wait(self, timeout: float | None = None) -> int:
            self.waits += 1
            if self.waits == 1:
                assert wait_for(begun.exists, 60)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(claims.sys, "executable", str(program))
    monkeypatch.setattr(claims.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_runs(planned(monkeypatch, tmp_path), lambda run: None)
    assert saved.exists()
