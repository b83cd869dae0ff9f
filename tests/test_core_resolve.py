"""Values that YAML knows and a recipe does not, and settings that do not go together: one sentence each."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_world import invoke

from ragr1_actors.core.errors import ConfigError, RunDirectoryError
from ragr1_actors.core.resolve import recipe_descriptions, recipe_names
from ragr1_actors.runs.run_directory import open_run_directory
from ragr1_actors.training.algorithm_config import AlgorithmConfig

LONG = "x" * 300


def refusal(text: str | bytes, directory: Path) -> str:
    path = directory / "recipe.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(ConfigError) as caught:
        AlgorithmConfig.from_recipe(str(path)).freeze()
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500 + len(str(path))
    return message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("environment: {tasks: 2024-01-01}", "environment.tasks: got 2024-01-01, a date, expected text"),
        ("environment: {tasks: 2024-13-45}", "not valid YAML"),
        ("training: {lr: 1.0, lr: 2.0}", "not valid YAML: the key lr twice"),
        ("env_runners: {engine_options: {a: 2024-01-01}}", "env_runners.engine_options.a: got 2024-01-01, a date"),
        ("env_runners: {engine_options: {a: [.nan]}}", "env_runners.engine_options.a[0]: got nan"),
        ("env_runners: {engine_options: {1: 2}}", "got the key 1, expected text"),
        ("env_runners: {engine_options: !!set {a}}", "a set, expected text"),
        ("env_runners: {engine_options: !!binary aGk=}", "a bytes, expected text"),
        ("env_runners: {engine_options: &a {b: *a}}", "nested more than 16 levels"),
        ("training: {lr: .inf}", "training.lr: got inf"),
        ("training: {lr: 0x" + "f" * 5000 + "}", "training.lr: got a number of 20000 bits"),
        ("training: {lr: " + "1" * 5000 + "}", "not valid YAML"),
        ("{1: {a: 2}}", "unknown section 1"),
        ("training: {1: 2}", "unknown key training.1"),
        ("? [1]\n: {}", "not valid YAML"),
        ('environment: {tasks: "a\\0b"}', "environment.tasks: got 'a\\x00b'"),
        (b"environment: {tasks: \xff}", "not UTF-8 text (byte 21); save the file as UTF-8"),
        ("[" * 20_000, "nested too deeply"),
        ("training: {lr: " + "[" * 40 + "]" * 40 + "}", "training.lr: nested more than 16 levels"),
        ("false", "expected sections of keys"),
    ],
    ids=range(20),
)
def test_what_a_recipe_cannot_hold(text: str | bytes, message: str, tmp_path: Path) -> None:
    assert message in refusal(text, tmp_path)


def test_a_list_repeated_by_aliases_is_looked_at_once(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 14)]
    path = tmp_path / "recipe.yaml"
    path.write_text("env_runners: {engine_options: {" + ", ".join(lines) + "}}")
    AlgorithmConfig.from_recipe(str(path))  # 9 ** 13 leaves


def test_a_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(b"\xef\xbb\xbftraining: {lr: 0.5}")
    assert AlgorithmConfig.from_recipe(str(path)).freeze().training.lr == 0.5


def test_names_that_are_too_long_for_a_file(tmp_path: Path) -> None:
    for refused in (
        invoke("train", f"{LONG}.yaml"),
        invoke("train", LONG),
        invoke("train", "quickstart", "--run-dir", str(tmp_path / LONG)),
        invoke("train", "quickstart", "--run-dir", str(tmp_path / LONG), "--resume"),
        invoke("train", "quickstart", f"environment.tasks={LONG}", "--run-dir", str(tmp_path / "run")),
        invoke("train", "quickstart", f"policy.model={LONG}", "--run-dir", str(tmp_path / "run")),
        invoke("ask", str(tmp_path / LONG), "Where?"),
    ):
        assert refused.startswith("error: "), refused
        assert "too long" in refused or "unknown recipe" in refused
        assert "\n" not in refused
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", [b"\xff\xfe", b"[" * 20_000, b"a: 2024-13-45", b"a: " + b"1" * 5000])
def test_a_configuration_of_nonsense_is_damaged(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.yaml").write_bytes(text)
    with pytest.raises(RunDirectoryError, match="damaged"):
        open_run_directory(tmp_path)


def test_a_prompt_without_its_question_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"environment\.prompt: got 'Answer\.', expected \{question\} in it"):
        AlgorithmConfig().environment(prompt="Answer.").freeze()


@pytest.mark.parametrize(("hidden_size", "num_heads"), [(12, 4), (8, 8), (30, 4), (8, 16), (9, 3)])
def test_odd_heads_are_refused_and_the_size_named_instead_works(hidden_size: int, num_heads: int) -> None:
    with pytest.raises(ConfigError, match=r"policy\.hidden_size: got") as caught:
        AlgorithmConfig().policy(hidden_size=hidden_size, num_heads=num_heads).freeze()
    named = int(str(caught.value).partition("such as ")[2].partition(":")[0])
    AlgorithmConfig().policy(hidden_size=named, num_heads=num_heads).freeze()
    AlgorithmConfig().policy(model="org/name", hidden_size=hidden_size, num_heads=num_heads).freeze()


def test_what_one_turn_may_bring_back_is_bounded() -> None:
    for settings in ({"top_k": 101}, {"max_queries_per_turn": 65}):
        with pytest.raises(ConfigError, match="less than or equal to"):
            AlgorithmConfig().environment(**settings).freeze()


def test_every_recipe_says_what_it_is() -> None:
    described = recipe_descriptions()
    assert list(described) == recipe_names()
    assert all(len(description) > 20 for description in described.values())
    assert described["quickstart"].startswith("A small model from nothing")
    printed = " ".join(invoke("recipes").split())
    assert "quickstart A small model from nothing" in printed
