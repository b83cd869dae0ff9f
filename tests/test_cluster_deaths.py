"""What ended an actor, in one line: from Ray's texts, copied from a cluster of 2.60, and from a memory monitor."""

from __future__ import annotations

from typing import Any

import pytest
from processes import run_python
from ray.exceptions import ActorDiedError, ActorUnavailableError, OutOfMemoryError, RayActorError, RayError

from cluster.supervision.fleet import PROCESSES, death_line, last_line
from learners.ranks.learner_group import LearnerWorker
from ragr1_actors.core.config import RunConfig
from ragr1_actors.rollout.runners.env_runner_group import EnvRunnerActor
from retrieval.encoders.embedding import EmbeddingActor
from retrieval.replicas.replica_set import EncoderActor, RetrieverActor

ACTOR_ID = "fa17da60bdf5d67c85f6601501000000"
REPORT = (
    "2 worker(s) were killed due to the node running low on memory. Memory on the node (IP: 192.0.2.2, ID: "
    "67e652bb2e979a491b8b4269bb9d57e601c1b4bc2b50a144d6a9a552) was 21.77GB used / 23.54GB limit (0.924809)\n"
    "OOM kill reason: Memory usage 23375372288B exceeded threshold of 22748457369B (90.0% of 25276063744B limit)\n"
    "Object store memory usage: [- objects spillable: 0\n- bytes spillable: 0\n"
    "(global lru) num evictions: 0\n(global lru) bytes evicted: 0]\n"
    "Ray killed 2 worker(s) based on the killing policy\nConsidered workers: [\n"
    "Selected to kill: (Actor(e171ea5bb15a6b7f0162200301000000): job ID=01000000, lease ID=01000000cb5453956d53d4, "
    "task name=EnvRunnerActor.__init__, required resources={}, pid=5817, actual memory used=0.06GB)\n]\n"
    "To see more information about memory usage on this node, use `ray logs raylet.out -ip 192.0.2.2`\n"
    "Top 10 memory users: PID\tMEM(GB)\tCOMMAND\n5818\t14.63\tCOMMAND_LINE\n"
    "5646\t0.07\t/home/ana/.venv/bin/python provoke.py 0\n5741\t0.07\tray::DashboardAgent\n"
    "Refer to the documentation on how to address the out of memory issue: https://docs.ray.io/en/latest/ray-"
    "observability/user-guides/debug-apps/debug-memory.html. Consider provisioning more memory on this node or "
    "reducing task parallelism by requesting more CPUs per task. To adjust the kill threshold, set the environment "
    "variable `RAY_memory_usage_threshold` when starting Ray."
)
LONG = (
    "The actor is dead because its node has died. Node Id: 67e652bb2e979a491b8b4269bb9d57e601c1b4bc2b50a144d6a9a552\n"
)


@pytest.mark.parametrize(
    ("command", "end"),
    [
        ("ray::LearnerWorker.update", "learner 14.6 GB; lower learners.micro_batch_tokens"),
        ("ray::EnvRunnerActor", "env runner 14.6 GB; lower env_runners.max_concurrent_trajectories"),
        ("python -m ragr1_actors train hotpotqa_small", "driver 14.6 GB; lower learners.micro_batch_tokens"),
        ("/home/x/.venv/bin/python -m pytest tests/test_a_long_name.py -q --no-header", "/home/x/.venv/bin/python"),
    ],
)
def test_the_memory_monitor_is_named_with_the_largest_process(command: str, end: str) -> None:
    line = last_line(OutOfMemoryError(REPORT.replace("COMMAND_LINE", command)))
    assert line.startswith(f"ended by Ray's memory monitor, node 21.8 of 23.5 GB; largest: {end}")
    assert line.endswith(end) or line.endswith("... 14.6 GB")
    assert len(f"env runner 0 died ({line}); 1 of 2 go on") <= 200
    if "learner" in end:
        assert len(f"learner rank 0 died: {line}; restart 1 of 3: 12 updates are repeated, and update") <= 200


