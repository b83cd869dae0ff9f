"""A cluster of several nodes on this machine: one is taken back by Ray, and actors wait for room."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from processes import ROOT, run_python

from ragr1_actors.planning.tiny_policy import make_tiny_policy

CLUSTER = """
    import os, shutil, subprocess, sys, tempfile, time
    sys.path.insert(0, "tests")
    os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="rr", dir="/tmp")  # read when Ray is imported
    import ray
    from benchmarks.scale.clusters import free_port
    from ray.cluster_utils import Cluster

    def until(holds, timeout_s=500):
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert time.monotonic() < deadline
            time.sleep(0.1)

    def tell(*values):
        print("TOLD", *values, flush=True)

    def node_of(actor):
        return ray.get(actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()))

    def drain(node_id):  # what Ray's autoscaler does before it takes a node back
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address]
        command += ["--node-id", node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "test"]
        subprocess.run([*command, "--deadline-remaining-seconds", "600"], check=True, capture_output=True)

    store = {"object_store_memory": 100_000_000}
    ports = {"gcs_server_port": free_port(), "dashboard_agent_listen_port": 0}
    cluster = Cluster(True, head_node_args={"num_cpus": 0, "include_dashboard": False, **ports, **store})
    try:
        environment = {"env_vars": {"PYTHONPATH": "ROOT:ROOT/tests"}}
        ray.init(address=cluster.address, log_to_driver=False, runtime_env=environment)
        SCRIPT
    finally:
        ray.shutdown()
        cluster.shutdown()
        shutil.rmtree(os.environ["RAY_TMPDIR"], ignore_errors=True)
"""


def run_on_cluster(script: str, *arguments: object) -> str:
    """Run a script that has ``ray``, ``cluster`` and the functions above, and return what it tells."""
    body = textwrap.indent(textwrap.dedent(script).strip(), " " * 4).lstrip()
    program = textwrap.dedent(CLUSTER).replace("SCRIPT", body).replace("ROOT", str(ROOT))
    lines = run_python(program, *arguments).splitlines()  # Ray prints, too
    return "\n".join(line.removeprefix("TOLD ") for line in lines if line.startswith("TOLD "))


@pytest.mark.ray
@pytest.mark.slow
def test_actors_without_room_are_counted() -> None:
    script = """
    from types import SimpleNamespace
    from cluster.placement import draining_nodes, free_resources, num_without_room
    cluster.add_node(num_cpus=1, **store)
    class Thing:
        def ping(self): return None
    make = ray.remote(num_cpus=1)(Thing)
    placed = make.remote()
    ray.get(placed.ping.remote())
    waiting = make.remote()
    until(lambda: num_without_room([placed, waiting]) == 1)
    unknown = SimpleNamespace(_actor_id=ray.ActorID(os.urandom(16)))
    assert num_without_room([unknown]) == 0  # as an actor's handle that is newer than its registration
    tell(sorted(draining_nodes()), free_resources())
    """
    assert run_on_cluster(script) == "[] 0 of 1 CPU, 0 of 0 GPU"


@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.slow
def test_runners_and_retrievers_leave_a_node_that_ray_takes_back(tmp_path: Path) -> None:
    make_tiny_policy(tmp_path, [" Riga"], seed=0, vocab_size=400, hidden_size=32, num_layers=2, num_heads=2)
    script = """
    from cluster.placement import draining_nodes
    from fakes import OnePassage
    from fleet_world import drain as collect_all, request, submit
    from test_rollout_scaling import make_config
    from ragr1_actors.rollout.runners.env_runner_group import EnvRunnerGroup
    from retrieval.replicas.replica_set import RpcActor
    from retrieval.replicas.replica_set import ReplicaSet, find_actors

    first = cluster.add_node(num_cpus=1, **store)
    runners = EnvRunnerGroup(make_config(1), sys.argv[1], OnePassage())
    class Stub(RpcActor): pass
    retrievers = ReplicaSet(Stub, [()], num_cpus=0.5)
    retrievers.scale_to(1)
    runners.wait_until_ready()
    retrievers.fleet.wait_until_up(500)
    until(lambda: retrievers.state().num_running == 1)
    before = find_actors(retrievers.name)
    submit(runners, request(0))
    second = cluster.add_node(num_cpus=1, **store)
    drain(first.node_id)
    until(lambda: draining_nodes() == {first.node_id})
    assert (runners.fleet.drain_nodes(draining_nodes()), retrievers.fleet.drain_nodes(draining_nodes())) == (1, 1)
    assert runners.fleet.drain_nodes(draining_nodes()) == 0
    assert find_actors(retrievers.name) == before  # until there is another
    runners.scale_to(1)
    retrievers.scale_to(1)
    submit(runners, request(1))
    tell(sorted(one.request.issue_id for one in collect_all(runners)))
    assert runners.fleet.drain_nodes({second.node_id}) == 1
    until(lambda: retrievers.state().num_running == 1 and len(find_actors(retrievers.name)) == 1)
    (actor,) = retrievers.handles.values()
    assert node_of(actor) == second.node_id
    assert find_actors(retrievers.name) != before
    """
    assert run_on_cluster(script, tmp_path) == "['t/0#0', 't/1#0']"


@pytest.mark.ray
@pytest.mark.slow
def test_batches_on_a_node_that_was_killed_are_found_lost() -> None:
    script = """
    import numpy as np
    from learners.ranks.learner_group import LearnerGroup
    from ragr1_actors.training.algorithm_config import AlgorithmConfig

    node = cluster.add_node(num_cpus=1, **store)
    class Maker:
        def make(self, size): return np.zeros(size, np.uint8)
    maker = ray.remote(num_cpus=1)(Maker).remote()
    batches = [maker.make.remote(size) for size in (10, 1_000_000, 2_000_000)]
    ray.wait(batches, num_returns=3, fetch_local=False)
    batches.append(ray.put(np.zeros(1_000_000)))
    learners = LearnerGroup(AlgorithmConfig().learners(num_learners=0).freeze())
    tell(learners.find_lost(batches[:2]))  # which copies the second to the driver's node
    cluster.remove_node(node, allow_graceful=False)
    ray.kill(maker)  # its process may have outlived its node
    def is_dead():
        try:
            ray.get(maker.make.remote(10))
        except ray.exceptions.RayActorError:
            return True
    until(is_dead)
    batches.append(maker.make.remote(10))
    tell(learners.find_lost(batches))
    """
    assert run_on_cluster(script) == "[]\n[2, 4]"
