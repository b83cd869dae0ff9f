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
from random import Random

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file
from small_world import ROOT, a_persons_environment, invoke, make_config, make_files
from transformers import GPT2Config

from ragr1_actors.cli.evaluate import NO_EXAMPLE, example_question
from ragr1_actors.core.disk.digests import LIST_FILE, write_list
from ragr1_actors.core.disk.learner_state import LEARNER_FILE, read_learner
from ragr1_actors.core.errors import ConfigError, DataError, RunDirectoryError
from ragr1_actors.core.resolve import override, resolve
from ragr1_actors.planning.tiny_policy import make_tiny_policy
from ragr1_actors.rollout.engines.base import PolicyTokenizer
from ragr1_actors.runs.checkpoint import Checkpoints
from ragr1_actors.runs.report import read_report
from ragr1_actors.runs.run_directory import create_run_directory, open_run_directory
from ragr1_actors.runs.storage.store import RunStore
from ragr1_actors.runs.telemetry.metrics import Gap, read_metrics
from ragr1_actors.training.training_run import TrainingRun

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


@pytest.mark.parametrize("key", ["extra", "task_ledger"])
def test_a_state_with_something_else_in_it(run_dir: Path, key: str) -> None:
    path = run_dir / "checkpoints" / "step_3" / "state.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: {"wall_s": 1}}))
    assert f"delete the folder {path.parent} and --resume goes on from step_2" in resume(run_dir)


def test_damaged_tensors_and_going_on_without_them(run_dir: Path) -> None:
    newest = run_dir / "checkpoints" / "step_3"
    path = newest / "learner.safetensors"
    content = path.read_bytes()
    no_learners = (newest / "policy" / "model.safetensors").read_bytes()  # whole
    for damaged in (content[:1000], None, no_learners):
        path.unlink() if damaged is None else path.write_bytes(damaged)
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


LIKE_ANOTHER = {
    *("weights are empty", "weights are no weights", "config is empty", "config is a list", "tokenizer is empty"),
    "tokenizer of no known sort",
}
"""Refused by the same line as another damage to the same file."""


@pytest.mark.parametrize(
    "damage", [pytest.param(name, marks=[pytest.mark.slow] * (name in LIKE_ANOTHER)) for name in DAMAGED_POLICIES]
)
def test_a_damaged_policy_is_one_sentence_for_every_command(run_dir: Path, damage: str) -> None:
    name, change, problem = DAMAGED_POLICIES[damage]
    path = run_dir / "checkpoints" / "step_3" / "policy" / name
    (path.parent / LIST_FILE).unlink()  # as in a folder of another source
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
    if damage == "weights are cut":
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


@pytest.mark.parametrize(
    "content", [b"", "cut", *(pytest.param(junk, marks=pytest.mark.slow) for junk in (b"ARROW1", b"\xff" * 100))]
)
def test_a_damaged_trajectories_file_is_named_and_hinders_nothing(run_dir: Path, content: bytes | str) -> None:
    path = sorted((run_dir / "trajectories").glob("iteration_*.arrow"))[-1]
    path.write_bytes(content if isinstance(content, bytes) else path.read_bytes()[:-100])
    with pytest.raises(DataError, match=path.name):
        example_question(run_dir)
    printed = resume(run_dir)
    assert "Held-out tasks" in printed
    assert f"{path} cannot be read: " in printed.replace("\n", "")
    assert f"'{NO_EXAMPLE}'" in printed
    assert "lamp" in invoke("ask", str(run_dir), "Where is the lamp ?")


NO_TASKS = dict.fromkeys(("issued", "trained", "failed", "skipped", "lost", "doubled"), 0)
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
    store = Checkpoints(RunStore(tmp_path), num_to_keep=3)
    for step in (2, 9, 10):
        store.begin(step, lambda directory: None)
        store.commit(step)
    assert store.recovery_hint(tmp_path / "checkpoints" / "step_10").endswith("goes on from step_9")


