"""The transformers engine with images samples what transformers computes, and the learner scores it alike."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from learners_common import make_config
from vision_world import Alone, make_seeing, page

from learners.algorithms.grpo import GRPOLearner
from learners.packing import flatten, pack
from ragr1_actors.core.content import Image
from ragr1_actors.core.models.vision import FAMILIES, ImageReader
from ragr1_actors.core.types import (
    Completion,
    Message,
    Sampling,
    StopReason,
    Task,
    TokenKind,
    Trajectory,
    TrajectoryGroup,
)
from ragr1_actors.rollout.chat_format import TagsFormat
from ragr1_actors.rollout.engines.base import EngineArguments, PolicyTokenizer, SeeingEngine, show_images
from ragr1_actors.rollout.engines.transformers_engine import TransformersEngine
from ragr1_actors.rollout.recorder import Reading, Recorder

pytestmark = pytest.mark.engine
PAGE, TWIN, WIDE = page(seed=1), page(seed=2), page(40, 8, seed=3)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seeing(tmp_path_factory.mktemp("seeing"), request.param)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PolicyTokenizer:
    return PolicyTokenizer(folder)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    return Alone(folder, ImageReader(folder))


def make_engine(folder: Path, tokenizer: PolicyTokenizer, max_rows: int = 8) -> TransformersEngine:
    return TransformersEngine(folder, tokenizer, EngineArguments(max_rows, 512, version=1))


def recorder_of(engine: TransformersEngine, tokenizer: PolicyTokenizer, name: str) -> Recorder:
    async def generate(ids: list[int], sampling: Sampling, *, images: object = (), **options: object) -> Completion:
        if images:
            show_images(engine, name, images)  # type: ignore[arg-type]
        return await engine.generate(ids, sampling, **options)  # type: ignore[arg-type]

    return Recorder(name, generate, tokenizer, Sampling(6, temperature=0.7), 512, 0, chat=TagsFormat(tokenizer))


async def attempt(
    engine: TransformersEngine, tokenizer: PolicyTokenizer, name: str, *, rewrites: bool = False
) -> Trajectory:
    """Three turns with pages; ``rewrites`` begins anew after two with another page of the same size."""
    recorder, reading = recorder_of(engine, tokenizer, name), Reading()
    recorder.restart([Message("user", ("What", PAGE, "?") if name != "blind" else "What?")], reading)
    for number in range(3):
        await recorder.generate(reading)
        recorder.end_turn("look", (), "", 0.0)
        if number == 1 and rewrites:
            recorder.restart([Message("user", ("What", TWIN, "?"))], reading)
        elif number < 2 and name != "blind":
            recorder.add([Message("user", ("x", WIDE, PAGE, "y"))], reading)
        elif number < 2:
            recorder.add([Message("user", "go on")], reading)
    return recorder.trajectory(Task("t", "?", ()), StopReason.MAX_TURNS)


def check(alone: Alone, found: Trajectory) -> None:
    for part in found.rows:
        images = [one.image for one in found.images if part.start <= one.start < part.stop]
        ids = torch.from_numpy(found.token_ids[part]).long()
        with torch.no_grad():
            scores = (alone.logits(ids.tolist(), images) / 0.7).log_softmax(-1)
        at = np.flatnonzero(found.kinds[part] == TokenKind.MODEL)
        expected = scores[at - 1, ids[at]].numpy()
        np.testing.assert_allclose(found.logprobs[part][at], expected, atol=2e-5)


@pytest.mark.parametrize("max_rows", [8, 2])
async def test_attempts_with_and_without_images_side_by_side(
    folder: Path, tokenizer: PolicyTokenizer, alone: Alone, max_rows: int
) -> None:
    engine = make_engine(folder, tokenizer, max_rows)
    assert isinstance(engine, SeeingEngine)
    names = ("one", "two", "blind", "rewritten")
    found = await asyncio.gather(*(attempt(engine, tokenizer, n, rewrites=n == "rewritten") for n in names))
    assert [len(one.images) for one in found] == [5, 5, 0, 4]
    for one in found:
        check(alone, one)
        engine.release(one.trajectory_id)
    await engine.close()


async def test_a_cache_is_not_taken_for_other_pixels(folder: Path, tokenizer: PolicyTokenizer) -> None:
    engine, ids = make_engine(folder, tokenizer), tokenizer.prompt_ids([Message("user", ("What", PAGE, "?"))])
    greedy = Sampling(1, temperature=0.0)

    async def first(name: str, image: Image) -> float:
        engine.show(name, tokenizer.place(ids, [image]))
        return (await engine.generate(ids, greedy, request_id=name)).logprobs[0]

    page_logprob, twin_logprob = await first("a", PAGE), await first("b", TWIN)
    assert abs(page_logprob - twin_logprob) > 1e-4
    assert abs(await first("a", TWIN) - twin_logprob) < 1e-5
    assert abs(await first("c", PAGE) - page_logprob) < 1e-5
    text = (await engine.generate(ids, greedy, request_id="a")).logprobs[0]  # placeholders without an image
    assert abs(text - twin_logprob) > 1e-4
    await engine.close()


async def test_weights_that_arrive_in_an_attempt_see_its_images_anew(
    folder: Path, tokenizer: PolicyTokenizer, tmp_path: Path
) -> None:
    other = make_seeing(
        tmp_path / "other", "qwen2_5_vl" if "Qwen2" in (folder / "config.json").read_text() else "qwen3_vl", seed=1
    )
    engine, ids = make_engine(folder, tokenizer), tokenizer.prompt_ids([Message("user", ("What", PAGE, "?"))])
    engine.show("a", tokenizer.place(ids, [PAGE]))
    started = asyncio.create_task(engine.generate(ids, Sampling(40, seed=1), request_id="a"))
    while not engine._sessions or len(engine._sessions["a"].tokens) < len(ids) + 3:
        await asyncio.sleep(0)
    weights = {name: value.detach().numpy() for name, value in make_engine(other, tokenizer).model.named_parameters()}
    await engine.update_weights(weights, 2)
    found = await started
    switch = found.policy_versions.index(2)
    whole = [*ids, *found.token_ids]
    with torch.no_grad():
        scores = Alone(other, ImageReader(other)).logits(whole, [PAGE]).log_softmax(-1)
    at = np.arange(len(ids) + switch, len(whole))
    np.testing.assert_allclose(found.logprobs[switch:], scores[at - 1, np.array(whole)[at]].numpy(), atol=2e-5)
    await engine.close()


@pytest.mark.parametrize("zero_stage", [0, 2, pytest.param(3, marks=pytest.mark.slow)])
async def test_the_learner_scores_what_the_engine_sampled_alike_and_learns(
    folder: Path, tokenizer: PolicyTokenizer, tmp_path: Path, zero_stage: int
) -> None:
    engine = make_engine(folder, tokenizer)
    names = [f"t{number}" for number in range(3)] + ["rewritten"]
    found = await asyncio.gather(*(attempt(engine, tokenizer, n, rewrites=n == "rewritten") for n in names))
    config = make_config(
        env_runners={"temperature": 0.7, "max_context_tokens": 512}, learners={"zero_stage": zero_stage}
    )
    learner = GRPOLearner(config, folder)
    learner.build()
    row = pack(flatten(found), range(5))
    scores = learner.policy_logprobs(row).detach()
    sampled = torch.from_numpy(flatten(found).rollout_logprobs)[row.column_index]
    assert float((scores - sampled).abs().max()) < 2e-5
    rewarded = tuple(replace(one, reward=float(number % 2)) for number, one in enumerate(found))
    before = {name: value.detach().clone() for name, value in learner.policy.module.named_parameters()}
    metrics = learner.update([TrajectoryGroup(found[0].task, rewarded)])
    assert metrics["num_steps"] == 1 and np.isfinite(list(metrics.values())).all()
    changed = {name for name, value in learner.policy.module.named_parameters() if not torch.equal(value, before[name])}
    assert any(".visual." in name for name in changed) and any(".language_model." in name for name in changed)
    # its weights are those of the engine's model, and its folder is a policy that reads images
    await engine.update_weights(learner.get_weights(), 2)
    learner.save_policy(tmp_path / "saved")
    saved = PolicyTokenizer(tmp_path / "saved")
    again = await attempt(make_engine(tmp_path / "saved", saved), saved, "one")
    engine.release("one")
    assert (again.token_ids == (await attempt(engine, tokenizer, "one")).token_ids).all()
    check(Alone(tmp_path / "saved", ImageReader(folder)), again)
    await engine.close()
