"""Names in a recipe of the wrong kind are refused before a run directory is made."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from small_world import invoke
from transformers import AutoTokenizer

from envs.base import TextEnv
from envs.search import SearchEnv
from learners.algorithms.grpo import GRPOLearner
from learners.learner import Learner
from ragr1_actors.core.config import RETRIEVAL_TYPES
from ragr1_actors.core.errors import ConfigError, DataError
from ragr1_actors.core.resolve import load_object
from ragr1_actors.core.types import Task
from ragr1_actors.planning.preflight import check_names
from ragr1_actors.planning.tiny_policy import make_tiny_policy
from ragr1_actors.rollout.engines.base import ScriptedEngine
from ragr1_actors.training.algorithm_config import AlgorithmConfig

HERE = __name__


def a_function(task: Task) -> float:
    return 0.0


def a_reward(task: Task, answer: str) -> float:
    return 0.0


async def a_slow_reward(task: Task, answer: str) -> float:
    return 0.0


a_number = 3


class Half(TextEnv):
    def parse(self, completion: str) -> Any: ...


class OtherConstructor(SearchEnv):
    def __init__(self) -> None: ...


class MyEnv(SearchEnv):
    pass


class HalfLearner(Learner):
    pass


class OtherLearner(GRPOLearner):
    def __init__(self, config: Any) -> None: ...


class MyLearner(GRPOLearner):
    pass


class HalfEngine:
    async def generate(self) -> None: ...


class MyEngine(ScriptedEngine):
    def __init__(self, policy_dir: str, tokenizer: Any, settings: Any) -> None: ...


class OtherEngine(ScriptedEngine):
    def __init__(self, policy_dir: str) -> None: ...


class MyRetriever:
    async def search(self, queries: list[str], k: int) -> list[Any]: ...


def refusal(key: str, value: str) -> str:
    section, _, name = key.partition(".")
    with pytest.raises(ConfigError) as caught:
        check_names(AlgorithmConfig({section: {name: value}}).freeze())
    message = str(caught.value)
    assert message.startswith(f"{key}: "), message
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("key", "name", "message"),
    [
        ("environment.env", "a_function", "is a function, expected a subclass of TextEnv"),
        ("environment.env", "HalfEngine", "is the class HalfEngine, expected a subclass of TextEnv"),
        ("environment.env", "a_number", "is a int, expected a subclass of TextEnv"),
        ("environment.env", "Half", "lacks the methods act, reset"),
        ("environment.env", "OtherConstructor", "cannot be called with (settings, context)"),
        ("environment.reward", "a_number", "got 3, which cannot be called, expected a reward of (trajectory, context)"),
        ("environment.reward", "MyEnv", "environment.reward: MyEnv failed at"),
        ("environment.reward", "a_function", "cannot be called with (trajectory, context)"),
        ("training.algorithm", "a_function", "is a function, expected a subclass of Learner"),
        ("training.algorithm", "HalfLearner", "lacks the methods compute_advantages, compute_loss"),
        ("training.algorithm", "OtherLearner", "cannot be called with (config, policy_dir, rank, world_size)"),
        ("env_runners.engine", "a_function", "is a function, expected a class with the methods"),
        ("env_runners.engine", "HalfEngine", "has no release, update_weights, check, close"),
        ("env_runners.engine", "OtherEngine", "cannot be called with (policy_dir, tokenizer, settings)"),
        ("retrieval.type", "a_function", "expected a class with the method async search(queries, k)"),
        ("retrieval.type", "HalfEngine", "expected a class with the method async search(queries, k)"),
    ],
)
def test_something_of_the_wrong_kind_is_named(key: str, name: str, message: str) -> None:
    assert message in refusal(key, f"{HERE}:{name}")


def test_evidence_that_is_not_there_is_named_before_anything_starts(tmp_path: Path) -> None:
    missing = str(tmp_path / "corpus.json")
    assert refusal("retrieval.corpus", missing).endswith("retrieval.index=FOLDER of an index that is built")
    config = AlgorithmConfig().retrieval(corpus=missing)
    check_names(config.freeze(), has_index=True)
    check_names(config.retrieval(type="replay").freeze())
    with pytest.raises(DataError, match=r"no index in .*corpus\.json: manifest\.json is missing"):
        check_names(AlgorithmConfig().retrieval(index=missing).freeze())


def test_what_fits_is_taken() -> None:
    config = (
        AlgorithmConfig()
        .environment(env=f"{HERE}:MyEnv", reward=f"{HERE}:a_reward")
        .training(algorithm=f"{HERE}:MyLearner")
        .env_runners(engine=f"{HERE}:MyEngine")
        .retrieval(type=f"{HERE}:MyRetriever")
        .policy(model="Qwen/Qwen2.5-7B-Instruct")
    )
    check_names(config.freeze())
    options = {"http": {"url": "http://127.0.0.1:1"}, "web": {"url": "http://127.0.0.1:1", "results_path": "found"}}
    for name in RETRIEVAL_TYPES:
        check_names(AlgorithmConfig().retrieval(type=name, options=options.get(name, {})).freeze())
    with pytest.raises(ConfigError, match=r"retrieval\.options\.url"):
        check_names(AlgorithmConfig().retrieval(type="http").freeze())


def test_an_unknown_retrieval_type_lists_the_known() -> None:
    assert "expected one of flat, fp16, sq8" in refusal("retrieval.type", "flt")


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for key in ("environment.tasks", "environment.eval_tasks"):
        expected = "expected world or a task file"
        assert f"there is no file nowhere.json, {expected}" in refusal(key, "nowhere.json")
        assert expected in refusal(key, "./data/*.json")
        problem = f"holds no file that ends in .json, .jsonl, .csv, .tsv, .parquet; {expected}"
        assert problem in refusal(key, str(tmp_path))
    assert "got nothing" in refusal("environment.tasks", "")
    assert "nowhere.json, expected correct, mixture or a file" in refusal("sft.demonstrations", "nowhere.json")


def test_a_policy_that_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_text("")
    assert "is a file, expected tiny, tiny_vision, a Hugging Face folder" in refusal(
        "policy.model", str(tmp_path / "model.bin")
    )
    assert "holds no config.json" in refusal("policy.model", str(tmp_path))
    for missing in (str(tmp_path / "none"), "./none", "~/none", "runs/a/policy", ""):
        assert "there is no folder" in refusal("policy.model", missing)
    assert "there is no folder './none', expected a Hugging Face folder" in refusal("retrieval.reranker", "./none")
    check_names(AlgorithmConfig().retrieval(reranker="cross-encoder/ms-marco-MiniLM-L6-v2").freeze())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "tiny"
    make_tiny_policy(folder, [" Riga"], seed=0, vocab_size=300, hidden_size=32, num_layers=1, num_heads=2)
    return folder


@pytest.fixture
def policy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "policy"))


def add_token(policy: Path, token: str, *, special: bool = True, **names: str) -> None:
    """Add a token behind the embeddings."""
    tokenizer = AutoTokenizer.from_pretrained(policy)
    tokenizer.add_tokens([token], special_tokens=special)
    tokenizer.add_special_tokens(names)
    tokenizer.save_pretrained(policy)


@pytest.mark.engine
def test_a_token_beyond_the_embeddings_that_may_occur_is_refused(policy: Path, tiny: Path) -> None:
    check_names(AlgorithmConfig().policy(model=str(tiny)).freeze())
    model = AlgorithmConfig().policy(model=str(policy))
    add_token(policy, " Jelgava", special=False)
    refused = "embeddings, and its tokenizer 1 tokens beyond them that may occur, such as ' Jelgava'"
    with pytest.raises(ConfigError, match=refused):
        check_names(model.freeze())
    assert refused in invoke("plan", "quickstart", f"policy.model={policy}")


@pytest.mark.engine
def test_a_control_token_beyond_the_embeddings_is_refused_where_it_is_used(
    policy: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = AlgorithmConfig().policy(model=str(policy))
    add_token(policy, "<pad>", pad_token="<pad>")
    check_names(model.freeze())
    (warning,) = caplog.messages
    assert "lack 1 tokens of its tokenizer, such as '<pad>'" in warning
    prompt = AlgorithmConfig().environment().freeze().environment.prompt
    with pytest.raises(ConfigError, match="such as '<pad>'"):
        check_names(model.environment(prompt=f"<pad>{prompt}").freeze())
    add_token(policy, "<end>", eos_token="<end>")
    with pytest.raises(ConfigError, match="such as '<end>'"):
        check_names(model.environment(prompt=prompt).freeze())


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}",
    ],
)
@pytest.mark.engine
def test_a_chat_template_that_leaves_the_prompt_out_is_refused(policy: Path, content: str) -> None:
    """Jinja takes a text for a list of characters, and says nothing of what those lack."""
    model = AlgorithmConfig().policy(model=str(policy)).environment(env="search")
    template = policy / "chat_template.jinja"
    template.write_text(f"{{% for message in messages %}}<|im_start|>{{{{ message.role }}}} {content}{{% endfor %}}")
    with pytest.raises(ConfigError, match="its chat template leaves out what the user says"):
        check_names(model.freeze())
    template.write_text("")
    with pytest.raises(ConfigError, match="its chat template leaves out what the user says"):
        check_names(model.freeze())


@pytest.mark.parametrize("in_config", [False, True])
@pytest.mark.engine
def test_a_chat_template_that_fails_is_named_with_its_file(policy: Path, *, in_config: bool) -> None:
    model = AlgorithmConfig().policy(model=str(policy))
    file = policy / "chat_template.jinja"

    def put(template: str) -> None:
        if not in_config:
            file.write_text(template)
            return
        file.unlink(missing_ok=True)
        config = policy / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": template}))

    name = "tokenizer_config.json" if in_config else "chat_template.jinja"
    for template, fault in (
        ("{% for message in messages %}{{ message.content }}", "TemplateSyntaxError: Unexpected end of template"),
        ("{{ messages | no_such_filter }}", "No filter named 'no_such_filter'"),
        ("{{ raise_exception('a system message first') }}", "a system message first"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ '{x}'.format(y=1) }}", "KeyError"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
    ):
        put(template)
        with pytest.raises(ConfigError) as caught:
            check_names(model.environment(env="search").freeze())
        assert str(caught.value).startswith(f"{policy / name}: the chat template fails (")
        assert fault in str(caught.value)
        assert "\n" not in str(caught.value)
    put("{{ messages | no_such_filter }}")
    with pytest.raises(ConfigError, match="No filter"):
        check_names(model.environment(env=f"{HERE}:MyEnv").freeze())
    put("{{ raise_exception('a system message first') }}")
    check_names(model.environment(env=f"{HERE}:MyEnv").freeze())  # its prompt may have one


def test_none_of_it_makes_a_run_directory(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for override in (
        f"environment.env={HERE}:Half",
        "environment.tasks=nowhere.json",
        "retrieval.type=flt",
        f"policy.model={tmp_path}/none",
        "policy.options={num_heads: 128}",
    ):
        assert invoke("train", "quickstart", override, "--run-dir", str(run_dir)).startswith("error: ")
    with pytest.raises(ConfigError, match="flt"):
        AlgorithmConfig().retrieval(type="flt").build_algo(run_dir)
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def (:", "line 1 is not Python"),
        ("\nboom()", "line 2: NameError"),
        ("from json import nothing", "ImportError"),
        ("import no_such_package_at_all", "needs the package 'no_such_package_at_all'"),
        ("x = 1", "has no 'MyEnv'"),
    ],
    ids=["syntax", "name", "import", "package", "attribute"],
)
def test_a_module_that_cannot_be_imported_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str, request: pytest.FixtureRequest
) -> None:
    module = f"broken_{request.node.callspec.id}"
    (tmp_path / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_object(f"{module}:MyEnv", {})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    for name in (":MyEnv", "..a:MyEnv", "no_such_module_at_all:MyEnv"):
        with pytest.raises(ConfigError):
            load_object(name, {})


def test_stage_1_is_not_offered_as_an_algorithm_of_stage_2() -> None:
    with pytest.raises(ConfigError, match=r"got 'grp0', expected one of .*, reinforce_pp, rloo or my_module:MyName"):
        check_names(AlgorithmConfig().training(algorithm="grp0").freeze())
