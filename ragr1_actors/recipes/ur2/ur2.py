"""UR2's rewards, curriculum and summaries (arXiv:2508.06165; the numbers are those of its code at b1cbc8b).

=====================================  ================================  =========================
what a trajectory has                  stage 1, ``skill``                stage 2, ``answers``
=====================================  ================================  =========================
an answer                              0                                 2 times its token F1
no fault                               +1                                +1
faults, where search is shown          -1 each                           0
one query, two or more                 +3, +4 until ``bonus_until``      0
no query                               a fault until ``bonus_until``     0
queries that the summariser refuses    -0.5 each                         -0.5 each
=====================================  ================================  =========================

Faults: no answer; a malformed turn; more than four queries; a query of more than 20 words; a search of a task that is
shown without the search tool. The last four rows are of tasks that are shown with it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from envs.base import StepResult
from envs.measures import RewardContext, exact_match, num_queries, token_f1
from envs.search import LAST_TURN_NOTICE, SearchEnv, search_prompt
from envs.tasks.curriculum import Shuffle, Stats
from ragr1_actors.core.resolve import load_object
from ragr1_actors.core.types import MALFORMED, ChatModel, Message, Sampling, StopReason, Task, Trajectory
from ragr1_actors.rollout.groups import GroupRequest, Play, RolloutStrategy
from retrieval.base import Passage
from retrieval.local import inner_retriever

MAX_QUERIES, MAX_QUERY_WORDS = 4, 20
REFUSAL = "No search can answer this."
_ASK = "Query: {query}\n\n{passages}\n\nSay in a few words what they tell about it. If it needs a calculation, reply: "


def num_faults(ended: Trajectory) -> int:
    """Return the number of faults of the format."""
    actions = [turn.action for turn in ended.turns]
    num_long = sum(len(call.asked.split()) > MAX_QUERY_WORDS for call in ended.calls)
    is_forbidden = bool(ended.variant) and "search" in actions
    faults = (ended.stop_reason is not StopReason.ANSWERED, MALFORMED in actions, len(ended.calls) > MAX_QUERIES)
    return sum(faults) + is_forbidden + num_long


def refusals(ended: Trajectory) -> float:
    """Return what the refused queries cost, at most 0."""
    return -0.5 * sum(record.text == REFUSAL for call in ended.calls for record in call.records)


async def skill(trajectory: Trajectory, context: RewardContext) -> float:
    """Return the reward of stage 1; ``environment.reward_options={bonus_until: 0.75}`` is a share of the run."""
    faults, count = num_faults(trajectory), len(trajectory.calls)
    if trajectory.variant:
        return float(faults == 0)
    is_paid = context.progress < float(context.options.get("bonus_until", 1.0))
    faults += is_paid and count == 0
    return (-faults or 1.0) + is_paid * (0.0, 3.0, 4.0)[min(count, 2)] + refusals(trajectory)


async def answers(trajectory: Trajectory, context: RewardContext) -> float:
    """Return the reward of stage 2: a right answer, and a clean format."""
    f1 = token_f1(trajectory.answer, trajectory.task.golden_answers)
    return 2.0 * f1 + (num_faults(trajectory) == 0) + refusals(trajectory)


def level_of(task: Task) -> str:
    """Return the field ``level`` of the task file, such as ``very_hard``, or else the category."""
    return str(task.meta.get("level", task.category))


class OnlyLevels(Shuffle):
    """The curriculum of stage 1, the hardest tasks: ``environment.curriculum_options={levels: [very_hard]}``."""

    options_class = None  # type: ignore[assignment]  # the mapping as it is

    def skip(self, task: Task, stats: Stats) -> bool:
        """Return whether the task has another level."""
        return level_of(task) not in self.options["levels"]


class ToolForHard(RolloutStrategy):
    """Show easy tasks without the search tool: with another prompt, which is the variant of the trajectory.

    ``env_runners.strategy_options={prompt: "Think. {question}", shown: {hard: 0.714, easy: 0}}``: by level, how often a
    task is shown with it; where a level is not named, always.
    """

    async def sample(self, request: GroupRequest, play: Play) -> list[Trajectory]:
        """Draw once for the group: its attempts are compared with each other."""
        share = self.options["shown"].get(level_of(request.task), 1.0)
        variant = "" if random.Random(request.issue_id).random() < share else self.options["prompt"]
        return list(await asyncio.gather(*(play(n, variant=variant) for n in range(request.num_trajectories))))


class UR2Env(SearchEnv):
    """Search where the prompt offers it. In an evaluation it always does."""

    measures: ClassVar = {  # each over all tasks, and 0 for those that it is not about
        "needless": lambda one: 0.0 if one.task.supporting_ids else num_queries(one),
        "needed_em": lambda one: exact_match(one.answer, one.task.golden_answers) if one.task.supporting_ids else 0.0,
    }

    async def reset(self, task: Task) -> list[Message]:
        """Return the prompt with the search tool, or the other one."""
        self._prompt = self._context.variant
        return search_prompt(self._prompt, self.options, task) if self._prompt else await super().reset(task)

    def peek(self, partial: str) -> None:
        """Begin a search early only where one is offered."""
        if not self._prompt:
            super().peek(partial)

    async def step(self, queries: list[str]) -> StepResult:
        """Search, or say that no search is offered."""
        if not self._prompt:
            return await super().step(queries)
        return replace(await self.malformed("no search is offered"), notice=LAST_TURN_NOTICE)


class Summarised:
    """Gives one summary of what another retriever finds, under the id of its best passage.

    ``retrieval.options={inner: {type: bm25, index: DIR}, model: NAME}``, which is one of ``environment.models``; or
    ``rule: my_module:my_rule`` in the model's place, a function of query and passages.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Open the inner retriever."""
        self._inner, self._options = inner_retriever(options["inner"]), options

    def use_models(self, models: Mapping[str, ChatModel]) -> None:
        """Take the models of the recipe."""
        self._models = models

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return the summary for each query, ``[len(queries)][<= 1]``; none where nothing was found."""
        found = await self._inner.search(queries, k)
        return list(await asyncio.gather(*map(self._summarised, queries, found)))

    async def _summarised(self, query: str, found: Sequence[Passage]) -> list[Passage]:
        if rule := self._options.get("rule"):
            return [replace(one, text=load_object(rule, {})(query, found)) for one in found[:1]]
        asked = _ASK.format(query=query, passages="\n\n".join(f"{one.title}: {one.text}" for one in found)) + REFUSAL
        model, sampling = self._models[self._options["model"]], Sampling(256, temperature=0.2)
        return [replace(one, text=(await model.chat([Message("user", asked)], sampling)).strip()) for one in found[:1]]
