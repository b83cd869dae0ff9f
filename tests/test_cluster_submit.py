"""``ragr1 submit`` and ``ray job submit`` against a real head that asks for a token."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ray.job_submission import JobSubmissionClient
from ray_head import BIN, ROOT, Head, clean_environment, running_head
from small_world import make_files, make_recipe, wait_for

from cluster.submit import STOP_WAIT_S, JobClient
from ragr1_actors.runs.checkpoint import Checkpoints, read_state
from ragr1_actors.runs.report import read_report
from ragr1_actors.runs.storage.store import RunStore
from ragr1_actors.runs.telemetry.metrics import read_metrics

pytestmark = [pytest.mark.ray, pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1800)]

NUM_ITERATIONS = 8
MODULE = """
import os, time
from pathlib import Path
from envs.search import SearchEnv
from learners.algorithms.grpo import GRPOLearner
import ragr1_actors
Path({marks!r}, str(os.getpid())).write_text("\\n".join([os.getcwd(), ragr1_actors.__file__]))
class MyEnv(SearchEnv):
    pass
class MyLearner(GRPOLearner):
    def update(self, *arguments):
        time.sleep(float(Path({pace!r}).read_text()))
        return super().update(*arguments)
def reward(task, answer):
    return float(answer in task.golden_answers)
"""


JOIN = """
import time
from cluster.session.ray_session import ray_session
from ragr1_actors.core.errors import UserError
started = time.monotonic()
try:
    with ray_session():
        print("joined")
except UserError as error:
    print("refused:", error)
print("took", time.monotonic() - started)
"""


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    directory = tempfile.mkdtemp(prefix="rh", dir="/tmp")
    try:
        with running_head(directory) as found:
            yield found
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def address(head: Head) -> str:
    return head.dashboard


def without_token(home: Path) -> dict[str, str]:
    kept = clean_environment(PYTHONPATH=str(ROOT), HOME=str(home))
    return {name: value for name, value in kept.items() if not name.startswith("RAY_AUTH")}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks and index, which every node sees."""
    return make_files(tmp_path_factory.mktemp("files"))


@pytest.fixture
def project(tmp_path: Path, files: Path) -> Path:
    """A user's folder: a recipe, and a module with an environment, a reward and a learner. No checkout."""
    folder = tmp_path / "project"
    folder.mkdir()
    (tmp_path / "marks").mkdir()
    (tmp_path / "pace").write_text("0")
    (folder / "my_project.py").write_text(MODULE.format(marks=str(tmp_path / "marks"), pace=str(tmp_path / "pace")))
    recipe = make_recipe(folder / "recipe.yaml", files, num_iterations=NUM_ITERATIONS, algorithm="my_project:MyLearner")
    settings = json.loads(recipe.read_text())
    settings["environment"] |= {"env": "my_project:MyEnv", "reward": "my_project:reward"}
    settings["checkpointing"]["interval"] = NUM_ITERATIONS  # only an interrupt writes one before the end
    recipe.write_text(json.dumps(settings))
    return folder


PATIENT = "import cluster.submit as s; s.ANSWER_TIMEOUT_S = 60.0; from ragr1_actors.__main__ import main; main()"
"""Has patience with a head on a busy machine."""


def submit(*arguments: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PATIENT, "submit", *map(str, arguments)],
        cwd=cwd,
        env=clean_environment(PYTHONPATH=str(ROOT)) | environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


