"""Groups: the request for a group, the strategy that chooses its attempts, and its result for the driver.

A ``GroupRequest`` goes to a runner, whose ``RolloutStrategy`` plays it; independent attempts are one strategy. A
``GroupSummary`` and a reference to the tokens come back as a ``FinishedGroup``::

    class Hinted(RolloutStrategy):                            # env_runners.strategy: my_module:Hinted
        async def sample(self, request, play):
            plain = [await play(index) for index in range(4)]
            wrong = [one for one in plain if not one.reward]
            again = [play(4 + n, fork=(one, len(one.turns) - 1, "<think> Look at it in another way:"))
                     for n, one in enumerate(wrong)]
            return plain + list(await asyncio.gather(*again))
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from inspect import isawaitable
from numbers import Real
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from cluster.autoscaler import FleetState
from envs.checker import Check, awaited_problem_of, made_up
from envs.measures import RewardContext
from ragr1_actors.core.config import EnvRunnerSettings
from ragr1_actors.core.errors import ConfigError, shortened
from ragr1_actors.core.process.users_code import contained
from ragr1_actors.core.resolve import make_part, named
from ragr1_actors.core.section import Section
from ragr1_actors.core.types import Failure, StopReason, Task, TokenKind, Trajectory, TrajectoryGroup
from ragr1_actors.rollout.recorder import Fork, can_fork, check_fork


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Request for a group: ``GroupRequest("world/train/17#2", task, num_trajectories=8, temperature=1.0, epoch=2)``."""

    issue_id: str
    """Id of task and epoch. All attempts share it, so that a task that is trained twice is noticed."""
    task: Task
    num_trajectories: int = 1
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""
    epoch: int = 0
    attempt: int = 0
    """Number of times that the group was asked for before in this epoch."""
    num_failures: int = 0
    """Number of attempts with a failure of the data."""
    num_outages: int = 0
    """Number of attempts with a failure of the infrastructure only."""
    num_deaths: int = 0
    """Number of runners in a row that died while they sampled this attempt."""
    policy_version: int = 0
    """Newest version when the group was asked for; no token of it is sampled with an older one."""
    context: RewardContext = field(default_factory=lambda: RewardContext("eval"))
    """Context for the reward."""

    @property
    def group_id(self) -> str:
        """Id that is unique per attempt, on which the sampling seeds depend."""
        return f"{self.issue_id}.{self.attempt}" if self.attempt else self.issue_id

    def trajectory_id(self, index: int) -> str:
        """Return the id of the group's trajectory ``index``: ``world/train/17#2/0``."""
        return f"{self.group_id}/{index}"

    def failed(self, failure: Failure) -> GroupRequest:
        """Return the request with one more failed attempt."""
        is_data = failure is Failure.DATA
        return replace(self, num_failures=self.num_failures + is_data, num_outages=self.num_outages + (not is_data))


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """Summary of a group for the driver, which never reads the group's tokens."""

    rewards: tuple[float, ...]  # [num_trajectories that did not fail]
    num_failed: int
    errors: tuple[str, ...]
    oldest_version: int
    """Lowest policy version of any token; -1 if none was sampled."""
    means: dict[str, float]
    """Means over trajectories that did not fail: turns, tokens, stop reasons, measures, environment's metrics."""
    data_errors: tuple[str, ...] = ()
    """Errors with ``Failure.DATA``."""
    stop_reasons: tuple[StopReason, ...] = ()
    """Stop reasons of the trajectories that failed."""
    samples: dict[str, tuple[float, ...]] = field(default_factory=dict)
    """Values whose histograms are drawn: per trajectory that did not fail, and per turn with calls."""
    num_sampled_tokens: int = 0
    """Sum over all trajectories, failed ones included."""


@dataclass(frozen=True, slots=True)
class FinishedGroup:
    """Sampled group: its summary, and a reference to its tokens."""

    request: GroupRequest
    summary: GroupSummary
    batch: Any
    """``ray.ObjectRef`` of the group's record batch, or the batch itself if the driver samples."""


def failed_group(request: GroupRequest, error: str) -> TrajectoryGroup:
    """Return the group of a request that ended its runners, the last one alone; the fault is taken for the task's."""
    no_tokens = np.zeros(0, np.int32)
    failed = [
        Trajectory(
            trajectory_id=request.trajectory_id(index),
            task=request.task,
            token_ids=no_tokens,
            kinds=no_tokens.astype(np.uint8),
            logprobs=no_tokens.astype(np.float32),
            policy_versions=no_tokens,
            turns=(),
            stop_reason=StopReason.ENV_ERROR,
            reward=0.0,
            error=error,
        )
        for index in range(request.num_trajectories)
    ]
    return TrajectoryGroup(request.task, tuple(failed))


