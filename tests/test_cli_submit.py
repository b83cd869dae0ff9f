"""``ragr1 submit`` up to the cluster: arguments, the size of the upload, heads that do not answer, and the log."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray._private import ray_constants
from ray._private.runtime_env.packaging import create_package
from ray_head import ROOT
from rich.console import Console
from rich.text import Text
from small_world import invoke

from benchmarks.scale.clusters import free_port
from cluster.submit import Job, JobClient, check_size, pack, stop_warning
from ragr1_actors.cli.submit import LogView, render_jobs, train_arguments
from ragr1_actors.core.errors import ConfigError, DataError, UserError
from ragr1_actors.core.process.progress_bar import (
    RateColumn,
    counted_bar,
    counted_bars,
    describe_iteration,
    elapsed_time,
    is_progress,
    show_progress,
)
from ragr1_actors.runs.run_directory import create_run_directory, holds_run, open_run_directory, start_again
from ragr1_actors.runs.storage.store import find_store
from ragr1_actors.training.algorithm_config import AlgorithmConfig

TOO_LARGE = 100 * 2**20


def sparse(path: Path, num_bytes: int) -> Path:
    """Make a file that has a size and takes no room."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(num_bytes)
    return path


def test_the_size_is_that_of_what_ray_uploads(tmp_path: Path) -> None:
    project = tmp_path / "project"
    for name in ("my_env.py", "data/tasks.json", "data/huge.bin", ".git/objects", ".venv/lib", "runs/old/log"):
        sparse(project / name, 10_000)
    (project / ".rayignore").write_text("/runs/\n")
    (project / "data/.gitignore").write_text("*.bin\n")
    excludes = ray_constants.get_runtime_env_default_excludes()
    create_package(str(project), tmp_path / "package.zip", include_gitignore=True, excludes=excludes)
    with zipfile.ZipFile(tmp_path / "package.zip") as package:
        assert sorted(package.namelist()) == [".rayignore", "data/.gitignore", "data/tasks.json", "my_env.py"]
    size = pack(project, tmp_path).stat().st_size  # with the packages of the project
    assert size > (tmp_path / "package.zip").stat().st_size + 1_000_000
    assert size - 1000 <= check_size(project) <= size


def test_the_project_travels_with_a_folder_that_is_no_checkout(tmp_path: Path) -> None:
    sparse(tmp_path / "project/my_env.py", 10)
    with zipfile.ZipFile(pack(tmp_path / "project", tmp_path)) as package:
        names = set(package.namelist())
    assert {
        "my_env.py",
        "ragr1_actors/__main__.py",
        "ragr1_actors/recipes/rag_r1/quickstart.yaml",
        "envs/base.py",
    } <= names
    assert not any("__pycache__" in name for name in names)
    (tmp_path / "checkout").mkdir()
    with zipfile.ZipFile(pack(ROOT, tmp_path / "checkout")) as package:
        assert len(package.namelist()) == len(set(package.namelist()))
    sparse(tmp_path / "project/envs/mine.py", 10)
    with pytest.raises(DataError, match="holds 'envs', the name of a package of ragr1; rename it"):
        check_size(tmp_path / "project")


def test_a_recipe_that_is_not_uploaded_is_refused(tmp_path: Path) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/mine.yaml").write_text("environment: {tasks: world}\n")
    (tmp_path / ".gitignore").write_text("recipes/\n")
    there = ("--working-dir", str(tmp_path), "--address", "http://127.0.0.1:1")
    assert "recipes/mine.yaml is not uploaded, as a .gitignore" in invoke("submit", "recipes/mine.yaml", *there)
    (tmp_path / ".gitignore").write_text("")
    assert "no Ray head answers" in invoke("submit", "recipes/mine.yaml", *there)


