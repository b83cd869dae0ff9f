"""Autoscaling policy over simulated fleets, in virtual time; ``FleetController`` is its counterpart in a run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from cluster.autoscaler import Autoscaler, autoscale_retrievers, autoscale_runners
from ragr1_actors.core.config import RunConfig
from ragr1_actors.lab.simulation.fleet import SimulatedRetrievers, SimulatedRunners
from ragr1_actors.training.batches import BatchCollector
from ragr1_actors.training.fleet_controller import LearnerClock


@dataclass(frozen=True, slots=True)
class Resized:
    """Decision that changed a fleet."""

    time_s: float
    fleet: str
    """Name of the fleet: ``runners`` or ``retrievers``."""
    before: int
    after: int
    reason: str


class SimulatedController:
    """Decides about the fleets that the recipe lets scale; ``tick`` is called once a second."""

    def __init__(
        self,
        config: RunConfig,
        runners: SimulatedRunners,
        retrievers: SimulatedRetrievers,
        learner: LearnerClock,
        collector: BatchCollector,
    ) -> None:
        """Begin with the present sizes of the fleets."""
        self.resized: list[Resized] = []
        self._runners, self._retrievers, self._learner, self._collector = runners, retrievers, learner, collector
        self._scalers: dict[str, Autoscaler] = {}
        if (settings := config.env_runners.autoscaling) is not None:
            most, lag = config.env_runners.max_concurrent_trajectories, config.training.max_policy_lag
            self._scalers["runners"] = autoscale_runners(settings, runners.num_running, most, lag)
        if (by_queries := config.retrieval.autoscaling) is not None:
            self._scalers["retrievers"] = autoscale_retrievers(by_queries, retrievers.num_running)

    def tick(self) -> None:
        """Look at the fleets, and give them other sizes."""
        for name, scaler in self._scalers.items():
            fleet = self._runners if name == "runners" else self._retrievers
            state, before = fleet.state(), scaler.num_replicas
            if name == "runners":
                state = replace(state, learner=self._learner.state(self._collector.num_finished_batches()))
            decision = scaler.decide(state)
            if decision.num_replicas != before:
                self.resized.append(Resized(state.time_s, name, before, decision.num_replicas, decision.reason))
                fleet.scale_to(decision.num_replicas)
