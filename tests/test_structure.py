"""The project keeps its shape: public names, file sizes, recipes and light imports."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
from io import StringIO
from pathlib import Path
from tokenize import COMMENT, DEDENT, ENDMARKER, INDENT, NEWLINE, NL, generate_tokens

import pytest
from conftest import LONGEST_FIRST
from processes import run_python

import ragr1_actors
from benchmarks import BENCHMARKS
from ragr1_actors.core.resolve import RECIPES, recipe_files
from ragr1_actors.training.algorithm_config import AlgorithmConfig

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("ragr1_actors", "envs", "learners", "retrieval", "cluster")
SOURCES = sorted(path for folder in (*PACKAGES, "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py"))
HEAVY = ("torch", "ray", "vllm", "faiss", "deepspeed", "transformers", "sentence_transformers")
PUBLIC_NAMES = [
    "Algorithm",
    "AlgorithmConfig",
    "Answer",
    "Completion",
    "Curriculum",
    "Learner",
    "Malformed",
    "Passage",
    "Record",
    "Retriever",
    "RewardContext",
    "RewardResult",
    "RolloutStrategy",
    "Search",
    "SearchEnv",
    "StepResult",
    "StopReason",
    "Task",
    "TaskSource",
    "TextEnv",
    "TokenKind",
    "ToolCall",
    "Trajectory",
    "TrajectoryGroup",
]


def test_public_names_are_pinned() -> None:
    assert sorted(ragr1_actors.__all__) == PUBLIC_NAMES
    same = {"Passage": "Record"}  # what a search brings back is a record, as what any other tool does
    for name in PUBLIC_NAMES:
        assert getattr(ragr1_actors, name).__name__ == same.get(name, name)


SPINE = (
    "ragr1_actors/core/types.py",
    "ragr1_actors/rollout/recorder.py",
    "ragr1_actors/rollout/env_runner.py",
    "ragr1_actors/rollout/runners/weight_sync.py",
    "ragr1_actors/training/batches.py",
    "ragr1_actors/training/algorithm.py",
    "learners/learner.py",
    "learners/losses.py",
)
"""What a newcomer reads first."""


def test_the_spine_is_short_and_knows_nothing_of_searches() -> None:
    assert sum(len((ROOT / name).read_text().splitlines()) for name in SPINE) <= 3_266
    found = []
    for name in SPINE:
        tree = ast.parse((ROOT / name).read_text())
        statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
        for node in ast.walk(tree):
            names = [getattr(node, field, None) for field in ("id", "attr", "arg", "name")]
            is_message = isinstance(node, ast.Constant) and node not in statements  # else it is a docstring
            words = [str(one) for one in (*names, node.value if is_message else None) if isinstance(one, str)]
            found += [(name, word) for word in words if re.search("search|quer(y|ies)|passage", word, re.IGNORECASE)]
    assert found == []


MAX_LINES, MAX_CODE_LINES, MAX_CLASSES = 52_770, 35_185, 558
"""Limits of the product's size, without the recipes. If you raise one, say why in the CHANGELOG."""
_NO_CODE = (COMMENT, NL, NEWLINE, INDENT, DEDENT, ENDMARKER)


def test_the_product_keeps_its_size() -> None:
    num_lines = num_code_lines = num_classes = 0
    files = (path for folder in PACKAGES for path in (ROOT / folder).rglob("*.py"))
    for path in (path for path in files if not path.is_relative_to(RECIPES)):
        text = path.read_text()
        nodes = list(ast.walk(ast.parse(text)))
        texts = [node for node in nodes if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)]
        docs = {line for node in texts for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
        tokens = [token for token in generate_tokens(StringIO(text).readline) if token.type not in _NO_CODE]
        num_lines += len(text.splitlines())
        num_code_lines += len({line for one in tokens for line in range(one.start[0], one.end[0] + 1)} - docs)
        num_classes += sum(isinstance(node, ast.ClassDef) for node in nodes)
    assert (num_lines <= MAX_LINES, num_code_lines <= MAX_CODE_LINES, num_classes <= MAX_CLASSES) == (True,) * 3, (
        num_lines,
        num_code_lines,
        num_classes,
    )


def test_files_and_functions_are_short() -> None:
    long_files = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in SOURCES}
    assert {name: lines for name, lines in long_files.items() if lines > 600} == {}
    lengths = [
        (f"{path.relative_to(ROOT)}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1)
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None
    ]
    assert [(name, lines) for name, lines in lengths if lines > 60] == []


FRAGMENT = re.compile(
    "(Of|As|Those|That|This|These|With|Without|Where|Which|What|Who|Whose|Why|When|How|In|On|For|From|By|At|If|To|Until"
    "|Since|Between|Beside|Behind|Outside|Its?|Be|Have|Under|Given|Nothing|None|Per|Then|Not|And|Or|So|But|Else)"
    r"(?![\w-])"
)


def fragments(source: str) -> list[str]:
    """Return the docstrings, of fields too, that do not begin with their noun or verb."""
    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Expr)]
    docs = [node.value for node in texts if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return [text.splitlines()[0] for text in docs if FRAGMENT.match(text)]


def test_docstrings_begin_with_their_noun_or_verb() -> None:
    shipped = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in PACKAGES]
    product = [path for path in shipped if not path.is_relative_to(RECIPES)]
    found = {str(path.relative_to(ROOT)): fragments(path.read_text()) for path in product}
    assert {name: texts for name, texts in found.items() if texts} == {}
    assert fragments('lr_factor = 1.0\n"""Of ``scale_lr``."""\n')
    assert not fragments('lr_factor = 1.0\n"""Factor of the learning rate."""\nlast = 0\n"""In-flight requests."""\n')


