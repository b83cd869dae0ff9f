"""Guard: alarms on metrics that show a collapse before the reward does.

::

    metrics of an iteration ──► one Track per alarm ──► outside its limits ``patience`` times in a row ──► Alarm
                                    │    ▲                                                                   │
                                    ▼    │ only values inside                       warn, stop or roll_back ◄┘
                              baseline: their median

RL on search tasks collapses after tens to hundreds of iterations. Before the answers get worse, entropy jumps or
vanishes, good actions become less likely (lazy likelihood displacement, arXiv:2512.04220), gradients grow, turns lose
their format and searches stop. The metrics are means over a whole batch; the defaults leave room for the noise of small
batches and for the slow change of a healthy run.

The guard is pure: the same metrics and settings give the same alarms, even if its state was saved in between.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from ragr1_actors.core.config import AlarmName, GuardAction, GuardSettings
from ragr1_actors.runs.telemetry.events import Alarm, GuardState, Track

Unit = Literal["times", "plus", "absolute"]
"""Meaning of limits: factors of the baseline, differences from it, or values."""
Limits = tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """Metric of an alarm, and the limits between which it is silent."""

    metric: str
    unit: Unit
    low: float | None = None
    high: float | None = None
    slack: float = 0.0
    """Distance from the baseline, in the metric's unit, that is always allowed: a factor of almost 0 says little."""
    from_best: bool = False
    """Whether the baseline is the highest median so far, and not the newest: a slow fall counts, too."""

    def bounds(self, baseline: float | None) -> Limits:
        """Return the least and greatest allowed values; without a baseline, or for a multiple of 0, all are allowed.

        The gradient's norm is 0 as long as no rewards differ: its first other value is no alarm.
        """
        if self.unit == "absolute":
            return self.low, self.high
        if baseline is None or (self.unit == "times" and not baseline):
            return None, None

        def at(limit: float) -> float:
            return limit * baseline if self.unit == "times" else baseline + limit

        low = None if self.low is None else min(at(self.low), baseline - self.slack)
        high = None if self.high is None else max(at(self.high), baseline + self.slack)
        return low, high


RULES: dict[AlarmName, Rule] = {
    "entropy": Rule("learner/entropy", "times", low=0.2, high=2.5, slack=0.1),
    "good_logprob": Rule("learner/good_logprob", "plus", low=-0.3, from_best=True),
    "grad_norm": Rule("learner/grad_norm", "times", high=4.0),
    "logprob_gap": Rule("learner/logprob_gap_mean", "absolute", high=0.1),
    "format": Rule("rollout/well_formed", "times", low=0.85, slack=0.05, from_best=True),
    "searches": Rule("rollout/queries", "times", low=0.4, slack=0.1),
    "repeat_queries": Rule("rollout/repeat_query_rate", "absolute", high=0.3),
    "observation_share": Rule("rollout/observation_share", "times", low=0.4, high=2.0, slack=0.2),
}


class Guard:
    """Watches one run. Call ``observe`` once per iteration; a resumed run begins with ``state``."""

    def __init__(self, settings: GuardSettings, state: GuardState | None = None) -> None:
        """Begin without a history, or with the history in a checkpoint."""
        self.settings = settings
        self.state = state or GuardState()
        self._rules = {
            name: replace(rule, low=limits[0], high=limits[1]) if (limits := settings.limits.get(name)) else rule
            for name, rule in RULES.items()
            if self._action(name) != "ignore"
        }

    def _action(self, name: AlarmName) -> GuardAction:
        return self.settings.actions.get(name, self.settings.action)

    def observe(self, iteration: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Take the metrics of an iteration and return the alarms that begin in it.

        A missing metric, such as the learner's in an iteration without a step, changes nothing.
        """
        begun = [
            alarm
            for name, rule in self._rules.items()
            if rule.metric in metrics and (alarm := self._look(name, rule, iteration, float(metrics[rule.metric])))
        ]
        self.state.alarms += begun
        self.state.unanswered += [alarm for alarm in begun if alarm.action != "warn"]
        return begun

    def _look(self, name: AlarmName, rule: Rule, iteration: int, value: float) -> Alarm | None:
        track = self.state.tracks.setdefault(name, Track())
        is_enough = 2 * len(track.values) >= self.settings.baseline_iterations
        newest = median(track.values) if is_enough and rule.unit != "absolute" else None
        baseline = track.best if rule.from_best else newest
        low, high = rule.bounds(baseline)
        passed = low if low is not None and value < low else high if high is not None and value > high else None
        if math.isfinite(value) and passed is None:
            self._keep(track, value)
            return None
        track.outside_since = track.outside_since if track.num_outside else iteration
        track.num_outside += 1
        if track.num_outside != self.settings.patience:
            return None
        found = value if math.isfinite(value) else None
        return Alarm(name, rule.metric, iteration, found, passed, baseline, self._action(name))

    def _keep(self, track: Track, value: float) -> None:
        track.num_outside = 0
        track.values = [*track.values, value][-self.settings.baseline_iterations :]
        if 2 * len(track.values) >= self.settings.baseline_iterations:
            newest = median(track.values)
            track.best = newest if track.best is None else max(track.best, newest)

    @property
    def num_active(self) -> int:
        """Number of alarms that have begun and not ended."""
        return sum(track.num_outside >= self.settings.patience for track in self.state.tracks.values())

    @property
    def is_suspicious(self) -> bool:
        """Whether a metric is outside limits whose alarm would roll back, so that the run must not return to here."""
        tracks = self.state.tracks
        return any(
            self._action(name) == "roll_back" and name in tracks and tracks[name].num_outside for name in self._rules
        )

    def answer(self) -> list[Alarm]:
        """Return the alarms that stop the run or roll it back, and count them as answered."""
        answered, self.state.unanswered = self.state.unanswered, []
        return answered

    def why_stop(self, alarms: list[Alarm]) -> str:
        """Return why these alarms stop the run, to follow ``the guard stopped the run``; empty if they roll back."""
        if any(alarm.action == "stop" for alarm in alarms):
            return " as training.guard says"
        num_roll_backs = self.state.num_roll_backs
        return f" after {num_roll_backs} roll-backs" if num_roll_backs >= self.settings.max_roll_backs else ""

    def last_good(self, alarms: list[Alarm]) -> int:
        """Return the newest iteration whose policy did not show the alarms.

        The metrics of an iteration belong to the policy before its update.
        """
        return min(self.state.tracks[alarm.name].outside_since for alarm in alarms) - 2

    @property
    def next_lr_factor(self) -> float:
        """Return the factor of the configuration's learning rate after one more roll-back."""
        return float(self.settings.lr_factor ** (self.state.num_roll_backs + 1))

    def rolled_back(self, alarms: list[Alarm], iteration: int, then: GuardState) -> None:
        """Continue from ``iteration``, whose state was ``then``, because of ``alarms``; alarms and counts are kept."""
        kept = [replace(a, rolled_back_to=iteration) if a in alarms else a for a in self.state.alarms]
        num_roll_backs = self.state.num_roll_backs + 1
        self.state = replace(then, alarms=kept, unanswered=[], num_roll_backs=num_roll_backs)

    def metrics(self) -> dict[str, float]:
        """Return the counts for ``metrics.jsonl``."""
        return {
            "guard/active": float(self.num_active),
            "guard/alarms": float(len(self.state.alarms)),
            "guard/roll_backs": float(self.state.num_roll_backs),
        }
