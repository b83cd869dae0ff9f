"""Values of a trajectory that has ended: its measures, which are averaged, and its reward, which is trained on.

Iterations and evaluations average the measures, by name. ``TextEnv.measures`` adds others, or replaces one::

    class Ranking(TextEnv):
        measures = {"ndcg": ndcg}            # metrics rollout/ndcg and eval/ndcg; checkpointing.best_metric: ndcg

A reward is a function or a class, plain or async::

    def short(trajectory: Trajectory, context: RewardContext) -> float: ...      # reward: my_module:short

    class Judge:                                                                 # reward: my_module:Judge
        def __init__(self, options): ...                                         # reward_options: {strict: true}
        async def __call__(self, trajectory, context) -> RewardResult:           # models: {judge: {url: ..}}
            said = await context.models["judge"].chat(messages, Sampling(8, temperature=0))

The trajectory loop calls it at every end that is not a failure, a full context included. A plain function runs in a
thread, so that a slow one does not delay other trajectories. The form ``(task, answer) -> float``, told by the name of
its first parameter, gets an empty answer where the policy gave none.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal, Self

import numpy as np

from ragr1_actors.core.answers import normalize_answer
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.errors import ConfigError, shortened
from ragr1_actors.core.process.users_code import contained, in_thread
from ragr1_actors.core.resolve import blamed, load_object, named, place_of
from ragr1_actors.core.types import ChatModel, ToolCall, Trajectory
from retrieval.base import RETRIEVE, SEARCH

Measure = Callable[[Trajectory], float]
Normalize = Callable[[str], str]
_WHOLE_ANSWERS = {"yes", "no", "noanswer"}


def exact_match(answer: str, golden_answers: Sequence[str], normalize: Normalize = normalize_answer) -> float:
    """Return 1.0 if there is an answer that, normalised, equals a normalised gold answer, else 0.0."""
    prediction = normalize(answer)
    return float(bool(answer.strip()) and any(prediction == normalize(gold) for gold in golden_answers))


def token_f1(answer: str, golden_answers: Sequence[str], normalize: Normalize = normalize_answer) -> float:
    """Return the F1 of HotpotQA's official script in [0, 1], for the closest gold answer.

    It is SQuAD's harmonic mean of token precision and recall, but an answer or gold answer yes, no or noanswer counts
    only if both are equal: "yes no" gets nothing for "yes". An answer without tokens ("The The", "A") gets 0.
    ``normalize`` is SQuAD's, or another paper's.
    """
    prediction = normalize(answer)
    return max((_f1(prediction, normalize(gold)) for gold in golden_answers), default=0.0)


def _f1(prediction: str, gold: str) -> float:
    if prediction != gold and {prediction, gold} & _WHOLE_ANSWERS:
        return 0.0
    tokens, gold_tokens = prediction.split(), gold.split()
    common = sum((Counter(tokens) & Counter(gold_tokens)).values())
    if not common:
        return 0.0
    # 2 * common / (sum of lengths) is the same number up to the last digit, but figures are compared with the script's
    precision, recall = common / len(tokens), common / len(gold_tokens)
    return (2 * precision * recall) / (precision + recall)


def searches(calls: Sequence[ToolCall]) -> list[ToolCall]:
    """Return the calls of a turn that searched, without those that were refused.

    Where an agent searches at the gateway for the policy's call ``search``, the agent's calls are returned.
    """
    made = [call for call in calls if call.was_made]
    return [call for call in made if call.tool == RETRIEVE] or [call for call in made if call.tool == SEARCH]


def num_rounds(trajectory: Trajectory) -> float:
    """Return the number of turns whose searches ran (RAG-R1's retrieval count); the last turn's do not run."""
    return float(sum(bool(searches(turn.calls)) for turn in trajectory.turns))


def num_queries(trajectory: Trajectory) -> float:
    """Return the number of queries executed over all rounds."""
    return float(sum(len(searches(turn.calls)) for turn in trajectory.turns))


def num_repeated_queries(trajectory: Trajectory) -> float:
    """Return the number of executed queries that an earlier turn had asked already, compared without case."""
    asked = [call.asked.casefold() for turn in trajectory.turns for call in searches(turn.calls)]
    return float(len(asked) - len(set(asked)))


MEASURES: Mapping[str, Measure] = {
    "em": lambda trajectory: exact_match(trajectory.answer, trajectory.task.golden_answers),
    "f1": lambda trajectory: token_f1(trajectory.answer, trajectory.task.golden_answers),
    "rounds": num_rounds,
    "queries": num_queries,
    "repeated_queries": num_repeated_queries,
}
"""The measures that every environment has, by name."""
RATIOS = {"queries_per_round": ("queries", "rounds"), "repeat_query_rate": ("repeated_queries", "queries")}
"""Metrics that divide the mean of one measure by the mean of another."""


Split = Literal["train", "eval", "demonstration"]


@dataclass(frozen=True, slots=True)
class RewardContext:
    """Second argument of a reward: split, progress, models and options."""

    split: Split
    """Split of the task; in an evaluation, a reward can leave out an expensive judge."""
    progress: float = 0.0
    """Share of the RL iterations that are done, in [0, 1]: 0 in demonstrations, 1 in ``ragr1 evaluate``."""
    models: Mapping[str, ChatModel] = field(default_factory=dict)
    """Models of ``environment.models``, by name."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options from ``environment.reward_options``."""


@dataclass(frozen=True, slots=True)
class RewardResult:
    """Reward of a trajectory, with the parts of which it is made."""

    total: float
    per_turn: Sequence[float] = ()
    """Share of ``total`` per turn, ``[num_turns]``; the last turn gets the rest too. Empty: the last turn gets all.

    PPO puts it at the last token of the turn; methods with a baseline per group see the total only.
    """
    parts: Mapping[str, float] = field(default_factory=dict)
    """Parts to show: ``{"format": 0.2}`` becomes the metric ``rollout/reward_format``."""


def rewarded(ended: Trajectory, result: RewardResult) -> Trajectory:
    """Return a trajectory with ``result`` added to the environment's rewards."""
    parts = {f"reward_{name}": value for name, value in result.parts.items()}
    turns = ended.turns
    if result.per_turn:
        turns = tuple(replace(turn, reward=turn.reward + own) for turn, own in zip(turns, result.per_turn, strict=True))
    return replace(ended, turns=turns, reward=ended.reward + result.total, metrics=ended.metrics | parts)


RewardFn = Callable[[Trajectory, RewardContext], float | RewardResult | Awaitable[float | RewardResult]]


async def exact_match_reward(trajectory: Trajectory, context: RewardContext) -> float:
    """Return RAG-R1's reward: 1.0 for an exact match, else 0.0."""
    return exact_match(trajectory.answer, trajectory.task.golden_answers)


async def token_f1_reward(trajectory: Trajectory, context: RewardContext) -> float:
    """Return token F1 against the closest gold answer."""
    return token_f1(trajectory.answer, trajectory.task.golden_answers)


async def no_reward(trajectory: Trajectory, context: RewardContext) -> float:
    """Return 0, so that only the environment's rewards count."""
    return 0.0


REWARDS: dict[str, RewardFn] = {"exact_match": exact_match_reward, "token_f1": token_f1_reward, "none": no_reward}
"""Known values of ``environment.reward``, async so that none takes a thread; others are ``my_module:my_reward``."""


class Reward:
    """Reward of a recipe, in the form that the trajectory loop calls."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        """Load ``environment.reward``; a class is made with ``environment.reward_options``.

        Raises:
            ConfigError: there is no such reward, its form is unknown, or a function is given options.
        """
        self.name = settings.reward
        found: Any = load_object(settings.reward, REWARDS)
        if isinstance(found, type):
            make: Callable[..., Any] = found
            with blamed("environment.reward", make):
                found = make(settings.reward_options)
        self._options, self._ask = settings.reward_options, _Form.of(found, "environment.reward")
        if settings.reward_options and (self._ask.takes_task or self.name in REWARDS):
            raise ConfigError(
                f"environment.reward_options: got {', '.join(settings.reward_options)} for {self.name}, which has no "
                "options; leave them out, or take a reward of (trajectory, context), which reads context.options"
            )

    async def __call__(self, trajectory: Trajectory, context: RewardContext) -> RewardResult:
        """Return the reward of a trajectory that has ended.

        Raises:
            ConfigError: it is neither a number nor a ``RewardResult``, it, or a part of it, is not a finite number, or
                ``per_turn`` has another length.
            ServiceError: a service that it needs did not answer. Any other error is the reward's own.
        """
        if self.name not in REWARDS:  # the known rewards change nothing
            trajectory = _read_only(trajectory)
        return await self._ask(trajectory, replace(context, options=self._options))


def _read_only(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory with read-only arrays: the sampled values, which are trained on, must not change."""
    views = {name: getattr(trajectory, name).view() for name in ("token_ids", "kinds", "logprobs", "policy_versions")}
    for view in views.values():
        view.flags.writeable = False
    return replace(trajectory, **views, metrics=dict(trajectory.metrics))


@dataclass(frozen=True, slots=True)
class _Form:
    """Calls a reward in the form that it was written in, and checks what it returns."""

    reward: Callable[..., Any]
    takes_task: bool
    """Whether the form is ``(task, answer)``."""

    @classmethod
    def of(cls, reward: Any, where: str) -> Self:
        """Find out the form of a reward; raises ``ConfigError``, beginning with ``where``, if it has none."""
        if isinstance(reward, type) or not callable(reward):
            got = named(reward) if place_of(reward) else shortened(repr(reward))
            is_made = "a class that is not made" if isinstance(reward, type) else "which cannot be called"
            raise ConfigError(f"{where}: got {got}, {is_made}, expected a reward of (trajectory, context)")
        try:
            signature = inspect.signature(reward)
            signature.bind(None, None)
        except (TypeError, ValueError) as error:  # Python knows no signature of some built-in functions
            raise ConfigError(
                f"{where}: {named(reward)} cannot be called with (trajectory, context): {error}; give it these two"
            ) from error
        return cls(reward, next(iter(signature.parameters)) == "task")

    async def __call__(self, trajectory: Trajectory, context: RewardContext) -> RewardResult:
        arguments = (trajectory.task, trajectory.answer) if self.takes_task else (trajectory, context)
        called = self.reward if inspect.isroutine(self.reward) else type(self.reward).__call__
        if inspect.iscoroutinefunction(called):
            given = await contained(self.reward(*arguments))
        else:
            given = await contained(in_thread(self.reward, *arguments))
            if inspect.isawaitable(given):  # such as a partial of an async function
                given = await contained(given)
        return _checked(given, self.reward, len(trajectory.turns))


def _checked(given: object, reward: Callable[..., Any], num_turns: int) -> RewardResult:
    if not isinstance(given, Real | RewardResult):
        raise ConfigError(f"{named(reward)} gave {shortened(repr(given))}, expected a number or a RewardResult")
    result = given if isinstance(given, RewardResult) else RewardResult(float(given))
    if not isinstance(result.parts, Mapping):
        raise ConfigError(f"{named(reward)} gave parts={shortened(repr(result.parts))}, expected numbers by name")
    if not isinstance(result.per_turn, Sequence | np.ndarray) or len(result.per_turn) not in (0, num_turns):
        expected = f"a number for each of {num_turns} turns, or none"
        raise ConfigError(f"{named(reward)} gave per_turn={shortened(repr(result.per_turn))}, expected {expected}")
    said = {"the reward": result.total}
    said |= {f"the reward of turn {number}": value for number, value in enumerate(result.per_turn, start=1)}
    said |= {f"the part {name}": value for name, value in result.parts.items()}
    for part, value in said.items():
        if not isinstance(value, Real) or not math.isfinite(value):
            raise ConfigError(f"{named(reward)} gave {value!r} as {part}, expected a finite number")
    parts = {part: float(value) for part, value in result.parts.items()}
    return RewardResult(float(result.total), tuple(map(float, result.per_turn)), parts)


def weighted(weights: Mapping[str, tuple[float, RewardFn]]) -> RewardFn:
    """Return the sum of several rewards times their weights: ``weighted({"em": (1.0, em), "format": (0.2, tidy)})``.

    The parts are the rewards before their weights. Raises ``ConfigError`` if one is not a reward.
    """
    asked = {name: (weight, _Form.of(one, "weighted")) for name, (weight, one) in weights.items()}

    async def reward(trajectory: Trajectory, context: RewardContext) -> RewardResult:
        found = {name: await one(trajectory, context) for name, (_, one) in asked.items()}
        turns = [0.0] * len(trajectory.turns)
        for name, (weight, _) in asked.items():
            for index, value in enumerate(found[name].per_turn):
                turns[index] += weight * value
        total = sum(weight * found[name].total for name, (weight, _) in asked.items())
        return RewardResult(total, tuple(turns), {name: result.total for name, result in found.items()})

    return reward


def gate(condition: RewardFn, reward: RewardFn) -> RewardFn:
    """Return ``reward`` if ``condition`` is above 0, else 0: no reward for an answer in a wrong format."""
    opens, asked = _Form.of(condition, "gate"), _Form.of(reward, "gate")

    async def gated(trajectory: Trajectory, context: RewardContext) -> RewardResult:
        is_open = (await opens(trajectory, context)).total > 0
        return await asked(trajectory, context) if is_open else RewardResult(0.0)

    return gated


def stage_switch(stages: Sequence[tuple[float, RewardFn]]) -> RewardFn:
    """Return the first reward whose share of the run is not over: ``stage_switch([(0.3, searches), (1.0, em)])``."""
    asked = [(until, _Form.of(one, "stage_switch")) for until, one in stages]
    if not asked:
        raise ConfigError("stage_switch got no stage, expected at least one, such as (1.0, my_reward)")

    async def reward(trajectory: Trajectory, context: RewardContext) -> RewardResult:
        current = next((one for until, one in asked if context.progress < until), asked[-1][1])
        return await current(trajectory, context)

    return reward


def by_source(rewards: Mapping[str, RewardFn], otherwise: RewardFn) -> RewardFn:
    """Return the reward of a task's source, or ``otherwise`` for a source that has no entry."""
    asked = {name: _Form.of(one, "by_source") for name, one in rewards.items()}
    rest = _Form.of(otherwise, "by_source")

    async def reward(trajectory: Trajectory, context: RewardContext) -> RewardResult:
        return await asked.get(trajectory.task.source, rest)(trajectory, context)

    return reward
