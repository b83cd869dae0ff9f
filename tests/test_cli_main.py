"""The command line: what cannot be done ends with one sentence and exit status 2, and nothing is lost."""

import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from processes import run_python
from rich.console import Console
from rich.table import Table
from small_world import a_persons_environment, invoke, make_config, make_files
from typer.core import TyperGroup
from typer.testing import CliRunner

from ragr1_actors.cli import console, print_error, print_line, print_state
from ragr1_actors.cli.main import app, describe_start, how_to_continue
from ragr1_actors.runs.run_directory import (
    STARTS_FILE,
    append_start,
    change_learners,
    check_recipe,
    create_run_directory,
    open_run_directory,
    this_start,
)
from ragr1_actors.runs.storage.store import find_store
from ragr1_actors.runs.telemetry.metrics import read_metrics
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from retrieval.images import INDEX_FILE

pytestmark = pytest.mark.engine


def ragr1(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ragr1_actors", *arguments],
        cwd=cwd,
        env=a_persons_environment() | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.json"
    path.write_text(
        json.dumps([{"title": "Riga", "text": "Riga lies in Latvia."}, {"title": "Oslo", "text": "In Norway."}])
    )
    return path


def test_errors_go_to_stderr_with_exit_status_2_and_no_traceback(tmp_path: Path) -> None:
    done = ragr1("train", "quickstat", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: unknown recipe 'quickstat'; did you mean 'quickstart'?\n"
    assert list(tmp_path.iterdir()) == []


def test_names_of_users_classes_are_no_emoji(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """``src:Cat: no`` has ``:cat:`` in it, of which rich makes a cat."""
    done = ragr1("check", "source", "src:cat: no", cwd=tmp_path)
    assert "src:cat: no" in done.stderr and done.returncode == 2
    print_line("src:cat: no")
    print_error("src:cat: no")
    print_state("wrong", "src:cat: no", "src:cat: no")
    table = Table("src:cat: no", title="src:cat: no")
    table.add_row("src:cat: no")
    console.print(table)
    printed = capfd.readouterr()
    assert (printed.out + printed.err).count(":cat:") == 7


def test_the_version_is_that_of_the_installed_package() -> None:
    assert invoke("--version").strip() == version("ragr1-actors")


def test_a_run_from_its_start_to_a_question(tmp_path: Path) -> None:
    """The whole run in one process: only the project's messages are printed, and none of a library."""
    config = make_config(make_files(tmp_path), {"num_steps": 2, "num_demonstrations": 16}, num_iterations=2)
    settings = config.model_dump()
    settings["evaluation"] |= {"interval": 1}
    settings["environment"] |= {"eval_tasks": "", "options": {"query_format": "json"}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(settings))
    asked = (tmp_path / "tasks.json").read_text().replace("Where is the", r"Where is \"$the\"")
    (tmp_path / "tasks.json").write_text(asked)
    done = ragr1("train", "recipe.yaml", "--run-dir", "run", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Held-out tasks, greedy (1 tasks)" in done.stdout
    assert "WARNING" not in done.stdout
    *command, question = shlex.split(done.stdout.splitlines()[-1].removeprefix("try: "))
    assert (command, question[:15]) == (["ragr1", "ask", "run"], 'Where is "$the"')
    logged = [row for row in read_metrics(tmp_path / "run") if row["stage"] == "rl"]
    assert [(row["iteration"], "eval/em" in row) for row in logged] == [(1, False), (2, False), (1, True)]
    asked = json.loads(invoke("ask", str(tmp_path / "run"), "Where is the lamp ?", "--json"))
    assert {"answer", "stop_reason", "turns"} <= set(asked)


def test_wrong_settings_make_no_run_directory(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    for override in (
        "training.lr=fast",
        "training.rl=1",
        "nothing",
        "training.algorithm=dop",
        "environment.env=json:Nope",
        "environment.reward=exact",
        "env_runners.engine=vlm",
    ):
        assert invoke("train", "quickstart", override, "--run-dir", str(run_dir)).startswith("error: ")
    assert not run_dir.exists()


def test_a_directory_with_a_run_offers_resume(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    message = invoke("train", "quickstart", "--run-dir", str(tmp_path))
    assert "--resume" in message
    assert (tmp_path / "config.yaml").read_text() == "{}"


@pytest.mark.parametrize("option", [(), ("--resume",), ("--auto-resume",)])
def test_a_run_directory_of_an_unknown_scheme_is_no_damage(option: tuple[str, ...]) -> None:
    said = invoke("train", "quickstart", "--run-dir", "foo://bucket/run", *option)
    assert said.startswith("error: foo://bucket/run: Unrecognized filesystem type in URI"), said
    assert said.endswith("expected a URI of pyarrow.fs, such as s3://bucket/runs/mine"), said


def test_how_a_stopped_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    monkeypatch.setattr(sys, "argv", ["my env/bin/ragr1"])
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert how_to_continue("my recipe.yaml", "runs/a", lasts=True, repeats=False) == (
        "go on with: 'my env/bin/ragr1' train 'my recipe.yaml' --run-dir runs/a --resume"
    )
    monkeypatch.setattr(sys, "argv", ["pytest"])
    assert how_to_continue("mine.yaml", "s3://b/r?region=eu", lasts=True, repeats=False) == (
        "go on with: ragr1 train mine.yaml --run-dir 's3://b/r?region=eu' --resume"
    )
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")  # as in a job
    assert how_to_continue("mine.yaml", "/runs/a", lasts=True, repeats=True) == (
        "submit the same command again, and the run goes on"
    )
    assert how_to_continue("mine.yaml", "s3://b/r?region=eu", lasts=True, repeats=False) == (
        "submit the same command again with --run-dir 's3://b/r?region=eu' --auto-resume, and the run goes on"
    )
    lost = how_to_continue("mine.yaml", "runs/mine", lasts=False, repeats=True)
    assert lost.startswith("runs/mine is in the job's folder, which Ray deletes; submit it with --run-dir s3://")


def test_resume_needs_a_run(tmp_path: Path) -> None:
    assert "--run-dir" in invoke("train", "quickstart", "--resume")
    assert "holds no run" in invoke("train", "quickstart", "--resume", "--run-dir", str(tmp_path))
    assert "neither the directory of a run nor a checkpoint" in invoke("ask", str(tmp_path), "Where?")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.lr=1", "got training.lr; a resumed run keeps its configuration, and takes only learners.key=value"),
        ("learners.lora={rank: 4}", "got learners.lora; a resumed run keeps"),
        ("learners.num_learner=2", "did you mean 'num_learners'?"),
        ("learners.zero_stage=4", "learners.zero_stage: got 4"),
        ("quickstart", "got quickstart; a resumed run keeps"),
    ],
)
def test_a_resumed_run_takes_other_learners_and_nothing_else(tmp_path: Path, override: str, message: str) -> None:
    config = AlgorithmConfig.from_recipe("quickstart").freeze()
    create_run_directory(config, tmp_path)
    assert message in invoke("train", "quickstart", "--resume", "--run-dir", str(tmp_path), override)
    assert open_run_directory(tmp_path) == config


def test_a_run_goes_on_by_its_own_recipe_only(tmp_path: Path) -> None:
    """An engine that does not exist stands for training: it is refused after the recipe."""
    own, run_dir = tmp_path / "own.yaml", tmp_path / "run"
    own.write_text("training: {lr: 0.5, num_iterations: 3}")
    words = [str(own), "debugging.seed=7", "env_runners.engine=nonsense"]
    create_run_directory(AlgorithmConfig.from_recipe(words[0]).override(words[1:]).freeze(), run_dir)
    append_start(run_dir, this_start(words))

    def resume(recipe: str, *overrides: str) -> str:
        return invoke("train", recipe, *overrides, "--resume", "--run-dir", str(run_dir))

    for overrides in ((), ("debugging.seed=7",), tuple(words[1:]), ("learners.num_learners=0",)):
        assert resume(str(own), *overrides).startswith("error: env_runners.engine: got 'nonsense'")
    assert "got debugging.seed; a resumed run keeps its configuration" in resume(str(own), "debugging.seed=8")
    assert "unknown recipe 'mine'" in resume("mine")
    other = tmp_path / "other.yaml"
    other.write_text("training: {lr: 0.25, num_iterations: 3}")
    assert resume(str(other)) == (
        f"error: {run_dir} was started by {' '.join(words)}, and {other} has another training.lr; name its own recipe, "
        "or start another run in another --run-dir"
    )
    assert re.search(r" has another (\w+\.\w+ and ){3}\d+ other keys; ", resume("quickstart"))
    own.write_text(other.read_text())  # it was changed since
    assert "has another training.lr;" in resume(str(own))
    (run_dir / STARTS_FILE).unlink()  # as in a run of the Python interface
    assert resume("quickstart").startswith("error: env_runners.engine: got 'nonsense'")
    note = check_recipe(find_store(run_dir), open_run_directory(run_dir), "quickstart")
    assert note.startswith("quickstart has another ")
    assert note.endswith(" than the run, which goes on with its own configuration")


def test_other_learners_are_kept_in_the_runs_configuration(tmp_path: Path) -> None:
    config = AlgorithmConfig.from_recipe("quickstart").freeze()
    create_run_directory(config, tmp_path)
    changed = change_learners(tmp_path, config, ["learners.num_learners=3", "learners.zero_stage=2"])
    assert (changed.learners.num_learners, changed.learners.zero_stage) == (3, 2)
    assert open_run_directory(tmp_path) == changed
    assert changed.model_copy(update={"learners": config.learners}) == config


def test_data_errors_name_file_and_line(tmp_path: Path, corpus: Path) -> None:
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "Where?", "answer": "Riga"}\n{"question": \n')
    common = ["env_runners.num_env_runners=0", "learners.num_learners=0", "retrieval.num_retrievers=0"]
    settings = [f"environment.tasks={tasks}", f"retrieval.corpus={corpus}"]
    message = invoke("train", "hotpotqa_small", *settings, *common, "--run-dir", str(tmp_path / "a"))
    assert "tasks.jsonl, line 2" in message
    assert not (tmp_path / "a").exists()
    tasks.write_text("".join(f'{{"question": "Where is {n}?", "answer": "Riga"}}\n' for n in range(10)))
    corpus.write_text("[]")
    message = invoke("train", "hotpotqa_small", *settings, *common, "--run-dir", str(tmp_path / "b"))
    assert message.startswith("error: ")
    assert "corpus.json" in message
    assert not (tmp_path / "b").exists()  # it held the configuration and nothing else


def test_index_commands(tmp_path: Path, corpus: Path) -> None:
    index = tmp_path / "index"
    build = ("index", "build", "--corpus", str(corpus), "--out", str(index))
    refused = invoke(*build, "--gpus-per-actor", "0.5")
    assert "--gpus-per-actor: got 0.5 with --device cpu; add --device cuda" in refused
    assert "2 passages" in invoke(*build)
    found = json.loads(invoke("index", "search", str(index), "where is riga", "-k", "1", "--json"))
    assert [p["title"] for p in found[0]["passages"]] == ["Riga"]
    assert json.loads(invoke("index", "info", str(index), "--json"))["count"] == 2
    assert "count  2" in invoke("index", "info", str(index))
    assert "not overwritten" in invoke(*build)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"question": "Where is Riga?", "answer": "Latvia"}\n')
    assert "supporting" in invoke("index", "eval", str(index), "--tasks", str(tasks))


BUILD, BUILD_PAGES = ("index", "build", "--corpus", "corpus.json"), ("index", "build", "--corpus", "pages")
PAGES_TAKE = "got pages, which take only --corpus, --out, --encoder and --option; leave the others out"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*BUILD, "--type", "flat", "--vectors", "pq"), "--vectors: got pq with --type flat; give --type hybrid"),
        ((*BUILD, "--type", "bm25", "--encoder", "e5"), "--encoder: got e5 with --type bm25, which has no vectors"),
        ((*BUILD_PAGES, "--vectors", "pq"), PAGES_TAKE),
        ((*BUILD_PAGES, "--format", "dpr"), PAGES_TAKE),
        ((*BUILD_PAGES, "--split-words", "100"), PAGES_TAKE),
        ((*BUILD_PAGES, "--restart"), PAGES_TAKE),
        ((*BUILD_PAGES, "--cpus-per-actor", "2"), PAGES_TAKE),
        ((*BUILD_PAGES, "--gpus-per-actor", "1"), PAGES_TAKE),
        (("index", "search", "images", "red", "--reranker", "r"), "--reranker: images has page images"),
        (("index", "serve", "index", "--encoders", "2"), "--encoders: got 2 with --retrievers 0; add --retrievers 1"),
        (("evaluate", "run", "--latency-tasks", "100"), "--latency-tasks: got 100 without --latency; add it"),
        (("simulate", "quickstart", "--from", "run", "--gpu", "a100-80gb"), "--gpu, --passages: got --from, whose run"),
        (("simulate", "quickstart", "--from", "run", "--passages", "9"), "--gpu, --passages: got --from, whose run"),
    ],
)
def test_options_without_an_effect_are_refused(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    for name in ("pages/1.png", f"images/{INDEX_FILE}"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    out = ("--out", "out") if "build" in arguments else ()
    assert invoke(*arguments, *out).startswith(f"error: {message}")


def test_a_passage_that_is_found_gives_the_terminal_no_orders(tmp_path: Path, corpus: Path) -> None:
    corpus.write_text(json.dumps([{"title": "Riga", "text": "Riga\x1b]0;owned\x07 lies in Latvia."}]))
    invoke("index", "build", "--corpus", str(corpus), "--out", str(tmp_path / "index"))
    printed = invoke("index", "search", str(tmp_path / "index"), "where is riga")
    assert "Riga\ufffd]0;owned\ufffd lies" in printed


def test_duplicate_passage_ids_are_named(tmp_path: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"id": "a", "title": "x", "text": "y"}\n{"id": "a", "title": "z", "text": "w"}\n')
    message = invoke("index", "build", "--corpus", str(path), "--out", str(tmp_path / "index"))
    assert "'a'" in message
    assert not (tmp_path / "index").exists()


@pytest.mark.slow
def test_an_index_of_another_encoder_is_refused(tmp_path: Path, corpus: Path) -> None:
    index = tmp_path / "index"
    invoke("index", "build", "--corpus", str(corpus), "--out", str(index))
    message = invoke(
        "train", "quickstart", f"retrieval.index={index}", "retrieval.encoder=e5", "--run-dir", str(tmp_path / "run")
    )
    assert "built with encoder" in message


PRINTS_JSON = {
    "ask": ["RUN", "Where is the lamp ?"],
    "evaluate": ["RUN", "--num-tasks", "2"],
    "index audit": ["INDEX", "--tasks", "TASKS"],
    "index eval": ["INDEX", "--tasks", "TASKS"],
    "index info": ["INDEX"],
    "index search": ["INDEX", "Where is the lamp ?", "two\nlines"],
    "plan": ["quickstart", "--here"],
    "recipes": [],
    "report": ["RUN"],
    "simulate": ["quickstart", "--iterations", "1", "--runners", "1", "--retrievers", "1"],
}
ELSEWHERE = {"bench", "chaos", "claims", "doctor", "rescore", "select"}
"""The commands "bench", "claims", "doctor" and "rescore" print several lines of JSON."""


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A run that has ended, its index and its tasks."""
    files = make_files(tmp_path_factory.mktemp("json"))
    settings = make_config(files, {"num_steps": 0}, num_iterations=0).model_dump()
    (files / "recipe.yaml").write_text(json.dumps(settings))
    invoke("train", str(files / "recipe.yaml"), "--run-dir", str(files / "run"))
    return {"RUN": str(files / "run"), "INDEX": str(files / "index"), "TASKS": str(files / "tasks.json")}


@pytest.mark.parametrize("command", PRINTS_JSON)
def test_json_is_one_line_on_stdout(named: dict[str, str], command: str) -> None:
    arguments = [named.get(argument, argument) for argument in PRINTS_JSON[command]]
    done = CliRunner().invoke(app, [*command.split(), *arguments, "--json"])
    assert done.exit_code == 0, done.output
    assert done.stdout.endswith("\n")
    assert done.stdout.count("\n") == 1, done.stdout
    assert "measures" not in json.loads(done.stdout)  # each has its own name


def commands(group: TyperGroup, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def test_every_command_with_json_is_tested() -> None:
    group = typer.main.get_group(app)
    have = {name for name, command in commands(group) if any("--json" in option.opts for option in command.params)}
    assert have == set(PRINTS_JSON) | ELSEWHERE


def test_recipes_are_listed() -> None:
    assert "quickstart" in invoke("recipes").split()


@pytest.mark.parametrize(
    "text", ["", "null", "3", "[1]", "a: [", "training: 3", "{1: 2}", "environment: {env: search}"]
)
def test_a_damaged_configuration_is_not_resumed_from(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    refused = invoke("train", "quickstart", "--run-dir", str(tmp_path), "--resume")
    assert refused.startswith(f"error: {tmp_path / 'config.yaml'} ")
    assert "start a new run in another --run-dir" in refused


def test_numbers_that_are_not_finite_or_too_large_are_refused(tmp_path: Path) -> None:
    for override in (
        "training.lr=.inf",
        "training.entropy_coeff=.nan",
        "debugging.seed=-5",
        "training.group_size=1e30",
    ):
        refused = invoke("train", "quickstart", override, "--run-dir", str(tmp_path / "run"))
        assert refused.startswith(f"error: {override.partition('=')[0]}: got "), refused


def test_the_start_shows_what_differs_from_the_defaults(tmp_path: Path) -> None:
    config = AlgorithmConfig.from_recipe("quickstart").override(["training.lr=0.25"]).freeze()
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(describe_start("quickstart", config, str(tmp_path / "run")))
    lines = console.export_text().splitlines()
    assert any("training.lr" in line and "0.25" in line for line in lines)
    assert any("run directory" in line and str(tmp_path) in line for line in lines)
    assert not any("training.weight_decay" in line for line in lines)
    assert len(lines) < 45


TOO_MANY = ["learners.num_learners=4096", "learners.num_gpus_per_learner=1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "quickstart", *TOO_MANY], "error: the actors reserve 4096 GPUs, and this machine has "),
        (["train", "quickstart", "environment.tasks=BROKEN"], "error: BROKEN, line 2: not a JSON object"),
        (["ask", "nowhere", "Where?"], "error: nowhere is neither the directory of a run nor a checkpoint"),
        (["evaluate", "nowhere"], "error: nowhere is neither the directory of a run nor a checkpoint"),
        (["evaluate", "RUN", "--tasks", "none.json"], "error: there is no file none.json, expected"),
    ],
)
def test_what_is_refused_is_refused_before_slow_imports(
    named: dict[str, str], tmp_path: Path, arguments: list[str], message: str
) -> None:
    script = """
        import sys
        from ragr1_actors.cli.main import main
        try:
            main()
        except SystemExit as end:
            print(end.code, [name for name in ("ray", "torch") if name in sys.modules])
    """
    broken = Path(named["TASKS"]).with_name("broken.jsonl")
    broken.write_text('{"question": "Where?", "answer": "Riga"}\n{"question": \n')
    arguments = [named.get(argument, argument).replace("BROKEN", str(broken)) for argument in arguments]
    printed = run_python(script, *arguments, cwd=tmp_path, stderr=subprocess.STDOUT)
    assert printed.startswith(message.replace("BROKEN", str(broken)))
    assert printed.endswith("2 []\n") or (shutil.which("nvidia-smi") and printed.endswith("2 ['torch']\n"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [[], ["train"], ["index", "build"]])
def test_help_answers_without_what_training_needs(command: list[str]) -> None:
    slow = ("numpy", "pydantic", "yaml", "ray", "torch", "psutil", "importlib.metadata", "jinja2")
    script = f"""
import sys
from ragr1_actors.cli.main import app
try:
    app([*{command}, "--help"])
finally:
    print([m for m in {slow} if m in sys.modules])
"""
    printed = run_python(script)
    assert "Usage:" in printed
    assert "default: " not in printed.partition("--help")[2].splitlines()[0]
    assert printed.endswith("[]\n")


GO_ON = "go on with: ragr1 train quickstart --run-dir run --resume"
INTERRUPTED = """
import os, signal, sys
module, number = sys.argv[1], int(sys.argv[2])
sys.argv[1:3] = []
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            try:
                signal.raise_signal(number)
                print("went on")  # the rest of the imports may take a minute
            except BaseException:
                print("lost")  # as an exception is in a callback of Python's, which runs during imports
sys.meta_path.insert(0, Interrupt())
from ragr1_actors.__main__ import main
main()
"""


@pytest.mark.parametrize(("given", "expected"), [(None, "1000"), ("7", "7")])
def test_threads_that_wait_sleep_early_unless_the_user_says_otherwise(given: str | None, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environment |= {} if given is None else {"GOMP_SPINCOUNT": given}
    script = "import os, sys; sys.argv = ['ragr1', '--version']; from ragr1_actors.__main__ import main\n"
    script += "try:\n    main()\nfinally:\n    print(os.environ['GOMP_SPINCOUNT'])"
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == expected


@pytest.mark.parametrize(
    ("module", "number", "advice"),
    [
        ("typer", signal.SIGTERM, "start the same command again"),
        ("ragr1_actors.planning.preflight", signal.SIGINT, "start the same command again"),
        ("ragr1_actors.training.training_run", signal.SIGTERM, GO_ON),
        pytest.param("ragr1_actors.training.training_run", signal.SIGINT, GO_ON, marks=pytest.mark.slow),
    ],
)
def test_an_interrupt_during_imports_is_one_line_at_once_and_not_lost(
    tmp_path: Path, module: str, number: signal.Signals, advice: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, module, str(int(number)), "train", "quickstart", "--run-dir", "run"],
        cwd=tmp_path,
        env=a_persons_environment(),
        capture_output=True,
        text=True,
        timeout=240,  # or an interrupt that is lost would let it train
        check=False,
    )
    assert (done.returncode, done.stderr) == (128 + number, f"interrupted; {advice}\n")
    assert "lost" not in done.stdout
    assert "went on" not in done.stdout


def test_a_check_without_a_name_says_where_it_goes() -> None:
    said = invoke("check", "source", "environment.tasks={source: my_tasks:Colours}")
    assert said.startswith(
        "error: got environment.tasks={source: my_tasks:Colours} where the name belongs; put it first"
    )
