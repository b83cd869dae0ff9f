"""``ragr1 ask``: text as it is sampled, documents, answers for programs, and several questions with one policy."""

import json
import shlex
import shutil
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from http_stub import free_port
from processes import run_python
from small_world import a_persons_environment, invoke, make_config, make_files
from typer.testing import CliRunner

from ragr1_actors.cli import print_line
from ragr1_actors.cli.ask import Shown, questions
from ragr1_actors.cli.main import app
from ragr1_actors.core.config import RetrievalSettings
from ragr1_actors.core.errors import DataError, advised, command_name
from ragr1_actors.core.types import Record, ToolCall, Turn
from ragr1_actors.evaluation import asking
from ragr1_actors.evaluation.asking import Asker
from ragr1_actors.rollout.engines.base import EngineArguments, PolicyTokenizer, ScriptedEngine
from ragr1_actors.rollout.recorder import Watch
from retrieval.base import Retriever

pytestmark = pytest.mark.engine
QUESTION = "Where is the lamp ?"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run whose policy has learned the format, and no more."""
    files = make_files(tmp_path_factory.mktemp("ask"))
    settings = make_config(files, num_iterations=0).model_dump()
    (files / "recipe.yaml").write_text(json.dumps(settings))
    invoke("train", str(files / "recipe.yaml"), "--run-dir", str(files / "run"))
    return str(files / "run")


class Searcher(ScriptedEngine):
    """Searches for the lamp and answers."""

    def __init__(self, policy_dir: str, tokenizer: PolicyTokenizer, settings: EngineArguments) -> None:
        script = ["<search> lamp</search>", "<answer> Riga</answer>"]
        super().__init__({"ask/0#0/0": script, "ask/0/0": script}, tokenizer.encode)


@pytest.fixture(scope="module")
def searching(run: str) -> str:
    """The same run with an engine that searches."""
    copy = Path(run).with_name("searching")
    shutil.copytree(run, copy, symlinks=True)
    config = (copy / "config.yaml").read_text()
    assert "engine: transformers\n" in config
    (copy / "config.yaml").write_text(config.replace("engine: transformers\n", "engine: test_cli_ask:Searcher\n"))
    return str(copy)


def test_a_search_server_that_is_away_is_said_at_once(run: str) -> None:
    away = Path(run).with_name("away")
    shutil.copytree(run, away, symlinks=True)
    settings = yaml.safe_load((away / "config.yaml").read_text())
    url = f"http://127.0.0.1:{free_port()}"
    settings["retrieval"] |= {"type": "http", "options": {"url": url}, "index": ""}
    (away / "config.yaml").write_text(yaml.safe_dump(settings))
    assert invoke("ask", str(away), QUESTION).startswith(f"error: retrieval.type=http: {url}/retrieve: ClientConnector")


def test_a_policy_from_the_middle_of_sft_is_said_so(run: str) -> None:
    middle = Path(run).with_name("middle")
    shutil.copytree(run, middle, symlinks=True)
    config = (middle / "config.yaml").read_text()
    assert "num_steps: 150\n" in config
    (middle / "config.yaml").write_text(config.replace("num_steps: 150\n", "num_steps: 300\n"))
    told = (
        "note: the policy is from the middle of SFT, step 150 of 300, and may not know the format yet; let the run go"
    )
    assert invoke("ask", str(middle), QUESTION).startswith(told)
    whole = invoke("ask", str(middle / "policy_sft"), QUESTION)  # with the index of its run
    assert whole == invoke("ask", run, QUESTION)
    assert "answer: " in whole and "note: " not in whole


def test_text_comes_as_it_is_sampled(run: str) -> None:
    texts: list[list[str]] = [[]]
    turns: list[Turn] = []

    def on_turn(turn: Turn) -> None:
        turns.append(turn)
        texts.append([])

    with Asker(run) as asker:
        trajectory = asker.ask(QUESTION, Watch(lambda text: texts[-1].append(text), on_turn))
    assert tuple(turns) == trajectory.turns
    assert turns
    for turn, seen in zip(turns, texts, strict=False):
        assert len(seen) > 2, "not a token at a time"
        assert all(later.startswith(earlier) for earlier, later in pairwise(seen))
        assert turn.completion_text.startswith(seen[-1])


def test_a_turn_is_printed_once_with_its_documents(searching: str) -> None:
    printed = invoke("ask", searching, QUESTION)
    found = json.loads(invoke("ask", searching, QUESTION, "--json"))
    lines = printed.splitlines()
    assert lines[0] == QUESTION
    assert [lines[1], lines[4]] == [turn["text"] for turn in found["turns"]], printed
    assert len(lines) == 6
    (document,) = found["turns"][0]["documents"]
    assert lines[2] == f"  [{document['query']}]"
    assert lines[3] == f"  (1) {document['score']:.3f}  {document['title']}: {document['text']}"
    assert lines[-1] == f"answer: {found['answer']}"


def test_the_json_of_an_answer(searching: str) -> None:
    done = CliRunner().invoke(app, ["ask", searching, QUESTION, "--json"])
    found = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert set(found) == {"question", "turns", "answer", "stop_reason", "error", "counts"}
    assert (found["question"], found["stop_reason"], found["error"]) == (QUESTION, "answered", "")
    assert [turn["action"] for turn in found["turns"]] == ["search", "answer"]
    documents = found["turns"][0]["documents"]
    assert set(documents[0]) == {"query", "id", "title", "text", "score"}
    assert found["turns"][0]["queries"] == [documents[0]["query"]]
    counts = found["counts"]
    assert (counts["turns"], counts["rounds"], counts["queries"], counts["documents"]) == (2, 1, 1, 1)
    assert 0 < counts["model_tokens"] < counts["context_tokens"]


class Reader(ScriptedEngine):
    """Opens the page of the lamp and answers."""

    def __init__(self, policy_dir: str, tokenizer: PolicyTokenizer, settings: EngineArguments) -> None:
        page = '<tool_call>\n{"name": "open_page", "arguments": {"title": "lamp"}}\n</tool_call>'
        super().__init__({"ask/0#0/0": [page, "Riga"], "ask/0/0": [page, "Riga"]}, tokenizer.encode)


def test_pages_are_opened_by_a_retriever_that_still_loads(run: str) -> None:
    copy = Path(run).with_name("reading")
    shutil.copytree(run, copy, symlinks=True)
    config = yaml.safe_load((copy / "config.yaml").read_text())
    config["env_runners"]["engine"] = "test_cli_ask:Reader"
    config["environment"] |= {"env": "tools", "tools": ["open_page"], "options": {}, "prompt": "{question}"}
    config["env_runners"] |= {"max_context_tokens": 4096, "max_new_tokens_per_turn": 200}
    config["policy"]["chat_format"] = "hermes"
    (copy / "config.yaml").write_text(yaml.safe_dump(config))
    with Asker(str(copy)) as asker:
        trajectory = asker.ask(QUESTION)
    assert trajectory.stop_reason.value == "answered", trajectory.error
    (opened,) = trajectory.turns[0].calls
    assert opened.tool == "open_page" and opened.records


def test_the_policy_writes_while_the_retriever_loads(searching: str, monkeypatch: pytest.MonkeyPatch) -> None:
    has_written = threading.Event()
    load = asking.open_retriever

    def wait_and_load(index: Path | None, settings: RetrievalSettings) -> Retriever:
        assert has_written.wait(60)
        return load(index, settings)

    monkeypatch.setattr(asking, "open_retriever", wait_and_load)
    with Asker(searching) as asker:
        trajectory = asker.ask(QUESTION, Watch(lambda text: has_written.set(), lambda turn: None))
    assert trajectory.turns[0].calls
    assert trajectory.stop_reason.value == "answered"


def test_a_retriever_that_cannot_be_loaded_is_one_line(searching: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: Path | None, settings: RetrievalSettings) -> Retriever:
        raise DataError("corpus.arrow is damaged")

    monkeypatch.setattr(asking, "open_retriever", fail)
    done = CliRunner().invoke(app, ["ask", searching, QUESTION])
    assert isinstance(done.exception, DataError), done.output
    assert str(done.exception) == "corpus.arrow is damaged"


@pytest.mark.parametrize("end", ["", "\nWhere is the cup ?\n"])  # end of file; an empty line
def test_one_policy_answers_every_question(run: str, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    loads: list[str] = []

    class Counted(Asker):
        def __init__(self, path: str | Path) -> None:
            loads.append(str(path))
            super().__init__(path)

    monkeypatch.setattr(asking, "Asker", Counted)
    asked = ["ask", run, QUESTION, "--interactive", "--json"]
    done = CliRunner().invoke(app, asked, input=f"Where is the coin ?\n{QUESTION}\n{end}")
    assert (done.exit_code, loads) == (0, [run]), done.output
    first, second, third = map(json.loads, done.stdout.splitlines())
    assert (first["question"], second["question"], third) == (QUESTION, "Where is the coin ?", first)
    assert done.stderr.count("question (empty line to end): ") == 3


def test_a_question_that_is_no_text_is_refused(run: str) -> None:
    said = invoke("ask", run, "Ana \udcff?")
    assert said == ("error: the question is not UTF-8 text (character 5); write it again in a UTF-8 terminal")


def test_a_closed_input_is_its_end(run: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert list(questions("first", True)) == ["first"]


def test_a_question_is_needed_without_interactive(run: str) -> None:
    assert (
        invoke("ask", run) == "error: got no question; write it after the run, or add --interactive to type questions"
    )


@pytest.mark.parametrize(
    ("called", "found", "expected"),
    [
        (".venv/bin/ragr1", None, ".venv/bin/ragr1"),
        (".venv/bin/ragr1", "/usr/bin/ragr1", "ragr1"),
        ("ragr1_actors/__main__.py", None, "ragr1"),
    ],
)
def test_a_command_that_is_advised_can_be_copied(
    monkeypatch: pytest.MonkeyPatch, called: str, found: str | None, expected: str
) -> None:
    monkeypatch.setattr(sys, "argv", [called, "train"])
    monkeypatch.setattr(shutil, "which", lambda name: found)
    assert command_name() == expected
    words = ("ask", "my runs/a", 'Who said "$HOME" in `Riga`, and who didn\'t?')
    assert shlex.split(advised(*words)) == [expected, *words]


SLOW_ANSWER = """
import os, signal, sys
from ragr1_actors.rollout.engines.transformers_engine import Session
whole = Session.report_text
def report_text(self):
    whole(self)
    if len(self.tokens) > self.num_prompt + 1:
        os.kill(os.getpid(), signal.SIGINT)
