"""A run whose files were damaged: one sentence that names the file and says what to do, and doing it helps."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file
from small_world import ROOT, a_persons_environment, invoke, make_config, make_files
from transformers import GPT2Config

from ragr1_actors.cli.evaluate import NO_EXAMPLE, example_question
from ragr1_actors.core.errors import ConfigError, DataError, RunDirectoryError
from ragr1_actors.rollout.engines.base import PolicyTokenizer
from ragr1_actors.runs.checkpoint import CheckpointStore
from ragr1_actors.runs.report import read_report
from ragr1_actors.runs.run_directory import create_run_directory, only_process_in
from ragr1_actors.runs.telemetry.metrics import read_metrics
from ragr1_actors.training.stages import TrainingRun
from ragr1_actors.training.tiny_policy import make_tiny_policy

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three iterations with the checkpoints ``step_2`` and ``step_3``."""
    files = tmp_path_factory.mktemp("files")
    config = make_config(make_files(files), {"num_steps": 2, "num_demonstrations": 16}, num_iterations=3)
    config = config.model_copy(
        update={
            "checkpointing": config.checkpointing.model_copy(update={"interval": 1}),
            "environment": config.environment.model_copy(update={"eval_tasks": ""}),
        }
    )
    create_run_directory(config, files / "run")
    TrainingRun(config, files / "run", Console(quiet=True)).execute()
    return files / "run"


@pytest.fixture
def run_dir(finished: Path, tmp_path: Path) -> Path:
    """A copy of it that has not written its report yet."""
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "report.json").unlink()
    return tmp_path / "run"


def resume(run_dir: Path) -> str:
    return invoke("train", "quickstart", "--run-dir", str(run_dir), "--resume")


LINES = [
    b'{"stage": \n',
    b"\xff\xfe\x00\n",
    b"[]\n",
    b'{"stage": "rl"}\n',
    b'{"stage": "rl", "iteration": 1, "loss": "low"}\n',
    b'{"stage": "rl", "iteration": 1, "loss": [1]}\n',
    b"[" * 100_000 + b"\n",
    b"1" * 5000 + b"\n",
]


@pytest.mark.parametrize("line", LINES, ids=range(len(LINES)))
def test_a_damaged_line_of_metrics_is_named(run_dir: Path, line: bytes) -> None:
    path = run_dir / "metrics.jsonl"
    path.write_bytes(line + path.read_bytes())
    refused = resume(run_dir)
    assert refused.startswith(f"error: {path}"), refused
    assert "delete the" in refused
    assert "\n" not in refused


STATES = [b"", b"\xff\x00", b"{}", b"[1", b"3", b"[" * 100_000, b'{"sft_step": "x"}']


@pytest.mark.parametrize("state", STATES, ids=range(len(STATES)))
def test_a_damaged_state_names_itself_and_the_checkpoint_before(run_dir: Path, state: bytes) -> None:
    path = run_dir / "checkpoints" / "step_3" / "state.json"
    path.write_bytes(state)
    refused = resume(run_dir)
    assert refused.startswith(f"error: {path}"), refused
    assert f"delete the folder {path.parent} and --resume goes on from step_2" in refused
    assert "\n" not in refused


@pytest.mark.parametrize("key", ["extra", "sampler"])
def test_a_state_with_something_else_in_it(run_dir: Path, key: str) -> None:
    path = run_dir / "checkpoints" / "step_3" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: {"wall_s": 1}}))
    assert f"delete the folder {path.parent} and --resume goes on from step_2" in resume(run_dir)


