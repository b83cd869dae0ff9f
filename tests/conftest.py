"""What all tests share: one thread per process, no model hub, and a private Ray cluster."""

from __future__ import annotations

import atexit
import os
import runpy
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_randomly
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from types import ModuleType

    from learners.learner import Learner
    from ragr1_actors.core.config import RunConfig
    from ragr1_actors.core.process.driver_loop import DriverLoop

ROOT = Path(__file__).resolve().parent.parent

# Torch, FAISS and Ray read these when they are first imported, so they are set here and not in a fixture. The token is
# new in every session: a test can neither attach to nor be attached to by another cluster on this machine.
os.environ |= {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DS_ACCELERATOR": "cpu",  # else DeepSpeed warns when it is imported
    "HF_HUB_OFFLINE": "1",
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's default of 15 leaves actors a thirtieth of a core beside the tests of another process
    "RAY_worker_niceness": "0",
    # Ray gives its processes 30 to 60 s to start, and a busy machine takes longer
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_worker_register_timeout_seconds": "600",
    "RAGR1_CACHE": tempfile.mkdtemp(prefix="ragr1-cache-"),
}
atexit.register(shutil.rmtree, os.environ["RAGR1_CACHE"], ignore_errors=True)
os.environ.pop("RAY_ADDRESS", None)
TRITON_CPU = str(Path(__file__).parent / "triton_cpu")
if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (TRITON_CPU, os.environ.get("PYTHONPATH", ""))))
    runpy.run_path(f"{TRITON_CPU}/sitecustomize.py")
# By default Hypothesis fails an example that takes 0.2 s or is slow to draw: on a busy machine any may be.
settings.register_profile("fast", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=20)
settings.register_profile("thorough", settings.get_profile("fast"), max_examples=100)
settings.load_profile("fast")
# A process that a shell starts in the background ignores SIGINT, and so would all processes of the tests.
signal.signal(signal.SIGINT, signal.default_int_handler)


LONGEST_FIRST = (
    "test_cli_chaos",
    "test_rollout_env_runner_group",
    "test_cluster_elastic",
    "test_cluster_session",
    "test_training_hangs",
    "test_recipes_train",
    "test_cluster_submit",
    "test_cluster_hosts",
    "test_retrieval_replicas_group",
    "test_rollout_weight_sync",
    "test_rollout_colocation",
    "test_learners_learner_group_restart",
    "test_learners_learner_group",
    "test_cluster_placement",
    "test_training_guard",
    "test_training_stages",
    "test_runs_store",
    "test_training_algorithm",
    "test_cli_main",
)
"""Files that take minutes, or without their slow tests the better part of one: the longest first."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest: one that began last would leave the other process idle.

    Then come other files of slow tests. Files of the same rank keep the random order of pytest-randomly.
    """
    rank = {name: number for number, name in enumerate(LONGEST_FIRST)}
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (rank.get(item.path.stem, len(rank)), item.path not in slow))


def seed_torch(seed: int) -> None:
    """Seed torch for a test, once something has imported it."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed % 2**63)


# DeepSpeed registers a function that does the same: with it, every process would import DeepSpeed before anything else,
# also that which only hands out the tests
pytest_randomly.entrypoint_reseeds = [seed_torch]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a slow test for which no time is left, and set one thread again, before any fixture.

    Encoders and learners of earlier tests set the number of threads, and sums depend on it.
    """
    if item.get_closest_marker("slow") and time.time() > float(os.environ.get("SLOW_TESTS_UNTIL", "inf")):
        pytest.skip("no time is left for slow tests on this machine (SLOW_TESTS_UNTIL)")
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ray_temp_dir() -> Iterator[str]:
    """A folder for Ray's session files with a short path: a Unix socket's path may have 107 characters, Ray adds 75."""
    parent = tempfile.gettempdir() if len(tempfile.gettempdir()) <= 20 else "/tmp"
    directory = tempfile.mkdtemp(prefix="rr", dir=parent)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def ray_local(ray_temp_dir: str) -> Iterator[ModuleType]:
    """A local Ray cluster, shared by the session; yields the module ``ray``.

    Its four CPUs and two GPUs are only counted: an actor that asks for a part of a GPU must not use it.
    """
    import ray

    from cluster.session import watcher, worker_forks

    worker_env: dict[str, Any] = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}

    def start() -> None:
        ray.init(
            address="local",
            num_cpus=4,
            num_gpus=2,
            include_dashboard=False,
            object_store_memory=200_000_000,
            log_to_driver=False,
            _temp_dir=ray_temp_dir,
            runtime_env={"env_vars": worker_env} | worker_forks.runtime_env(worker_env["PYTHONPATH"]),
        )

    try:
        start()
    except Exception:  # Ray gives its processes 30 s, and a busy machine takes longer
        watcher.kill_processes(Path(ray_temp_dir), spared=os.getpid())
        start()
    yield ray
    ray.shutdown()


@pytest.fixture
def build(tmp_path: Path) -> Iterator[Callable[..., Learner]]:
    """Build learners in this process on one tiny policy, ``tmp_path / "policy"``, and close them afterwards."""
    from learners_common import make_config, make_policy

    made: list[Learner] = []

    def build(learner_class: type[Learner], config: RunConfig | None = None, folder: Path | None = None) -> Learner:
        if folder is None and not (tmp_path / "policy").is_dir():
            make_policy(tmp_path / "policy")
        learner = learner_class(config or make_config(), folder or tmp_path / "policy")
        learner.build()
        made.append(learner)
        return learner

    yield build
    for learner in made:
        learner.close()


@pytest.fixture
def loop() -> Iterator[DriverLoop]:
    """An event loop as the driver's."""
    from ragr1_actors.core.process.driver_loop import DriverLoop

    driver = DriverLoop()
    yield driver
    driver.close()
