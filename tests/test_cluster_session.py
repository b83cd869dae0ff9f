"""Ray sessions, each in a separate process: the other tests share one."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from processes import run_python
from small_world import ended, invoke, wait_for

from cluster.session.ray_session import ray_session
from cluster.session.watcher import processes_of
from ragr1_actors.core.errors import FleetError, UserError
from ragr1_actors.core.process.interrupts import InterruptGuard, TerminationError

ROOT = Path(__file__).resolve().parent.parent
ROOM = """
import sys
import psutil
from ragr1_actors.core.errors import UserError
from ragr1_actors.core.resolve import resolve
from ragr1_actors.rollout.runners.rollout_fleets import session_for
def session(num_cpus, num_gpus):
    runners = {"num_cpus_per_env_runner": num_cpus, "num_gpus_per_env_runner": num_gpus}
    config = resolve({"env_runners": runners, "retrieval": {"num_retrievers": 0}, "learners": {"num_learners": 0}})
    return session_for(config, lambda plan: print("plan", [(row.demand.role, row.num_missing) for row in plan.rows]))
num_cpus = float(sys.argv[1])
with session(num_cpus, 0):
    import ray
    print("cpus", ray.cluster_resources()["CPU"])
    available = min(psutil.virtual_memory().available, psutil.disk_usage("/dev/shm").free)
    assert ray.cluster_resources()["object_store_memory"] > available / 8, "sized from the host"
    assert ray.get(ray.remote(num_cpus=num_cpus)(lambda: "ran").remote(), timeout=60) == "ran"
    try:
        with session(1, 4096):  # in the session that is there
            print("there is room")
    except UserError as error:
        print("refused:", error)
assert not ray.is_initialized()
"""

KILL = """
import os, signal, sys, time
from pathlib import Path
from cluster.session.ray_session import ray_session
class Sleeper:
    def sleep(self, started):
        writing = Path(f"{started}.writing")
        writing.write_text(str(os.getpid()))
        writing.rename(started)
        time.sleep(60)
with ray_session():
    import ray
    for number in range(60):
        actor = ray.remote(num_cpus=0, max_restarts=-1)(Sleeper).remote()
        started = Path(sys.argv[1], str(number))
        call = actor.sleep.remote(str(started))
        while not started.exists():
            time.sleep(0.01)
        os.kill(int(started.read_text()), signal.SIGKILL)
        killed = time.monotonic()
        try:
            ray.get(call)
        except ray.exceptions.RayActorError:
            took_s = time.monotonic() - killed
            print(f"failed after {took_s}")  # one write: Ray's lines come from another thread
        ray.kill(actor)
        if took_s < 0.8:
            break
"""


@pytest.mark.slow
@pytest.mark.ray
def test_actors_may_share_the_cores_of_a_small_machine_and_gpus_that_are_not_there_are_named() -> None:
    wanted = (os.cpu_count() or 1) + 5
    printed = run_python(ROOM, wanted - 0.5)
    assert f"cpus {float(wanted)}" in printed
    assert "plan [('env runners', 0)]" in printed
    assert "refused: the cluster has no room and cannot grow enough: 1 of 1 env runners find no place: each" in printed
    assert "needs 1 CPU, 4096 GPUs on one node, and of such nodes" in printed
    assert "there is room" not in printed


SESSION = """
from cluster.session.ray_session import ray_session
from ragr1_actors.core.errors import UserError
try:
    with ray_session():
        print("started")
except UserError as error:
    print(error)
"""


@pytest.mark.parametrize(("folder", "refused"), [("my project", True), ("Jörgs~1", False)])
def test_a_python_that_ray_cannot_start_is_one_sentence(
    folder: str, refused: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a blank in its path, no worker starts, and ``ray.init`` waits without end."""

    def init(**_: object) -> None:
        raise UserError("Ray starts")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    (path := tmp_path / folder / "python").parent.mkdir()
    path.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(path))
    said = f"^got a Python at {path}, expected a path without blanks" if refused else "Ray starts"
    with pytest.raises(UserError, match=said), ray_session():
        pass


def test_a_limit_of_files_that_is_too_low_for_ray_is_one_sentence() -> None:
    """The raylet would stop to answer, and after a minute the machine would be blamed."""
    script = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))" + SESSION
    assert run_python(script).startswith("got a limit of 64 open files, expected at least 128")