@pytest.mark.parametrize("damage", ["cut", "gone", "other"])
def test_damaged_tensors_and_going_on_without_them(run_dir: Path, damage: str) -> None:
    newest = run_dir / "checkpoints" / "step_3"
    path = newest / "learner.safetensors"
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:1000])
    elif damage == "gone":
        path.unlink()
    else:
        shutil.copyfile(newest / "policy" / "model.safetensors", path)  # whole, but no learner's
    refused = resume(run_dir)
    assert refused.startswith("error: ")
    assert f"delete the folder {newest} and --resume goes on from step_2" in refused
    shutil.rmtree(newest)
    assert "RL iteration 2" in resume(run_dir)
    assert [row["iteration"] for row in read_metrics(run_dir) if row["stage"] == "rl"] == [1, 2, 3]
    assert read_report(run_dir).tasks.trained == 24


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def swap_weights(path: Path) -> None:
    other = path.parent.with_name("other")
    make_tiny_policy(other, ["Riga"], seed=0, vocab_size=300, hidden_size=32, num_layers=2, num_heads=2)
    shutil.copyfile(other / path.name, path)


def drop_weight(path: Path) -> None:
    tensors = load_file(path)
    save_file({name: tensors[name] for name in sorted(tensors)[1:]}, path)


def set_key(path: Path, key: str, value: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))


WEIGHTS = "model.safetensors"
DAMAGED_POLICIES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "weights are cut": (WEIGHTS, cut, "{path} cannot be read: "),
    "weights are empty": (WEIGHTS, lambda path: path.write_bytes(b""), "{path} cannot be read: "),
    "weights are no weights": (WEIGHTS, lambda path: path.write_bytes(b"\xff" * 100), "{path} cannot be read: "),
    "weights are gone": (WEIGHTS, Path.unlink, "cannot load a model from {path.parent}: "),
    "weights of other shapes": (WEIGHTS, swap_weights, "of another shape, such as model"),
    "a weight is gone": (WEIGHTS, drop_weight, "(2 missing, such as lm_head.weight)"),
    "config is cut": ("config.json", cut, "{path} cannot be read: "),
    "config is empty": ("config.json", lambda path: path.write_text(""), "{path} cannot be read: "),
    "config is a list": ("config.json", lambda path: path.write_text("[]"), "{path} cannot be read: "),
    "config of a GPT-2": ("config.json", lambda path: GPT2Config().save_pretrained(path.parent), "missing, such as"),
    "config of a llama": ("config.json", lambda path: set_key(path, "model_type", "llama"), "too many, such as"),
    "config of a CLIP": ("config.json", lambda path: set_key(path, "model_type", "clip"), "cannot load a model from"),
    "config without heads": (
        "config.json",
        lambda path: set_key(path, "num_attention_heads", 0),
        "cannot load a model",
    ),
    "config with a word": (
        "config.json",
        lambda path: set_key(path, "hidden_size", "wide"),
        "expected int, got str",
    ),
    "tokenizer is cut": ("tokenizer.json", cut, "{path} cannot be read: "),
    "tokenizer is empty": ("tokenizer.json", lambda path: path.write_text(""), "{path} cannot be read: "),
    "tokenizer has no tokens": ("tokenizer.json", lambda path: path.write_text("{}"), "cannot load a tokenizer from"),
    "tokenizer of no known sort": (
        "tokenizer.json",
        lambda path: set_key(path, "model", {"type": "none"}),
        "cannot load a tokenizer from",
    ),
    "tokenizer's config is cut": ("tokenizer_config.json", cut, "{path} cannot be read: "),
}


@pytest.mark.parametrize("damage", DAMAGED_POLICIES)
def test_a_damaged_policy_is_one_sentence_for_every_command(run_dir: Path, damage: str) -> None:
    name, change, problem = DAMAGED_POLICIES[damage]
    path = run_dir / "checkpoints" / "step_3" / "policy" / name
    change(path)
    new = run_dir.with_name("new")
    for command in (
        ["ask", str(run_dir), "Where is the lamp ?"],
        ["evaluate", str(run_dir)],
        ["train", "quickstart", f"policy.model={path.parent}", "--run-dir", str(new)],
    ):
        refused = invoke(*command)
        assert refused.startswith("error: "), refused
        assert problem.format(path=path) in refused
        assert str(path.parent) in refused
        assert refused.endswith("; copy the folder again, or take another model or checkpoint"), refused
        assert "\n" not in refused
    assert not new.exists()
    assert "lamp" in invoke("ask", str(run_dir / "checkpoints" / "step_2"), "Where is the lamp ?")