def test_nothing_else_is_printed_about_weights_of_other_shapes(run_dir: Path) -> None:
    policy = run_dir / "checkpoints" / "step_3" / "policy"
    swap_weights(policy / WEIGHTS)
    write_list(policy)
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
from ragr1_actors.runs.storage.store import RunStore
with RunStore(sys.argv[1]).held():
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
        with pytest.raises(RunDirectoryError, match=f"^another process works in {run}; "), RunStore(run).held():
            pass
        holds.kill()
    try:
        with RunStore(run).held():
            pass
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_policy_without_its_tokenizer_is_refused(finished: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    shutil.copytree(finished / "policy", policy)
    PolicyTokenizer(policy)
    (policy / LIST_FILE).unlink()
    (policy / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"has no words; is its tokenizer\.json missing\? copy the folder again"):
        PolicyTokenizer(policy)


def flip(path: Path) -> None:
    """Change one byte, but none between the words of a JSON file: ``digests.json`` is compared by what it says."""
    content = bytearray(path.read_bytes())
    free = [index for index, byte in enumerate(content) if byte not in b" \n"] or range(len(content))
    content[Random(path.name).choice(free)] ^= 1
    path.write_bytes(content)


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


DAMAGES: dict[str, Callable[[Path], object]] = {"a byte": flip, "cut": cut, "gone": Path.unlink}


# the digest finds a byte and a cut by the same line
@pytest.mark.parametrize("damage", ["a byte", pytest.param("cut", marks=pytest.mark.slow), "gone"])
@pytest.mark.parametrize("folder", ["checkpoints/step_3/policy", "checkpoints/step_3", "policy_sft", "policy", "index"])
def test_no_damaged_file_of_a_run_is_used_in_silence(
    run_dir: Path, folder: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each file of a real run, by the command that uses it."""
    index = run_dir / "index"
    shutil.copytree(open_run_directory(run_dir).retrieval.index, index)
    where = run_dir / folder
    checked = 0
    for name in files_of(where):
        path = where / name
        if folder.endswith("step_3") and name.startswith("policy/"):
            continue  # --resume reads the learner's state, and no policy of a checkpoint
        content = path.read_bytes()
        DAMAGES[damage](path)
        evaluates = folder in ("checkpoints/step_3/policy", "index")
        caplog.clear()
        found = invoke("evaluate", str(run_dir), "--index", str(index)) if evaluates else resume(run_dir)
        if name.endswith(LIST_FILE) and damage == "gone" and folder != "index":
            # what it names is whole, and is used with a warning; a run that goes on has written more
            assert folder == "policy" or f"{where}: no {LIST_FILE}" in caplog.text
            if not evaluates:
                shutil.rmtree(run_dir)
                return
        else:
            is_named = str(where) in found and path.name in found
            assert found.startswith("error: ") and is_named and "\n" not in found, (path, found)
        path.write_bytes(content)
        checked += 1
    assert checked


def test_the_advice_about_a_damaged_policy_of_sft_is_about_it(run_dir: Path) -> None:
    policy = run_dir / "policy_sft"
    newest = run_dir / "checkpoints" / "step_3"
    (policy / "config.json").unlink()
    refused = resume(run_dir)
    assert refused.startswith(f"error: {policy / 'config.json'} cannot be read"), refused
    anew = f"begin a new run with a copy of {newest}/policy as policy.model and with sft.num_steps=0"
    assert anew in refused and "delete" not in refused
    (policy / LIST_FILE).unlink()  # of an earlier version
    assert f"error: cannot load a model from {policy}: " in (refused := resume(run_dir)) and anew in refused
    shutil.rmtree(policy)
    assert resume(run_dir).startswith(f"error: {policy} is missing; put a copy of it back")
    keys = [f"policy.model={newest}/policy", "sft.num_steps=0", "training.num_iterations=1"]
    config = override(open_run_directory(run_dir).model_dump(), keys)
    new = run_dir.with_name("new")
    create_run_directory(resolve(config), new)
    assert "RL iteration" not in (printed := resume(new)) and "Held-out tasks" in printed


def test_a_policy_of_sft_that_is_damaged_before_rl_is_written_again(run_dir: Path) -> None:
    begun, checkpoints = run_dir.with_name("begun"), run_dir / "checkpoints"
    config = open_run_directory(run_dir)
    kept = config.checkpointing.model_copy(update={"num_to_keep": 9})
    create_run_directory(config.model_copy(update={"checkpointing": kept}), begun)
    assert "Held-out tasks" in resume(begun)
    expected = (begun / "policy_sft" / WEIGHTS).read_bytes()
    for step in (1, 2, 3):
        shutil.rmtree(begun / "checkpoints" / f"step_{step}")
    (begun / "report.json").unlink()
    flip(begun / "policy_sft" / WEIGHTS)
    refused = resume(begun)
    assert f"delete {begun / 'policy_sft'}: --resume writes it again" in refused, refused
    shutil.rmtree(begun / "policy_sft")
    assert "Held-out tasks" in resume(begun)
    assert (begun / "policy_sft" / WEIGHTS).read_bytes() == expected
    newest = read_learner(begun / "checkpoints" / "step_3" / LEARNER_FILE)
    for name, value in read_learner(checkpoints / "step_3" / LEARNER_FILE).items():
        np.testing.assert_array_equal(newest[name], value)


def test_a_run_of_an_earlier_version_goes_on_with_one_warning(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path in run_dir.rglob(LIST_FILE):
        path.unlink()
    shutil.rmtree(run_dir / "checkpoints" / "step_3")
    assert "RL iteration 2" in resume(run_dir)
    before = run_dir / "checkpoints" / "step_2"
    assert caplog.text.count(LIST_FILE) == 1
    assert f"{before} and {run_dir / 'policy_sft'}: no {LIST_FILE}" in caplog.text
    caplog.clear()
    assert "lamp" in invoke("ask", str(before), "Where is the lamp ?")
    assert caplog.text.count(LIST_FILE) == 1
    caplog.clear()
    assert "lamp" in invoke("ask", str(run_dir), "Where is the lamp ?")
    assert LIST_FILE not in caplog.text, "the newest checkpoint has lists"


def test_lost_lines_of_metrics_are_told(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    rows = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["iteration"] not in (1, 3)]
    path.write_text("".join(rows))
    printed = resume(run_dir).replace("\n", " ")
    for gap in ("sft 1 to 1", "rl 1 to 1", "rl 3 to 3"):
        assert f"lacks the lines of {gap}" in printed, printed
    gaps = [str(gap) for gap in read_report(run_dir).gaps]
    assert gaps == ["sft 1 to 1", "rl 1 to 1", "rl 3 to 3"]
    assert "Lines that metrics.jsonl lacks" in (run_dir / "report.html").read_text()


def test_a_file_of_metrics_that_was_cut_is_told(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    first = next(
        index for index, line in enumerate(lines) if (json.loads(line)["iteration"], b'"rl"' in line) == (2, True)
    )
    path.write_bytes(b"".join(lines[:first]) + lines[first][:20])
    assert "lacks the lines of rl 2 to 3" in resume(run_dir).replace("\n", " ")
    assert read_report(run_dir).gaps == (Gap("rl", 2, 3),)
