"""VRAG-RL (arXiv:2505.22019): a policy searches for page images, looks closer at parts of them, and answers. A turn::

    <search> revenue by region</search>       the images of the pages that are found
    <bbox>[120,80,560,300]</bbox>             that part of the last image, in all its pixels
    <answer> Latvia</answer>

The reward of its code is 0 where nothing was searched or answered, and elsewhere::

    0.7 * what a judge says + 0.1 + 0.2 * nDCG of the pages that were found

The toy shows a page of 128 x 128 pixels, which the policy sees in 16 x 16: its glyphs are grey, until one is cut out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import PIL.Image
from pydantic import Field

from envs.base import EnvContext
from envs.grammars.tags import STOP_TAGS, skip_thoughts
from envs.measures import exact_match
from envs.options import SearchOptions, ToolOptions
from envs.search import LAST_TURN_NOTICE, SearchEnv
from envs.sources import Split, TaskSource
from envs.tools.search import CropTool
from ragr1_actors import Completion, RewardContext, RewardResult, StepResult, Task, Trajectory
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.content import Image, images_of
from ragr1_actors.core.images import encoded
from ragr1_actors.core.types import Message, Sampling

GLYPHS = {"oak": "#.#.#.#.#.#.#.#.", "elm": "####....####....", "ash": "#.#..#.##.#..#.#", "fir": "#..##..##..##..#"}
GLYPHS |= {"fig": "####........####", "bay": "#.#.#.#..#.#.#.#", "yew": "#..##..#.##..##.", "box": "#..#.##.#..#.##."}
"""Four rows of four pixels, which repeat in a cell; two of each quarter are black: a glyph is grey if it is reduced."""
PLACES = {"top left": (1, 1), "top right": (6, 1), "bottom left": (1, 6), "bottom right": (6, 6)}
"""Column and row of each glyph on a page of eight by eight."""
CELLS, CELL = 8, 16  # on a page, and pixels of one
GUESSES, LOOKS = 0.6, 0.2  # shares of the demonstrations that guess, and that look at what is asked, not anywhere
_BOX = re.compile(r"\s*<bbox>\s*\[" + ",".join([r"\s*(\d+(?:\.\d+)?)\s*"] * 4) + r"\]\s*</bbox>")
_ASK = "Question: {question}\nReference: {gold}\nAnswer: {answer}\nIs the answer right? Say yes or no."


class CropOptions(SearchOptions):
    """``environment.options``."""

    side: int = Field(1000, ge=1)
    """Number that stands for the right and the lower edge of an image in a box."""


class VragEnv(SearchEnv):
    """Search, crop, answer."""

    options_class: type[CropOptions] = CropOptions
    options: CropOptions
    measures: ClassVar = {"crops": lambda ended: float(sum(call.tool == "crop" for call in ended.calls))}

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        """Make the tool."""
        super().__init__(settings, context)
        self._crop, self.stop = CropTool(context, ToolOptions()), (*STOP_TAGS, "</bbox>")

    async def act(self, turn: Completion) -> StepResult:
        """Cut a part out of the last image, or act as in a search."""
        written = _BOX.match(turn.text, skip_thoughts(turn.text))
        result = await (super().act(turn) if written is None else self._look([float(one) for one in written.groups()]))
        self._context.seen.extend(images_of(result.observation))
        return result

    async def _look(self, box: Sequence[float]) -> StepResult:
        self._end_turn().cancel()
        if self._turns_left == 0:
            return StepResult(truncated=True, action="crop")
        (found,) = await self._crop.call([{"box": [number / self.options.side for number in box]}])
        return StepResult(observation=found.text, notice=self._notice(), action="crop", calls=found.calls)


async def vrag(trajectory: Trajectory, context: RewardContext) -> RewardResult:
    """Return the reward above; exact match stands for a judge that is missing."""
    task, answer = trajectory.task, trajectory.answer
    if not answer or "search" not in [turn.action for turn in trajectory.turns]:
        return RewardResult(0.0)
    right = exact_match(answer, task.golden_answers)
    if "judge" in context.models:
        asked = _ASK.format(question=task.question, gold=" or ".join(task.golden_answers), answer=answer)
        said = await context.models["judge"].chat([Message("user", asked)], Sampling(4, temperature=0.0))
        right = float(said.strip().lower().startswith("yes"))
    pages = dict.fromkeys(record.id for call in trajectory.calls for record in call.records)
    gained = sum(1 / np.log2(rank + 2) for rank, page in enumerate(pages) if page in task.supporting_ids)
    found = gained / (sum(1 / np.log2(rank + 2) for rank in range(len(task.supporting_ids))) or 1.0)
    return RewardResult(0.7 * right + 0.1 + 0.2 * found, parts={"judge": right, "found": found})


def draw(glyphs: Sequence[str]) -> Image:
    """Return a page with a glyph at each of ``PLACES``."""
    page = np.full((CELLS * CELL, CELLS * CELL), 255, np.uint8)
    for name, (x, y) in zip(glyphs, PLACES.values(), strict=True):
        glyph = np.reshape([0 if one == "#" else 255 for one in GLYPHS[name]], (4, 4))
        page[y * CELL : (y + 1) * CELL, x * CELL : (x + 1) * CELL] = np.tile(glyph, (CELL // 4, CELL // 4))
    return encoded(PIL.Image.fromarray(page))


class GlyphEnv(VragEnv):
    """Shows the page of the task; there is nothing to search."""

    async def reset(self, task: Task) -> list[Message]:
        """Return the page and the question."""
        (asked,) = await super().reset(task)
        if (page := re.match(r"page (\d+)", task.question)) is None:
            raise ValueError(f"got the question {task.question!r}, expected one like 'page 1004 top right'")
        self._context.seen.append(draw(_task(int(page[1])).meta["glyphs"]))
        return [Message("user", (*self._context.seen, asked.text))]


def _task(number: int) -> Task:
    rng = random.Random(number)
    glyphs, place = rng.sample(list(GLYPHS), len(PLACES)), rng.randrange(len(PLACES))
    meta = {"glyphs": glyphs, "place": place}
    return Task(f"glyphs/{number}", f"page {number} {[*PLACES][place]}", (glyphs[place],), meta=meta)


class GlyphWorld(TaskSource):
    """Pages of four glyphs, and a question about one of them; without a turn for a crop, demonstrations know it."""

    def __init__(self, environment: EnvironmentSettings, options: Mapping[str, Any]) -> None:
        """Take no options."""
        super().__init__(environment, options)
        self._can_crop = environment.max_turns > 1

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return 4,000 training tasks, or 300 evaluation tasks."""
        return [_task(number) for number in (range(1000, 5000) if split == "train" else range(5000, 5300))]

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return a guess, or a look and what is seen there."""
        if (habit := rng.random()) < GUESSES or not self._can_crop:
            name = rng.choice(list(GLYPHS)) if self._can_crop else task.golden_answers[0]
            return [f"<answer> {name}</answer>"]
        place = task.meta["place"] if habit < GUESSES + LOOKS else rng.randrange(len(PLACES))
        x, y = [*PLACES.values()][place]
        return [f"<bbox>[{x},{y},{x + 1},{y + 1}]</bbox>", f"<answer> {task.meta['glyphs'][place]}</answer>"]

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield the words of places, glyphs and turns; numbers are written in digits."""
        yield from [f"page {' '.join(PLACES)} <bbox>[,]</bbox> {' '.join(GLYPHS)}{LAST_TURN_NOTICE}"] * 100