@contextmanager
def submitting(log: Path, *arguments: object, cwd: Path, terminal: int | None = None) -> Iterator[Any]:
    """Start ``ragr1 submit`` with its output in a file; with ``terminal``, on that pseudo-terminal."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", PATIENT, "submit", *map(str, arguments)],
            cwd=cwd,
            env=clean_environment(PYTHONPATH=str(ROOT)),
            stdin=terminal if terminal is not None else subprocess.DEVNULL,
            stdout=terminal if terminal is not None else output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait(60)


def job_id(text: str) -> str:
    found = re.search(r"submitted (raysubmit_\w+)", text)
    assert found, text
    return found[1]


def test_a_run_with_the_users_own_modules(address: str, project: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = submit("recipe.yaml", "--address", address, "--run-dir", run_dir, cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    job = job_id(done.stdout)
    assert f"RL  {NUM_ITERATIONS}/{NUM_ITERATIONS}  reward" in done.stdout
    assert f"job {job} succeeded" in done.stdout
    assert read_report(run_dir).tasks.trained == 8 * NUM_ITERATIONS
    marks = [path.read_text().splitlines() for path in (tmp_path / "marks").iterdir()]
    assert len(marks) >= 3  # driver, env runner and learner
    for folder, package in marks:
        assert "/working_dir_files/" in folder  # the current folder is the uploaded one, and not the test's
        assert package.startswith(folder)  # and so is the project's

    details = JobSubmissionClient(address).get_job_info(job)  # what Ray's dashboard shows
    assert os.environ["RAY_AUTH_TOKEN"] not in details.model_dump_json()
    assert details.runtime_env["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)}
    assert job in submit("--list", "--address", address, cwd=project).stdout
    again = submit("recipe.yaml", "--address", address, "--run-dir", run_dir, cwd=project)
    assert (again.returncode, "is finished" in again.stdout) == (0, True)


def test_the_exit_status_of_a_run_that_fails(address: str, project: Path, tmp_path: Path) -> None:
    done = submit("recipe.yaml", "environment.tasks=none.json", "--address", address, cwd=project)
    assert done.returncode == 2
    assert "error: environment.tasks: there is no file none.json" in done.stdout
    assert "Ray deletes some time after the job" in done.stdout  # no --run-dir


def test_a_stopped_run_writes_a_checkpoint_and_goes_on_when_it_is_submitted_again(
    address: str, project: Path, tmp_path: Path
) -> None:
    """Ctrl-C without a terminal detaches; ``--stop`` ends the job after its update, which is longer than Ray's 3 s."""
    run_dir, log = tmp_path / "run", tmp_path / "log.txt"
    (tmp_path / "pace").write_text("8")
    command = ("recipe.yaml", "--address", address, "--run-dir", run_dir)
    with submitting(log, *command, cwd=project) as process:
        assert wait_for(lambda: "RL  1/" in log.read_text(), 600, process), log.read_text()
        process.send_signal(signal.SIGINT)
        assert process.wait(300) == 130, log.read_text()
    job = job_id(log.read_text())
    assert f"the job goes on; follow it with: ragr1 submit --logs {job}" in log.read_text()
    stopped = submit("--stop", job, "--address", address, cwd=project)
    assert stopped.returncode == 143, stopped.stdout + stopped.stderr
    assert f"job {job} stopped" in stopped.stdout
    assert "interrupted; submit the same command again, and the run goes on" in stopped.stdout
    newest = Checkpoints(RunStore(run_dir)).latest()
    assert newest is not None
    iteration = read_state(newest).iteration
    assert 1 <= iteration < NUM_ITERATIONS
    (tmp_path / "pace").write_text("0")

    other = submit(*command, "training.lr=0.5", cwd=project)
    assert (other.returncode, "holds a run with another training.lr;" in other.stdout) == (2, True)
    done = submit(*command, cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"resumed at SFT step 2, RL iteration {iteration}" in done.stdout
    tasks = read_report(run_dir).tasks
    assert (tasks.trained, tasks.lost, tasks.doubled) == (8 * NUM_ITERATIONS, 0, 0)
    logged = [row["iteration"] for row in read_metrics(run_dir) if row["stage"] == "rl"]
    assert logged == list(range(1, NUM_ITERATIONS + 1))


def test_stopping_shows_what_comes_after_it_was_asked_for(address: str, tmp_path: Path) -> None:
    client = JobSubmissionClient(address)
    command = "echo begun €; trap 'echo ending; exit 0' TERM; while :; do sleep 0.1; done"
    job = client.submit_job(entrypoint=command)
    assert wait_for(lambda: all(line in client.get_job_logs(job) for line in ("begun €\n", "Running entrypoint")), 600)
    stopped = submit("--stop", job, "--address", address, cwd=tmp_path)
    assert stopped.returncode == 143, stopped.stdout + stopped.stderr
    first, *shown, last = stopped.stdout.splitlines()
    assert (first, last) == (f"stopping {job}: it ends its step and writes a checkpoint first", f"job {job} stopped")
    assert shown[-1] == "ending" and set(shown) <= {"Terminated", "ending"}  # the shell's word on its sleep
    again = submit("--stop", job, "--address", address, cwd=tmp_path)
    assert (again.returncode, again.stdout) == (143, f"job {job} stopped\n")
    whole = submit("--logs", job, "--address", address, cwd=tmp_path).stdout
    assert {"begun €", "ending"} <= set(whole.splitlines())


@pytest.mark.parametrize(("answer", "status", "ends"), [("y\n", 143, True), ("n\n", 130, False)])
def test_ctrl_c_on_a_terminal_asks(
    address: str,
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    answer: str,
    status: int,
    ends: bool,
) -> None:
    monkeypatch.setattr("cluster.submit.ANSWER_TIMEOUT_S", 60.0)
    client = JobClient(address)
    job = JobSubmissionClient(address).submit_job(entrypoint="echo begun; exec sleep 300")
    shown = bytearray()
    ours, theirs = pty.openpty()
    poll = select.poll()
    poll.register(ours, select.POLLIN)

    def shows(text: bytes) -> bool:
        while poll.poll(0):
            shown.extend(os.read(ours, 4096))
        return text in shown

    with submitting(tmp_path / "log.txt", "--logs", job, "--address", address, cwd=project, terminal=theirs) as process:
        assert wait_for(lambda: shows(b"begun"), 300, process), shown
        process.send_signal(signal.SIGINT)
        assert wait_for(lambda: shows(b"stop the job?"), 300, process), shown
        os.write(ours, answer.encode())
        assert wait_for(lambda: not shows(b"\0") and process.poll() is not None, 300), shown
        assert process.returncode == status, shown
    assert wait_for(lambda: (client.job(job).status == "STOPPED") == ends, 300)
    client.stop(job)


def test_ray_job_submit_from_a_checkout(address: str, files: Path, tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path / "recipe.yaml", files, num_iterations=1)
    command = [BIN / "ray", "job", "submit", "--address", address, "--working-dir", ROOT, "--"]
    command += ["python", "-m", "ragr1_actors", "train", recipe, "--run-dir", tmp_path / "run"]
    done = subprocess.run(command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert read_report(tmp_path / "run").tasks.trained == 8
    assert "ray job stop kills this run after 3 s" in done.stdout


@pytest.mark.parametrize(
    ("token", "message"),
    [("0" * 64, "refuses the token"), (None, "asks for a token")],
)
def test_a_wrong_or_missing_token_is_one_sentence_in_time(
    address: str, tmp_path: Path, token: str | None, message: str
) -> None:
    environment = without_token(tmp_path)
    if token:
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "ragr1_actors", "submit", "--list", "--address", address],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert time.monotonic() - started < 60  # the start of Python included
    assert done.returncode == 2
    assert done.stdout == ""
    assert re.fullmatch(rf"error: the cluster at {address} {message}; set RAY_AUTH_MODE=token, .*\n", done.stderr)


@pytest.mark.parametrize("token", ["0" * 64, None])
def test_joining_with_a_wrong_or_missing_token_is_one_sentence_in_time(
    head: Head, tmp_path: Path, token: str | None
) -> None:
    environment = without_token(tmp_path) | {"RAY_ADDRESS": head.gcs}
    if token:
        environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    done = subprocess.run([sys.executable, "-c", JOIN], env=environment, capture_output=True, text=True, check=False)
    assert float(done.stdout.partition("took ")[2]) < 15  # Ray alone tries for 20 s
    assert re.search(rf"^refused: the cluster at {head.gcs} asks for a token, or refuses this one; set", done.stdout)


def test_a_job_that_is_not_there_is_one_sentence(address: str, tmp_path: Path) -> None:
    for option in ("--logs", "--stop"):
        done = submit(option, "raysubmit_none", "--address", address, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"the cluster at {address} has no job raysubmit_none; ragr1 submit --list" in done.stderr


def test_a_project_outside_runs_on_the_wheel(address: str, tmp_path: Path) -> None:
    """``examples/outside``, installed beside the wheel of the project, as its README says."""
    source, installed, project = tmp_path / "source", tmp_path / "installed", tmp_path / "project"
    made = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in ("ragr1_actors", "envs", "learners", "retrieval", "cluster"):
        shutil.copytree(ROOT / name, source / name, ignore=made)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(ROOT / name, source / name)
    shutil.copytree(ROOT / "examples" / "outside", project, ignore=made)
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--target", installed]
    built = subprocess.run([*install, source, project], capture_output=True, text=True, timeout=600, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    shutil.rmtree(project / "shop")  # what runs is what was installed

    command = [BIN / "ray", "job", "submit", "--address", address, "--working-dir", project]
    command += ["--runtime-env-json", json.dumps({"env_vars": {"PYTHONPATH": str(installed)}}), "--"]
    command += ["python", "-m", "ragr1_actors", "train", "shop.yaml", "--run-dir", tmp_path / "run"]
    done = subprocess.run(command, cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = read_report(tmp_path / "run").stages[-1].eval.measures
    assert set(measured) == {"paid"}
    assert (installed / "ragr1_actors" / "recipes" / "search_r1" / "search_r1.py").is_file()
    assert (installed / "ragr1_actors" / "recipes" / "search_r1" / "claim.yaml").is_file()
    assert (installed / "ragr1_actors" / "recipes" / "search_r1" / "README.md").is_file()