def summarize(group: TrajectoryGroup) -> GroupSummary:
    """Return the summary of a group for task ledger and metrics."""
    kept = [t for t in group.trajectories if not t.stop_reason.is_failure]
    totals: Counter[str] = Counter()
    for trajectory in kept:
        values: dict[str, float] = {
            "turns": float(len(trajectory.turns)),
            "tokens": float(trajectory.num_model_tokens),
            "observation_tokens": float((trajectory.kinds == TokenKind.OBSERVATION).sum()),
            "context_tokens": float(trajectory.num_tokens),
            "well_formed": float(trajectory.is_well_formed),
            f"stop_{trajectory.stop_reason.value}": 1.0,
            **trajectory.metrics,
        }
        totals.update(values)
    sampled = (t.policy_versions[t.kinds == TokenKind.MODEL] for t in kept)  # an agent's rows are in no order
    versions = [int(found.min()) for found in sampled if found.size]
    return GroupSummary(
        rewards=tuple(t.reward for t in kept),
        num_failed=len(group.trajectories) - len(kept),
        errors=tuple(t.error for t in group.trajectories if t.stop_reason.is_failure),
        oldest_version=min(versions, default=-1),
        means={name: total / len(kept) for name, total in totals.items()},
        data_errors=tuple(t.error for t in group.trajectories if t.stop_reason.failure is Failure.DATA),
        stop_reasons=tuple(t.stop_reason for t in group.trajectories if t.stop_reason.is_failure),
        samples={
            "turns": tuple(float(len(t.turns)) for t in kept),
            "calls_per_turn": tuple(float(len(turn.calls)) for t in kept for turn in t.turns if turn.calls),
            "tokens": tuple(float(t.num_model_tokens) for t in kept),
            "context_tokens": tuple(float(t.num_tokens) for t in kept),
        },
        num_sampled_tokens=sum(t.num_model_tokens - t.num_copied_tokens for t in group.trajectories),
    )


KEY = "env_runners.strategy"
ROUNDING = 1e-3
"""Amount by which a log-prob may be above 0."""


class Play(Protocol):
    """Makes one attempt of the group."""

    async def __call__(self, index: int, *, variant: str = "", fork: Fork | None = None) -> Trajectory:
        """Return the trajectory ``index`` of the group, which has ended, in any way.

        ``variant`` reaches the environment as ``EnvContext.variant``, and is recorded. A ``fork`` begins as its parent:
        the environment acts on the parent's turns again, the tokens are copied, and the text is INJECTED.
        """


class RolloutStrategy(ABC):
    """Chooses the attempts of a group; one instance serves all groups of an env runner."""

    options_class: ClassVar[type[Section] | None] = None
    """Class that reads ``env_runners.strategy_options``. None: the constructor gets the mapping unchanged."""

    def __init__(self, options: Any) -> None:
        """Keep the options."""
        self.options = options

    @abstractmethod
    async def sample(self, request: GroupRequest, play: Play) -> list[Trajectory]:
        """Return the group's trajectories, each from a ``play``; ``request.num_trajectories`` is the requested number.

        It is called for groups that are trained; an evaluation or a demonstration is one plain attempt.
        """


class Independent(RolloutStrategy):
    """Independent attempts, at the same time."""

    options_class = Section

    async def sample(self, request: GroupRequest, play: Play) -> list[Trajectory]:
        """Play each index once."""
        return list(await asyncio.gather(*(play(index) for index in range(request.num_trajectories))))


STRATEGIES: dict[str, type[RolloutStrategy] | str] = {"independent": Independent}
"""Known values of ``env_runners.strategy``; any other is ``my_module:MyStrategy``."""


def make_strategy(settings: EnvRunnerSettings) -> RolloutStrategy:
    """Make the strategy that a recipe names; ``ConfigError`` if it is unknown, or its options do not fit."""
    return make_part(KEY, settings.strategy, STRATEGIES, settings.strategy_options)


async def try_strategy(strategy: RolloutStrategy) -> list[Check]:
    """Let a strategy sample groups of 4 and of 1 over made-up attempts, of which every other one is right."""

    async def play(index: int, *, variant: str = "", fork: Fork | None = None) -> Trajectory:
        if fork is not None:
            check_fork(*fork[:2])
        found = made_up("Riga" if index % 2 else "Oslo", index)
        return replace(found, reward=float(index % 2), variant=variant, parent=fork[0].trajectory_id if fork else "")

    checks = []
    for count in (4, 1):
        request = GroupRequest("check/0", made_up("").task, count, 1.0, context=RewardContext("train"))
        problem = await awaited_problem_of(partial(checked_sample, strategy, request, play), strategy.sample)
        checks.append(Check(f"sample returns trajectories where {count} are asked for", problem))
    return checks


