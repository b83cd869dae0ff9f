"""Benchmarks: ratios of two sides measured in one run, ``ragr1 bench NAME``. Not installed; run from a checkout.

A benchmark is a module with ``describe()``, one line on the workload; ``METRICS``, the names it measures; and
``run(only, repeats, quick)``, which yields one ``Measurement`` after another.
"""

from __future__ import annotations

BENCHMARKS = {
    "all": "benchmarks.everything",
    "crowd": "benchmarks.retrieval.crowd",
    "fast": "benchmarks.fast",
    "gpu": "benchmarks.learner.gpu",
    "growth": "benchmarks.growth",
    "learner": "benchmarks.learner.ratios",
    "real": "benchmarks.real.ratios",
    "retrieval": "benchmarks.retrieval.ratios",
    "rollout": "benchmarks.rollout.ratios",
    "scale": "benchmarks.scale.ratios",
    "trl": "benchmarks.peers.ratios",
    "view": "benchmarks.view.ratios",
}
"""By the name that ``ragr1 bench`` takes; imported only when asked for."""
