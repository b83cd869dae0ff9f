"""A command that is tied to its starter: nothing that it started outlives either of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest
from processes import ROOT
from waits import until

from ragr1_actors.core.process.tied_process import tied

pytestmark = pytest.mark.integration
# prints the processes: the shell, a child of it, and an orphan that called setsid
FAMILY = "sleep 600 & child=$!; orphan=$(setsid bash -c 'sleep 600 >&- & echo $!'); echo $$ $child $orphan"
STARTER = """
import subprocess, sys, time
from ragr1_actors.core.process.tied_process import tied
subprocess.Popen(tied(sys.argv[1:]), stdin=subprocess.PIPE)
time.sleep(600)
"""


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def family(command: list[str]) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Run a command that prints its processes, which have ended at the end of the block."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    pipes = {"stdin": pipe, "stdout": pipe, "stderr": pipe}
    with subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes) as process:
        assert process.stdout is not None
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 3
        yield process, pids


def test_all_end_with_the_command() -> None:
    with family(tied(["bash", "-c", f"{FAMILY}; read line"])) as (process, pids):
        assert all(map(is_running, pids))
        process.communicate("go on\n", timeout=60)
        assert not any(map(is_running, pids))


def test_all_end_with_standard_input() -> None:
    with family(tied(["bash", "-c", f"{FAMILY}; wait"])) as (process, pids):
        process.communicate(timeout=60)
        assert not any(map(is_running, pids))


@pytest.mark.parametrize("kill", [os.kill, os.killpg])  # Ray kills the children of an actor, the SDK of MCP the group
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_all_end_with_the_process_that_stands_for_them(kill: Callable[[int, int], None], number: int) -> None:
    with family(tied(["bash", "-c", f"{FAMILY}; wait"])) as (process, pids):
        kill(process.pid, number)
        await until(lambda: not any(map(is_running, pids)))


async def test_all_end_with_a_starter_that_is_killed() -> None:
    starter = [sys.executable, "-c", STARTER, "bash", "-c", f"{FAMILY}; wait"]
    with family(starter) as (process, pids):
        assert all(map(is_running, pids))
        process.kill()
        await until(lambda: not any(map(is_running, pids)))


def test_a_command_has_a_second_to_end_by_itself() -> None:
    done = subprocess.run(tied(["bash", "-c", "cat; echo bye"]), input=b"hello\n", capture_output=True, timeout=60)
    assert done.stdout == b"hello\nbye\n"


def test_a_command_that_is_not_there_is_said() -> None:
    done = subprocess.run(tied(["no-such-command"]), input=b"", capture_output=True, timeout=60)
    assert done.stderr == b"no-such-command: No such file or directory\n"
