"""Our side of a comparison with a peer: a real run whose turns have a number and a length that no policy changes.

Two systems sample different tokens. So that both compute the same number, every turn has ``max_new_tokens_per_turn``
tokens. The number of the turn says whether it searches, for the task's question, or answers.
"""

from __future__ import annotations

from envs.base import EnvContext
from envs.grammars.tags import Action, Answer, Search
from envs.measures import RewardContext
from envs.search import SearchEnv
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.types import FinishReason, Message, Task, Trajectory
from ragr1_actors.rollout.engines.transformers_engine import Session, TransformersEngine


class FixedEnv(SearchEnv):
    """``SearchEnv`` that searches for the question in all turns but the last; no string ends a turn."""

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        super().__init__(settings, context)
        self.stop = ()
        self._question = ""

    async def reset(self, task: Task) -> list[Message]:
        self._question = task.question
        return await super().reset(task)

    def parse(self, completion: str) -> Action:
        return Search((self._question,)) if self._turns_left > 1 else Answer("done")


class FixedEngine(TransformersEngine):
    """``TransformersEngine`` in which no token ends a turn."""

    def _finish_reason(self, session: Session, token: int) -> FinishReason | None:
        full = len(session.tokens) - session.num_prompt >= session.sampling.max_new_tokens
        return FinishReason.LENGTH if full else None


async def token_reward(trajectory: Trajectory, context: RewardContext) -> float:
    """Return a number that differs within a group, as ``trl_grpo.rewards`` does."""
    return int(trajectory.token_ids.sum()) % 97 / 97
