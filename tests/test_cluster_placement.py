"""Placement on real Ray clusters of several nodes, each in a separate process; GPUs are only counted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from processes import run_python
from small_world import make_files

from benchmarks.scale.clusters import autoscaled_cluster, free_port
from cluster.placement_plan import Demand

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STATIC = """
import json, os, sys, time
from pathlib import Path
nodes, cases, temp_dir, files = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
os.environ["RAY_TMPDIR"] = temp_dir  # where Ray notes the address of this cluster
os.makedirs(f"{temp_dir}/ray", exist_ok=True)
import ray
from ray._private.state import actors
from ray.cluster_utils import Cluster
from cluster.placement import Placement, wait_for_room
from cluster.placement_plan import actor_demands
from ragr1_actors.core.errors import UserError
from ragr1_actors.core.resolve import resolve
from ragr1_actors.rollout.runners.rollout_fleets import RolloutFleets

class Rank:
    def node(self):
        return ray.get_runtime_context().get_node_id()

ports = {"gcs_server_port": int(sys.argv[5]), "dashboard_agent_listen_port": 0}
cluster = Cluster(True, head_node_args={"num_cpus": 0, "include_dashboard": False, **ports})
names = {}
for number, (num_cpus, num_gpus, labels) in enumerate(nodes):
    node = cluster.add_node(num_cpus=num_cpus, num_gpus=num_gpus, labels=labels, object_store_memory=80_000_000)
    names[node.node_id] = f"n{number}"
ray.init(address=cluster.address, log_to_driver=False)

def alive():
    return [actor for actor in actors().values() if actor["State"] == "ALIVE"]

def is_free():
    free, all_of_it = ray.available_resources(), ray.cluster_resources()
    return not alive() and all(free.get(name) == all_of_it[name] for name in ("CPU", "GPU"))

def place(config, found):
    wait_for_room(actor_demands(config, has_index=True), lambda plan: found.update(shown=found["shown"] + 1), print)
    placement = Placement(config)
    learners = config.learners
    size = {"num_cpus": learners.num_cpus_per_learner, "num_gpus": learners.num_gpus_per_learner}
    options = [placement.learner_options(rank) for rank in range(learners.num_learners)]
    ranks = [ray.remote(Rank).options(**size, **where).remote() for where in options]
    found["Rank"] = [names[node] for node in ray.get([rank.node.remote() for rank in ranks], timeout=500)]
    with RolloutFleets(config, str(files / "policy"), files / "index", placement):
        for actor in alive():
            if actor["ActorClassName"] != "Rank":
                found.setdefault(actor["ActorClassName"], []).append(names[actor["Address"]["NodeID"]])
    for rank in ranks:
        ray.kill(rank)
    placement.remove()

results = {}
for name, sections in cases.items():
    results[name] = {"shown": 0}
    try:
        place(resolve(sections), results[name])
    except UserError as error:
        results[name]["refused"] = str(error)
    while not is_free():
        time.sleep(0.1)
print("RESULT", json.dumps(results))
ray.shutdown()
cluster.shutdown()
"""

GROWING = """
import json, sys, time
import ray
from cluster.placement import wait_for_room
from cluster.placement_plan import Demand
from ragr1_actors.core.errors import UserError

ray.init(log_to_driver=False)
demands = [Demand(**demand) for demand in json.loads(sys.argv[1])]
started = time.monotonic()
try:
    wait_for_room(demands, lambda plan: None, lambda sentence: print("SAID", sentence))
    print("ROOM", len([node for node in ray.nodes() if node["Alive"]]))
except UserError as error:
    print("REFUSED", error)
print("AFTER", time.monotonic() - started)
"""

SEATED = """
import os, signal, time
import psutil, ray
from cluster.placement import Placement, wait_for_room
from cluster.placement_plan import actor_demands
from ragr1_actors.core.resolve import resolve

class Runner:
    def node(self):
        return ray.get_runtime_context().get_node_id()

def place_of(actor):
    while True:
        try:
            return ray.get(actor.node.remote())
        except ray.exceptions.RayActorError:  # it is being restarted
            time.sleep(0.1)

ray.init(log_to_driver=False)
config = resolve({"env_runners": {"label_selector": {"role": "runner"}}, "learners": {"num_learners": 0}})
wait_for_room(actor_demands(config, has_index=False), lambda plan: None, print)
options = Placement(config, has_index=False).runner_options(0)
runners = [ray.remote(Runner).options(num_cpus=1, max_restarts=-1, **options).remote() for _ in range(2)]
first, second = (place_of(runner) for runner in runners)
print("TWO NODES", first != second)
port = next(node["NodeManagerPort"] for node in ray.nodes() if node["NodeID"] == first)
listeners = [c.pid for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr[1] == port]
os.kill(listeners[0], signal.SIGKILL)
while next(node["Alive"] for node in ray.nodes() if node["NodeID"] == first):
    time.sleep(0.1)
while (place := place_of(runners[0])) == first:  # its process outlives its raylet for a moment, and still answers
    time.sleep(0.1)