def test_without_any_checkpoint_a_run_begins_anew(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints" / "step_2")
    newest = run_dir / "checkpoints" / "step_3"
    (newest / "state.json").write_text("")
    assert f"delete the folder {newest} and --resume starts again" in resume(run_dir)
    shutil.rmtree(newest)
    assert "Held-out tasks" in resume(run_dir)
    assert [row["iteration"] for row in read_metrics(run_dir) if row["stage"] == "rl"] == [1, 2, 3]


def test_the_evaluation_after_rl_carries_its_iteration(run_dir: Path) -> None:
    rows = {row["stage"]: row["iteration"] for row in read_metrics(run_dir) if row["stage"].startswith("eval_")}
    assert rows == {"eval_start": 0, "eval_sft": 0, "eval_rl": 3}


@pytest.mark.parametrize("content", [b"", b"ARROW1", b"\xff" * 100, "cut"])
def test_a_damaged_trajectories_file_is_named_and_hinders_nothing(run_dir: Path, content: bytes | str) -> None:
    path = sorted((run_dir / "trajectories").glob("iteration_*.arrow"))[-1]
    path.write_bytes(content if isinstance(content, bytes) else path.read_bytes()[:-100])
    with pytest.raises(DataError, match=path.name):
        example_question(run_dir)
    printed = resume(run_dir)
    assert "Held-out tasks" in printed
    assert f"{path} is damaged" in printed.replace("\n", "")
    assert f"'{NO_EXAMPLE}'" in printed
    assert "lamp" in invoke("ask", str(run_dir), "Where is the lamp ?")


NO_TASKS = dict.fromkeys(("issued", "trained", "failed", "lost", "doubled"), 0)
NO_STAGES = json.dumps({"stages": [], "wall_s": 1, "peak_rss_bytes": 1, "tasks": NO_TASKS}).encode()
REPORTS = [b"", b"\xff\x00", b"[1", b"{}", b"3", NO_STAGES, b"[" * 100_000]


@pytest.mark.parametrize("report", REPORTS, ids=range(len(REPORTS)))
def test_a_damaged_report_is_written_again(run_dir: Path, report: bytes) -> None:
    (run_dir / "report.json").write_bytes(report)
    for flags in ([], ["--json"]):
        refused = invoke("report", str(run_dir), *flags)
        assert refused.startswith(f"error: {run_dir / 'report.json'}"), refused
        assert "delete the file, and --resume writes it again" in refused


def test_what_to_do_about_a_checkpoint_names_the_newest_of_the_others(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, num_to_keep=3)
    for step in (2, 9, 10):
        store.begin(step, lambda directory: None)
        store.commit(step)
    assert store.without(tmp_path / "step_10").endswith("goes on from step_9")


def test_nothing_else_is_printed_about_weights_of_other_shapes(run_dir: Path) -> None:
    swap_weights(run_dir / "checkpoints" / "step_3" / "policy" / WEIGHTS)
    done = subprocess.run(
        [sys.executable, "-m", "ragr1_actors", "ask", str(run_dir), "Why ?"],
        env=a_persons_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr


HOLD = """
import subprocess, sys
from ragr1_actors.runs.run_directory import only_process_in
with only_process_in(sys.argv[1]):
    print(subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL).pid, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["folder", "URI"])
def test_one_process_works_in_a_run_and_a_killed_one_does_not_hold_it(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGR1_CACHE", str(tmp_path / "cache"))
    run = str(tmp_path) if kind == "folder" else f"file://{tmp_path}/run"
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, run],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holds:
        assert holds.stdout is not None
        child = int(holds.stdout.readline())
        with pytest.raises(RunDirectoryError, match=f"^another process works in {run}; "), only_process_in(run):
            pass
        holds.kill()
    try:
        with only_process_in(run):
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_policy_without_its_tokenizer_is_refused(finished: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(finished / "policy", policy)
    PolicyTokenizer(policy)
    (policy / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no words; is its tokenizer\.json missing\? copy the folder again"):
        PolicyTokenizer(policy)
