"""Tests of the workers that are forked: they begin and end as new processes do, and fall back to them."""

import json
import os
import resource
import selectors
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from processes import run_python
from small_world import wait_for

from cluster.session import worker_forks

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parent.parent
DRIVER = """
import sys
import psutil
from cluster.session import worker_forks
print(worker_forks.runtime_env(sys.argv[1])["py_executable"], psutil.Process().children()[0].pid, sep="\\n", flush=True)
sys.stdin.read()
"""
WORKER = """
import json, os, random, sys
import numpy
import ragr1_actors.recipes
__import__("__main__").is_main = True
print(json.dumps({
    "arguments": sys.argv[1:], "path": sys.path, "folder": os.getcwd(), "environment": dict(os.environ),
    "name": __name__, "is_main": globals().get("is_main", False), "input": sys.stdin.read(),
    "parent": os.getppid(), "leads_group": os.getpgrp() == os.getpid(), "flags": str(sys.flags),
    "random": [random.random(), numpy.random.rand()],
    "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")),
    "imported": [name for name in ("torch", "transformers", "ray") if name in sys.modules],
}))
print("an error", file=sys.stderr)
if sys.argv[1] == "exit":
    sys.exit(int(sys.argv[2]))
if sys.argv[1] == "signal":
    sys.stdout.flush()
    os.kill(os.getpid(), int(sys.argv[2]))
"""
IMPORTED = ["torch", "transformers", "ray"]


def _limit_files(count: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


class Server:
    """A driver with its server."""

    def __init__(self) -> None:
        self.environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "RAY_RAYLET_PID": "1", "MINE": "a"}
        self.environment["RAY_CLIENT_MODE"] = "0"  # as a driver that has imported Ray sets it
        del self.environment["OMP_NUM_THREADS"]  # OpenBLAS has threads without it, as in the driver of a user
        self.driver = subprocess.Popen(
            [sys.executable, "-c", DRIVER, self.environment["PYTHONPATH"]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**self.environment, "DRIVERS": "b"},
            text=True,
            preexec_fn=lambda: _limit_files(256),
        )
        assert self.driver.stdout is not None
        self.client = shlex.split(self.driver.stdout.readline())
        self.process = psutil.Process(int(self.driver.stdout.readline()))

    def command(self, script: Path, *arguments: str) -> list[str]:
        return [*self.client, str(script), *arguments]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.driver.communicate()
    made.process.wait()


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    return script


@pytest.fixture
def run(server: Server, worker: Path, tmp_path: Path) -> Callable[..., tuple[dict, subprocess.CompletedProcess[str]]]:
    def run(*arguments: str, command: list[str] | None = None, **environment: str):
        ended = subprocess.run(
            [*(command or server.client), str(worker), *arguments],
            input="asked",
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**server.environment, **environment},
            timeout=600,
        )
        return json.loads(ended.stdout), ended

    return run


def test_a_fork_begins_as_a_new_process_does(server: Server, run: Callable) -> None:
    (forked, ended), (new, _) = run("exit", "0", "a b"), run("exit", "0", "a b", command=[sys.executable])
    assert forked["parent"] == server.process.pid and forked["imported"] == IMPORTED and new["imported"] == []
    assert ended.stderr == "an error\n" and ended.returncode == 0
    assert forked["leads_group"]  # Ray may kill the group of a worker that has ended
    for same in ("arguments", "folder", "flags", "name", "is_main", "input", "descriptors"):
        assert forked[same] == new[same], same
    assert [part for part in forked["path"] if "thirdparty_files" not in part] == new["path"]
    assert new["environment"].items() <= forked["environment"].items()  # imports set some more
    assert "DRIVERS" not in forked["environment"]


def test_forks_draw_different_numbers(run: Callable) -> None:
    first, second = (run("exit", "0")[0]["random"] for _ in range(2))
    assert first[0] != second[0] and first[1] != second[1]


@pytest.mark.parametrize(
    ("arguments", "status"),
    [(("exit", "3"), 3), (("signal", "15"), -15), (("signal", "9"), -9), (("signal", "6"), -6)],
)
def test_a_client_ends_as_its_worker_does(run: Callable, arguments: tuple[str, ...], status: int) -> None:
    forked, ended = run(*arguments)
    assert forked["imported"] == IMPORTED and ended.returncode == status


