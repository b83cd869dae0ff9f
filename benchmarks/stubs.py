"""Retrieval actors that search nothing: for the cost of the road to them, and for fleets of a fixed service time."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.evidence import PASSAGE_WORDS, words
from retrieval.base import Passage
from retrieval.wire import WireHits, compress, pack


def stub_passages(query: str, k: int) -> list[Passage]:
    """``k`` passages of 100 words that are the query's own: nothing travels once for several queries."""
    return [Passage(f"{query}/{rank}", f"title {rank}", _text(query, rank), 1.0 - rank / 10) for rank in range(k)]


@lru_cache(maxsize=4096)
def _text(query: str, rank: int) -> str:
    rng = random.Random(f"{rank} {query}")
    return " ".join(rng.choices(_known_words(), k=PASSAGE_WORDS))


@lru_cache(maxsize=1)
def _known_words() -> list[str]:
    return words()


class StubActor:
    """A ``RetrieverActor`` in all but the search: a query takes a fixed time."""

    def __init__(self, service_s: float) -> None:
        self._service_s = service_s

    def ping(self) -> None:
        """Answer."""

    def search_batch(self, queries: list[str], k: int, vectors: NDArray[np.float32] | None = None) -> WireHits:
        if self._service_s:
            time.sleep(self._service_s * len(queries))
        rows = np.arange(len(queries) * k).reshape(len(queries), k)
        return compress(pack([stub_passages(query, k) for query in queries], rows, "stub"))


def start_stubs(num_actors: int, service_s: float) -> Any:
    """Return an ``ActorFleet`` of stubs that a ``RetrieverClient`` searches as any other."""
    import ray

    from cluster.fleet import ActorFleet

    actor_class: Any = ray.remote(StubActor)

    def start(member: str) -> Mapping[str, Any]:
        name = f"{member}.0"
        return {name: actor_class.options(name=name, num_cpus=0).remote(service_s)}

    fleet = ActorFleet("retriever", start)
    fleet.scale_to(num_actors)
    fleet.wait_until_ready(300)
    return fleet