def test_a_directory_above_rays_limit_names_its_largest_entries(tmp_path: Path) -> None:
    for name, num_bytes in {"data/a": TOO_LARGE, "data/b": 2**20, "model.bin": 2**23, "note": 9, "x": 2**10}.items():
        sparse(tmp_path / name, num_bytes)
    with pytest.raises(
        DataError, match=r"holds 11\d\.\d MiB, and Ray uploads less than 100\.0 MiB with a job"
    ) as caught:
        check_size(tmp_path)
    assert "in a .rayignore file" in str(caught.value)
    assert "largest entries are data (101.0 MiB), model.bin (8.0 MiB), the packages of ragr1 (" in str(caught.value)
    said = invoke("submit", "quickstart", "--working-dir", str(tmp_path), "--address", "http://127.0.0.1:1")
    assert "Ray uploads less than 100.0 MiB" in said, "before anything connects"
    (tmp_path / ".rayignore").write_text("data/a\n")
    assert check_size(tmp_path) < TOO_LARGE
    (tmp_path / ".rayignore").write_bytes(b"data/\xff\n")
    with pytest.raises(
        DataError, match=r"^--working-dir: a \.rayignore or \.gitignore in .* cannot be read .*in UTF-8$"
    ):
        check_size(tmp_path)
    said = invoke("submit", "quickstart", "--working-dir", str(tmp_path / "none"), "--address", "http://127.0.0.1:1")
    assert said.startswith("error: --working-dir: there is no directory")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give one of these: a recipe, --list, --logs ID or --stop ID"),
        (("quickstart", "--list"), "give one of these"),
        (("quickstart", "training.rl=1"), "unknown key training.rl"),
        (("quickstart", "--run-dir", "runs/mine"), "--run-dir: got 'runs/mine', expected an absolute path"),
        (("quickstart", "--run-dir", "s3://key:hidden@bucket/runs"), "--run-dir: the address holds a password"),
        (("quickstart", "--run-dir", "foo://bucket/runs"), "foo://bucket/runs: Unrecognized filesystem type in URI"),
        (("quickstart", "--run-dir", "s3://"), "s3:// names no bucket; expected one such as s3://bucket/runs/mine"),
        (("quickstart", "--run-dir", "s3:///runs"), "s3:///runs names no bucket; expected one such as"),
        (
            ("quickstart", "--run-dir", "s3://bucket/my runs"),
            "'s3://bucket/my runs' has white space; expected one",
        ),
        (
            ("quickstart", "--run-dir", "s3://[::1/runs"),
            "got a URI that cannot be read (Invalid IPv6 URL); ",
        ),
        (("quickstart", "--run-dir", "file://shared/runs"), "Unsupported hostname"),
        (("quickstart", "--address", "10.0.0.2:8265"), "--address: got '10.0.0.2:8265', expected the head's dashboard"),
        (("--list", "--address", "http://me:hidden@10.0.0.2:8265"), "--address: the address holds a password"),
        (("quickstart", "retrieval.type=http", "retrieval.options={token: hidden}"), "options.token: a secret in a"),
        (("/tmp/other/recipe.yaml",), "/tmp/other/recipe.yaml is not in the working directory"),
        (("none.yaml",), "no recipe file"),
        (
            ("quickstart", "--run-dir", "s3://key:hidden/with?more@bucket/runs"),
            "--run-dir: the address holds a password",
        ),
    ],
)
def test_what_cannot_be_submitted_is_one_sentence(arguments: tuple[str, ...], message: str) -> None:
    said = invoke("submit", *arguments)
    assert said.startswith("error: ")
    assert message in said
    assert "hidden" not in said


def test_the_command_of_the_job(tmp_path: Path) -> None:
    recipe = tmp_path / "recipes" / "mine.yaml"
    recipe.parent.mkdir()
    recipe.write_text("training: {lr: 1e-4}")
    expected = ["train", "recipes/mine.yaml", "training.lr=0.1", "--run-dir", "/shared/run", "--auto-resume"]
    for given in ("recipes/mine.yaml", str(recipe)):
        assert train_arguments(given, ["training.lr=0.1"], "/shared/run", tmp_path) == expected
    assert train_arguments("quickstart", [], "s3://bucket/run", tmp_path)[-2:] == ["s3://bucket/run", "--auto-resume"]
    assert train_arguments("quickstart", [], None, tmp_path) == ["train", "quickstart"]