def test_a_worker_ends_with_its_client(server: Server, tmp_path: Path, run: Callable) -> None:
    (sleeper := tmp_path / "sleeper.py").write_text("import os, time; print(os.getpid(), flush=True); time.sleep(1000)")
    clients = [
        subprocess.Popen(server.command(sleeper), stdout=subprocess.PIPE, env=server.environment, text=True)
        for _ in range(2)
    ]
    workers = [psutil.Process(int(client.stdout.readline())) for client in clients if client.stdout]
    forked, new = run("exit", "0")[0], run("exit", "0", command=[sys.executable])[0]
    assert forked["imported"] == IMPORTED and forked["descriptors"] == new["descriptors"]  # none of another worker
    clients[0].kill()
    clients[0].communicate()
    assert wait_for(lambda: not workers[0].is_running(), timeout_s=600)
    assert workers[1].is_running()
    os.kill(workers[1].pid, signal.SIGKILL)
    clients[1].communicate()
    assert clients[1].returncode == -signal.SIGKILL


LIMITS = """
import resource, sys
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], open("/proc/self/oom_score_adj").read(), end="", flush=True)
sys.stdin.read()
"""


def test_a_fork_has_the_limits_that_its_client_got(server: Server, tmp_path: Path) -> None:
    """The kernel kills the worker with most memory, and not one of its clients after another."""
    (script := tmp_path / "limits.py").write_text(LIMITS)

    def limit() -> None:
        _limit_files(300)
        Path("/proc/self/oom_score_adj").write_text("700")  # as the raylet does

    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(server.command(script), env=server.environment, preexec_fn=limit, **pipes) as client:
        assert client.stdout is not None and client.stdout.readline() == "300 700\n"
        scores = [Path(f"/proc/{process}/oom_score_adj").read_text() for process in (client.pid, server.process.pid)]
        assert scores[0] == scores[1] != "700\n"
        client.communicate("")
    soft, hard = server.process.rlimit(psutil.RLIMIT_NOFILE)
    assert soft == hard  # it has two descriptors per worker