Session.report_text = report_text
from ragr1_actors.__main__ import main
main()
"""


def test_an_interrupt_during_an_answer_is_one_line(run: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SLOW_ANSWER, "ask", run, QUESTION, "--interactive"],
        cwd=tmp_path,
        env=a_persons_environment(),
        input="Where is the coin ?\n",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.strip() == "interrupted; start the same command again"


def test_an_answer_loads_nothing_that_only_training_needs(run: str) -> None:
    script = """
        import sys
        from ragr1_actors.evaluation.asking import ask
        ask(sys.argv[1], "Where is the lamp ?")
        print([name for name in ("ray", "deepspeed", "tensorboard", "vllm", "learners.learner") if name in sys.modules])
    """
    assert run_python(script, run) == "[]\n"


def test_what_an_environment_says_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    turn = Turn("<think> no", 3, "malformed", observation="\nWrite a query.\n")
    Shown().turn(turn)
    assert capsys.readouterr().out == "<think> no\nWrite a query.\n"


def test_what_a_tool_says_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    Shown().turn(Turn("2 + 3 =", 3, "sum", (ToolCall("calculator", {"term": "2 + 3"}, result="5\n"),)))
    assert capsys.readouterr().out == "2 + 3 =\n  [2 + 3]\n  5\n"


def test_a_passage_gives_the_terminal_no_orders(capsys: pytest.CaptureFixture[str]) -> None:
    orders = "\x1b]0;owned\x07\x1b[2J\x9b31m\b"
    record = Record("1", f"Riga{orders}", f"It lies\r\n\there{orders}", 0.5)
    found = ToolCall("search", {"query": f"q{orders}", "k": 1}, records=(record,))
    Shown().turn(Turn(f"<search> q{orders}", 3, "search", (found,)))
    Shown().turn(Turn("", 3, "malformed", observation=f"Write{orders}"))
    print_line(f"Riga{orders}")
    printed = capsys.readouterr().out
    assert not [sign for sign in printed if (ord(sign) < 32 and sign not in "\n\t") or 127 <= ord(sign) < 160]
    assert "It lies\n" in printed
    assert printed.count("\ufffd]0;owned\ufffd\ufffd[2J\ufffd31m\ufffd") == 6


HELP = """
import sys
import typer
from typer.testing import CliRunner
from ragr1_actors.cli.main import app

