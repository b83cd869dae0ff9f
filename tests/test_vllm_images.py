"""Images in a real vLLM, on a CPU: `make test-vllm`. One engine per family serves the module."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

pytest.importorskip("vllm")

from learners_common import make_config
from test_recipes_vrag_rl import TASK, WORLD, Nothing
from test_rollout_vision import PAGE, TWIN, attempt, check
from vision_world import TEXTS, Alone, page

from learners.algorithms.sft import SFTLearner
from learners.packing import flatten, pack
from ragr1_actors.core.content import Image, PlacedImage
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.models.vision import FAMILIES, ImageReader, rope_positions
from ragr1_actors.core.models.vision_inputs import VisionInputs
from ragr1_actors.core.types import Completion, Message, Sampling, Trajectory
from ragr1_actors.planning.tiny_policy import make_tiny_policy, make_tiny_vision_policy
from ragr1_actors.rollout.engines.base import EngineArguments, PolicyTokenizer, ScriptedEngine, SeeingEngine
from ragr1_actors.rollout.engines.transformers_engine import TransformersEngine
from ragr1_actors.rollout.engines.vllm_engine import ImageInputs, VLLMEngine
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.groups import GroupRequest
from ragr1_actors.training.algorithm_config import AlgorithmConfig

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]
LONG = (PAGE, "Riga lies in Latvia. " * 40)
"""An image in the first block of the prefix cache, of 128 tokens, and more after it."""


def make_folder(directory: Path, family: str, seed: int) -> Path:
    """Write a policy for the recipe's pages; vLLM's attention on a CPU takes heads of at least 32 numbers."""
    texts = [*TEXTS, *WORLD.texts([TASK])]
    sizes = {"vocab_size": 400, "hidden_size": 64, "num_layers": 2, "num_heads": 2, "max_image_tokens": 8}
    make_tiny_vision_policy(directory, texts, seed=seed, family=family, **sizes)
    return directory


@pytest.fixture(scope="module", params=FAMILIES)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two policies with one tokenizer; the engine begins with the first."""
    return [make_folder(tmp_path_factory.mktemp("seeing"), request.param, seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def tokenizer(folders: list[Path]) -> PolicyTokenizer:
    return PolicyTokenizer(folders[0])


@pytest.fixture(scope="module")
def alone(folders: list[Path]) -> list[Alone]:
    return [Alone(folder, ImageReader(folder)) for folder in folders]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(folders: list[Path], tokenizer: PolicyTokenizer) -> AsyncIterator[VLLMEngine]:
    engine = VLLMEngine(folders[0], tokenizer, EngineArguments(max_rows=8, max_context_tokens=512))
    await engine.check()
    yield engine
    await engine.close()


def weights_of(one: Alone) -> dict[str, Any]:
    return {name: value.numpy() for name, value in one.model.state_dict().items()}


def load(one: Alone, weights: dict[str, Any]) -> None:
    one.model.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: VLLMEngine, alone: list[Alone]) -> VLLMEngine:
    await shared.update_weights(weights_of(alone[0]), 1)
    return shared


def gap(one: Alone, ids: list[int], found: Completion, images: list[PlacedImage], tokens: Any = slice(None)) -> float:
    """Return the largest difference of a completion's log-probs from the learner's, for which a place is an image."""
    whole = torch.tensor([[*ids, *found.token_ids]])
    positions = torch.from_numpy(rope_positions(whole.shape[1], images))[:, None]
    with torch.no_grad():
        inputs = VisionInputs(one.model, one.model.config.name_or_path)(whole, images)
        hidden = one.model.get_decoder()(**inputs, position_ids=positions).last_hidden_state
        scores = one.model.get_output_embeddings()(hidden[0]).log_softmax(-1)
    at = torch.arange(len(ids), whole.shape[1])
    return float((scores[at - 1, whole[0, at]] - torch.tensor(found.logprobs))[tokens].abs().max())


def swapped(found: Trajectory) -> Trajectory:
    """Return a trajectory with another page in the place of one."""
    return replace(found, images=tuple(replace(p, image=TWIN if p.image == PAGE else p.image) for p in found.images))


async def test_engine_and_transformers_agree_on_every_token_of_rows_with_images(
    engine: VLLMEngine, tokenizer: PolicyTokenizer, alone: list[Alone]
) -> None:
    assert isinstance(engine, SeeingEngine)
    names = ("one", "two", "blind", "rewritten")
    for version, one in ((1, alone[0]), (2, alone[1])):
        if version == 2:
            await engine.update_weights(weights_of(one), version)
        found = await asyncio.gather(*(attempt(engine, tokenizer, n, rewrites=n == "rewritten") for n in names))
        assert [len(each.images) for each in found] == [5, 5, 0, 4]
        for each in found:
            check(one, each)
            if each.images:
                with pytest.raises(AssertionError, match="Not equal to tolerance"):
                    check(one, swapped(each))


async def test_the_prefix_cache_is_not_taken_for_other_pixels(
    engine: VLLMEngine, tokenizer: PolicyTokenizer, alone: list[Alone]
) -> None:
    ids = tokenizer.prompt_ids([Message("user", LONG)])
    assert len(ids) > 129
    page_places, twin_places = (tokenizer.place(ids, [image]) for image in (PAGE, TWIN))
    for places, others in ((page_places, twin_places), (twin_places, page_places), (page_places, twin_places)):
        engine.show("a", places)
        found = await engine.generate(ids, Sampling(8, seed=1), request_id="a")
        assert gap(alone[0], ids, found, places) < 2e-5
        assert gap(alone[0], ids, found, others) > 1e-3


async def test_a_placeholder_that_is_no_image_is_a_token_like_any_other(
    engine: VLLMEngine, tokenizer: PolicyTokenizer, folders: list[Path]
) -> None:
    """As if the policy had sampled it, within a row with an image and in one without."""
    twin = TransformersEngine(folders[0], tokenizer, EngineArguments(max_rows=2, max_context_tokens=512))
    image_ids = tokenizer.image_ids(PAGE)
    seen = tokenizer.prompt_ids([Message("user", ("What", PAGE, "?"))])
    for ids, images in ((seen, [PAGE]), (tokenizer.prompt_ids([Message("user", "What?")]), [])):
        found = []
        for one in (engine, twin):
            if images:
                one.show("a", tokenizer.place(ids, images))
            found.append(await one.generate([*ids, *image_ids], Sampling(8, temperature=0.0), request_id="a"))
        assert found[0].token_ids == found[1].token_ids
        np.testing.assert_allclose(found[0].logprobs, found[1].logprobs, atol=2e-5)
    await twin.close()


async def test_a_tower_that_is_updated_in_a_turn_sees_the_images_anew(
    engine: VLLMEngine, tokenizer: PolicyTokenizer, alone: list[Alone]
) -> None:
    """Only its weights change: neither its old embeddings nor a cache of them are left."""
    ids = tokenizer.prompt_ids([Message("user", ("What", PAGE, "?"))])
    before, after = ({n: value.copy() for n, value in weights_of(one).items()} for one in alone)
    changed = {name for name in before if ".visual." in name}
    mixed = {name: after[name] if name in changed else value for name, value in before.items()}
    told, places = asyncio.Event(), tokenizer.place(ids, [PAGE])
    engine.show("a", places)
    turn = engine.generate(ids, Sampling(400, seed=1), request_id="a", on_text=lambda _: told.set())
    started = asyncio.create_task(turn)
    await told.wait()
    await engine.update_weights(mixed, 2)
    found = await started
    assert set(found.policy_versions) == {1, 2}, "the update came before or after the turn"
    switch = found.policy_versions.index(2)
    assert gap(alone[0], ids, found, places, slice(switch)) < 2e-5
    assert gap(alone[0], ids, found, places, slice(switch, None)) > 1e-3
    load(alone[0], mixed)
    try:
        assert gap(alone[0], ids, found, places, slice(switch, None)) < 2e-5
        engine.show("b", places)
        assert gap(alone[0], ids, await engine.generate(ids, Sampling(8, seed=1), request_id="b"), places) < 2e-5
    finally:
        load(alone[0], before)


async def test_patches_are_sent_once_and_again_if_they_were_lost(
    engine: VLLMEngine, tokenizer: PolicyTokenizer, alone: list[Alone], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    items = ImageInputs._items

    def counted(self: ImageInputs, images: list[Image]) -> Any:
        made.append(len(images))
        return items(self, images)

    monkeypatch.setattr(ImageInputs, "_items", counted)
    shown = [page(seed=number) for number in (10, 11)]
    ids = tokenizer.prompt_ids([Message("user", (shown[0], "x", shown[1], "y", shown[0]))])
    places = tokenizer.place(ids, [*shown, shown[0]])

    async def turn() -> None:
        engine.show("a", places)
        found = await engine.generate(ids, Sampling(4, seed=1), request_id="a")
        assert gap(alone[0], ids, found, places) < 2e-5

    await turn()
    await turn()
    assert made == [2]
    await engine.llm.engine_core.reset_mm_cache_async()
    await turn()
    assert made == [2, 2]


async def test_a_policy_without_vision_refuses_images_as_elsewhere(
    engine: VLLMEngine, tokenizer: PolicyTokenizer, tmp_path: Path
) -> None:
    make_tiny_policy(tmp_path, TEXTS, seed=0, vocab_size=300, hidden_size=32, num_layers=1, num_heads=1)
    reason = "of the type qwen2 reads none here; take a model of the types qwen2_5_vl, qwen3_vl"
    with pytest.raises(ConfigError, match=reason):
        PolicyTokenizer(tmp_path).image_ids(PAGE)
    ids = tokenizer.prompt_ids([Message("user", ("What", PAGE, "?"))])
    with pytest.raises(ConfigError, match=reason):
        await ImageInputs(engine.llm, tmp_path).prompt(ids, tokenizer.place(ids, [PAGE]), sends_all=False)


async def test_what_the_learner_taught_crops_in_the_environment_and_is_scored_alike(
    engine: VLLMEngine, tokenizer: PolicyTokenizer, folders: list[Path]
) -> None:
    """Demonstrations, the learner's weights in the engine, attempts with crops, and their log-probs in the learner."""
    config = AlgorithmConfig.from_recipe("vrag_rl").env_runners(max_context_tokens=256).freeze()
    turns = next(t for seed in range(9) if len(t := WORLD.demonstrate(TASK, random.Random(seed))) == 2)
    scripted = ScriptedEngine({"t/0": turns}, tokenizer.encode)
    played = await EnvRunner(config, tokenizer, Nothing(), scripted).sample_group(GroupRequest("t", TASK))
    learner = SFTLearner(make_config(sft={"lr": 3e-3}), folders[0])
    learner.build()
    before = learner.get_weights()
    for _ in range(40):
        learner.update([played])
    weights = learner.get_weights()
    same = {name for name, value in weights.items() if np.array_equal(value, before[name])}
    assert not any(".visual." in name for name in same), same
    await engine.update_weights(weights, 7)
    found = await EnvRunner(config, tokenizer, Nothing(), engine).sample_group(GroupRequest("e", TASK, 3, 1.0))
    learned = [one for one in found.trajectories if one.metrics["crops"]]
    assert learned and not any(one.error for one in found.trajectories)
    assert all(len(one.images) == 2 for one in learned)
    row = pack(flatten(found.trajectories), range(3))
    scores = learner.policy_logprobs(row).detach()
    sampled = torch.from_numpy(flatten(found.trajectories).rollout_logprobs)[row.column_index]
    assert float((scores - sampled).abs().max()) < 2e-5
    other = pack(flatten([swap_crop(one) for one in found.trajectories]), range(3))
    assert float((learner.policy_logprobs(other).detach() - sampled).abs().max()) > 1e-3
    learner.close()


def swap_crop(found: Trajectory) -> Trajectory:
    """Return a trajectory in which the crop is the whole page."""
    return replace(found, images=tuple(replace(one, image=found.images[0].image) for one in found.images))