def unavailable(reason: str) -> ActorUnavailableError:
    return ActorUnavailableError(f"The actor is temporarily unavailable: {reason}", bytes.fromhex(ACTOR_ID))


class _Died(ActorDiedError):
    """With the last lines that Ray writes."""

    def __init__(self, message: str) -> None:
        RayActorError.__init__(self, ACTOR_ID, f"{ActorDiedError.BASE_ERROR_MSG}\n\tclass_name: A\n{message}")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (unavailable("IOError: The actor was restarted"), "its process was killed or crashed"),
        (unavailable("IOError: The actor is restarting."), "its process was killed or crashed"),
        (
            unavailable("RpcError: RPC error: Socket closed rpc_code: 14"),
            "ActorUnavailableError: RpcError: RPC error: Socket closed rpc_code: 14",
        ),
        (
            _Died("The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR (1) the ..."),
            "its process was killed or crashed",
        ),
        (
            _Died("The actor is dead because it was killed by `ray.kill`."),
            "_Died: The actor is dead because it was killed by `ray.kill`.",
        ),
    ],
)
def test_an_actor_that_died_or_is_out_of_reach(error: RayError, line: str) -> None:
    assert last_line(error) == line


def test_a_long_text_is_cut_and_other_errors_keep_their_last_line() -> None:
    cut = death_line(_Died(LONG * 40 + "word " * 90))
    assert len(cut) <= 160
    assert cut.endswith(" ...")
    assert death_line(ValueError("a\nb")) == ""
    assert last_line(ValueError("a\nb")) == "ValueError: b"
    assert last_line(ValueError("a\n  b")) == "ValueError: b"
    assert last_line(ValueError()) == "ValueError"


def test_the_advice_behind_an_error_of_cuda_is_not_its_reason() -> None:
    raised = """ray::Runner.__init__() (pid=7)
  File "engine.py", line 59, in __init__
    self.model = model.to(device)
                 ^^^^^^^^^^^^^^^^
torch.AcceleratorError: CUDA error: out of memory
Search for `cudaErrorMemoryAllocation' for more information.

Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."""
    assert last_line(RuntimeError(raised)) == "RuntimeError: torch.AcceleratorError: CUDA error: out of memory"


def test_the_processes_and_the_settings_exist() -> None:
    actors: list[type[Any]] = [LearnerWorker, EnvRunnerActor, RetrieverActor, EncoderActor, EmbeddingActor]
    assert {f"ray::{actor.__name__}" for actor in actors} == {name for name in PROCESSES if name.startswith("ray::")}
    for _, key in PROCESSES.values():
        keys: Any = RunConfig().model_dump()
        for name in key.split("."):
            keys = keys[name]


MONITORED = """
    import os, shutil, tempfile, time
    os.environ["RAY_memory_usage_threshold"] = "0.0001"  # every node uses more: the monitor ends each actor
    os.environ["RAY_memory_monitor_refresh_ms"] = "100"
    import ray
    from cluster.supervision.fleet import last_line

    class LearnerWorker:
        def wait(self):
            import threading
            threading.Event().wait()

    folder = tempfile.mkdtemp(prefix="rr", dir="/tmp")
    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    try:
        for max_restarts in (0, -1):
            actor = ray.remote(LearnerWorker).options(max_restarts=max_restarts, num_cpus=0).remote()
            try:
                ray.get(actor.wait.remote())
            except ray.exceptions.RayError as error:
                deadline = time.monotonic() + 60  # the node's report may come later
                while "monitor" not in last_line(error) and time.monotonic() < deadline:
                    time.sleep(0.1)
                print("TOLD", last_line(error))
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
"""


@pytest.mark.ray
def test_an_actor_that_the_memory_monitor_ends_says_so_whether_it_restarts_or_not() -> None:
    told = [line.removeprefix("TOLD ") for line in run_python(MONITORED).splitlines() if line.startswith("TOLD ")]
    assert len(told) == 2
    for line in told:
        assert line.startswith("ended by Ray's memory monitor, node ")
        assert "; largest: " in line
