"""Rows with images: a learner's packed row computes what transformers computes, sequence by sequence."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from learners_common import make_config
from vision_world import Alone, make_seeing, page, seen_trajectory

from learners.algorithms.grpo import PPOLearner
from learners.algorithms.segments import without_malformed_turns
from learners.models.scoring import PolicyModel, ValueModel
from learners.packing import flatten, pack
from ragr1_actors.core.content import PlacedImage
from ragr1_actors.core.images import decoded
from ragr1_actors.core.models import vision
from ragr1_actors.core.models.vision import FAMILIES, ImageReader, rope_positions
from ragr1_actors.core.schema import groups_from_record_batch, groups_to_record_batch
from ragr1_actors.core.types import MALFORMED, StopReason, Task, Trajectory, TrajectoryGroup, Turn
from ragr1_actors.rollout.engines.base import PolicyTokenizer

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp("seeing"), request.param)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PolicyTokenizer:
    return PolicyTokenizer(folder)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    return Alone(folder, ImageReader(folder))


@pytest.fixture(scope="module")
def policy(folder: Path) -> PolicyModel:
    return PolicyModel(folder, torch.float32, 0.7)


def attempts(tokenizer: PolicyTokenizer, seed: int) -> list[Trajectory]:
    """Attempts that begin with a page, one with another page of its size, one without images, and one rewritten."""
    rng = np.random.default_rng(seed)
    one, other = page(seed=10), page(seed=11)
    alike = [seen_trajectory(tokenizer, rng, ("Look", one, "?"), turns=int(rng.integers(1, 4))) for _ in range(3)]
    return [
        *alike,
        replace(alike[0], images=(replace(alike[0].images[0], image=other), *alike[0].images[1:])),
        seen_trajectory(tokenizer, rng, ("What is on the page?",), turns=1),
        seen_trajectory(tokenizer, rng, ("What", page(32, 8), one, "?"), turns=3, rewritten=True),
    ]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4), st.integers(1, 4)), max_size=4),
    st.integers(0, 5),
    st.data(),
)
def test_rotary_positions_of_a_part_are_those_of_the_whole(
    images: list[tuple[int, int, int]], rest: int, data: st.DataObject
) -> None:
    places, done = [], 0
    for gap, rows, cols in images:
        places.append(PlacedImage(page(), done + gap, rows, cols))
        done += gap + rows * cols
    whole = rope_positions(done + rest, places)
    start = data.draw(st.integers(0, done + rest))
    assert (rope_positions(done + rest, places, start) == whole[:, start:]).all()


def test_rotary_positions_are_those_of_transformers(tokenizer: PolicyTokenizer, alone: Alone, folder: Path) -> None:
    found = seen_trajectory(tokenizer, np.random.default_rng(0), ("Look", page(40, 8), page(8, 24), "?"), turns=3)
    ids = torch.from_numpy(found.token_ids).long()[None]
    reader = ImageReader(folder)
    _, grids = reader.patches([one.image for one in found.images])
    types = (ids == reader.token_ids[1]).int()
    theirs, _ = alone.model.model.get_rope_index(ids, types, image_grid_thw=torch.from_numpy(grids))
    assert (theirs[:, 0].numpy() == rope_positions(found.num_tokens, found.images)).all()


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**31), st.randoms(use_true_random=False))
def test_a_packed_row_has_the_gradients_of_its_sequences_one_at_a_time(
    tokenizer: PolicyTokenizer, alone: Alone, policy: PolicyModel, seed: int, order: object
) -> None:
    trajectories = attempts(tokenizer, seed)
    flat = flatten(trajectories)
    chosen = list(range(len(flat.lengths)))
    order.shuffle(chosen)  # type: ignore[attr-defined]
    row = pack(flat, chosen)
    # a page that several attempts begin with is in a row once, if the row shares what is common
    assert len(row.images) <= len(flat.images) - 2 * (row.layout.shared is not None)
    policy.zero_grad()
    logprobs = policy(row).logprobs
    logprobs.sum().backward()
    alone.model.zero_grad()
    expected = torch.zeros(len(flat.model_positions))
    number = 0
    for trajectory in trajectories:
        for part in trajectory.rows:
            images = [one.image for one in trajectory.images if part.start <= one.start < part.stop]
            ids = torch.from_numpy(trajectory.token_ids[part]).long()
            scores = (alone.logits(ids.tolist(), images) / 0.7).log_softmax(-1)
            at = torch.from_numpy(trajectory.kinds[part] == 1).nonzero()[:, 0]
            values = scores[at - 1, ids[at]]
            expected[slice(*flat.model_offsets[number : number + 2].tolist())] = values.detach()
            values.sum().backward()
            number += 1
    torch.testing.assert_close(logprobs.detach(), expected[row.column_index], atol=2e-5, rtol=0)
    theirs = dict(alone.model.named_parameters())
    for name, ours in policy.model.named_parameters():
        grad = theirs[name.replace("lm_head.head", "lm_head")].grad
        assert (ours.grad is not None and grad is not None and grad.abs().max() > 0) or ".k_proj.bias" in name, name
        scale = grad.abs().max().clamp(min=1)
        torch.testing.assert_close(ours.grad / scale, grad / scale, atol=2e-5, rtol=0, msg=name)


def test_other_pixels_of_the_same_size_are_another_beginning(tokenizer: PolicyTokenizer, policy: PolicyModel) -> None:
    one, *_, other = attempts(tokenizer, 0)[:4]
    assert (one.token_ids == other.token_ids).all()
    flat = flatten([one, other])
    row = pack(flat, [0, 1])
    scores = torch.zeros(len(flat.model_positions))
    scores[row.column_index] = policy(row).logprobs.detach()
    ours, theirs = scores.chunk(2)
    assert (ours - theirs).abs().max() > 1e-3


def test_a_sampled_placeholder_is_a_token_like_any_other(tokenizer: PolicyTokenizer, policy: PolicyModel) -> None:
    found = attempts(tokenizer, 0)[0]
    ids = found.token_ids.copy()
    ids[np.flatnonzero(found.kinds == 1)[0]] = tokenizer.image_ids(page())[1]
    sampled = replace(found, token_ids=ids)
    row = pack(flatten([sampled]), [0])
    assert len(row.images) == len(found.images) and torch.isfinite(policy(row).logprobs).all()


def test_a_row_without_images_trains_the_tower_by_zero(tokenizer: PolicyTokenizer, policy: PolicyModel) -> None:
    """Ranks reduce the gradients of all weights together, with or without images in their rows."""
    policy.zero_grad()
    policy(pack(flatten([attempts(tokenizer, 0)[4]]), [0])).logprobs.sum().backward()
    tower = [value.grad for name, value in policy.named_parameters() if ".visual." in name]
    assert all(grad is not None and not grad.any() for grad in tower)


def test_the_tower_runs_once_per_distinct_image_of_a_row(
    tokenizer: PolicyTokenizer, policy: PolicyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = policy.model.model, []
    features = model.get_image_features

    def noted(patches: torch.Tensor, grids: torch.Tensor) -> object:
        seen.append(len(grids))
        return features(patches, grids)

    monkeypatch.setattr(model, "get_image_features", noted)
    rng = np.random.default_rng(0)
    prompts = [(word, page(seed=10), page(seed=11), page(seed=10), "?") for word in ("What", "Look", "Riga")]
    row = pack(flatten([seen_trajectory(tokenizer, rng, prompt, turns=1) for prompt in prompts]), range(3))
    policy(row)
    assert len(row.images) == 9 and seen == [2]


def noted_decodes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list that gets the digest of each image that is decoded for its patches."""
    made: list[str] = []
    monkeypatch.setattr(vision, "decoded", lambda image: (made.append(image.digest), decoded(image))[1])
    return made


