"""Every task is trained exactly once or given up, whatever dies, hangs, is slow or fails, and whenever a run resumes.

Hundreds of random schedules drive the loop of a run in virtual time: ``BatchCollector``, ``TaskLedger``,
``GroupBuffer``, ``EnvRunner``, ``SearchEnv`` and ``MetricsLogger`` are the real ones. The driver is killed or
interrupted at any moment and goes on from the newest checkpoint that was whole. A test that fails prints its seed.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from faulty_fleet import FaultyEnv, FaultyRunners, ShortAttempts, Weather

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.types import Failure
from ragr1_actors.lab.simulation.fleet import VirtualLoop
from ragr1_actors.lab.simulation.run import Simulator, Size
from ragr1_actors.lab.simulation.workload import made_up_task
from ragr1_actors.planning.pace import EnginePace, LearnerPace, Pace, SearchPace
from ragr1_actors.rollout.groups import FinishedGroup, GroupRequest
from ragr1_actors.runs.checkpoint import TaskLedgerState
from ragr1_actors.runs.telemetry.metrics import MetricsLogger, read_metrics
from ragr1_actors.training.algorithm_config import AlgorithmConfig

NUM_SCHEDULES, PER_TEST = 320, 80
NUM_EPOCHS = 2
MAX_ITERATIONS = 60


def batch_s(num_queries: int) -> float:
    return 0.01 + 0.01 * num_queries


PACE = Pace(EnginePace(base_s=0.01, row_s=0.001), SearchPace(batch_s), LearnerPace(0.05, 0.2))


@dataclass(frozen=True)
class Saved:
    """A checkpoint: the position of the run, and what the learner of that moment has learned from."""

    iteration: int = 0
    version: int = 0
    books: str = ""
    """JSON, as in ``state.json``."""
    issued: frozenset[str] = frozenset()
    trained: tuple[str, ...] = ()


class Life(Simulator):
    """One process of a driver, from a checkpoint to its end or its death."""

    def __init__(self, loop: VirtualLoop, config: RunConfig, weather: Weather, num_tasks: int, saved: Saved) -> None:
        size = Size(weather.rng.randint(1, 3), 1)
        super().__init__(
            loop, config, PACE, ShortAttempts(), size, weather.load_at, num_tasks=num_tasks, runners=FaultyRunners
        )
        self.iteration, self.issued, self.trained = saved.iteration, set(saved.issued), list(saved.trained)
        self.is_torn = False
        """Learner and books are between two states."""
        self.num_stale = 0
        if saved.books:
            self.collector.tasks.set_state(TaskLedgerState.model_validate_json(saved.books).model_dump())
        self._version = saved.version - 1
        self._publish()
        assert isinstance(self.runners, FaultyRunners)
        self.runners.weather, self.runners.on_step, self.runners.on_submit = (
            weather,
            self._check_unless_torn,
            self._issue,
        )
        self._storm = loop.create_task(self.runners.storm())

    def _issue(self, request: GroupRequest) -> None:
        assert request.issue_id not in {*self.trained, *self.failed}, "issued after its end"
        if request.issue_id not in self.issued:
            failed = self.collector.tasks.failed_tasks
            assert request.task.task_id not in {one.task_id for one in failed if one.failure is Failure.DATA}
        self.issued.add(request.issue_id)

    @property
    def failed(self) -> list[str]:
        return [f"{failed.task_id}#{failed.epoch}" for failed in self.collector.tasks.failed_tasks]

    @property
    def outstanding(self) -> set[str]:
        return {f"{task_id}#{epoch}" for task_id, epoch, *_ in self.collector.tasks.get_state()["outstanding"]}

    def _check_unless_torn(self) -> None:
        if not self.is_torn:
            self.check()

    def check(self) -> None:
        """The books agree with what was seen of the fleet and of the learner."""
        counts, outstanding, failed = self.collector.tasks.counts(), self.outstanding, self.failed
        assert counts["lost"] == counts["doubled"] == 0
        assert counts["issued"] == len(self.issued)
        assert counts["issued"] == counts["trained"] + counts["failed"] + len(outstanding)
        assert not {*failed} & {*self.trained}
        assert self.issued == outstanding | {*failed} | {*self.trained}
        assert len(self.trained) == len({*self.trained}) == counts["trained"]

    def step(self) -> float:
        """One iteration; return its lag."""
        taken: list[FinishedGroup] = []

        def on_batch(batch: list[FinishedGroup]) -> None:
            self.is_torn = True
            taken.extend(batch)
            for group in batch:
                summary = group.summary
                lag = self._version - summary.oldest_version if summary.oldest_version >= 0 else 0
                assert 0 <= lag <= self._config.training.max_policy_lag, "a stale group is trained"
                assert len(summary.rewards) + summary.num_failed == group.request.num_trajectories
                assert len(summary.rewards) >= 2, "a group without a baseline is trained"

        before = self.outstanding
        done = self.train(on_batch)
        # of groups set aside (dynamic sampling) the learner sees nothing, but their tasks are done
        self.trained += [group.request.issue_id for group in taken]
        self.trained += sorted(self.issued - self.outstanding - {*self.failed} - {*self.trained})
        assert len(taken) == self._config.training.train_batch_size
        assert {group.request.issue_id for group in taken} <= self.issued | before
        self.iteration += 1
        self.num_stale += done.num_stale
        self.is_torn = False
        self.check()
        return done.lag

    def is_done(self) -> bool:
        """All tasks of the epochs are trained or given up."""
        state = self.collector.tasks.get_state()
        return state["epoch"] >= NUM_EPOCHS and all(epoch >= NUM_EPOCHS for _, epoch, *_ in state["outstanding"])

    def save(self) -> Saved:
        books = json.dumps(self.collector.tasks.get_state())
        return Saved(self.iteration, self._version, books, frozenset(self.issued), tuple(self.trained))


@dataclass
class Schedule:
    """A run and its faults, drawn from a seed."""

    seed: int
    run_dir: Path
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = rng = random.Random(self.seed)
        batch_size, group_size = rng.randint(1, 3), rng.choice((2, 2, 3))
        self.num_tasks = rng.randint(5, 8)
        tasks = [made_up_task(number).task_id for number in range(self.num_tasks)]
        algorithm = rng.choice(("grpo", "grpo", "dapo"))
        self.config = (
            AlgorithmConfig()
            .environment(env="faulty_fleet:FaultyEnv", prompt="{question}", max_turns=3, options={"top_k": 1})
            .env_runners(max_concurrent_trajectories=rng.randint(2, 8))
            .debugging(
                seed=self.seed,
                fault_tolerance={
                    "max_task_retries": rng.randint(0, 3),
                    "failed_trajectories": rng.choice(("refill", "shrink")),
                    "stale_groups": rng.choice(("wait", "drop")),
                },
            )
            .training(
                algorithm=algorithm,
                options={"max_sampled_batches": 2} if algorithm == "dapo" else {},
                train_batch_size=batch_size,
                group_size=group_size,
                max_policy_lag=rng.choice((0, 0, 1, 2, 3)),
            )
            .freeze()
        )
        self.weather = Weather(
            rng,
            gap_s=rng.choice((0.5, 2.0)),
            faults_left=rng.choice((0, 10, 20)),
            search_failures=rng.choice((0.0, 0.05, 0.2)),
            flaws=rng.choice((0.0, 0.0, 0.02)),
            slow_searches=rng.choice((0.0, 0.05)),
            broken_tasks=frozenset(rng.sample(tasks, rng.choice((0, 0, 1, 2)))),
            seen=self.seen,
        )
        self.lives_left = rng.randint(0, 4)
        self.saved = Saved()

    def play(self) -> None:
        """Play the run to the end of its epochs, through all deaths of its driver."""
        FaultyEnv.weather = self.weather
        while not self._live():
            self.lives_left -= 1
        rows = read_metrics(self.run_dir)
        assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1)), "the metrics have a gap"
        assert all(row["loop/policy_lag"] <= self.config.training.max_policy_lag for row in rows)

    def _live(self) -> bool:
        """Play one life of the driver; return whether it reached the end."""
        begun = None  # a checkpoint that is still being written
        with closing(VirtualLoop()) as loop, closing(MetricsLogger(self.run_dir)) as logger:
            life = Life(loop, self.config, self.weather, self.num_tasks, self.saved)
            killed: list[bool] = []
            if self.lives_left:
                loop.call_later(self.rng.expovariate(1 / 8), lambda: (killed.append(True), loop.stop()))
            try:
                while not life.is_done():
                    assert life.iteration < MAX_ITERATIONS, "a task is never trained"
                    if begun is not None:
                        self.saved, begun = begun, None
                    lag = life.step()
                    logger.log("rl", life.iteration, {"loop/policy_lag": lag})
                    if self.rng.random() < 0.5:
                        begun = life.save()
                self._check_end(life)
            except RuntimeError:
                if not killed:
                    raise
                self.seen["driver deaths, torn" if life.is_torn else "driver deaths"] += 1
                if not life.is_torn and self.rng.random() < 0.3:  # Ctrl-C: it saves, at any moment of sampling
                    self.seen["saved while sampling"] += 1
                    life.check()
                    self.saved = life.save()
                return False
            finally:
                self.seen["stale groups"] += life.num_stale
                life.stop()
        return True

    def _check_end(self, life: Life) -> None:
        """Every task of every epoch was trained once, or given up, or is in quarantine since an earlier one."""
        trained, failed, quarantined = Counter(life.trained), Counter(life.failed), dict[str, int]()
        for given_up in life.collector.tasks.failed_tasks:
            if given_up.failure is Failure.DATA:
                quarantined.setdefault(given_up.task_id, given_up.epoch)
            if given_up.task_id in self.weather.broken_tasks:
                assert given_up.failure is Failure.DATA and "has no gold" in given_up.error
                assert given_up.num_tries == 1 + self.config.debugging.fault_tolerance.max_task_retries
        for number in range(self.num_tasks):
            task_id = made_up_task(number).task_id
            for epoch in range(NUM_EPOCHS):
                issue_id = f"{task_id}#{epoch}"
                expected = int(issue_id in life.issued)
                assert expected or quarantined[task_id] < epoch, "never issued"
                assert trained[issue_id] + failed[issue_id] == expected
        assert self.weather.broken_tasks <= quarantined.keys()
        if not self.weather.flaws:
            assert self.weather.broken_tasks == quarantined.keys(), "a failed search counted against a task"
        self.seen["tasks in quarantine"] += len(quarantined)
        self.seen["tasks trained"] += len(life.trained)


FAULTS = (
    "runner kills",
    "hangs",
    "slow searches",
    "search failures",
    "flaws",
    "driver deaths",
    "driver deaths, torn",
    "saved while sampling",
    "stale groups",
    "tasks in quarantine",
)


@pytest.mark.integration
@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=pytest.mark.slow if first else ()) for first in range(0, NUM_SCHEDULES, PER_TEST)],
)
def test_every_task_is_trained_exactly_once_or_given_up(
    first: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + PER_TEST):
        schedule = Schedule(seed, tmp_path / str(seed))
        try:
            schedule.play()
        except BaseException:
            print(f"seed {seed}: {dict(schedule.seen)}; {schedule.config.training}; {schedule.weather}")
            raise
        seen += schedule.seen
    print(dict(seen))
    assert not [fault for fault in FAULTS if not seen[fault]], "no schedule had this fault"