@contextmanager
def answering(answers: dict[str, tuple[int, object]]) -> Iterator[str]:
    """Serve JSON at some paths, and 404 at all others."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.get(self.path, (404, {}))
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            return

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def refusal(address: str) -> str:
    """Return what ``JobClient`` says, which it must within 15 s."""
    started = time.monotonic()
    with pytest.raises(UserError) as caught:
        JobClient(address)
    assert time.monotonic() - started < 60  # imports included
    assert "\n" not in str(caught.value)
    return str(caught.value)


def version(
    ray_version: str = ray.__version__, python_version: str = sys.version.split()[0]
) -> dict[str, tuple[int, object]]:
    data = {"rayVersion": ray_version, "pythonVersion": python_version}
    return {
        "/api/version": (200, {"ray_version": ray_version, "version": "4"}),
        "/api/v0/cluster_metadata": (200, {"result": True, "data": data}),
    }


def test_another_version_of_ray_or_python_is_one_sentence() -> None:
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    for answers in (version(ray_version="2.55.0"), version(python_version="3.9.1")):
        with answering(answers) as address:
            said = refusal(address)
        assert f"the cluster at {address} runs Ray " in said
        assert f"expected Ray {ray.__version__} and Python {here} as on this machine" in said
    with answering(version(python_version=f"{here}.99")) as address:
        JobClient(address)  # another patch of Python is none


@pytest.mark.integration
@pytest.mark.parametrize("token", ["hidden\ntoken", "hidden €"])
def test_a_token_that_cannot_be_sent_is_not_quoted(token: str) -> None:
    variables = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "PYTHONPATH": str(ROOT)}
    with answering(version()) as address:  # Ray reads the token once per process
        command = [sys.executable, "-m", "ragr1_actors", "submit", "--list", "--address", address]
        said = subprocess.run(command, env=variables, capture_output=True, text=True).stderr
    assert said.startswith("error: the token holds characters that cannot be sent"), said
    assert "hidden" not in said


@pytest.mark.parametrize("job_id", ["", "../version", "a/b", "."])
def test_an_id_that_no_job_can_have_is_one_sentence(job_id: str) -> None:
    with answering(version()) as address:
        for option in ("--logs", "--stop"):
            said = invoke("submit", option, job_id, "--address", address)
            assert said.startswith(f"error: got the job id {job_id!r}, expected one such as"), said


def test_a_head_that_is_not_there_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):  # which Ray prefers to its argument
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    address = f"http://127.0.0.1:{free_port()}"
    assert refusal(address).startswith(f"no Ray head answers at {address}; give the address of its dashboard")

    def unknown(*_: object, **__: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", unknown)
    assert "no Ray head answers at http://no-such-host.invalid" in refusal("http://no-such-host.invalid:8265")


@pytest.mark.integration
def test_a_head_that_accepts_and_never_answers_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert refusal(address).startswith(f"the head at {address} does not answer in 6 s")


@pytest.mark.parametrize(
    "answers", [{}, {"/api/version": (200, b"<html>")}, {"/api/version": (200, {})}, {"/api/version": (500, {})}]
)
def test_what_is_no_ray_dashboard_is_one_sentence(answers: dict[str, tuple[int, object]]) -> None:
    with answering(answers) as address:
        assert address in refusal(address)


def test_a_line_of_progress_replaces_the_one_before(capsys: pytest.CaptureFixture[str]) -> None:
    log = "starting\nRL  1/9  reward 0.1\nRL  2/9  reward 0.2\nlast\nno end"
    for is_terminal, expected in (
        (False, log + "\n"),
        (True, "starting\nRL  1/9  reward 0.1\r\x1b[KRL  2/9  reward 0.2\r\x1b[Klast\nno end\n"),
    ):
        view = LogView(is_terminal=is_terminal)
        for start in range(0, len(log), 7):
            view.write(log[start : start + 7])
        view.close()
        assert view.num_chars == len(log)
        assert capsys.readouterr().out == expected


def test_ids_are_whole_on_a_narrow_terminal() -> None:
    job = Job("raysubmit_4LamXRuQpYdSMg7J", "RUNNING", "python -m ragr1_actors train " + "x=1 " * 50, 1.0, None, "")
    printed = io.StringIO()
    Console(file=printed, width=60).print(render_jobs([job]))
    assert printed.getvalue().startswith(f"{job.job_id}  RUNNING  ")


def test_progress_in_a_log_is_a_line_at_a_time() -> None:
    output = io.StringIO()
    with show_progress(Console(file=output), "RL", 12, 0) as report:
        for step in range(1, 13):
            report(step, f"reward {step / 10:.3f}")
    lines = output.getvalue().splitlines()
    assert (lines[0], lines[-1]) == ("RL   1/12  reward 0.100", "RL  12/12  reward 1.200")
    assert all(map(is_progress, lines))
    assert not is_progress("resumed at SFT step 2, RL iteration 1")


def test_every_iteration_of_rl_has_its_line_in_a_log() -> None:
    metrics = {
        "rollout/reward": 0.25,
        "rollout/em": 0.5,
        "rollout/queries": 1.5,
        "learner/tokens": 2000.0,
        "env_runners/sampled_tokens": 8000.0,
        "time/iteration_s": 4.0,
        "time/sample_s": 1.0,
        "time/learn_s": 2.5,
        "time/publish_s": 0.5,
    }
    status = "reward 0.250  em 0.500  searches 1.50  tokens/s 2,000  waits for the learner 62%"
    assert describe_iteration(metrics) == status
    assert describe_iteration({"rollout/reward": 0.0}) == "reward 0.000"
    output = io.StringIO()
    with show_progress(Console(file=output, width=40), "RL", 3, 0, line_interval_s=0) as report:
        for step in range(1, 4):
            report(step, status)
    assert output.getvalue().splitlines() == [f"RL  {step}/3  {status}" for step in range(1, 4)]


def test_what_loads_is_shown_with_its_time_on_a_terminal_and_as_a_line_in_a_log() -> None:
    terminal = Console(file=io.StringIO(), width=150, force_terminal=True, record=True)
    log, quiet = io.StringIO(), io.StringIO()
    for console, in_logs in ((terminal, False), (Console(file=log), True), (Console(file=quiet), False)):
        with elapsed_time(console, "loading [2] env runners", in_logs=in_logs):
            pass
    assert "loading [2] env runners 0:00:00" in terminal.export_text()
    assert (log.getvalue(), quiet.getvalue()) == ("loading [2] env runners\n", "")


@pytest.mark.parametrize(("speed", "shown"), [(None, ""), (0.2, "12.0/min"), (9.9, "594.0/min"), (1234.5, "1,234/s")])
def test_a_rate_is_in_seconds_or_minutes(speed: float | None, shown: str) -> None:
    assert str(RateColumn().render(SimpleNamespace(speed=speed))) == shown


def test_the_bar_on_a_terminal_has_the_rate_and_the_time_left() -> None:
    console = Console(file=io.StringIO(), width=150, force_terminal=True, record=True)
    with show_progress(console, "SFT", 100, 0) as report:
        for step in range(1, 4):
            report(step, "loss 0.5")
    text = console.export_text()
    assert re.search(r"3/100 +[\d,.]+/(s|min) ", text)
    assert text.count(":") >= 4  # the time since the start, and the time left


def test_a_counted_bar_appears_with_its_first_count() -> None:
    for is_terminal in (True, False):
        output = io.StringIO()
        with counted_bar(Console(file=output, width=150, force_terminal=is_terminal), "answering") as on_task:
            assert output.getvalue() == ""
            on_task(0, 4)
            on_task(3, 4)
        assert ("3/4" in output.getvalue()) is is_terminal


def test_counted_bars_have_a_bar_for_each_title() -> None:
    output = io.StringIO()
    with counted_bars(Console(file=output, width=150, force_terminal=True)) as count:
        count("questions", 5, 6)
        count("passages", 7, 8)
        count("questions", 6, 6)
    shown = Text.from_ansi(output.getvalue()).plain
    assert re.search(r"questions .* 6/6 ", shown)
    assert re.search(r"passages .* 7/8 ", shown)
    assert not re.search(r"passages .* 6/6 ", shown)


def test_a_run_is_started_again_by_the_same_command_only(tmp_path: Path) -> None:
    config, place = AlgorithmConfig().freeze(), find_store(tmp_path)
    assert not holds_run(place)
    create_run_directory(config, place)
    assert holds_run(place)
    assert start_again(place, config, config) == config
    more_ranks = AlgorithmConfig().learners(num_learners=2).freeze()
    assert start_again(place, config, more_ranks) == more_ranks == open_run_directory(tmp_path)
    for other in (AlgorithmConfig().training(lr=0.5), AlgorithmConfig().learners(lora={"rank": 2})):
        with pytest.raises(ConfigError, match=r"holds a run with another (training\.lr|learners\.lora)"):
            start_again(place, more_ranks, other.learners(num_learners=2).freeze())
    assert open_run_directory(tmp_path) == more_ranks
    chosen = AlgorithmConfig().learners(num_learners=2, micro_batch_tokens=2048).freeze()
    assert start_again(place, chosen, more_ranks) == chosen, "what the start of the run chose stays"
    assert "--auto-resume needs --run-dir" in invoke("train", "quickstart", "--auto-resume")


def test_a_job_that_ray_would_kill_at_once_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_JOB_STOP_WAIT_TIME_S", raising=False)
    assert stop_warning() == ""
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert "RAY_JOB_STOP_WAIT_TIME_S=600 in env_vars" in stop_warning()
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "600")
    assert stop_warning() == ""