def test_a_ray_that_does_not_start_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise Exception("The current node timed out\nduring startup.")  # as Ray does

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(FleetError, match=r"^Ray did not start: The current node timed out during"), ray_session():
        pass


LATE = """
import os, ray
from pathlib import Path
from ray._private import services
from cluster.session.watcher import processes_of
from cluster.session.ray_session import ray_session
find, first = services.get_node, set()
def late(address, node_id):
    node = find(address, node_id)  # raises RuntimeError until the node is there
    if not first:
        first.update(processes_of(Path(node["raylet_socket_name"]).parents[2]))
        raise Exception("The current node timed out during startup.")  # as Ray does after 30 s
    return node
services.get_node = late
with ray_session():
    assert ray.get(ray.remote(lambda: "ran").remote()) == "ran"
    left = [pid for pid in first - {os.getpid()} if Path(f"/proc/{pid}").exists()]
    print(len(first), "of the first start,", len(left), "left")
"""


@pytest.mark.ray
@pytest.mark.slow
def test_a_ray_that_does_not_start_in_time_is_started_once_more() -> None:
    printed = run_python(LATE)
    assert re.search(r"\b([4-9]|[1-9]\d) of the first start, 0 left", printed)


@pytest.mark.ray
@pytest.mark.slow
def test_a_call_to_a_killed_actor_fails_at_once(tmp_path: Path) -> None:
    found = re.findall(r"failed after ([\d.]+)", run_python(KILL, tmp_path))  # Ray prints more
    assert min(map(float, found)) < 0.8  # a busy machine delays some of them; a wait of 1 s would delay all


STOPPED_RAYLET = """
import os, signal, threading
import psutil
from cluster.session.ray_session import ray_session
with ray_session():
    import ray
    raylet, = (process for process in psutil.Process().children(recursive=True) if process.name() == "raylet")
    raylet.send_signal(signal.SIGSTOP)
    print("stopped", flush=True)
    threading.Event().wait()
"""


