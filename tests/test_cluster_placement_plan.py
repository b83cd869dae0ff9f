"""What goes where, over made-up nodes; no Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cluster.placement_plan import Demand, Node, PlacementPlan, actor_demands, matches, place_actors
from ragr1_actors.core.config import RunConfig, SamplerConfig
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.resolve import resolve

GPU_NODE = {"num_cpus": 96, "num_gpus": 8}


def demands_of(has_index: bool = True, **sections: dict[str, Any]) -> dict[str, Demand]:
    config = resolve(sections)
    return {demand.role: demand for demand in actor_demands(config, has_index=has_index)}


def nodes_of(plan: PlacementPlan) -> dict[str, dict[str, int]]:
    return {row.demand.role: dict(row.nodes) for row in plan.rows}


def planned(nodes: Sequence[Node], **sections: dict[str, Any]) -> PlacementPlan:
    return place_actors(actor_demands(resolve(sections), has_index=True), nodes)


def test_spare_cpus_are_those_that_no_actor_of_the_node_reserves() -> None:
    sections: dict[str, Any] = {
        "env_runners": {"num_env_runners": 3, "num_cpus_per_env_runner": 2},
        "retrieval": {"num_cpus_per_retriever": 0.5},
        "learners": {"num_cpus_per_learner": 0, "label_selector": {"role": "learner"}},
    }
    one = [Node("a", 8, labels={"role": "learner"})]
    assert planned(one, **sections).spare_cpus("learner ranks") == 1  # 8 - 3 * 2 - 0.5
    two = [Node("a", 5.5, labels={"role": "learner"}), Node("b", 16)]
    assert planned(two, **sections).spare_cpus("learner ranks") == 1  # two runners and the retriever are on a
    assert planned([Node("b", 16)], **sections).spare_cpus("learner ranks") == 0


# -- demands -----------------------------------------------------------------------------------------------------------


def test_demands_of_a_recipe() -> None:
    labels = {"ragr1": "retriever"}
    found = demands_of(
        env_runners={"num_env_runners": 3, "num_gpus_per_env_runner": 2, "label_selector": {"ragr1": "runner"}},
        retrieval={"num_retrievers": 2, "num_shards": 4, "encoders": {"num_encoders": 1}, "label_selector": labels},
        learners={"num_learners": 4, "num_gpus_per_learner": 1, "placement": "spread"},
    )
    assert found["env runners"] == Demand("env runners", 3, 1, 2, {"ragr1": "runner"})
    assert found["index shards"] == Demand("index shards", 8, 1, 0, labels)
    assert found["encoders"] == Demand("encoders", 1, 1, 0, labels)
    assert found["learner ranks"] == Demand("learner ranks", 4, 1, 1, {}, "spread")


def test_what_is_in_the_driver_is_not_placed() -> None:
    in_driver = {"env_runners": {"num_env_runners": 0}, "learners": {"num_learners": 0}}
    assert set(demands_of(**in_driver)) == {"retrievers"}
    assert demands_of(has_index=False, **in_driver, retrieval={"encoders": {"num_encoders": 2}}) == {}


def test_without_learning_there_are_no_learner_ranks() -> None:
    assert {demand.role for demand in actor_demands(SamplerConfig(), has_index=True)} == {"env runners", "retrievers"}
    assert {demand.role for demand in actor_demands(RunConfig(), has_index=True)} == {
        "env runners",
        "retrievers",
        "learner ranks",
    }


def test_a_runner_and_a_rank_that_share_a_gpu_are_one_bundle_with_the_whole_gpu() -> None:
    labels = {"gpu": "in(a100, h100)"}
    found = demands_of(
        env_runners={"num_env_runners": 2, "num_gpus_per_env_runner": 0.4, "label_selector": labels},
        learners={"num_learners": 2, "num_gpus_per_learner": 0.5, "num_cpus_per_learner": 3, "label_selector": labels},
    )
    assert found["pairs of an env runner and a learner rank"] == Demand(
        "pairs of an env runner and a learner rank", 2, 4, 1, labels, "pack"
    )
    assert "env runners" not in found


def test_a_bundle_is_never_empty() -> None:
    assert Demand("env runners", 1, 2, 0.5).bundle == {"CPU": 2, "GPU": 0.5}
    assert Demand("env runners", 1, 0, 1).bundle == {"GPU": 1}
    assert Demand("env runners", 1, 0).bundle == {"memory": 1}, "no CPU is taken from others"


# -- places ------------------------------------------------------------------------------------------------------------


def test_a_7b_recipe_fills_one_node_of_eight_gpus() -> None:
    sections: dict[str, dict[str, Any]] = {
        "env_runners": {"num_env_runners": 3, "num_gpus_per_env_runner": 1},
        "retrieval": {"num_gpus_per_retriever": 1},
        "learners": {"num_learners": 4, "num_gpus_per_learner": 1},
    }
    assert not planned([Node("a", **GPU_NODE)], **sections).missing
    assert "7 GPUs" not in planned([Node("a", 96, 7)], **sections).missing
    assert "1 of " in planned([Node("a", 96, 7)], **sections).missing


def test_engines_over_two_gpus_find_no_place_on_nodes_of_one() -> None:
    runners = {"num_env_runners": 2, "num_gpus_per_env_runner": 2, "engine_options": {"tensor_parallel_size": 2}}
    nodes = [Node(f"10.0.0.{number}", 16, 1) for number in range(4)] + [Node("10.0.0.9", 16, 3)]
    found = planned(nodes, env_runners=runners, learners={"num_learners": 0}, retrieval={"num_retrievers": 0})
    assert found.missing == (
        "1 of 2 env runners find no place: each needs 1 CPU, 2 GPUs on one node, and of such nodes the one with most "
        "room, 10.0.0.0, has 1 GPU and 16 CPUs left"
    )
    assert found.rows[0].where == "10.0.0.9, no place for 1"


@pytest.mark.parametrize(
    ("share", "count", "fits"), [(0.5, 4, True), (0.6, 2, True), (0.6, 3, False), (0.25, 9, False)]
)
def test_a_part_of_a_gpu_is_a_part_of_one(share: float, count: int, fits: bool) -> None:
    found = place_actors([Demand("retrievers", count, 0, share)], [Node("a", 1, 2)])
    assert bool(found.missing) != fits


def test_a_gpu_of_which_a_part_is_taken_is_not_a_whole_one() -> None:
    assert place_actors([Demand("env runners", 2, 0, 1)], [Node("a", 1, 1.5)]).rows[0].num_missing == 1
    assert not place_actors(
        [Demand("env runners", 1, 0, 1), Demand("encoders", 1, 0, 0.5)], [Node("a", 1, 1.5)]
    ).missing


def test_parts_are_put_together_so_that_whole_gpus_stay_free() -> None:
    demands = [Demand("encoders", 2, 0, 0.5), Demand("env runners", 1, 0, 2)]
    assert not place_actors(demands, [Node("a", 1, 3)]).missing
    demands = [Demand("encoders", 1, 0, 0.6), Demand("env runners", 2, 0, 0.5)]
    assert not place_actors(demands, [Node("a", 1, 1.6)]).missing, "0.6 on the GPU of which 0.6 are free"


def test_cpus_are_counted() -> None:
    found = place_actors([Demand("retrievers", 3, 8)], [Node("a", 20)])
    assert found.missing.startswith("1 of 3 retrievers find no place: each needs 8 CPUs on one node, and of such nodes")
    assert "a, has 0 GPUs and 4 CPUs left" in found.missing


def test_actors_without_a_gpu_leave_the_nodes_with_gpus_to_others() -> None:
    found = place_actors(
        [Demand("retrievers", 2, 8), Demand("env runners", 2, 8, 1)], [Node("gpu", 16, 2), Node("cpu", 16)]
    )
    assert nodes_of(found) == {"env runners": {"gpu": 2}, "retrievers": {"cpu": 2}}


def test_labels_keep_the_fleets_apart() -> None:
    nodes = [Node("a", 8, 2, {"ragr1": "runner"}), Node("b", 8, 2, {"ragr1": "retriever"})]
    demands = [
        Demand("retrievers", 2, 1, 1, {"ragr1": "retriever"}),
        Demand("env runners", 2, 1, 1, {"ragr1": "runner"}),
    ]
    assert nodes_of(place_actors(demands, nodes)) == {"retrievers": {"b": 2}, "env runners": {"a": 2}}
    found = place_actors([Demand("env runners", 1, 1, 0, {"ragr1": "learner"})], nodes)
    assert found.missing.endswith("each needs 1 CPU, labels ragr1=learner on one node, and no node has these labels")


def test_actors_that_only_some_nodes_may_hold_come_first() -> None:
    labels = {"ragr1": "retriever"}
    half, two = Demand("retrievers", 1, 8, 0.5, labels), Demand("retrievers", 2, 8, 1.0, labels)
    rank, wide = Demand("learner ranks", 1, 1, 1.0, strategy="pack"), Demand("env runners", 2, 1, 2.0)
    for demands, num_gpus in (((rank, half), 1), ((wide, two), 2)):
        nodes = [Node("retriever", 16, num_gpus, labels, "a" * 56), Node("other", 64, 4, {}, "b" * 56)]
        assert place_actors(demands, nodes).missing == ""


def test_packed_ranks_share_a_node_if_one_has_room() -> None:
    nodes = [Node("small", 8, 2), Node("large", 8, 8), Node("fitting", 8, 4)]
    assert nodes_of(place_actors([Demand("learner ranks", 4, 1, 1, {}, "pack")], nodes)) == {
        "learner ranks": {"fitting": 4}
    }
    assert nodes_of(place_actors([Demand("learner ranks", 5, 1, 1, {}, "pack")], nodes)) == {
        "learner ranks": {"large": 5}
    }
    two = [Node("a", 16, 8), Node("b", 16, 8)]
    assert nodes_of(place_actors([Demand("learner ranks", 12, 1, 1, {}, "pack")], two)) == {
        "learner ranks": {"a": 8, "b": 4}
    }


def test_spread_ranks_use_all_nodes_alike() -> None:
    nodes = [Node(name, 8, 4) for name in "abc"]
    assert nodes_of(place_actors([Demand("learner ranks", 6, 1, 1, {}, "spread")], nodes)) == {
        "learner ranks": {"a": 2, "b": 2, "c": 2}
    }
    uneven = [Node("a", 8, 1), Node("b", 8, 8)]
    assert nodes_of(place_actors([Demand("learner ranks", 5, 1, 1, {}, "spread")], uneven)) == {
        "learner ranks": {"a": 1, "b": 4}
    }


def test_many_nodes_are_counted_in_the_table() -> None:
    found = place_actors([Demand("env runners", 20, 1, 1)], [Node(f"n{number:02}", 8, 2) for number in range(10)])
    assert found.rows[0].where == "n00 x 2, n01 x 2, n02 x 2, n03 x 2, 6 more nodes"


@pytest.mark.parametrize(
    ("value", "label", "is_match"),
    [
        ("a", "a", True),
        ("a", "b", False),
        ("a", None, False),
        ("!a", "b", True),
        ("!a", "a", False),
        ("!a", None, True),
        ("in(a, b)", "b", True),
        ("in(a,b)", "c", False),
        ("!in(a, b)", "b", False),
        ("!in(a, b)", None, True),
    ],
)
def test_a_selector_means_what_it_means_to_ray(value: str, label: str | None, is_match: bool) -> None:
    labels = {} if label is None else {"kind": label}
    assert matches({"kind": value}, labels) == is_match
    assert not matches({"kind": value, "zone": "x"}, labels)


# -- what a recipe may not say -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "selector", [{"role": ""}, {"role": "-a"}, {"role": "in()"}, {"": "a"}, {"a b": "c"}, {"r": "!!a"}]
)
def test_what_ray_does_not_take_as_a_label_is_refused(selector: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"^env_runners\.label_selector: got .* is no label and value such as"):
        resolve({"env_runners": {"label_selector": selector}})


def test_an_engine_has_as_many_gpus_as_it_is_parallel() -> None:
    runners = {"num_gpus_per_env_runner": 1, "engine_options": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}}
    with pytest.raises(ConfigError, match=r"num_gpus_per_env_runner: got 1 with tensor_parallel_size=2 .* expected 4:"):
        resolve({"env_runners": runners})
    resolve({"env_runners": {**runners, "num_gpus_per_env_runner": 4}})
    resolve({"env_runners": {**runners, "num_gpus_per_env_runner": 0}})  # on CPUs


def test_a_number_of_gpus_that_ray_cannot_give_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^retrieval\.num_gpus_per_retriever: got 1\.5, expected a part of one GPU"):
        resolve({"retrieval": {"num_gpus_per_retriever": 1.5}})