def test_a_fork_gets_the_score_where_its_client_must_keep_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only root may lower a score."""
    with subprocess.Popen(["sleep", "100"]) as client:
        scores = {str(os.getpid()): b"0", str(client.pid): b"1000"}

        def write(path: Path, score: bytes) -> None:
            if int(score) < int(scores[path.parts[2]]):
                raise PermissionError(path)
            scores[path.parts[2]] = score

        monkeypatch.setattr(Path, "read_bytes", lambda path: scores[path.parts[2]])
        monkeypatch.setattr(Path, "write_bytes", write)
        worker_forks._take_limits(client.pid)
        client.kill()
    assert [*scores.values()] == [b"1000", b"1000"]


@pytest.mark.parametrize("setting", ["PYTHONPATH", "RAY_AUTH_TOKEN", "RAY_NEW"])
def test_a_worker_whose_imports_would_read_other_settings_is_a_new_process(run: Callable, setting: str) -> None:
    assert run("exit", "0")[0]["imported"] == IMPORTED
    forked, ended = run("exit", "4", **{setting: f"{ROOT}:/other"})
    assert forked["imported"] == [] and ended.returncode == 4
    assert forked["environment"][setting] == f"{ROOT}:/other"


@pytest.mark.parametrize(
    ("changes", "is_forked"),
    [
        ({}, True),
        ({"py_executable": sys.executable}, False),
        ({"command_prefix": ["export B=4 &&"]}, True),
        ({"env_vars": {"A": "${A}3"}}, True),
        (None, False),
    ],
)
def test_a_client_takes_the_place_of_rays_script(
    server: Server, worker: Path, run: Callable, changes: dict[str, Any] | None, is_forked: bool
) -> None:
    context = {"command_prefix": [], "env_vars": {"A": "1 2"}, "py_executable": shlex.join(server.client)}
    context |= {"override_worker_entrypoint": None, "java_jars": []} | (changes or {})
    given = [] if changes is None else [f"--serialized-runtime-env-context={json.dumps(context)}"]
    command = [sys.executable, worker_forks.__file__]
    told, ended = run("exit", "6", "a b", "--language=PYTHON", *given, command=command, A="0")
    assert told["imported"] == (IMPORTED if is_forked else []) and ended.returncode == 6
    assert told["arguments"] == ["exit", "6", "a b"]
    assert told["environment"]["A"] == ("0" if changes is None else "03" if "env_vars" in changes else "1 2")
    assert told["environment"].get("B") == ("4" if changes and "command_prefix" in changes else None)


def test_a_client_that_ends_before_its_request_ends_nothing(server: Server, run: Callable) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(bytes.fromhex(server.client[-1]))
    assert run("exit", "0")[0]["imported"] == IMPORTED


def test_a_descriptor_that_the_next_client_gets_is_not_taken_for_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called = []
    (driver, driver_end), (first, first_end), (second, second_end) = (os.pipe() for _ in range(3))
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, os.fdopen(driver) as stdin:
        listener.bind("")
        listener.listen()
        monkeypatch.setattr(sys, "stdin", stdin)
        server = worker_forks._Server(listener)

        def reuse() -> None:
            for ended in (first, second):
                server._selector.unregister(ended)
            server._selector.register(second, selectors.EVENT_READ, lambda: called.append("new"))
            os.close(driver_end)

        server._selector.register(first, selectors.EVENT_READ, reuse)
        server._selector.register(second, selectors.EVENT_READ, lambda: called.append("old"))
        os.close(first_end)  # both end before the server looks
        os.close(second_end)
        with pytest.raises(SystemExit):
            server.run()
    server._selector.close()
    os.close(first)
    os.close(second)
    assert "old" not in called


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_other_users_get_no_fork(server: Server) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        os.seteuid(65534)
        try:
            client.connect(bytes.fromhex(server.client[-1]))
        finally:
            os.seteuid(0)
        client.settimeout(600)
        assert client.recv(1) == b""


def test_the_server_ends_with_its_driver_and_clients_then_start_new_processes(worker: Path) -> None:
    server = Server()
    server.driver.kill()
    server.driver.communicate()
    ended = subprocess.run(
        server.command(worker, "exit", "5"),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=server.environment,
    )
    assert json.loads(ended.stdout)["imported"] == [] and ended.returncode == 5
    server.process.wait(600)


def test_a_server_that_still_imports_has_ended_when_its_driver_ends(server: Server) -> None:
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", DRIVER, "/nowhere"]
    ended = subprocess.run(command, capture_output=True, text=True, env=server.environment, input="", check=True)
    assert not psutil.pid_exists(int(ended.stdout.splitlines()[1])) and ended.stderr == ""


THREAD = """
import socket, sys, threading
from cluster.session import worker_forks
worker_forks._PRELOADED = worker_forks._PRELOADED_WITH_RAY = ()
threading.Thread(target=threading.Event().wait, daemon=True).start()
worker_forks._serve(socket.socket(fileno=int(sys.argv[1])))
"""


def test_a_server_with_threads_forks_nothing(server: Server, worker: Path) -> None:
    """A lock that another thread holds would stay locked in the fork."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")
        listener.listen()
        with subprocess.Popen(
            [sys.executable, "-c", THREAD, str(listener.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            env=server.environment,
        ) as process:
            command = [*server.client[:-1], listener.getsockname().hex(), str(worker), "exit", "0"]
            ended = subprocess.run(command, capture_output=True, text=True, env=server.environment, input="")
            told = json.loads(ended.stdout)
            assert told["parent"] != process.pid
            process.communicate()


@pytest.mark.parametrize("driver", ["/dev/nvidiactl", "/dev/kfd"])
def test_with_a_gpu_workers_start_as_ray_starts_them(monkeypatch: pytest.MonkeyPatch, driver: str) -> None:
    monkeypatch.setattr(Path, "exists", lambda path, **_: str(path) == driver)
    assert worker_forks._start.__wrapped__("/nowhere") is None


SESSION = """
import os, sys
import psutil
from cluster.session import worker_forks
from cluster.session.ray_session import ray_session
class Counted:
    def parents(self):
        return os.getppid(), "transformers" in sys.modules
with ray_session(forks_workers=True):
    import ray
    [server] = [each.pid for each in psutil.Process().children() if worker_forks.__file__ in each.cmdline()]
    raylet = next(each for each in psutil.Process().children() if each.name() == "raylet")
    print("setup_worker.py" in " ".join(raylet.cmdline()))
    actors = [ray.remote(num_cpus=0)(Counted).remote() for _ in range(3)]
    print(ray.get([actor.parents.remote() for actor in actors]) == [(server, True)] * 3)
print([process.name() for process in psutil.Process(server).children()])
"""


@pytest.mark.ray
def test_actors_of_a_local_session_are_forks_and_end_with_it() -> None:
    assert run_python(SESSION) == "False\nTrue\n[]\n"