def test_the_tests_that_begin_first_are_there() -> None:
    assert set(LONGEST_FIRST) <= {path.stem for path in SOURCES}


@pytest.mark.parametrize("name", list(recipe_files()))
def test_every_recipe_loads(name: str) -> None:
    AlgorithmConfig.from_recipe(name).freeze()


def test_there_are_recipes() -> None:
    assert {"quickstart", "quickstart_sq", "hotpotqa_small"} <= set(recipe_files())


@pytest.mark.integration
def test_import_is_light() -> None:
    assert run_python(f"import sys, ragr1_actors, envs; print([m for m in {HEAVY} if m in sys.modules])") == "[]\n"


@pytest.mark.integration
def test_a_recipe_is_checked_without_heavy_imports() -> None:
    modules = "ragr1_actors.planning.preflight, ragr1_actors.cli.main"
    assert run_python(f"import sys, {modules}; print([m for m in {HEAVY} if m in sys.modules])") == "[]\n"


@pytest.mark.slow
def test_an_env_runner_starts_without_what_it_never_uses() -> None:
    """Its module, and that of the retriever it is given: five seconds of every actor's start, were it all imported."""
    heavy = ("sentence_transformers", "faiss", "deepspeed")
    modules = "ragr1_actors.rollout.runners.env_runner_group, retrieval.replicas.retriever_group"
    assert run_python(f"import sys, {modules}; print([m for m in {heavy} if m in sys.modules])") == "[]\n"


AUTO_LOADERS = re.compile(r"Auto\w+\.from_pretrained")
UNPICKLERS = ("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve")


def unsafe_loads(source: str) -> list[str]:
    """Return what in a module may run code from a file that it loads."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            found += [name for name in names if name.partition(".")[0] in UNPICKLERS]
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        if called == "torch.load" and keywords.get("weights_only") != "True":
            found.append("torch.load without weights_only=True")
        if called in ("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "torch.jit.load"):
            found.append(called)
        if keywords.get("allow_pickle", "False") != "False":
            found.append(f"{called}(allow_pickle={keywords['allow_pickle']})")
        trusts = keywords.get("trust_remote_code", "")  # without it, transformers asks on the terminal
        from_recipe = ("False", "trust_remote_code", "settings.trust_remote_code")
        if AUTO_LOADERS.fullmatch(called) and trusts not in from_recipe:
            found.append(f"{called}(trust_remote_code={trusts})")
    return found


def test_nothing_is_unpickled_from_a_file_or_a_socket() -> None:
    """``numpy.load`` refuses pickles unless it is told otherwise, and so does sentence-transformers."""
    shipped = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in PACKAGES]
    found = {str(path.relative_to(ROOT)): unsafe_loads(path.read_text()) for path in shipped}
    assert {name: loads for name, loads in found.items() if loads} == {}


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from joblib import load",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "yaml.load(text, yaml.Loader)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "AutoTokenizer.from_pretrained(path)",
    ],
)
def test_what_would_run_code_of_a_file_is_found(line: str) -> None:
    assert unsafe_loads(line)
    assert not unsafe_loads("np.load(path, mmap_mode='r')\ntorch.load(path, weights_only=True)\nyaml.safe_load(text)")


@pytest.mark.integration
def test_an_engine_does_not_load_what_transformers_only_may_use() -> None:
    """scikit-learn and SciPy are a fifth of the time until an actor can load a policy."""
    program = (
        "import sys\n"
        "import learners.algorithms.grpo, ragr1_actors.rollout.engines.transformers_engine\n"
        "from transformers import Qwen2ForCausalLM\n"
        "print(sorted({'scipy', 'sklearn'} & set(sys.modules)))\n"
        "import scipy, sklearn\n"
    )
    assert run_python(program, cwd=ROOT).strip() == "[]"


@pytest.mark.parametrize("name", sorted(BENCHMARKS))
def test_a_benchmark_makes_the_environments_that_it_needs_and_no_other(name: str) -> None:
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    # as if nothing was installed, and without the options of a `make` that runs these tests
    command = ["make", "--dry-run", "--always-make", "bench", f"NAME={name}"]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("MAKE") and key != "MFLAGS"}
    planned = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True).stdout
    environment = ".venv-vllm" if name == "rollout" else ".venv"
    assert f"\n{environment}/bin/ragr1 bench {name} " in f"\n{planned}"
    assert (".venv-vllm" in planned) == (name in ("rollout", "all"))
    assert (".venv-trl" in planned) == (name in ("trl", "all"))


ONE_OF_EACH = {
    r"\.partition\(\"=\"\)": "ragr1_actors/core/resolve.py",
    r"\bray\.kill\b": "cluster/supervision/watchdog.py",
    r"\b(fcntl|filelock)\b": "ragr1_actors/core/disk/files.py",
    r"\bValidationError\b|json\.loads?\(.*read_(text|bytes)": "ragr1_actors/core/disk/json_files.py",
    r"\.renames?\(|\bos\.replace\(|\.replace\([\w.]+\)": "ragr1_actors/core/disk/files.py",
    r"\b(AppRunner|ServerRunner|TCPSite|SockSite|UnixSite|run_app|start_server|HTTPServer)\b": "cluster/http.py",
}
"""The one file that may use what these words name: overrides, ends of actors, locks, renames, checks, servers."""


@pytest.mark.parametrize("words", list(ONE_OF_EACH))
def test_one_file_does_what_all_need(words: str) -> None:
    shipped = [path for path in SOURCES if path.relative_to(ROOT).parts[0] in PACKAGES]
    found = {str(path.relative_to(ROOT)) for path in shipped if re.search(words, path.read_text())}
    assert found == {ONE_OF_EACH[words]}