def test_patches_are_kept_for_their_settings_up_to_a_limit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = page(40, 40, seed=20), page(40, 40, seed=21)
    made, reader = noted_decodes(monkeypatch), ImageReader(folder)
    monkeypatch.setattr(vision, "_KEPT", WeakKeyDictionary())
    monkeypatch.setattr(vision, "KEPT_BYTES", 0)
    whole, grids = reader.patches([one, other])
    monkeypatch.setattr(vision, "KEPT_BYTES", whole.nbytes // 2)
    for _ in range(3):
        found, same = reader.patches([one, other])
        assert (found == whole).all() and (same == grids).all()
    assert made == [image.digest for image in (one, other, one, other, other, other)]
    shutil.copytree(folder, tmp_path / "smaller")
    file = tmp_path / "smaller" / "preprocessor_config.json"
    file.write_text(file.read_text().replace('"longest_edge": 4096', '"longest_edge": 1024'))
    assert len(ImageReader(tmp_path / "smaller").patches([one])[0]) < len(whole) // 2


def test_a_critic_has_the_values_and_gradients_of_its_sequences_one_at_a_time(
    tokenizer: PolicyTokenizer, alone: Alone, folder: Path
) -> None:
    """The tower has gradients too, of the same images as transformers' own model."""
    critic, trajectories = ValueModel(folder, torch.float32, False), attempts(tokenizer, 3)
    torch.nn.init.normal_(critic.head.weight)
    flat = flatten(trajectories)
    row = pack(flat, range(len(flat.lengths)))
    values = critic(row)
    values.sum().backward()
    alone.model.zero_grad()
    expected = []
    for trajectory in trajectories:
        for part in trajectory.rows:
            images = [one.image for one in trajectory.images if part.start <= one.start < part.stop]
            at = torch.from_numpy(trajectory.kinds[part] == 1).nonzero()[:, 0]
            own = critic.head(alone.hidden(trajectory.token_ids[part].tolist(), images)[at - 1])[:, 0]
            expected.append(own.detach())
            own.sum().backward(inputs=[*alone.model.parameters()])
    torch.testing.assert_close(values.detach(), torch.cat(expected)[row.column_index], atol=2e-5, rtol=0)
    theirs = dict(alone.model.model.named_parameters())
    for name, ours in critic.backbone.named_parameters():
        grad = theirs[name].grad
        assert ours.grad is not None and grad is not None, name
        assert grad.abs().max() > 0 or ".k_proj.bias" in name, name
        scale = grad.abs().max().clamp(min=1)
        torch.testing.assert_close(ours.grad / scale, grad / scale, atol=2e-5, rtol=0, msg=name)


def test_ppo_learns_from_images(tokenizer: PolicyTokenizer, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Policy and critic share what is made of an image: once for all passes of an update."""
    made = noted_decodes(monkeypatch)
    settings = {"training": {"algorithm": "ppo", "num_epochs": 2}, "learners": {"micro_batch_tokens": 40}}
    learner = PPOLearner(make_config(**settings), folder)
    learner.build()
    try:
        before = {name: value.detach().clone() for name, value in learner.critic.module.named_parameters()}
        for seed in range(2):
            members = tuple(replace(one, reward=float(at % 2)) for at, one in enumerate(attempts(tokenizer, seed)))
            group = TrajectoryGroup(members[0].task, members)
            made.clear()
            metrics = learner.update(groups_from_record_batch(groups_to_record_batch([group]), decode_texts=False))
            assert made and len(made) == len(set(made)) and learner.num_micro_batches > 20
        after = dict(learner.critic.module.named_parameters())
    finally:
        learner.close()
    assert np.isfinite(metrics["value_loss"]) and metrics["critic_grad_norm"] > 0
    assert any((after[name] != value).any() for name, value in before.items() if "visual." in name)


def test_a_row_that_is_not_taught_takes_its_images_along() -> None:
    """The first row, of a malformed turn, is left out: the second one begins where it began."""
    kinds = np.array([0, 0, 1, 0, 0, 0, 0, 1], np.uint8)
    one = Trajectory(
        "x",
        Task("t", "?", ()),
        token_ids=np.arange(8, dtype=np.int32),
        kinds=kinds,
        logprobs=np.zeros(8, np.float32),
        policy_versions=np.where(kinds, 0, -1).astype(np.int32),
        turns=(Turn("", 1, MALFORMED), Turn("", 1, "answer")),
        stop_reason=StopReason.ANSWERED,
        reward=1.0,
        row_lengths=(3, 5),
        images=(PlacedImage(page(seed=1), 0, 1, 1), PlacedImage(page(seed=2), 4, 1, 2)),
    )
    taught = without_malformed_turns(one)
    assert taught.token_ids.tolist() == [3, 4, 5, 6, 7]
    assert taught.images == (PlacedImage(page(seed=2), 1, 1, 2),)
    assert flatten([taught]).contents.tolist() == [3, -1, -1, 6, 7]
