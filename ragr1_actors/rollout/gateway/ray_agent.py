"""RayAgent: an agent's function as a Ray task on the node of its env runner."""

from __future__ import annotations

import asyncio

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ragr1_actors.core.errors import ConfigError, one_line
from ragr1_actors.core.types import Task
from ragr1_actors.rollout.gateway.agents import AgentSession, Ended, Function, answer_of


class RayAgent:
    """Plain function that Ray runs in a separate process, which is killed to end it."""

    def __init__(self, function: Function, num_cpus: float) -> None:
        """Reserve ``num_cpus`` for each call."""
        self._function = function
        self._remote = ray.remote(num_cpus=num_cpus, max_retries=0)(function)

    async def solve(self, task: Task, session: AgentSession) -> Ended:
        """Return the result of the function."""
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        call = self._remote.options(scheduling_strategy=here).remote(task, session)
        try:
            return Ended(answer_of(await asyncio.wrap_future(call.future()), self._function))
        except asyncio.CancelledError:
            ray.cancel(call, force=True)
            raise
        except ConfigError as error:
            return Ended(problem=one_line(error))
        except RayTaskError as error:
            return Ended(problem=f"{type(error.cause).__name__}: {one_line(error.cause)}")
        except RayError as error:
            return Ended(problem=f"its process ended: {one_line(error)}")
