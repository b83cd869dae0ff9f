"""README and docs are true: their Python runs, and the commands, keys, recipes, paths and links in them exist."""

from __future__ import annotations

import ast
import functools
import importlib.util
import itertools
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from processes import run_python
from typer.core import TyperGroup
from typer.main import get_command

from ragr1_actors.cli.main import app
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.resolve import recipe_files
from ragr1_actors.training.algorithm_config import AlgorithmConfig

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
HISTORY = "CHANGELOG.md"
"""Also names what no longer exists, so that only its links are checked."""
CHECKED = [name for name in NAMES if name != HISTORY]
PACKAGES = ("ragr1_actors", "envs", "learners", "retrieval", "cluster")
MAX_README_LINES = 150
_SECTIONS = "|".join(RunConfig.model_fields)
_PATH = re.compile(r"`((?:ragr1_actors|envs|learners|retrieval|cluster|benchmarks|tests|docs)/[\w/-]*(?:\.\w+|/))`")
_KEY = re.compile(rf"`(?:{_SECTIONS})\.(?!py\b)\w+(?=[`=.])")
_METRIC = re.compile(r"(?:rollout|learner|loop|time|retrieval|eval|tasks|env_runners)/[a-z0-9_]+")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def code_blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield ``(info string, code)`` of every fenced block."""
    for match in re.finditer(r"^( *)```([^\n]*)\n(.*?)^\1```", text, re.DOTALL | re.MULTILINE):
        code = re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE)
        yield match[2].strip(), code


def prose(text: str) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)


def commands(text: str) -> list[str]:
    """Return the shell commands of a page: lines of its bash blocks, and inline code that begins with a command."""
    found: list[str] = []
    for info, code in code_blocks(text):
        lines = code.replace("\\\n", " ").splitlines()
        if info.startswith("bash"):
            found += lines
    return found + re.findall(r"`((?:make|ragr1) [^`\n]+)`", prose(text))


def cli_calls(command: str) -> Iterator[list[str]]:
    """Yield the arguments of ``ragr1`` in a command, once for every ``a|b`` alternative."""
    words = shlex.split(command, comments=True)
    words = [word if "=[" in word else re.sub(r"^\[|\]$", "", word) for word in words]  # [--resume] may be left out
    for index, word in enumerate(words):
        if Path(word).name == "ragr1" or words[index - 1 : index + 1] == ["-m", "ragr1_actors"]:
            end = next((i for i, w in enumerate(words) if i > index and w in ("|", "&&", ";", ">", "&")), len(words))
            arguments = words[index + 1 : end]
            choices = next((w for w in arguments if re.fullmatch(r"[a-z-]+(\|[a-z-]+)+", w)), "")
            arguments = list(itertools.takewhile(lambda word: word != "COMMAND", arguments))  # a placeholder
            for choice in choices.split("|"):
                yield [choice if w == choices else w for w in arguments if w != "..."]
            return


def make_targets(command: str) -> list[str]:
    words = [word for word in shlex.split(command, comments=True) if "=" not in word]
    return [word for word in words[1:] if re.fullmatch(r"[a-z-]+", word)] if words[:1] == ["make"] else []


def test_commands_are_read_from_markdown() -> None:
    text = (
        "Run `make train` or:\n\n```bash no-run: why\nmake claims ARGS=x  # both\n```\n\n"
        "```bash\nA=1 ragr1 train quickstart \\\n  a.b=1 > out\n"
        "ray job submit --working-dir . -- python -m ragr1_actors train R [--resume]\n```\n\n"
        "```text\nmake nothing\n```\nand `ragr1 index build|search ...`."
    )
    found = commands(text)
    assert [make_targets(command) for command in found if make_targets(command)] == [["claims"], ["train"]]
    assert [call for command in found for call in cli_calls(command)] == [
        ["train", "quickstart", "a.b=1"],
        ["train", "R", "--resume"],
        ["index", "build"],
        ["index", "search"],
    ]


def test_readme_is_short() -> None:
    assert len(read("README.md").splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("name", CHECKED)
def test_commands_exist(name: str) -> None:
    """Targets of make, sub-commands and options of ragr1, recipes, and every ``section.key=value``."""
    targets = set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE))
    for command in commands(read(name)):
        assert set(make_targets(command)) <= targets, command
        for call in cli_calls(command):
            check_call(tuple(call))


def parse_call(call: Sequence[str]) -> None:
    """Find the sub-command and read its options, as click does before it runs anything."""
    command: Any = get_command(app)
    words, context = list(call), None
    while True:
        context = command.context_class(command, parent=context)
        _, words, _ = command.make_parser(context).parse_args(words)
        if not words or not isinstance(command, TyperGroup):
            return
        _, command, words = command.resolve_command(context, words)


@functools.cache
def check_call(call: tuple[str, ...]) -> None:
    """Parse a call of ragr1, and resolve its recipe and assignments as the command would."""
    parse_call(call)
    assignments = [word for word in call if re.fullmatch(rf"(?:{_SECTIONS})\.\w+=.*", word, re.DOTALL)]
    recipe = call[1] if len(call) > 1 and call[0] in ("train", "plan", "simulate") else ""
    if recipe and not recipe.isupper():  # RECIPE is a placeholder
        assert recipe in recipe_files() or recipe.endswith(".yaml"), call
    config = AlgorithmConfig.from_recipe(recipe) if recipe in recipe_files() else AlgorithmConfig()
    config.override(assignments).freeze()


@pytest.mark.parametrize("name", CHECKED)
def test_a_submitted_run_has_a_run_directory_that_all_nodes_see(name: str) -> None:
    for command in commands(read(name)):
        if "job submit" in command and " train " in command:
            assert re.search(r"--run-dir (/|s3:)", command), command


@pytest.mark.parametrize("name", CHECKED)
def test_keys_exist(name: str) -> None:
    for match in _KEY.finditer(prose(read(name))):
        section, key = match[0][1:].split(".")
        if list(ROOT.glob(f"{section}/{key}*")):  # a module: two packages are called like sections
            continue
        assert key in type(RunConfig.model_fields[section].default).model_fields, f"{section}.{key}"


# decisions name paths that are gone
@pytest.mark.parametrize("name", [name for name in CHECKED if "decisions/" not in name])
def test_paths_exist(name: str) -> None:
    for path in _PATH.findall(prose(read(name))):
        assert list(ROOT.glob(path.rstrip("/"))), path


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as mkdocs makes them; GitHub's are the same for these headings."""
    headings = re.findall(r"^#+ (.+)$", prose(page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


@pytest.mark.parametrize("name", NAMES)
def test_links_resolve(name: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(read(name))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        page = (ROOT / name).parent / path if path else ROOT / name
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), target


@pytest.mark.parametrize("name", CHECKED)
def test_python_compiles(name: str) -> None:
    for info, code in code_blocks(read(name)):
        if info.startswith("python"):
            compile(code, name, "exec")


@pytest.mark.parametrize("name", CHECKED)
def test_a_block_runs_or_says_why_not(name: str) -> None:
    """Blocks of Python run in this file, those of commands in ``test_docs_commands.py``."""
    for info, _ in code_blocks(read(name)):
        if re.match("python|bash|sh|console|shell", info):
            assert re.fullmatch(r"(python|bash)( no-run: \S.+)?", info), f"{info}: say why it does not run"


@pytest.mark.engine
@pytest.mark.parametrize("name", [n for n in CHECKED if any(info == "python" for info, _ in code_blocks(read(n)))])
def test_python_runs(name: str, tmp_path: Path) -> None:
    """The blocks of a page run in one process, each in a separate namespace."""
    blocks = [code for info, code in code_blocks(read(name)) if info == "python"]
    program = "".join(
        f"exec(compile({code!r}, 'block {number}', 'exec'), {{}})\n" for number, code in enumerate(blocks)
    )
    run_python(program, cwd=tmp_path)


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_configuration", DOCS / "generate_configuration.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_configuration_page_is_up_to_date() -> None:
    assert load_generator().page() == read("docs/configuration.md"), "run: python docs/generate_configuration.py"


@functools.cache
def strings() -> set[str]:
    """Return every string of the product code; ``…`` in place of what an f-string fills in."""
    found: set[str] = set()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.add("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def test_glossary_of_metrics_is_complete() -> None:
    """A name that is put together from parts is not seen here."""
    documented = set(re.findall(r"`([^`\n]+)`", read("docs/metrics.md")))
    assert {text for text in strings() if _METRIC.fullmatch(text)} - documented == set()


def test_names_of_rllib_are_in_rllib() -> None:
    before, _, after = read("docs/metrics.md").partition("## RLlib's names")
    table = after.partition("\n## ")[0]
    rows = [line.split("|")[1:3] for line in table.splitlines() if line.startswith("| `")]
    theirs = {name for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    found = importlib.util.find_spec("ray")
    assert found is not None and found.submodule_search_locations
    rllib = Path(found.submodule_search_locations[0]) / "rllib"
    files = ("utils/metrics/__init__.py", "core/learner/learner.py", "algorithms/algorithm.py")
    source = "".join((rllib / file).read_text("utf-8") for file in files)
    assert len(theirs) > 12
    assert {name for name in theirs if f'"{name}"' not in source} == set()
    ours = {name for row in rows for name in re.findall(r"`([^`]+)`", row[1])}
    assert ours - set(re.findall(r"`([^`\n]+)`", before)) == set()


def quoted_messages() -> list[str]:
    """Return the messages in the first column of the tables of the troubleshooting page."""
    cells = re.findall(r"^\| (.+?) \|", read("docs/troubleshooting.md"), re.MULTILINE)
    return [text for cell in cells for text in re.findall(r"`([^`]+)`", cell) if " " in text and "=" not in text]


@pytest.mark.parametrize("message", quoted_messages())
def test_quoted_messages_are_in_the_code(message: str) -> None:
    pattern = re.compile(".*".join(map(re.escape, message.split("…"))), re.DOTALL)
    assert any(pattern.search(text) for text in strings())
