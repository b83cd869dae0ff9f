"""Two ranks as Ray actors: equal to one plain process, one error for all, one group for all stages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from learners_common import make_config, make_groups, make_policy, pickle_by_value
from transformers import AutoModelForCausalLM

from learners.ranks.learner_group import LearnerGroup
from ragr1_actors.core.disk.folders import SharedFolderWriter
from ragr1_actors.core.disk.learner_state import learner_files
from ragr1_actors.core.errors import ConfigError, DataError, FleetError
from ragr1_actors.core.schema import groups_to_record_batch
from ragr1_actors.core.types import TokenKind, TrajectoryGroup

pytestmark = [pytest.mark.ray, pytest.mark.engine]
NUM_STEPS = 5


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def two_ranks(ray_local: ModuleType) -> Iterator[LearnerGroup]:
    pickle_by_value(ray_local, __name__)
    group = LearnerGroup(make_config(learners={"num_learners": 2, "zero_stage": 2}))
    yield group
    group.stop()


def plain_torch(policy_dir: Path, batches: list[list[TrajectoryGroup]]) -> tuple[dict[str, np.ndarray], list[float]]:
    """GRPO by the book: one process, one sequence at a time, eager attention, torch AdamW."""
    model = AutoModelForCausalLM.from_pretrained(policy_dir, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    norms = []
    for groups in batches:
        count = sum(t.num_model_tokens for group in groups for t in group.trajectories)
        for group in groups:
            rewards = np.array([t.reward for t in group.trajectories])
            for trajectory, reward in zip(group.trajectories, rewards, strict=True):
                advantage = (reward - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
                ids = torch.from_numpy(trajectory.token_ids.copy()).long()
                at = torch.from_numpy(trajectory.kinds == TokenKind.MODEL).nonzero()[:, 0]
                logprobs = model(ids[None]).logits[0].log_softmax(-1)[at - 1, ids[at]]
                ratio = (logprobs - torch.from_numpy(trajectory.logprobs)[at]).exp()
                loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / count
                loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}, norms


Layout = tuple[int, tuple[str, ...]]
"""A ZeRO stage, and what is offloaded."""


def run_layouts(
    learner: Any, policy_dir: Path, batches: list[list[TrajectoryGroup]], layouts: list[Layout]
) -> dict[Layout, Any]:
    """On a rank: the same five steps in every layout, and a resume of each."""
    results, states = {}, {}
    for layout in layouts:
        stage, offload = layout
        config = make_config(
            learners={"zero_stage": stage, "offload": list(offload), "micro_batch_tokens": 64},
            training={"lr": 1e-3, "weight_decay": 0.01},
        )
        from learners.algorithms.grpo import GRPOLearner

        made = GRPOLearner(config, policy_dir, learner.rank, learner.world_size)
        made.build()
        for batch in batches[:3]:
            made.update(batch)
        states[layout] = made.get_state()
        metrics = [made.update(batch) for batch in batches[3:]]
        assert all(tensor.shape == tuple(tensor.gather().shape) for tensor in made.published_tensors())
        resumed = GRPOLearner(config, policy_dir, learner.rank, learner.world_size)
        resumed.build()
        resumed.set_state(states[layout])
        for batch in batches[3:]:
            resumed.update(batch)
        ours, theirs = made.get_state(), resumed.get_state()
        is_bitwise = all(np.array_equal(ours[name], theirs[name]) for name in ours)
        results[layout] = (made.get_weights(), metrics, is_bitwise, states[layout])
        made.close()
        resumed.close()
    return results


@pytest.mark.parametrize(
    "layouts",
    [
        [(0, ()), (1, ()), (2, ()), (3, ())],
        pytest.param(
            [(1, ("optimizer",)), (2, ("optimizer",)), (3, ("optimizer",)), (3, ("params", "optimizer"))],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["on the device", "offloaded"],
)
def test_two_ranks_equal_plain_torch_at_every_zero_stage(
    two_ranks: LearnerGroup, policy_dir: Path, layouts: list[Layout]
) -> None:
    two_ranks.build("sft", policy_dir)
    # The last batch has a single trajectory more than one rank can use: the other rank runs a dummy.
    batches = [make_groups(seed, num_groups=3, group_size=3) for seed in range(NUM_STEPS)]
    expected, norms = plain_torch(policy_dir, batches)
    rank_0, rank_1 = two_ranks.foreach_learner(lambda learner: run_layouts(learner, policy_dir, batches, layouts))
    for layout, (weights, metrics, is_bitwise, state) in rank_0.items():
        assert is_bitwise and rank_1[layout][2], f"{layout} does not resume bitwise"
        assert [m["grad_norm"] for m in metrics] == pytest.approx(norms[3:], rel=1e-4)
        for name, weight in weights.items():
            np.testing.assert_allclose(weight, expected[name], atol=1e-5, rtol=0, err_msg=f"{layout}: {name}")
        for name, value in state.items():  # a state is the same whatever layout it comes from, and on every rank
            np.testing.assert_allclose(value, rank_0[layouts[0]][3][name], atol=1e-5, rtol=0)
            np.testing.assert_array_equal(value, rank_1[layout][3][name])


def run_with_adapters(learner: Any, policy_dir: Path, batches: list[list[TrajectoryGroup]]) -> dict[int, Any]:
    """On a rank: adapters alone are trained, with a KL term against the policy without them."""
    results = {}
    for stage in (1, 3):
        config = make_config(
            learners={"zero_stage": stage, "micro_batch_tokens": 64, "lora": {"rank": 3}, "num_learners": 2},
            training={"lr": 1e-3, "kl_coeff": 0.1},
        )
        from learners.algorithms.grpo import GRPOLearner

        made = GRPOLearner(config, policy_dir, learner.rank, learner.world_size)
        made.build()
        kl = [made.update(batch)["kl"] for batch in batches]
        results[stage] = (made.get_weights(), made.get_state(), kl)
        made.close()
    return results


@pytest.mark.slow
def test_two_ranks_train_adapters_as_one_does(two_ranks: LearnerGroup, policy_dir: Path) -> None:
    batches = [make_groups(seed, num_groups=3) for seed in range(3)]
    alone = LearnerGroup(make_config())
    for group in (alone, two_ranks):
        group.build("sft", policy_dir)
    [expected] = alone.foreach_learner(lambda learner: run_with_adapters(learner, policy_dir, batches))
    both = two_ranks.foreach_learner(lambda learner: run_with_adapters(learner, policy_dir, batches))
    alone.stop()
    for stage, (weights, state, kl) in expected.items():
        assert kl[0] == pytest.approx(0, abs=1e-6) and kl[-1] > 1e-5
        for found in both:
            assert found[stage][2] == pytest.approx(kl, rel=1e-3, abs=1e-6)
            for name, value in state.items():
                np.testing.assert_allclose(found[stage][1][name], value, atol=1e-5, rtol=0, err_msg=name)
        for name, weight in weights.items():
            np.testing.assert_allclose(both[0][stage][0][name], weight, atol=1e-5, rtol=0, err_msg=name)


def test_ranks_give_their_memory_back_and_go_on(two_ranks: LearnerGroup, policy_dir: Path) -> None:
    import ray

    batches = [ray.put(groups_to_record_batch(make_groups(seed))) for seed in range(2)]
    states = []
    for is_moved in (False, True):
        two_ranks.build("ppo", policy_dir)
        for batch in batches:
            two_ranks.update([batch])
            if is_moved:
                assert two_ranks.offload_states() > 0
        states.append(two_ranks.get_state())
    for name, value in states[0].items():
        np.testing.assert_array_equal(value, states[1][name], err_msg=name)


def test_every_rank_writes_its_part_and_any_number_continues(
    two_ranks: LearnerGroup, policy_dir: Path, tmp_path: Path
) -> None:
    batch = groups_to_record_batch(make_groups(0))
    alone = LearnerGroup(make_config())
    for group, other, num_ranks in ((two_ranks, alone, 2), (alone, two_ranks, 1)):
        group.build("ppo", policy_dir)
        group.update([batch])
        expected, folder = group.get_state(), tmp_path / str(num_ranks)
        group.begin_save(SharedFolderWriter(folder))
        group.finish_save()
        names = learner_files(num_ranks)
        assert {path.name for path in folder.iterdir()} == {*names, "policy"}
        sizes = [(folder / name).stat().st_size for name in names]
        assert max(sizes) < 1.2 * sum(sizes) / num_ranks
        other.build("ppo", policy_dir)
        other.load_state(folder)
        found = other.get_state()
        assert found.keys() == expected.keys()
        for name, value in found.items():
            np.testing.assert_array_equal(value, expected[name], err_msg=name)
    (tmp_path / "2" / "learner_1.safetensors").unlink()
    with pytest.raises(
        DataError, match=r"2 is damaged: there are \d+ of \d+ elements of .*; the file of a rank is missing"
    ):
        alone.load_state(tmp_path / "2")
    alone.stop()


def run_on(
    learner: Any, policy_dir: Path, batches: list[list[TrajectoryGroup]], states: dict[int, Any]
) -> dict[int, tuple[Any, Any, Any]]:
    """On a rank, at every ZeRO stage that shares something out: (state taken over, after one update, after two)."""
    from learners.algorithms.grpo import GRPOLearner

    results = {}
    for stage in (1, 2, 3):
        config = make_config(learners={"zero_stage": stage, "micro_batch_tokens": 64}, training={"lr": 1e-3})
        made = GRPOLearner(config, policy_dir, learner.rank, learner.world_size)
        made.build()
        if stage in states:
            made.set_state(states[stage])
        found = [made.get_state()]
        for batch in batches:
            made.update(batch)
            found.append(made.get_state())
        results[stage] = (found[0], found[1], found[2])
        made.close()
    return results


@pytest.mark.slow
def test_a_state_goes_on_on_more_ranks_and_on_fewer(two_ranks: LearnerGroup, policy_dir: Path) -> None:
    batches = [make_groups(seed, num_groups=3, group_size=3) for seed in range(3)]
    alone = LearnerGroup(make_config())
    for group in (alone, two_ranks):
        group.build("sft", policy_dir)
    one, two = (
        group.foreach_learner(lambda learner: run_on(learner, policy_dir, batches[:2], {}))[0]
        for group in (alone, two_ranks)
    )
    for group, theirs in ((two_ranks, one), (alone, two)):
        taken = {stage: state for stage, (_, state, _) in theirs.items()}
        continued = group.foreach_learner(lambda learner, t=taken: run_on(learner, policy_dir, batches[1:], t))[0]
        for stage, (start, after, _) in continued.items():
            for name, value in start.items():
                np.testing.assert_array_equal(value, taken[stage][name], err_msg=f"stage {stage}: {name}")
            moved = 0.0
            for name, value in after.items():
                np.testing.assert_allclose(value, theirs[stage][2][name], atol=1e-5, rtol=0, err_msg=f"{stage}: {name}")
                moved = max(moved, float(np.abs(value - taken[stage][name]).max()))
            assert moved > 1e-4  # the update was one
    alone.stop()


def measure_gaps(learner: Any, policy_dir: Path, groups: list[TrajectoryGroup]) -> list[dict[str, float]]:
    """On a rank: what an update reports of engine and learner, without the correction and with it."""
    from learners.algorithms.grpo import PPOLearner

    found = []
    correction = {"kind": "geometric_mask", "low": 0.7, "high": 1.4}
    for clip, stage, options in ((0.0, 1, {}), (2.0, 2, {}), (2.0, 3, {"sequence_correction": correction})):
        config = make_config(
            learners={"zero_stage": stage, "micro_batch_tokens": 64},
            training={"lr": 1e-3, "num_minibatches": 2, "options": {"tis_clip": clip, **options}},
        )
        made = PPOLearner(config, policy_dir, learner.rank, learner.world_size)
        made.build()
        found.append(made.update(groups))
        made.close()
    return found


@pytest.mark.slow
def test_two_ranks_measure_and_correct_the_gap_as_one_does(two_ranks: LearnerGroup, policy_dir: Path) -> None:
    groups = make_groups(0, num_groups=3)
    for number, trajectory in enumerate(t for group in groups for t in group.trajectories):
        is_model = trajectory.kinds == TokenKind.MODEL
        trajectory.policy_versions[is_model] = number % 2
    alone = LearnerGroup(make_config())
    for group in (alone, two_ranks):
        group.build("sft", policy_dir)
    [expected] = alone.foreach_learner(lambda learner: measure_gaps(learner, policy_dir, groups))
    both = two_ranks.foreach_learner(lambda learner: measure_gaps(learner, policy_dir, groups))
    alone.stop()
    names = {"logprob_gap_mean", "logprob_gap_max", "ratio_outliers", "engine_kl", "skipped_steps"}
    names |= {"logprob_gap_mean_fresh", "ratio_outliers_fresh", "policy_loss", "grad_norm"}
    for found in both:
        for one, two in zip(expected, found, strict=True):
            corrected = {name for name in one if name.startswith(("tis_", "sequence"))}
            for name in names | corrected:
                assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    assert expected[2]["sequences_outside"] > 0 and expected[2]["sequence_ratio_min"] > 0
    assert expected[1]["tis_truncated"] > 0 and expected[0]["logprob_gap_mean_fresh"] > 0


def test_a_group_outlives_its_stages(two_ranks: LearnerGroup, policy_dir: Path, tmp_path: Path) -> None:
    import ray

    batch = groups_to_record_batch(make_groups(0))
    alone = LearnerGroup(make_config())
    for group, folder in ((two_ranks, tmp_path / "two"), (alone, tmp_path / "one")):
        group.build("sft", policy_dir)
        group.update([ray.put(batch)])
        group.save_policy(SharedFolderWriter(folder))
        group.build("grpo", folder)
        metrics = group.update([ray.put(batch)])
        assert metrics["tokens"] == sum(t.num_model_tokens for g in make_groups(0) for t in g.trajectories)
    together, single = ray.get(two_ranks.weights_ref()), alone.get_weights()
    for name, weight in single.items():
        np.testing.assert_allclose(weight, together[name], atol=1e-5, rtol=0)
    state = two_ranks.get_state()
    alone.foreach_learner(lambda learner: learner.set_state(state))  # from two ranks at stage 2 to one at stage 1
    for name, weight in alone.get_weights().items():
        np.testing.assert_array_equal(weight, together[name])
    two_ranks.foreach_learner(lambda learner: learner.set_state(state))
    alone.stop()


@pytest.mark.slow
def test_one_rank_without_trajectories_runs_a_dummy(two_ranks: LearnerGroup, policy_dir: Path) -> None:
    import ray

    two_ranks.build("ppo", policy_dir)
    trajectory = make_groups(0, num_groups=1)[0].trajectories[0]
    batch = groups_to_record_batch([TrajectoryGroup(trajectory.task, (trajectory,))])
    metrics = two_ranks.update([ray.put(batch)])
    assert metrics["tokens"] == trajectory.num_model_tokens
    assert metrics["padding_waste"] == pytest.approx(0.5)


@pytest.mark.slow
def test_an_error_on_one_rank_is_one_error(ray_local: ModuleType, policy_dir: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        LearnerGroup(make_config()).build("nowhere", policy_dir)

    def fail(learner: Any) -> None:
        if learner.rank == 1:
            raise ArithmeticError("one is not two")
        threading.Event().wait(600)  # as in a collective that the failed rank never joins

    group = LearnerGroup(make_config(learners={"num_learners": 2, "num_cpus_per_learner": 0.5}))
    group.build("sft", policy_dir)
    with pytest.raises(FleetError, match=r"rank 1 failed.*one is not two"):
        group.foreach_learner(fail)
    assert group.is_stopped
    with pytest.raises(FleetError, match="stopped"):
        group.get_weights()


def test_a_single_rank_without_reserved_cpus_uses_the_spare_ones(ray_local: ModuleType, policy_dir: Path) -> None:
    pickle_by_value(ray_local, __name__)
    group = LearnerGroup(make_config(learners={"num_learners": 1, "num_cpus_per_learner": 0}), spare_cpus=3)
    try:
        group.build("sft", policy_dir)
        assert group.foreach_learner(lambda learner: torch.get_num_threads()) == [3]
    finally:
        group.stop()