SLOW = sys.argv[1].split(",")

def paths(group, before=()):
    yield before
    for name, command in getattr(group, "commands", {}).items():
        yield from paths(command, (*before, name))

for path in paths(typer.main.get_group(app)):
    done = CliRunner().invoke(app, [*path, "--help"])
    assert done.exit_code == 0 and "Usage" in done.output, done.output
    print(" ".join(path) or "ragr1", *[name for name in SLOW if name in sys.modules], sep=",")
"""
SLOW = (
    "aiohttp",
    "deepspeed",
    "duckdb",
    "faiss",
    "numpy",
    "pandas",
    "pyarrow",
    "ray",
    "safetensors",
    "sentence_transformers",
    "tensorboard",
    "torch",
    "transformers",
    "vllm",
    "yaml",
)
"""Not one of these is needed to say what a command does; each takes a tenth of a second or more, or leads to one.

pydantic is not in the list: typer itself loads it for a command's options."""


def test_help_of_every_command_loads_nothing_slow(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", HELP, ",".join(SLOW)],
        cwd=tmp_path,
        env=a_persons_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    lines = done.stdout.splitlines()
    assert {"ragr1", "ask", "evaluate", "index build", "train"} <= {line.partition(",")[0] for line in lines}
    assert [line for line in lines if "," in line] == []