async def checked_sample(strategy: RolloutStrategy, request: GroupRequest, play: Play) -> list[Trajectory]:
    """Return the result of ``sample`` after checks.

    Raises:
        ConfigError: it is not a list of trajectories, is empty, has a trajectory twice or one that was not played here,
            or numbers that cannot be trained on; or ``play`` is called with other arguments.
    """
    played: dict[str, Trajectory] = {}
    order: list[str] = []

    async def noted(index: int, *, variant: str = "", fork: Fork | None = None) -> Trajectory:
        _check_play(index, variant, fork)
        if fork is not None:
            _check_parent(index, fork[0], played)
        name = request.trajectory_id(index)
        if name in order:
            raise ConfigError(f"play({index}) was called twice in one group; take another index")
        order.append(name)
        found = await play(index, variant=variant, fork=fork)
        if fork is not None and not can_fork(*fork[:2]):
            found = replace(found, error=f"{found.error}; {named(strategy.sample)} asked for it")
        played[name] = found
        return found

    sampling: Any = strategy.sample(request, noted)
    if not isawaitable(sampling):
        raise ConfigError(f"{named(strategy.sample)} is plain, expected async def")
    returned: object = await contained(sampling)
    if not isinstance(returned, list) or not all(isinstance(one, Trajectory) for one in returned):
        got = shortened(repr(returned))
        raise ConfigError(f"{named(strategy.sample)} returned {got}, expected a list of trajectories")
    ids = [one.trajectory_id for one in returned]
    if not ids or len(set(ids)) < len(ids) or not played.keys() >= set(ids):
        expected = f"at least one of {order}, each once"
        raise ConfigError(f"{named(strategy.sample)} returned the trajectories {ids}, expected {expected}")
    for one in returned:
        as_played = played[one.trajectory_id]
        if one is not as_played and (problem := _problem(one, as_played)):
            raise ConfigError(f"{named(strategy.sample)} returned {one.trajectory_id} with {problem}")
    return returned


def _check_parent(index: int, parent: Trajectory, played: Mapping[str, Trajectory]) -> None:
    as_played = played.get(parent.trajectory_id)
    problem = "which was not played" if as_played is None else ""
    if as_played is not None and as_played is not parent and (changed := _problem(parent, as_played)):
        problem = f"with {changed}"
    if problem:
        expected = "a trajectory that play returned for this group"
        raise ConfigError(f"play({index}) got a fork of {parent.trajectory_id}, {problem}; expected {expected}")


_CHANGEABLE = ("reward", "turns", "behaviour_logprobs", "metrics", "variant")
"""Fields of a trajectory that a strategy may change; in its turns only the reward."""


def _problem(changed: Trajectory, played: Trajectory) -> str:
    """Return what is wrong with a strategy's changes to a trajectory that it played; empty if nothing is."""
    for name in (one.name for one in fields(Trajectory) if one.name not in _CHANGEABLE):
        now, before = (getattr(one, name) for one in (changed, played))
        if not (np.array_equal(now, before) if isinstance(before, np.ndarray) else now == before):
            return f"other {name} than were sampled; change {', '.join(_CHANGEABLE)} only"
    rewards = (changed.reward, *(turn.reward for turn in changed.turns))
    if not all(isinstance(value, Real) and math.isfinite(value) for value in rewards):
        return f"the reward {changed.reward} and {rewards[1:]} of its turns, expected finite numbers"
    own = (replace(turn, reward=turn_now.reward) for turn, turn_now in zip(played.turns, changed.turns, strict=False))
    if len(changed.turns) != len(played.turns) or changed.turns != tuple(own):
        return "other turns than were sampled; change their rewards only"
    if bad := [name for name, value in changed.metrics.items() if not isinstance(value, Real) or math.isnan(value)]:
        return f"the metric {bad[0]} of {changed.metrics[bad[0]]!r}, expected a number"
    acted = changed.behaviour_logprobs
    if acted is not None and (np.shape(acted) != changed.token_ids.shape or not _are_logprobs(acted)):
        return (
            f"behaviour_logprobs of the shape {np.shape(acted)}, expected finite ones up to 0, or NaN where the policy "
            f"that acted is not known, for each of {changed.num_tokens} tokens"
        )
    return ""


def _are_logprobs(values: NDArray[np.float32]) -> bool:
    known = values[~np.isnan(values)]
    return bool(np.isfinite(known).all() and (known <= ROUNDING).all())