print("A THIRD NODE", place != second)
"""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from ragr1_actors.planning.tiny_policy import make_tiny_policy

    directory = make_files(tmp_path_factory.mktemp("files"))
    sizes = {"vocab_size": 400, "hidden_size": 32, "num_layers": 1, "num_heads": 2}
    make_tiny_policy(directory / "policy", [" Riga is a city"], seed=0, **sizes)
    return directory


NODES: list[tuple[int, int, dict[str, str]]] = [
    (2, 2, {"ragr1": "learner"}),
    (2, 2, {"ragr1": "learner"}),
    (2, 2, {"ragr1": "runner"}),
    (2, 2, {"ragr1": "runner"}),
    (3, 0, {"ragr1": "retriever"}),
    (1, 0, {"ragr1": "small"}),
    (2, 0, {"ragr1": "small"}),
    (2, 0, {"ragr1": "small"}),
]
"""CPUs, GPUs and labels; there are n0 to n7."""
LEARNER, RUNNER, RETRIEVER, SMALL = (
    {"label_selector": {"ragr1": name}} for name in ("learner", "runner", "retriever", "small")
)
ENGINE = {"engine": "benchmarks.rollout.fleet:PacedEngine"}
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "too large": {
        "env_runners": {"num_env_runners": 2, "num_gpus_per_env_runner": 4, **ENGINE}
        | {"engine_options": {"tensor_parallel_size": 4}},
        "learners": {"num_learners": 0},
    },
    "labels": {
        "learners": {"num_learners": 2, "num_gpus_per_learner": 1, **LEARNER},
        "env_runners": {"num_env_runners": 2, "num_gpus_per_env_runner": 2, **RUNNER, **ENGINE},
        "retrieval": {
            "num_retrievers": 2,
            "encoders": {"num_encoders": 1},
            "label_selector": {"ragr1": "!in(learner, runner, small)"},
        },
    },
    "spread": {
        "learners": {"num_learners": 2, "num_gpus_per_learner": 1, "placement": "spread", **LEARNER},
        "env_runners": {"num_env_runners": 1, **RUNNER, **ENGINE},
        "retrieval": RETRIEVER,
    },
    "by plan": {
        "learners": {"num_learners": 1, "num_cpus_per_learner": 1, **SMALL},
        "env_runners": {"num_env_runners": 2, "num_cpus_per_env_runner": 1.5, **SMALL, **ENGINE},
        "retrieval": {"num_retrievers": 2, "num_cpus_per_retriever": 0.5, **SMALL},
    },
}


@pytest.fixture(scope="module")
def placed(files: Path, ray_temp_dir: str) -> dict[str, dict[str, Any]]:
    """Where the actors of each case were, one case after the other on one cluster."""
    printed = run_python(STATIC, json.dumps(NODES), json.dumps(CASES), ray_temp_dir, files, free_port())
    found: dict[str, dict[str, Any]] = json.loads(printed.partition("RESULT ")[2].splitlines()[0])
    return found


def test_labels_and_bundles_place_a_run(placed: dict[str, dict[str, Any]]) -> None:
    """Two ranks packed on one node, runners with two GPUs on others, retrievers and encoders where the labels are."""
    found = placed["labels"]
    assert found["Rank"] in (["n0", "n0"], ["n1", "n1"])
    assert sorted(found["EnvRunnerActor"]) == ["n2", "n3"]
    assert found["RetrieverActor"] == ["n4", "n4"] and found["EncoderActor"] == ["n4"]
    assert found["shown"] == 1


def test_ranks_are_spread(placed: dict[str, dict[str, Any]]) -> None:
    assert Counter(placed["spread"]["Rank"]) == {"n0": 1, "n1": 1}


def test_actors_start_where_the_plan_has_them(placed: dict[str, dict[str, Any]]) -> None:
    """Ray alone puts both retrievers on the node of the learner, or on one of which a runner needs three quarters."""
    found = placed["by plan"]
    assert found["Rank"] == ["n5"]
    assert sorted(found["EnvRunnerActor"]) == sorted(found["RetrieverActor"]) == ["n6", "n7"]


def test_what_a_cluster_of_fixed_nodes_lacks_is_said_at_once(placed: dict[str, dict[str, Any]]) -> None:
    refused = placed["too large"]["refused"]
    assert refused.startswith("the cluster has no room and cannot grow enough: 2 of 2 env runners find no place")
    assert "each needs 1 CPU, 4 GPUs on one node, and of such nodes the one with most room" in refused
    assert "Rank" not in placed["too large"]


def asked_of(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, *demands: Demand) -> str:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return run_python(GROWING, json.dumps([vars(demand) for demand in demands]))


def test_an_autoscaler_is_asked_before_a_run_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It starts nodes within its limits; beyond them it says so, and the run ends with a sentence."""
    types = {"runner": {"resources": {"CPU": 2, "GPU": 2}, "max_workers": 2, "labels": {"ragr1": "runner"}}}
    with autoscaled_cluster(types) as environment:
        labels = {"ragr1": "runner"}
        refused = asked_of(environment, monkeypatch, Demand("env runners", 3, 1, 2, labels))
        assert "REFUSED the cluster has no room and cannot grow enough: 3 of 3 env runners find no place" in refused
        assert float(refused.partition("AFTER ")[2]) < 400, "Ray's autoscaler looks every second here"
        printed = asked_of(environment, monkeypatch, Demand("env runners", 2, 1, 2, labels))
        assert "SAID waiting until the cluster grows: 2 of 2 env runners find no place" in printed
        assert "ROOM 3" in printed


def test_the_cluster_grows_for_an_actor_whose_seat_is_taken_or_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    types = {"runner": {"resources": {"CPU": 1}, "max_workers": 3, "labels": {"role": "runner"}}}
    with autoscaled_cluster(types) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        printed = run_python(SEATED)
    assert "TWO NODES True" in printed and "A THIRD NODE True" in printed
