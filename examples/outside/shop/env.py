"""An environment in which each query has a price."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pydantic import Field

from envs.options import SearchOptions
from ragr1_actors import SearchEnv, StepResult, Trajectory


class ShopOptions(SearchOptions):
    """``environment.options``."""

    price: float = Field(0.05, ge=0)
    """Reward that a query costs."""


class ShopEnv(SearchEnv):
    """The search environment, with a price per query, and the measure ``paid``."""

    options_class = ShopOptions
    options: ShopOptions
    measures: ClassVar = {"paid": lambda trajectory: paid(trajectory)}

    async def step(self, queries: list[str]) -> StepResult:
        """Search, and take the price of the queries from the reward of the turn."""
        return replace(await super().step(queries), reward=-self.options.price * len(queries))


def paid(trajectory: Trajectory) -> float:
    """Return what the queries of a trajectory cost."""
    return -sum(turn.reward for turn in trajectory.turns if turn.action == "search")