@pytest.mark.ray
@pytest.mark.slow
def test_a_process_whose_raylet_stops_ends_with_a_sentence() -> None:
    """Its own calls would wait for ever."""
    quick = {"RAY_health_check_period_ms": "500", "RAY_health_check_timeout_ms": "1000"}
    ended = subprocess.run(
        [sys.executable, "-c", STOPPED_RAYLET],
        env=os.environ | quick | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert ended.returncode == 1 and ended.stdout.startswith("stopped\n"), ended.stderr
    assert "failed: Ray's head has lost the node of this process" in ended.stderr


LOCAL = """
import os
from cluster.session.ray_session import ray_session
tokens = set()
for _ in range(2):
    with ray_session():
        import ray
        from ray._private.authentication.authentication_utils import is_token_auth_enabled
        ray.get(ray.remote(lambda: None).remote())
        assert is_token_auth_enabled()
        tokens.add(os.environ["RAY_AUTH_TOKEN"])
print("tokens", *tokens, flush=True)
"""


def without_token(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    return kept | {"HOME": str(home), "PYTHONPATH": str(ROOT)}


@pytest.mark.ray
@pytest.mark.slow
def test_a_local_session_asks_for_a_token_and_leaves_nothing_in_the_home_folder(tmp_path: Path) -> None:
    """A token there would be asked for by every ``ray start --head`` of the account."""
    command = [sys.executable, "-c", LOCAL]
    done = subprocess.run(command, env=without_token(tmp_path), capture_output=True, text=True, cwd=ROOT, check=False)
    assert re.search(r"^tokens [0-9a-f]{64}$", done.stdout, re.MULTILINE), done.stdout + done.stderr
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()] == []


KILLED = """
from cluster.session import leftovers
leftovers.PREFIX = "ragr1-own-"  # so that no other test's session removes it
import os, signal, sys, time
from contextlib import suppress
from pathlib import Path
from cluster.session.watcher import processes_of
from cluster.session.ray_session import ray_session
class Actor:
    pass
with ray_session():
    import ray
    actor = ray.remote(num_cpus=0)(Actor).remote()
    ray.get(actor.__ray_ready__.remote())
    folder = Path(ray.nodes()[0]["RayletSocketName"]).parents[2]
    pids = processes_of(folder)
    print(folder, *pids, flush=True)
    assert len(pids) > 6  # this process, Ray's and the actor's
    if "watcher" in sys.argv:
        watchers = []
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if f"watcher.py\\0{folder}\\0".encode() in (entry / "cmdline").read_bytes():
                    watchers.append(int(entry.name))
        assert len(watchers) == 1
        os.kill(watchers[0], signal.SIGKILL)
    if "driver" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def end_session(*killed: str) -> tuple[Path, set[int]]:
    """Start a session, end it or kill these processes of it, and return its folder and the processes."""
    done = subprocess.run(
        [sys.executable, "-c", KILLED, *killed],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (-signal.SIGKILL if "driver" in killed else 0), done.stderr
    folder, *pids = done.stdout.split()
    assert Path(folder).parent == Path("/tmp")
    return Path(folder), set(map(int, pids))


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("killed", ["driver", "watcher"])
def test_nothing_of_a_session_is_left_if_its_driver_or_what_watches_it_is_killed(killed: str) -> None:
    folder, pids = end_session(killed)
    assert wait_for(lambda: not folder.exists(), 300)
    assert processes_of(folder) == set()
    assert wait_for(lambda: ended(pids), 300)


LIVING = """
from cluster.session import leftovers
leftovers.PREFIX = "ragr1-own-"  # so that no other test's session removes it
import sys
from cluster.session.ray_session import ray_session
with ray_session():
    import ray
    print(ray.nodes()[0]["RayletSocketName"], flush=True)
    sys.stdin.read()
    print(ray.get(ray.remote(lambda: "works").remote()))
"""


@pytest.mark.ray
@pytest.mark.slow
def test_the_next_session_and_doctor_remove_what_a_dead_one_left_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.session.leftovers.PREFIX", "ragr1-own-")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # of scratch folders
    earlier, _ = end_session("driver", "watcher")
    assert earlier.is_dir()
    with subprocess.Popen(
        [sys.executable, "-c", LIVING],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as living:
        assert living.stdout is not None
        folder = Path(living.stdout.readline()).parents[2]
        assert not earlier.exists()
        left, pids = end_session("driver", "watcher")
        assert not ended(pids)  # Ray's agents at least
        with (
            next(left.glob("session_latest/logs/raylet.out")).open() as log,
            subprocess.Popen("cat", stdin=log) as reads,
        ):
            os.kill(reads.pid, signal.SIGSTOP)
            printed = invoke("doctor", "--clean")
            reads.send_signal(signal.SIGCONT)
        assert reads.returncode == 0  # a person may read the log
        assert re.fullmatch(rf" +ok  dead session: {left} removed, \d+ processes killed\n", printed), printed
        assert not left.exists()
        assert wait_for(lambda: ended(pids), 300)
        assert "none in /tmp" in invoke("doctor", "--clean")
        assert folder.is_dir()
        in_it = processes_of(folder)
        assert len(in_it) > 5
        assert "works" in living.communicate("")[0]
    assert wait_for(lambda: not folder.exists(), 300), "something of a session is left at its end"
    assert wait_for(lambda: ended(in_it), 300)


def test_the_folder_of_a_session_that_goes_on_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Path] = []

    def init(**settings: Any) -> None:
        started.append(Path(settings["_temp_dir"]))
        raise ConnectionError

    def in_between(**settings: Any) -> None:
        monkeypatch.setattr(ray, "init", init)
        with pytest.raises(UserError), ray_session():  # a second session starts and ends
            pass
        started.append(Path(settings["_temp_dir"]))
        assert started[1].is_dir() and not started[0].exists()
        raise ConnectionError

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", in_between)
    with pytest.raises(UserError), ray_session():
        pass
    assert not started[1].exists()


def test_sigterm_while_ray_starts_is_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as Ray does
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    with InterruptGuard():
        before = signal.getsignal(signal.SIGTERM)
        with pytest.raises(TerminationError), ray_session():
            pass
        assert signal.getsignal(signal.SIGTERM) == before


def test_a_cluster_that_is_not_there_is_one_sentence_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        monkeypatch.setenv("RAY_ADDRESS", address)
        started = time.monotonic()
        with (
            pytest.raises(UserError, match=f"^no Ray cluster answers at {address}: .*; check RAY_ADDRESS"),
            ray_session(),
        ):
            pass
    assert time.monotonic() - started < 15


def test_a_cluster_of_another_version_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise RuntimeError("Version mismatch: The cluster was started with:\n    Ray: 2.55.0\n")  # as Ray does

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    expected = (
        r"^Version mismatch: The cluster was started with: Ray: 2\.55\.0; run with the versions of the cluster at "
    )
    with pytest.raises(UserError, match=expected), ray_session():
        pass
