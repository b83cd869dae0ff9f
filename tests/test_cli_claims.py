"""``ragr1 claims``, ``recipes`` and ``new``, as a person calls them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from small_world import a_persons_environment, descendants, ended, wait_for
from typer.testing import CliRunner

from ragr1_actors.cli.main import app
from ragr1_actors.core.resolve import method_recipes, recipe_files

SMALL = (
    "env_runners.num_env_runners=0",
    "learners.num_learners=0",
    "retrieval.num_retrievers=0",
    "policy.options={hidden_size: 32, num_layers: 1}",
    "sft.num_steps=1",
    "sft.num_demonstrations=8",
    "training.num_iterations=1",
    "training.train_batch_size=2",
    "evaluation.num_tasks=4",
)


def invoke(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(words))
    return done.exit_code, done.output + str(done.exception or "")


def test_the_recipes_are_listed_by_method() -> None:
    code, text = invoke("recipes", "--json")
    rows = json.loads(text)
    assert code == 0 and list(rows) == list(recipe_files())
    assert rows["quickstart"]["method"] == "rag_r1" and "15 % fewer" in rows["quickstart"]["claim"]
    assert rows["hotpotqa_small"] | {"description": ""} == {"method": "", "description": "", "claim": ""}
    code, text = invoke("recipes")
    assert code == 0 and text.index("without a method") < text.index("rag_r1") < text.index("quickstart_sq")


def test_a_method_is_copied_once(tmp_path: Path) -> None:
    code, text = invoke("new", "search_r1", str(tmp_path / "mine"))
    assert code == 0
    for name in method_recipes()["search_r1"]:
        assert f"train {tmp_path}/mine/{name}.yaml" in text
    assert {path.name for path in (tmp_path / "mine").iterdir()} == {
        *(f"{name}.yaml" for name in method_recipes()["search_r1"]),
        "search_r1.py",
        "README.md",
        "claim.yaml",
    }
    assert "exists and is not empty; name a new folder" in invoke("new", "search_r1", str(tmp_path / "mine"))[1]
    assert "unknown method 'serch_r1'; did you mean 'search_r1'?" in invoke("new", "serch_r1", str(tmp_path / "b"))[1]
    assert not (tmp_path / "b").exists()
    (tmp_path / "file").write_text("")
    for taken in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/none")):
        assert invoke("new", "search_r1", str(taken))[1].count("; name a") == 1, taken


def test_a_method_is_copied_into_an_empty_folder_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke("new", "gtr", ".")[0] == 0
    assert (Path.cwd() / "gtr.yaml").samefile("gtr.yaml")


def test_an_unknown_method_has_no_claims(tmp_path: Path) -> None:
    assert (
        "unknown method 'rag-r1'; did you mean 'rag_r1'?" in invoke("claims", "rag-r1", "--run-dir", str(tmp_path))[1]
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.engine
@pytest.mark.slow
def test_a_run_ends_with_a_killed_claim(tmp_path: Path) -> None:
    assert invoke("new", "gtr", str(tmp_path / "mine"))[0] == 0
    command = [sys.executable, "-m", "ragr1_actors", "claims", "mine", *SMALL, "sft.num_steps=1000000"]
    metrics = tmp_path / "runs/claims/mine/seed0/sft/metrics.jsonl"
    with (tmp_path / "output").open("w") as output:
        claims = subprocess.Popen(command, cwd=tmp_path, env=a_persons_environment(), stdout=output, stderr=output)
        runs = set[int]()
        try:
            assert wait_for(metrics.exists, 300, claims)
            runs = descendants(claims.pid)
            assert runs
            claims.kill()
            claims.wait()
            assert wait_for(lambda: ended(runs), 120)
        finally:
            claims.kill()
            for pid in runs:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.engine
@pytest.mark.slow
def test_a_claim_is_put_to_the_test_and_goes_on(tmp_path: Path) -> None:
    assert invoke("new", "gtr", str(tmp_path / "mine"))[0] == 0
    command = [sys.executable, "-m", "ragr1_actors", "claims", "mine", *SMALL, "--run-dir", "claims", "--json"]

    def claims() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=tmp_path, env=a_persons_environment(), capture_output=True, text=True, timeout=900, check=False
        )

    first = claims()
    assert "2 runs are to be made, about 0.1 hours on two CPU cores" in first.stderr
    assert "train mine/gtr.yaml" in first.stderr
    verdict = json.loads(first.stdout)  # one line, and nothing of the runs
    assert verdict["method"] == "mine" and verdict["value"] == 0.0 and verdict["holds"] is False
    assert first.returncode == 1
    reports = list((tmp_path / "claims").rglob("report.json"))
    assert sorted(path.parent.name for path in reports) == ["rl", "sft"]
    written = [path.stat().st_mtime_ns for path in reports]
    again = claims()
    assert (again.returncode, again.stderr) == (1, "")
    assert json.loads(again.stdout) == verdict
    assert [path.stat().st_mtime_ns for path in reports] == written
