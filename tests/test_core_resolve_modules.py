"""Modules beside a recipe: found by that recipe first, from every folder and in every process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run_python
from small_world import a_persons_environment

from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.resolve import RECIPES, load_object, read_recipe

REWARD = "from ours_{name} import WORTH\n\n\ndef reward(task, answer):\n    return WORTH\n"
RECIPE = """
environment:
  reward: {name}:reward
  tools: [search, "{name}:reward", "other:reward"]
  prompt: "{name}:reward {{question}}"
"""


def write_method(folder: Path, name: str, worth: float = 0.25) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(REWARD.format(name=name))
    (folder / f"ours_{name}.py").write_text(f"WORTH = {worth}\n")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(name=name))
    return recipe


def test_a_module_beside_a_recipe_becomes_the_path_of_its_file(tmp_path: Path) -> None:
    environment = read_recipe(str(write_method(tmp_path / "m", "besides_a")))["environment"]
    path = tmp_path / "m" / "besides_a.py"
    assert environment["reward"] == f"{path}:reward"
    assert environment["tools"] == ["search", f"{path}:reward", "other:reward"]
    assert environment["prompt"] == "besides_a:reward {question}"


def test_a_module_beside_a_recipe_imports_those_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", list(sys.path))
    recipe = write_method(tmp_path / "m", "besides_b")
    (tmp_path / "here" / "besides_b.py").write_text("raise RuntimeError('the wrong one')\n")
    reward = load_object(read_recipe(str(recipe))["environment"]["reward"], {})
    assert reward(None, "") == 0.25
    relative = load_object("../m/besides_b.py:reward", {})
    assert relative is reward


def test_two_modules_of_one_name_are_not_confused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    first, second = (write_method(tmp_path / folder, "besides_c") for folder in ("a", "b"))
    load_object(read_recipe(str(first))["environment"]["reward"], {})
    with pytest.raises(
        ConfigError, match=r"has another module besides_c already, .*/a/besides_c\.py; rename besides_c\.py"
    ):
        load_object(read_recipe(str(second))["environment"]["reward"], {})


def test_a_file_that_does_not_exist_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"besides_d.*there is no file .*besides_d\.py; put it there"):
        load_object(f"{tmp_path}/besides_d.py:reward", {})


def test_a_recipe_of_the_project_names_its_module_as_everyone_imports_it() -> None:
    environment = read_recipe("search_r1")["environment"]
    assert environment["env"] == "ragr1_actors.recipes.search_r1.search_r1:StructuredEnv"
    assert environment == read_recipe(str(RECIPES / "search_r1" / "search_r1.yaml"))["environment"]


@pytest.mark.integration
def test_a_relative_recipe_keeps_relative_names(tmp_path: Path) -> None:
    write_method(tmp_path / "m", "besides_e")
    program = (
        "from ragr1_actors.core.resolve import load_object, read_recipe\n"
        "name = read_recipe('m/recipe.yaml')['environment']['reward']\n"
        "print(name, load_object(name, {})(None, ''))\n"
    )
    assert run_python(program, cwd=tmp_path) == "m/besides_e.py:reward 0.25\n"


@pytest.mark.ray
def test_workers_find_the_module_beside_a_recipe(tmp_path: Path) -> None:
    """The env runner is an actor, and the command starts in another folder than the recipe's."""
    recipe = write_method(tmp_path / "m", "besides_f", worth=0.375)
    recipe.write_text(
        "environment: {tasks: world, reward: 'besides_f:reward', prompt: '{question}'}\n"
        "policy: {options: {hidden_size: 16, num_layers: 1}}\n"
        "env_runners: {num_env_runners: 1, num_cpus_per_env_runner: 0, max_context_tokens: 256, "
        "max_new_tokens_per_turn: 8}\n"
        "retrieval: {num_retrievers: 0}\n"
        "learners: {num_learners: 0}\n"
        "training: {num_iterations: 1, train_batch_size: 2, group_size: 2, kl_coeff: 0.1}\n"
        "evaluation: {num_tasks: 2}\n"
    )
    (tmp_path / "here").mkdir()
    words = ["train", str(recipe), "--run-dir", "run"]
    ended = subprocess.run(
        [sys.executable, "-m", "ragr1_actors", *words],
        cwd=tmp_path / "here",
        env=a_persons_environment(),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = [json.loads(line) for line in (tmp_path / "here/run/metrics.jsonl").read_text().splitlines()]
    assert [row["rollout/reward"] for row in rows if "rollout/reward" in row] == [0.375]
