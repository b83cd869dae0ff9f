"""LINVIT (arXiv:2402.16181): value iteration that keeps near a frozen language model; no language model is trained.

An unknown environment is explored in episodes of H steps. Its transitions P and the counts n(s, a) are those of the
steps so far. Before each episode, for h = H .. 1, with V_(H+1) = 0::

    Q_h(s, a)  = min(1, r + P V_(h+1) + bonus / sqrt(n(s, a)))           1 where n(s, a) = 0
    V_h(s)     = lambda log sum_a pi_LLM(a|s) exp(Q_h(s, a) / lambda)    the best value, less lambda KL(pi || pi_LLM)
    pi_h(a|s)  in proportion to  pi_LLM(a|s) exp(Q_h(s, a) / lambda)     acts

The reward is 1 for the step that reaches the goal and ends the attempt: r is 0 in all that was seen before. The policy
is asked once in each state. What it says has the probability with which it says it; the other actions share the rest.
With ``prior: uniform`` all actions have the same probability, and nothing else changes.
"""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from envs.base import EnvContext, StepResult, TextEnv
from ragr1_actors import Completion, Task
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.section import Section
from ragr1_actors.core.types import MALFORMED, Message
from ragr1_actors.recipes.worlds.blocks import Move, State, distances, moved, moves, said_move, shown

FLOOR = (
    0.05  # share of the prior that all actions have alike: none has the probability 0, so that values can correct it
)
Probabilities = Mapping[Move, float]


class LinvitOptions(Section):
    """``environment.options``."""

    prior: Literal["policy", "uniform"] = "policy"
    """pi_LLM: what the policy says, or the baseline."""
    temperature: float = Field(0.1, ge=0.01)
    """lambda: the price of acting in another way than the prior, in rewards per nat."""
    bonus: float = Field(0.0, ge=0)
    """Added for an action that was taken once. 0 (default): where transitions are certain, one step shows all."""
    horizon: int = Field(12, ge=1)
    """H, the steps of an episode."""
    max_steps: int = Field(1000, ge=1)
    """Steps of all episodes together."""


class Planner:
    """Value iteration over what has been seen of one task."""

    def __init__(self, options: LinvitOptions) -> None:
        """Begin with nothing."""
        self._options = options
        self.prior: dict[State, Probabilities] = {}  # pi_LLM
        self.seen: dict[tuple[State, Move], Counter[State]] = defaultdict(Counter)  # how often each state followed
        self.policy: list[dict[State, Probabilities]] = [{} for _ in range(options.horizon)]  # [H], pi_h by state

    def plan(self) -> None:
        """Compute Q_h, V_h and pi_h from the last step to the first one."""
        price, after, unknown = self._options.temperature, dict.fromkeys(self.prior, 0.0), 0.0  # V_(H+1)
        for policy in reversed(self.policy):
            values: dict[State, float] = {}
            for state, prior in self.prior.items():
                q = {move: self._q(state, move, after, unknown) for move in prior}
                weights = {move: prior[move] * math.exp((q[move] - 1) / price) for move in prior}  # at most exp(0)
                total = sum(weights.values())
                values[state] = 1 + price * math.log(total)
                policy[state] = {move: weight / total for move, weight in weights.items()}
            after, unknown = values, 1.0

    def _q(self, state: State, move: Move, after: Mapping[State, float], unknown: float) -> float:
        counts = self.seen[state, move]
        if not (num_steps := counts.total()):
            return 1.0
        expected = sum(count * after.get(follows, unknown) for follows, count in counts.items()) / num_steps
        return min(1.0, expected + self._options.bonus / math.sqrt(num_steps))

    def draw(self, state: State, step: int, rng: random.Random) -> Move:
        """Return an action of pi_h, where ``step`` counts from 0; of the prior where the state was not planned for."""
        probabilities = self.policy[step].get(state, self.prior[state])
        return rng.choices(list(probabilities), list(probabilities.values()))[0]


class LinvitEnv(TextEnv):
    """Plans for a task, and asks the policy in each state that is new. A task for SFT asks for one action."""

    stop = ("</answer>",)
    options_class = LinvitOptions
    measures: ClassVar = {
        "env_steps": lambda ended: ended.metrics.get("steps", 0.0),
        "success": lambda ended: ended.metrics.get("solved", 0.0),
    }

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        """Read the options."""
        self._options = LinvitOptions.read(settings.options, "environment.options")
        self._planner, self._num_steps = Planner(self._options), 0
        self._prompt, self._rng = settings.prompt, random.Random(context.seed)

    async def reset(self, task: Task) -> list[Message]:
        """Return the prompt about the first state."""
        self._start, self._goal = tuple(task.meta["state"]), tuple(task.meta["goal"])
        self._state, self._is_planned = self._start, task.meta["plan"]
        return [self._ask()]

    def _ask(self) -> Message:
        return Message("user", self._prompt.replace("{question}", shown(self._state, self._goal)))

    async def act(self, turn: Completion) -> StepResult:
        """Take the prior of a state, and step until another one is needed, the goal is reached, or no step is left."""
        possible, said = moves(self._state), said_move(turn.text)
        action = "move" if said in possible else MALFORMED
        if not self._is_planned:
            steps = distances(self._goal)
            nearer = [move for move in possible if steps[moved(self._state, move)] < steps[self._state]]
            return StepResult(terminated=True, action=action, reward=float(said in nearer))
        heard = said if self._options.prior == "policy" else None
        self._planner.prior[self._state] = prior_of(possible, heard, math.exp(sum(turn.logprobs)))
        before, limit = self._num_steps, self._options.max_steps
        while self._state in self._planner.prior and self._state != self._goal and self._num_steps < limit:
            self._step()
        is_solved = self._state == self._goal
        metrics = {"steps": float(self._num_steps - before), "solved": float(is_solved)}
        if is_solved:
            return StepResult(terminated=True, action=action, reward=1.0, metrics=metrics)
        return StepResult(truncated=self._num_steps == limit, action=action, restart=(self._ask(),), metrics=metrics)

    def _step(self) -> None:
        """Take one step, and begin the next episode behind the last one of an episode."""
        step = self._num_steps % self._options.horizon
        move = self._planner.draw(self._state, step, self._rng)
        follows = moved(self._state, move)
        self._planner.seen[self._state, move][follows] += 1
        self._state, self._num_steps = follows, self._num_steps + 1
        if step == self._options.horizon - 1 and follows != self._goal:
            self._state = self._start
            self._planner.plan()


def prior_of(possible: list[Move], said: Move | None, probability: float) -> Probabilities:
    """Return pi_LLM of a state, where the policy says an action with a probability; uniform if it is not possible."""
    if said not in possible:
        return dict.fromkeys(possible, 1 / len(possible))
    rest, alike = (1 - probability) / max(1, len(possible) - 1), FLOOR / len(possible)
    return {move: (1 - FLOOR) * (probability if move == said else rest) + alike for move in possible}
