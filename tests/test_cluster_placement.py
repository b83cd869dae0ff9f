"""Placement on real Ray clusters of several nodes, each in a separate process; GPUs are only counted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cluster_world import autoscaled_cluster
from processes import run_python

from cluster.placement_plan import Demand
from ragr1_actors.core.resolve import resolve

pytestmark = [pytest.mark.ray, pytest.mark.slow]

STATIC = """
import json, sys
import ray
from ray.cluster_utils import Cluster
from cluster.placement import Placement, labelled, wait_for_room
from cluster.placement_plan import Demand, actor_demands
from ragr1_actors.core.errors import UserError
from ragr1_actors.core.resolve import resolve
from retrieval.fleet.group import ActorFleet

class Where:
    def node(self):
        return ray.get_runtime_context().get_node_labels()["name"]

nodes, sections, directory = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
cluster = Cluster(True, head_node_args={"num_cpus": 0, "temp_dir": directory, "include_dashboard": False})
for number, (num_cpus, num_gpus, labels) in enumerate(nodes):
    labels = {**labels, "name": f"n{number}"}
    cluster.add_node(num_cpus=num_cpus, num_gpus=num_gpus, labels=labels, object_store_memory=80_000_000)
ray.init(address=cluster.address, log_to_driver=False)
config = resolve(sections)
shown = []
try:
    wait_for_room(actor_demands(config, has_index=True), shown.append, print)
    placement = Placement(config)
    where = lambda options: ray.remote(Where).options(**options).remote()
    actors = {
        "learners": [
            where({"num_gpus": config.learners.num_gpus_per_learner, **placement.learner_options(rank)})
            for rank in range(config.learners.num_learners)
        ],
        "runners": [
            where({"num_gpus": config.env_runners.num_gpus_per_env_runner, **placement.runner_options(index)})
            for index in range(config.env_runners.num_env_runners)
        ],
        "retrievers": [
            where({"num_cpus": 1, **labelled(config.retrieval.label_selector)(number)})
            for number in range(config.retrieval.num_retrievers)
        ],
    }
    found = {name: ray.get([actor.node.remote() for actor in group], timeout=120) for name, group in actors.items()}
    print("RESULT", json.dumps(found))
except UserError as error:
    print("REFUSED", error)
print("SHOWN", len(shown))
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


def on_nodes(directory: str, nodes: list[tuple[int, int, dict[str, str]]], **sections: dict[str, Any]) -> str:
    resolve(sections)
    return run_python(STATIC, json.dumps(nodes), json.dumps(sections), directory)


def result(printed: str) -> dict[str, list[str]]:
    found: dict[str, list[str]] = json.loads(printed.partition("RESULT ")[2].splitlines()[0])
    return found


def test_labels_and_bundles_place_a_run(ray_temp_dir: str) -> None:
    """Two ranks of one GPU packed on one node, engines over two GPUs on another, retrievers where there is no GPU."""
    nodes = [
        (2, 2, {"ragr1": "learner"}),
        (2, 2, {"ragr1": "learner"}),
        (2, 2, {"ragr1": "runner"}),
        (2, 2, {"ragr1": "runner"}),
        (2, 0, {"ragr1": "retriever"}),
    ]
    learners: dict[str, Any] = {"num_learners": 2, "num_gpus_per_learner": 1, "label_selector": {"ragr1": "learner"}}
    rest: dict[str, Any] = {
        "env_runners": {
            "num_env_runners": 2,
            "num_gpus_per_env_runner": 2,
            "engine": "vllm",
            "engine_options": {"tensor_parallel_size": 2},
            "label_selector": {"ragr1": "runner"},
        },
        "retrieval": {"num_retrievers": 2, "label_selector": {"ragr1": "!in(learner, runner)"}},
    }
    printed = on_nodes(ray_temp_dir, nodes, learners=learners, **rest)
    found = result(printed)
    assert found["learners"] in (["n0", "n0"], ["n1", "n1"])
    assert sorted(found["runners"]) == ["n2", "n3"]
    assert found["retrievers"] == ["n4", "n4"]
    assert "SHOWN 1" in printed


def test_ranks_are_spread(ray_temp_dir: str) -> None:
    nodes = [(4, 2, {}), (4, 2, {})]
    learners = {"num_learners": 2, "num_gpus_per_learner": 1, "placement": "spread"}
    found = result(on_nodes(ray_temp_dir, nodes, learners=learners, env_runners={"num_cpus_per_env_runner": 0}))
    assert Counter(found["learners"]) == {"n0": 1, "n1": 1}


def test_what_a_cluster_of_fixed_nodes_lacks_is_said_at_once(ray_temp_dir: str) -> None:
    runners = {"num_env_runners": 2, "num_gpus_per_env_runner": 2, "engine_options": {"tensor_parallel_size": 2}}
    printed = on_nodes(ray_temp_dir, [(4, 1, {}), (4, 1, {})], env_runners=runners, learners={"num_learners": 0})
    assert "REFUSED the cluster has no room and cannot grow enough: 2 of 2 env runners find no place" in printed
    assert "each needs 1 CPU, 2 GPUs on one node, and of such nodes the one with most room" in printed


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
        assert float(refused.partition("AFTER ")[2]) < 60, "Ray's autoscaler looks every second here"
        printed = asked_of(environment, monkeypatch, Demand("env runners", 2, 1, 2, labels))
        assert "SAID waiting until the cluster grows: 2 of 2 env runners find no place" in printed
        assert "ROOM 3" in printed
