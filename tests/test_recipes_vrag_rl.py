"""VRAG-RL's toy: a glyph of a page can be read in a crop only, and a crop is an image of the row."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragr1_actors.core.images import decoded
from ragr1_actors.core.models.vision import ImageReader
from ragr1_actors.core.types import Task, Trajectory
from ragr1_actors.planning.tiny_policy import policy_maker
from ragr1_actors.recipes.vrag_rl.vrag_rl import GLYPHS, PLACES, GlyphWorld, draw
from ragr1_actors.rollout.engines.base import PolicyTokenizer, ScriptedEngine
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.groups import GroupRequest
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from retrieval.base import Passage

pytestmark = pytest.mark.engine
CONFIG = AlgorithmConfig.from_recipe("vrag_rl").freeze()
WORLD = GlyphWorld(CONFIG.environment, {})
TASK = WORLD.tasks("train")[0]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, maker = tmp_path_factory.mktemp("policy"), policy_maker(CONFIG.policy)
    assert maker is not None
    maker.write(folder, WORLD.texts([TASK]), seed=0, max_position_embeddings=128)
    return folder


class Nothing:
    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        return [[] for _ in queries]


async def play(policy: Path, task: Task, turns: list[str], **settings: Any) -> Trajectory:
    tokenizer = PolicyTokenizer(policy)
    config = AlgorithmConfig.from_recipe("vrag_rl").environment(**settings).freeze()
    runner = EnvRunner(config, tokenizer, Nothing(), ScriptedEngine({"t/0": turns}, tokenizer.encode))
    (found,) = (await runner.sample_group(GroupRequest("t", task, 1, 0.0))).trajectories
    return found


async def test_a_crop_shows_the_glyph_that_is_asked_for(policy: Path) -> None:
    demonstrations = [WORLD.demonstrate(TASK, random.Random(seed)) for seed in range(100)]
    looks = [turns for turns in demonstrations if len(turns) == 2]
    assert 25 < len(looks) < 55
    right = next(turns for turns in looks if turns[1] == f"<answer> {TASK.golden_answers[0]}</answer>")
    found = await play(policy, TASK, right)
    assert (found.error, found.reward, found.metrics["crops"]) == ("", 1.0, 1.0)
    page, crop = (one.image for one in found.images)
    assert page == draw(TASK.meta["glyphs"])
    glyph = np.array([255 if one == "." else 0 for one in GLYPHS[TASK.golden_answers[0]]]).reshape(4, 4)
    np.testing.assert_array_equal(np.asarray(decoded(crop))[4:8, 4:8, 0], glyph)
    assert all(one.num_tokens == 4 for one in found.images)
    assert len(found.token_ids) < CONFIG.env_runners.max_context_tokens // 2


async def test_the_page_of_a_question_is_shown_without_its_task(policy: Path) -> None:
    found = await play(policy, Task("t", TASK.question, ()), ["<answer> oak</answer>"])
    assert [one.image for one in found.images] == [draw(TASK.meta["glyphs"])], found.error
    other = await play(policy, Task("t", "Which page?", ()), ["<answer> oak</answer>"])
    assert "got the question 'Which page?', expected one like 'page 1004 top right'" in other.error


async def test_what_is_no_part_of_the_page_is_told_and_the_last_turn_answers(policy: Path) -> None:
    found = await play(policy, TASK, ["<bbox>[0,0,9,1]</bbox>", "<answer> oak</answer>"])
    assert found.calls[0].result.startswith("The box [0.0, 0.0, 1.125, 0.125] is not in the image: expected")
    assert len(found.images) == 1 and found.error == ""
    alone = await play(policy, TASK, ["<bbox>[1,1,2,2]</bbox>"], max_turns=1)
    assert (alone.reward, len(alone.images), alone.metrics["crops"]) == (0.0, 1, 0.0)
    baseline = GlyphWorld(AlgorithmConfig.from_recipe("vrag_rl").environment(max_turns=1).freeze().environment, {})
    assert baseline.demonstrate(TASK, random.Random(0)) == [f"<answer> {TASK.golden_answers[0]}</answer>"]


def test_glyphs_are_grey_on_a_page_and_differ_in_a_crop(policy: Path) -> None:
    """The patches of a page, as the policy gets them, and those of the glyphs alone."""
    reader, names = ImageReader(policy), list(GLYPHS)
    pages = [draw([name] * len(PLACES)) for name in names]
    small, _ = reader.patches(pages)
    seen = small.reshape(len(names), -1)
    crops = np.stack([np.asarray(decoded(page).crop((16, 16, 32, 32))) for page in pages])
    told = np.abs(crops[:, None].astype(float) - crops[None]).mean((2, 3, 4)) / 255
    assert told[~np.eye(len(names), dtype=bool)].min() >= 0.5
    spread = seen.max(0) - seen.min(0)
    assert spread.max() < 0.15 * (seen.max() - seen.min())
