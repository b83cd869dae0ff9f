"""Publishing a policy version: from the learners into every EnvRunner.

The weights go from learner rank 0 into the object store and from there to each runner, by reference: they never pass
through the driver. In the driver's own process they are handed over as they are.
"""

from __future__ import annotations

import time
from typing import Any, Protocol


class WeightSource(Protocol):
    """What publishes, a ``LearnerGroup``."""

    def weights_ref(self) -> Any:
        """A reference to ``{name: array}``, or the dictionary itself."""
        ...


class WeightSink(Protocol):
    """What takes the weights over, an ``EnvRunnerGroup``."""

    def update_weights(self, weights: Any, version: int) -> None:
        """Swap them in; every token sampled from now on carries ``version``."""
        ...


def publish(source: WeightSource, sink: WeightSink, version: int) -> float:
    """Make ``version`` the policy that every runner samples with, and return the seconds it took."""
    started = time.perf_counter()
    sink.update_weights(source.weights_ref(), version)
    return time.perf_counter() - started
