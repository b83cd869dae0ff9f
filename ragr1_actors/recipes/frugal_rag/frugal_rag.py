"""FrugalRAG's reward (arXiv:2507.07634, section 3.2; ``train_grpo.py`` of its code), and the stages before it.

With m searches, B = the searches allowed + 1, and m* the earliest search after which the recall no longer grew::

    d = |m - B| / B       recall below the explorer's:        log((1 - d) / d), clipped to [-2, 0]
    d = (m - m*) / B      m > m*, it searched on for nothing: log((1 - d) / d), clipped to [-2, 1.9]
                          m = m*, it stopped in time:         2 + 2 m* / B, more for a question that needs more

plus 0.5 or -0.5 for the format, averaged over the turns that are no answer. Whether the answer is right does not count.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

from envs.options import SearchOptions
from envs.search import SearchEnv
from envs.sources import Split, WorldSource
from envs.tasks.demonstrations import Habit
from ragr1_actors import RewardContext, RewardResult, Task, Trajectory
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.schema import read_trajectories
from ragr1_actors.core.types import MALFORMED
from ragr1_actors.recipes.worlds.evidence import evidence_in, recall

MAX_REWARD, HARDNESS, FORMAT = 2.0, 2.0, 0.5
"""``max_reward``, ``zeta`` and ``format_coeff`` of the published code."""
UNKNOWN_RECALL = 0.6
"""What the explorer is taken to have found where the task does not say."""
RECALL_FIELD = "explorer_recall"
"""Field of the task file: the recall that the explorer reached on the question, in [0, 1]."""
MAX_SEARCHES = 4
"""``environment.max_turns`` of the recipes less the answer."""
EXPLORES = 0.7
"""Share of the demonstrations that search to the end; 0.9 in the paper. The others teach to answer after any search."""
NUM_EXPLORED = 1000
"""Questions of the explorer's run, as many as in the paper."""


def recalls(trajectory: Trajectory) -> list[float]:
    """Return the share of the evidence found after each search: ``[0.5, 1.0, 1.0]``."""
    known, found = set[str](), []
    for records in [[one for call in turn.calls for one in call.records] for turn in trajectory.turns if turn.calls]:
        known |= evidence_in(trajectory.task, records)
        found.append(len(known) / max(1, len(trajectory.task.supporting_ids)))
    return found


def logit(share: float) -> float:
    """Return log((1 - d) / d) of a share d that is kept off 0 and 1: ``logit(0.5) == 0``."""
    share = min(max(share, 1e-6), 1 - 1e-6)
    return math.log((1 - share) / share)


def search_reward(reached: Sequence[float], explorer_recall: float, budget: int) -> float:
    """Return the reward of searches with these recalls; B is ``budget``: ``search_reward([0.5, 1], 1, 5) == 2.8``."""
    m, best = len(reached), max(reached, default=0.0)
    if best == 0.0 or best < explorer_recall:
        return max(-MAX_REWARD, min(logit(abs(m - budget) / budget), 0.0))
    earliest = 1 + list(reached).index(best)
    if m > earliest:
        return max(-MAX_REWARD, min(logit((m - earliest) / budget), MAX_REWARD - 0.1))
    return MAX_REWARD + HARDNESS * earliest / budget


class Frugal:
    """The reward; its option ``max_searches`` is the number of searches that are allowed."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Read the option."""
        self._budget = int(options.get("max_searches", MAX_SEARCHES)) + 1

    async def __call__(self, trajectory: Trajectory, context: RewardContext) -> RewardResult:
        """Return the sum of the parts for searches and format."""
        explorer_recall = float(trajectory.task.meta.get(RECALL_FIELD, UNKNOWN_RECALL))
        searches = search_reward(recalls(trajectory), explorer_recall, self._budget)
        is_wrong = [turn.action == MALFORMED for turn in trajectory.turns if turn.action != "answer"]
        layout = FORMAT * fmean(1 - 2 * wrong for wrong in is_wrong) if is_wrong else 0.0
        return RewardResult(searches + layout, parts={"searches": searches, "format": layout})


class FrugalOptions(SearchOptions):
    """Options of the search environment, and where the explorer's recall is."""

    explorer: str = ""
    """Run directory of ``frugal_rag_recall``; empty: tasks have ``RECALL_FIELD`` themselves, or it is not known."""


class FrugalEnv(SearchEnv):
    """The search environment, which measures the recall of all searches together."""

    options_class = FrugalOptions
    measures: ClassVar = {"recall": recall}


class Explorer(WorldSource):
    """The generated world, whose demonstrations search until none is left, or stop when they have the evidence."""

    def __init__(self, environment: EnvironmentSettings, options: Mapping[str, Any]) -> None:
        """Take ``WorldOptions``."""
        good = {"one_hop": {Habit.GOOD: 1.0}, "two_hop": {Habit.GOOD: 1.0}}
        super().__init__(environment, {"shares": {"one_hop": 0.5, "two_hop": 0.5}, "habits": good, **options})

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return an attempt that follows the names it reads, and begins again behind the last one."""
        turns = super().demonstrate(task, rng)
        if rng.random() >= EXPLORES:
            return turns
        names, entities = [task.plan[0][0]], self._world.entities
        while (following := entities[names[-1]].place_or_maker) in entities:  # a country has no passage
            names.append(following)
        thoughts = [f"find {names[0]}", *(f"found {name}" for name in names[1:]), *(f"again {name}" for name in names)]
        searches = zip(thoughts, cycle(names), range(MAX_SEARCHES), strict=False)
        return [*(f"<think> {thought}</think><search> {name}</search>" for thought, name, _ in searches), turns[-1]]

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield the word of a repeated search too."""
        yield from super().texts(tasks)
        yield " again"


class ToExplore(Explorer):
    """What the explorer is run on after SFT: training questions, as if they were held out."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the first training tasks to evaluate."""
        tasks = super().tasks("train")
        return tasks[:NUM_EXPLORED] if split == "eval" else tasks


class Explored(Explorer):
    """The training questions of the explorer's run, with the recall that it reached on each."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the tasks of the run with ``RECALL_FIELD``, all without a run; or those to evaluate."""
        run = self.search.explorer if isinstance(self.search, FrugalOptions) else ""
        if split == "eval" or not run:
            return super().tasks(split)
        groups = read_trajectories(Path(run) / "trajectories" / "eval_rl.arrow")
        found = {one.task.task_id: recall(one.trajectories[0]) for one in groups}
        tasks = [task for task in super().tasks("train") if task.task_id in found]
        return [replace(task, meta={RECALL_FIELD: found[task.task_id]}) for task in tasks]
