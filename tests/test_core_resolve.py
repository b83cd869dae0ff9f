"""Values that YAML knows and a recipe does not, and settings that do not go together: one sentence each."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from small_world import invoke

from envs.tasks.published_sets import load_sets
from ragr1_actors.cli.view import tokenizer_folders
from ragr1_actors.core.config import GuardSettings, LoraSettings, PolicySettings, RunnerAutoscaling
from ragr1_actors.core.errors import ConfigError, RunDirectoryError, UserError
from ragr1_actors.core.models.model_shape import HUB_CONFIGS, ModelShape
from ragr1_actors.core.resolve import override, read_recipe, recipe_descriptions, recipe_files
from ragr1_actors.planning.plan import count_passages
from ragr1_actors.planning.preflight import check_classes, check_names
from ragr1_actors.planning.tiny_policy import TinyPolicy, TinyVisionPolicy, policy_maker
from ragr1_actors.runs.run_directory import create_run_directory, open_run_directory
from ragr1_actors.runs.storage.store import RunStore
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from retrieval.base import Passage
from retrieval.build import build_index
from retrieval.capacity import EncoderShape

LONG = "x" * 300
ENDPOINT = ("--endpoint", "http://127.0.0.1:1/v1", "--model", "m")


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


TRAIN = ("train", "quickstart", "--run-dir", "run")
TAKES_PATH = [
    ("train", "PATH.yaml"),
    ("train", "quickstart", "--run-dir", "PATH"),
    ("train", "quickstart", "--run-dir", "PATH", "--resume"),
    ("train", "quickstart", "--run-dir", "PATH", "--auto-resume"),
    ("train", "quickstart", "--run-dir", "file://HERE/PATH"),
    *((*TRAIN, f"{key}=PATH") for key in ("environment.tasks", "environment.eval_tasks", "sft.demonstrations")),
    *((*TRAIN, f"{key}=PATH") for key in ("policy.model", "retrieval.corpus", "retrieval.index")),
    ("evaluate", *ENDPOINT, "--tasks", "tasks.jsonl", "retrieval.type=replay", "retrieval.options={run: PATH}"),
    ("claims", "--run-dir", "PATH"),
    ("plan", "PATH.yaml"),
    ("plan", "quickstart", "policy.model=PATH/x"),
    ("simulate", "PATH.yaml"),
    ("simulate", "quickstart", "--from", "PATH"),
    ("scale", "PATH", "--runners", "2"),
    ("submit", "quickstart", "--address", "http://127.0.0.1:1", "--working-dir", "PATH"),
    ("chaos", "quickstart", "--run-dir", "PATH"),
    ("chaos", "--run", "PATH"),
    ("evaluate", "PATH"),
    ("evaluate", "PATH", "--recipe", "quickstart"),
    ("evaluate", "RUN", "--recipe", "PATH.yaml"),
    *(("evaluate", *ENDPOINT, option, "PATH") for option in ("--tasks", "--prompt", "--against")),
    ("evaluate", *ENDPOINT, "--tasks", "tasks.jsonl", "--out", "PATH/out.jsonl"),
    ("evaluate", *ENDPOINT, "--tasks", "tasks.jsonl", "--out", "PATH"),
    ("evaluate", *ENDPOINT, "--tasks", "tasks.jsonl", "--index", "PATH"),
    ("evaluate", *ENDPOINT, "--tasks", "nq", "--data", "PATH"),
    ("select", "PATH/x", "--tasks", "tasks.jsonl", "--out", "out.jsonl"),
    ("select", "quickstart", "--tasks", "PATH", "--out", "out.jsonl"),
    ("select", "quickstart", "--tasks", "tasks.jsonl", "--out", "PATH"),
    ("select", "quickstart", "--tasks", "tasks.jsonl", "--out", "out.jsonl", "--index", "PATH"),
    ("ask", "PATH", "Where?"),
    ("serve", "PATH", "--port", "0"),
    ("view", "PATH"),
    ("report", "PATH"),
    ("report", "RUN", "--html", "--out", "PATH"),
    ("index", "build", "--corpus", "PATH", "--out", "index"),
    ("index", "build", "--corpus", "tasks.jsonl", "--out", "PATH"),
    ("index", "build", "--corpus", "corpus.jsonl", "--out", "index", "--encoder", "PATH/x/y"),
    ("index", "info", "PATH"),
    ("index", "search", "PATH", "riga"),
    ("index", "eval", "PATH", "--tasks", "tasks.jsonl"),
    ("index", "eval", "index", "--tasks", "PATH"),
    ("index", "audit", "PATH", "--tasks", "tasks.jsonl"),
    ("index", "serve", "PATH", "--port", "0"),
]


@pytest.mark.parametrize("path", [LONG, "tasks.jsonl/x", "a\0b"], ids=["long", "below a file", "nul"])
@pytest.mark.parametrize("arguments", TAKES_PATH, ids=" ".join)
def test_a_path_that_cannot_be_is_one_sentence(
    arguments: tuple[str, ...], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tasks.jsonl").write_text('{"question": "Where is Riga?", "answer": "Latvia"}')
    Path("corpus.jsonl").write_text('{"id": "a", "title": "Riga", "text": "Riga lies in Latvia."}')
    create_run_directory(AlgorithmConfig().freeze(), "run" if "RUN" in arguments else "other")
    named = {"RUN": "run", "PATH": path, "HERE": str(tmp_path)}
    before = sorted(Path.cwd().rglob("*"))
    said = invoke(*(reduce(lambda word, name: word.replace(name, named[name]), named, word) for word in arguments))
    assert said.startswith("error: "), said
    assert "\n" not in said
    assert len(said) < 900
    assert sorted(Path.cwd().rglob("*")) == before


@pytest.mark.parametrize("text", [b"\xff\xfe", b"[" * 20_000, b"a: 2024-13-45", b"a: " + b"1" * 5000])
def test_a_configuration_of_nonsense_is_damaged(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "config.yaml").write_bytes(text)
    with pytest.raises(RunDirectoryError, match="damaged"):
        open_run_directory(tmp_path)


@pytest.mark.parametrize(("stage", "value"), [(3, "selective"), (2, "some")])
def test_a_checkpointing_that_does_not_work_is_refused(stage: int, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"learners\.gradient_checkpointing.*: got '?{value}"):
        AlgorithmConfig().learners(zero_stage=stage, gradient_checkpointing=value).freeze()


def test_a_prompt_without_its_question_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"environment\.prompt: got 'Answer\.', expected \{question\} in it"):
        AlgorithmConfig().environment(prompt="Answer.").freeze()


@pytest.mark.parametrize(("hidden_size", "num_heads"), [(12, 4), (8, 8), (30, 4), (8, 16), (9, 3)])
def test_odd_heads_are_refused_and_the_size_named_instead_works(hidden_size: int, num_heads: int) -> None:
    with pytest.raises(ConfigError, match=r"policy\.options\.num_heads: got") as caught:
        TinyPolicy.read({"hidden_size": hidden_size, "num_heads": num_heads}, "policy.options")
    named = int(str(caught.value).partition("such as ")[2].partition(":")[0])
    assert TinyPolicy.read({"hidden_size": named, "num_heads": num_heads}, "policy.options").shape.hidden_size == named
    with pytest.raises(ConfigError, match=r"policy\.options\.num_heads: got 3; hidden_size is 128"):
        TinyPolicy.read({"num_heads": 3}, "policy.options")


def test_the_head_of_a_policy_that_reads_images_holds_two_axes() -> None:
    with pytest.raises(ConfigError, match="hidden_size is 24, expected a multiple of four times the heads, such as 32"):
        TinyVisionPolicy.read({"hidden_size": 24, "num_heads": 4}, "policy.options")
    assert TinyVisionPolicy.read({"hidden_size": 32, "num_heads": 4}, "policy.options").shape.vision is not None
    made = policy_maker(PolicySettings(model="tiny_vision", options={"family": "qwen3_vl"}))
    assert isinstance(made, TinyVisionPolicy) and made.shape.has_qk_norm


def test_one_name_of_a_group_or_of_options_is_set_and_the_others_stay() -> None:
    config = AlgorithmConfig().training(algorithm="ppo", guard={"patience": 3}, options={"gamma": 0.9})
    config.override(["training.guard.action=stop", "training.options.vf_clip=0.5", "learners.lora.rank=4"])
    config.override(["env_runners.autoscaling={max_replicas: 4}", "env_runners.autoscaling.min_replicas=1"])
    found = config.freeze()
    assert found.training.guard == GuardSettings(action="stop", patience=3)
    assert found.training.options == {"gamma": 0.9, "vf_clip": 0.5}
    assert found.learners.lora == LoraSettings(rank=4)
    assert found.env_runners.autoscaling == RunnerAutoscaling(max_replicas=4)
    assert found.changes() == {
        "env_runners.autoscaling.max_replicas": 4,
        "training.algorithm": "ppo",
        "training.options": {"gamma": 0.9, "vf_clip": 0.5},
        "training.guard.action": "stop",
        "training.guard.patience": 3,
        "learners.lora.rank": 4,
    }
    assert AlgorithmConfig(found.model_dump()).freeze() == found
    assert config.override(["training.guard={action: warn}", "learners.lora=null"]).freeze().learners.lora is None


def test_a_key_of_a_group_that_is_written_as_a_text_keeps_it() -> None:
    found = override({"environment": {"agent": "my_agent:solve"}}, ["environment.agent.deadline_s=30"])
    assert found["environment"]["agent"] == {"function": "my_agent:solve", "deadline_s": 30}


def test_a_number_with_an_exponent_is_a_number_in_options() -> None:
    words = "{a: 1e-3, b: 1.5e3, c: -2E5, d: .5e1, e: 1e5x, f: '1e3'}"
    found = override({}, [f"environment.reward_options={words}"])["environment"]["reward_options"]
    assert found == {"a": 1e-3, "b": 1500.0, "c": -2e5, "d": 5.0, "e": "1e5x", "f": "1e3"}


def test_a_name_deep_in_options_is_set_and_one_level_up_replaces_all() -> None:
    config = AlgorithmConfig().override(["training.options.correction.kind=mask", "training.options.correction.high=3"])
    assert config.freeze().training.options == {"correction": {"kind": "mask", "high": 3}}
    config.override(["training.options.correction={kind: reject}", "training.options.gamma=0.9"])
    assert config.freeze().training.options == {"correction": {"kind": "reject"}, "gamma": 0.9}


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("training.guard.acton=stop", "unknown key training.guard.acton; did you mean 'action'"),
        ("training.guard.patience=0", "training.guard.patience: got 0; input should be greater than or equal to 1"),
        ("training.guard=stop", "training.guard: got 'stop'"),
        ("learners.lora.rank=0", "learners.lora.rank: got 0"),
        ("env_runners.autoscaling.min_replicas=2", "env_runners.autoscaling.max_replicas: got "),
        ("training.lr.x=1", "got training.lr.x; training.lr is one value: write training.lr=..."),
        ("training.gaurd.action=stop", "unknown key training.gaurd; did you mean 'guard'"),
        ("training..x=1", "unknown key training."),
    ],
)
def test_wrong_names_in_a_group_are_refused(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AlgorithmConfig().override([assignment]).freeze()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("environment.top_k=4", "environment.top_k is environment.options.top_k now; rename it"),
        ("environment.query_format=json", "environment.query_format is environment.options.query_format now"),
    ],
)
def test_a_renamed_key_is_refused_with_its_new_name(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AlgorithmConfig().override([assignment])
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("env", "options", "problem"),
    [
        ("search", {"top_k": 101}, "environment.options.top_k: got 101; input should be less than or equal to 100"),
        ("search", {"max_queries_per_turn": 65}, "environment.options.max_queries_per_turn: got 65"),
        ("search", {"top_key": 3}, "unknown key environment.options.top_key; did you mean 'top_k'?"),
        ("search", {"mode": "direct", "query_format": "xml"}, "environment.options.query_format: got 'xml'"),
    ],
)
def test_options_of_an_environment_are_checked_before_a_run(env: str, options: dict[str, Any], problem: str) -> None:
    config = AlgorithmConfig().environment(env=env, options=options).freeze()
    with pytest.raises(ConfigError) as caught:
        check_classes(config)
    assert str(caught.value).startswith(problem)


def test_every_recipe_says_what_it_is() -> None:
    described = recipe_descriptions()
    assert list(described) == list(recipe_files())
    assert all(len(description) > 20 for description in described.values())
    assert described["quickstart"].startswith("A small model from nothing")
    printed = " ".join(invoke("recipes").split())
    assert "quickstart A small model from nothing" in printed


def check_key(name: str) -> Callable[[str], object]:
    return lambda value: check_names(AlgorithmConfig().override([f"{name}={value}"]).freeze())


def build_by(encoder: str) -> None:
    build_index([Passage("a", "Riga", "Riga lies in Latvia.", 0.0)], mkdtemp(dir="."), encoder=encoder, progress=False)


def count_by(corpus: str) -> None:
    assert count_passages(AlgorithmConfig().retrieval(corpus=corpus).freeze()) > 1  # the line of the file is one


def select_by(source: str) -> None:
    Path("tasks.jsonl").write_text('{"question": "Where is Riga?", "answer": "Latvia"}')
    said = invoke("select", source, "--tasks", "tasks.jsonl", "--out", "out.jsonl", "training.lrr=1")
    if "did you mean 'lr'?" not in said:  # the recipe was read before
        raise ConfigError(said)


def load_published(name: str) -> None:
    Path("sets").mkdir(exist_ok=True)
    Path("sets", "nq.jsonl").write_text('{"question": "Where is Riga?", "golden_answers": ["Latvia"]}')
    load_sets(name, Path("sets"))


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize(
    ("word", "use"),
    [
        ("tiny", check_key("policy.model")),
        ("world", check_key("environment.tasks")),
        ("world", count_by),
        ("correct", check_key("sft.demonstrations")),
        ("mixture", check_key("sft.demonstrations")),
        pytest.param("static", build_by, marks=pytest.mark.engine),
        ("nq", load_published),
        ("quickstart", read_recipe),
        ("quickstart", select_by),
    ],
)
def test_a_known_word_wins_over_a_file_of_its_name(
    word: str, use: Callable[[str], object], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in the current folder is nonsense here: a file that says nothing, or a folder without anything."""
    monkeypatch.chdir(tmp_path)
    if kind == "folder":
        Path(word).mkdir()
    else:
        Path(word).write_bytes(b"\xff")
    use(word)
    with pytest.raises((UserError, AssertionError)):
        use(f"./{word}")


def test_the_viewer_and_an_index_know_a_word_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert Path("tiny") not in tokenizer_folders(RunStore(tmp_path / "run"), "tiny")
    assert Path("tiny") in tokenizer_folders(RunStore(tmp_path / "run"), "./tiny")


def test_a_folder_wins_over_a_hub_name_as_it_does_where_it_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, encoder = "Qwen/Qwen2.5-7B", "BAAI/bge-large-en-v1.5"
    known = ModelShape.of(model), EncoderShape.of(encoder)
    for name in (model, encoder):
        Path(name).mkdir(parents=True)
    Path(model, "config.json").write_text(json.dumps(dict(HUB_CONFIGS["Qwen/Qwen2.5-0.5B"])))
    Path(encoder, "config.json").write_text(
        json.dumps(
            {"hidden_size": 8, "num_hidden_layers": 1, "intermediate_size": 8}
            | {"vocab_size": 9, "max_position_embeddings": 9}
        )
    )
    assert ModelShape.of(model) == ModelShape.from_config(HUB_CONFIGS["Qwen/Qwen2.5-0.5B"], "") != known[0]
    assert EncoderShape.of(encoder).dimension == 8 != known[1].dimension
