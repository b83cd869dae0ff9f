"""The command blocks of README and docs run, page by page, in a folder with the files that they name."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_world import PLACES, SHORT, THINGS, make_config, make_files
from test_docs import CHECKED, cli_calls, code_blocks, read
from typer.testing import CliRunner

from ragr1_actors.cli.main import app
from retrieval.build import build_index
from retrieval.corpora.readers import read_passages

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SMALL = ["policy.options={hidden_size: 64, num_layers: 2}", "sft.num_steps=2", "sft.num_demonstrations=16"]
SMALL += ["training.num_iterations=1", "training.train_batch_size=2", "training.group_size=2", "evaluation.num_tasks=2"]
SMALL += ["env_runners.num_env_runners=0", "learners.num_learners=0", "retrieval.num_retrievers=0"]
"""Appended to a command that starts to train: a page's run takes minutes."""


def blocks(name: str) -> list[str]:
    return [code for info, code in code_blocks(read(name)) if info == "bash"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions, passages, a published set, an index, a finished run and a model folder."""
    folder = make_files(tmp_path_factory.mktemp("docs"))
    settings = make_config(folder, SHORT | {"num_steps": 2}, num_iterations=1).model_dump()
    settings["checkpointing"]["best_metric"] = "em"
    (folder / "recipe.yaml").write_text(json.dumps(settings))
    result = CliRunner().invoke(app, ["train", str(folder / "recipe.yaml"), "--run-dir", str(folder / "run")])
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def here(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for run in ("mine", "first", "ppo", "costly"):
        shutil.copytree(world / "run", Path("runs", run), symlinks=True)
    shutil.copytree(world / "run" / "policy", "FOLDER")
    shutil.copy(world / "tasks.json", "questions.json")
    shutil.copy(world / "corpus.json", "passages.json")
    Path("questions.txt").write_text("Where is the lamp ?\nWhere is the coin ?\n")
    Path("FOLDER/musique").mkdir()
    answers = {thing: PLACES[index % 4] for index, thing in enumerate(THINGS)}
    tasks = [{"id": t, "question": f"Where is the {t} ?", "golden_answers": [p]} for t, p in answers.items()]
    Path("FOLDER/musique/dev.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    build_index(read_passages(Path("passages.json")), Path("indexes/mine"), progress=False)
    monkeypatch.syspath_prepend(tmp_path)
    for name, code in itertools.chain.from_iterable(map(saved_modules, CHECKED)):
        Path(name).write_text(code)
    return tmp_path


def saved_modules(name: str) -> Iterator[tuple[str, str]]:
    """Yield the modules that a page has the reader save: Python blocks that begin with ``# my_env.py``."""
    for info, code in code_blocks(read(name)):
        if info == "python" and (saved := re.match(r"# (\w+\.py)\n", code)):
            yield saved[1], code


def lines(block: str) -> Iterator[str]:
    """Yield the commands of a block; a line that ends in a backslash goes on."""
    for line in block.replace("\\\n", " ").splitlines():
        if shlex.split(line, comments=True):
            yield line


def run(command: str) -> None:
    words = shlex.split(command, comments=True)
    assert words[0] == "ragr1", f"{command}: only ragr1 runs here; write 'bash no-run: REASON' above the block"
    [call] = cli_calls(command)
    stdin = Path(words[words.index("<") + 1]).read_text() if "<" in words else None
    arguments = call[: call.index("<")] if "<" in call else call
    if arguments[0] == "train" and "--resume" not in arguments:
        shutil.rmtree(arguments[arguments.index("--run-dir") + 1], ignore_errors=True)
        arguments += SMALL
    elif arguments[:2] == ["index", "build"]:
        shutil.rmtree(arguments[arguments.index("--out") + 1])
    result = CliRunner().invoke(app, arguments, input=stdin)
    passed = (0, 1) if arguments[0] == "plan" else (0,)  # 1: a plan that does not fit is what the page shows
    assert result.exit_code in passed, f"{command}: {result.exception or result.output}"


@pytest.mark.parametrize("name", [name for name in CHECKED if blocks(name)])
def test_commands_run(name: str, here: Path) -> None:
    for block in blocks(name):
        for command in lines(block):
            run(command)