def _check_play(index: object, variant: object, fork: object) -> None:
    if not isinstance(index, int) or index < 0:
        raise ConfigError(f"play got the index {index!r}, expected a whole number from 0")
    if not isinstance(variant, str):
        raise ConfigError(f"play({index}) got variant={shortened(repr(variant))}, expected text")
    match fork:
        case None | (Trajectory(), int(), str()):
            return
    raise ConfigError(f"play({index}) got fork={shortened(repr(fork))}, expected (parent, number of turns, text)")


R = TypeVar("R")
C = TypeVar("C")


class RequestQueue(Generic[R, C]):
    """Gives each request to the runner with the least to do, once it has room. Counts are in trajectories."""

    def __init__(
        self,
        ready: Callable[[], Sequence[R]],
        call: Callable[[GroupRequest, R], C],
        max_in_flight: int,
        clock: Callable[[], float],
        lock: AbstractContextManager[Any],
    ) -> None:
        """Begin without requests; a runner that has ``max_in_flight`` trajectories gets no further group.

        ``ready`` returns the runners that take requests, ``call`` begins to sample a group at one of them, ``clock``
        returns seconds. ``lock`` is held from the choice of a runner until it is called.
        """
        self._ready, self._call, self._max_in_flight = ready, call, max_in_flight
        self._clock, self._lock = clock, lock
        self._waiting: deque[tuple[GroupRequest, asyncio.Future[C]]] = deque()
        self.is_held = False
        """Whether waiting requests keep waiting."""
        self.num_in_flight: Counter[R] = Counter()
        """Number of trajectories that a runner has not returned."""
        self.num_sampled = 0
        """Number of trajectories since the start."""
        self._busy_s, self._accounted_at = 0.0, clock()
        self._loads: list[tuple[float, int]] = []

    def __len__(self) -> int:
        """Return the number of requests that wait for a runner."""
        return len(self._waiting)

    async def place(self, request: GroupRequest, *, is_urgent: bool = False) -> C:
        """Wait until a runner was called with a request; an urgent one goes before those that wait."""
        called: asyncio.Future[C] = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if is_urgent else self._waiting.append)((request, called))
        self.dispatch()
        return await called

    def size(self, request: GroupRequest) -> int:
        """Return the trajectories as which a request counts; one whose runners died shares a runner with fewer.

        So what ended them is found: after the first death at most seven other groups are beside it, then none.
        """
        share = (0, self._max_in_flight // 8, self._max_in_flight)[min(2, request.num_deaths)]
        return max(request.num_trajectories, share)

    def dispatch(self) -> None:
        """Call runners that have room."""
        with self._lock:
            while self._waiting and not self.is_held:
                if self._waiting[0][1].done():  # cancelled
                    self._waiting.popleft()
                    continue
                runner = min(self._ready(), key=self.num_in_flight.__getitem__, default=None)
                if runner is None or not self._has_room(self._waiting[0][0], self.num_in_flight[runner]):
                    return
                request, called = self._waiting.popleft()
                called.set_result(self._call(request, runner))

    def _has_room(self, request: GroupRequest, taken: int) -> bool:
        if request.num_deaths and taken:
            return taken + self.size(request) <= self._max_in_flight
        return taken < self._max_in_flight

    def begin(self, runner: R, num_trajectories: int) -> None:
        """Count a group that a runner was given."""
        self._account()
        self.num_in_flight[runner] += num_trajectories

    def end(self, runner: R, num_trajectories: int) -> None:
        """Count a group that a runner has returned or lost."""
        self._account()
        self._loads.append((self.num_in_flight.total() / max(1, len(self._ready())), len(self._waiting)))
        self.num_in_flight[runner] -= num_trajectories
        if not self.num_in_flight[runner]:
            del self.num_in_flight[runner]

    def fail(self, error: Exception) -> None:
        """Fail all waiting requests."""
        waiting, self._waiting = self._waiting, deque()
        for _, called in waiting:
            if not called.done():
                called.set_exception(error)

    def take_load(self) -> tuple[float, float]:
        """Return trajectories in flight per ready runner, and the length of the queue.

        Both are averaged over the groups that have ended since the last call.
        """
        loads, self._loads = self._loads or [(0.0, 0)], []
        return sum(load for load, _ in loads) / len(loads), sum(queue for _, queue in loads) / len(loads)

    def _account(self) -> None:
        now = self._clock()
        self._busy_s += (now - self._accounted_at) * len(self.num_in_flight)
        self._accounted_at = now

    def state(self, num_starting: int) -> FleetState:
        """Return the load for the fleet's autoscaler; requests are trajectories."""
        self._account()
        return FleetState(
            self._clock(),
            len(self._ready()),
            num_starting,
            ongoing=float(self.num_in_flight.total()),
            queued=float(sum(request.num_trajectories for request, _ in self._waiting)),
            busy_s=self._busy_s,
            num_answered=float(self.num_sampled),
        )
