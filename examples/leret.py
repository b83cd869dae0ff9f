"""LeReT (arXiv:2410.23214): attempts with unlike examples in the prompt, whose searches are compared by what they find.

To train with it::

    ragr1 train quickstart environment.env=examples.leret:FewShotEnv env_runners.strategy=examples.leret:Prompts \\
      environment.reward=examples.leret:evidence training.algorithm=ipo
"""

from __future__ import annotations

import asyncio
import random

from envs.base import EnvContext
from ragr1_actors import RewardContext, RolloutStrategy, SearchEnv, Task, Trajectory
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.types import Message
from ragr1_actors.rollout.issue import GroupRequest
from ragr1_actors.rollout.strategy import Play
from retrieval.corpora.text import found_evidence

EXAMPLES = {
    "names": ["Who is older, Ana Bell or Bo Cole? Search: Ana Bell", "Who founded Corvex? Search: Corvex"],
    "questions": ["Where was Ana Bell born? Search: birthplace of Ana Bell"],
    "short": ["In which country is Riga? Search: Riga"],
}


class Prompts(RolloutStrategy):
    """Each attempt has the examples of one set, in turn."""

    async def sample(self, request: GroupRequest, play: Play) -> list[Trajectory]:
        sets = sorted(EXAMPLES)
        plays = (play(index, variant=sets[index % len(sets)]) for index in range(request.num_trajectories))
        return list(await asyncio.gather(*plays))


class FewShotEnv(SearchEnv):
    """Puts the examples of its variant in front of the prompt, in an order of this trajectory's seed."""

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        super().__init__(settings, context)
        self._examples = list(EXAMPLES.get(context.variant, ()))
        random.Random(context.seed).shuffle(self._examples)

    async def reset(self, task: Task) -> list[Message]:
        (prompt,) = await super().reset(task)
        return [Message("user", "\n".join([*self._examples, prompt.content]))]


async def evidence(trajectory: Trajectory, context: RewardContext) -> float:
    """Share of the supporting passages that the searches found."""
    gold = set(trajectory.task.supporting_ids)
    records = [record for call in trajectory.calls for record in call.records]
    found = found_evidence(gold, [one.id for one in records], [one.title for one in records])
    return len(found) / max(1, len(gold))
