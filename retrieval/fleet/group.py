"""RetrieverGroup: the retrieval of a run: a fleet of actors, an index in this process, or a custom retriever."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import ray
from ray.actor import ActorHandle

from cluster.actor_fleet import ActorFleet, answers
from ragr1_actors.core.config import RetrievalSettings
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.resolve import load_object
from retrieval.base import RETRIEVERS, SHARED_KEYS, Retriever
from retrieval.fleet.actor import ActorLoad, ActorSettings, ClientLoad, EncoderActor, RetrieverActor
from retrieval.fleet.batching import PoolSettings
from retrieval.fleet.client import REFRESH_S, RetrieverClient
from retrieval.indexes.manifest import Manifest

START_TIMEOUT_S = 600.0
"""For all replicas to load: reading an index of tens of gigabytes from disk takes minutes."""
_REPORT_EXPIRES_S = 5 * REFRESH_S
"""A client that has not reported for this long has no queries out."""


class RetrieverGroup:
    """The retrieval of a run, with its fleets of ``RetrieverActor`` and ``EncoderActor`` if it has any.

    Every node of the fleets must see the index directory. Ray restarts an actor that dies; clients do not use it until
    it answers a ping.
    """

    def __init__(
        self,
        settings: RetrievalSettings,
        index_dir: Path | None,
        num_threads: int = 1,
        retrievers: ActorFleet | None = None,
        encoders: ActorFleet | None = None,
    ) -> None:
        """Hold fleets that were started; callers use ``create``."""
        self._settings = settings
        self._index_dir = index_dir
        self._num_threads = num_threads
        self._retrievers = retrievers
        self._encoders = encoders
        self._incarnations: dict[str, float] = {}
        """When the process of each actor started, as ``metrics`` last saw it."""
        self._num_restarts: dict[str, int] = {"retriever": 0, "encoder": 0}

    @classmethod
    def create(cls, index_dir: str | Path | None, settings: RetrievalSettings, num_threads: int = 0) -> Self:
        """Start ``settings.num_retrievers`` replicas and ``num_encoders``; ``wait_until_ready`` waits for them.

        Args:
            index_dir: made by ``build_index``; None where ``settings.type`` needs no index.
            settings: the recipe's ``retrieval`` section. With 0 retrievers no actor is started.
            num_threads: of one retriever; 0 takes ``num_cpus_per_retriever``, rounded up.

        Raises:
            DataError: no index in ``index_dir``.
            ConfigError: the index does not fit ``num_shards`` or ``num_encoders``.
        """
        if index_dir is None:
            return cls(settings, None)
        index_dir = Path(index_dir).resolve()
        manifest = Manifest.read(index_dir)  # here, since an actor would wrap the error in a traceback
        num_threads = num_threads or _num_threads(settings.num_cpus_per_retriever)
        if settings.num_retrievers == 0:
            return cls(settings, index_dir, num_threads)
        _check_fleet(settings, manifest)
        encoders = _make_encoders(index_dir, settings) if settings.num_encoders else None
        retrievers = _make_retrievers(index_dir, settings, manifest, num_threads)
        return cls(settings, index_dir, num_threads, retrievers, encoders)

    @property
    def handles(self) -> list[ActorHandle[Any]]:
        """The actors that hold the index and are not stopped."""
        return list(self._retrievers.handles.values()) if self._retrievers else []

    @property
    def num_healthy(self) -> int:
        """Number of actors in ``handles`` that answer a ping within 5 seconds. Blocks while they are busy."""
        return self._retrievers.num_healthy() if self._retrievers else 0

    def wait_until_ready(self) -> None:
        """Return once every actor has loaded its index and searched once.

        Raises:
            FleetError: an actor did not start; all are stopped.
        """
        try:
            for fleet in self._fleets():
                fleet.wait_until_ready(START_TIMEOUT_S)
            self.metrics()  # keeps when each actor started, to count restarts
        except BaseException:
            self.stop()
            raise

    def retriever(self) -> Retriever:
        """Return the retriever, which pickles, so that it can be sent to any actor.

        It is a client of the fleet; with 0 retrievers a ``LocalRetriever``; without an index, what ``retrieval.type``
        names.
        """
        if self._index_dir is None:
            settings = self._settings
            shared = {key: getattr(settings, key) for key in SHARED_KEYS.get(settings.type, ())}
            made: Retriever = load_object(settings.type, RETRIEVERS)(shared | settings.options)
            return made
        if self._retrievers is None:
            from retrieval.local import LocalRetriever  # loads faiss and torch

            settings = self._settings
            return LocalRetriever(
                self._index_dir, self._num_threads, reranker=settings.reranker, options=settings.options
            )
        pool = PoolSettings(self._settings.timeout_s, self._settings.max_retries, self._settings.cache_size)
        encoder_fleet = self._encoders.name if self._encoders else ""
        # a reranker needs the passages, which only the actors rerank
        index_dir = "" if self._settings.reranker else str(self._index_dir)
        return RetrieverClient(self._retrievers.name, self._settings.num_shards, encoder_fleet, pool, index_dir)

    def scale_to(self, num_retrievers: int, num_encoders: int | None = None) -> None:
        """Grow or shrink the fleets while they are used; clients follow within ``client.REFRESH_S``.

        A new replica is searched once it has answered a ping; one that ends answers its calls first.

        Args:
            num_retrievers: replicas, at least 1.
            num_encoders: at least 1; None leaves them as they are.
        """
        assert self._retrievers is not None, "there is no fleet to scale"
        assert num_retrievers >= 1, num_retrievers
        self._retrievers.scale_to(num_retrievers)
        if num_encoders is not None:
            assert self._encoders is not None, "the retrievers encode themselves"
            assert num_encoders >= 1, num_encoders
            self._encoders.scale_to(num_encoders)

    def metrics(self) -> dict[str, float]:
        """Return the health and load of the fleets; ``{}`` without a fleet. Waits up to 5 seconds for lost actors.

        Per fleet, ``retriever`` and ``encoder``::

            retrieval/retriever_actors     actors that answered now
            retrieval/retriever_lost       actors that did not answer
            retrieval/retriever_restarts   restarts of actors since the start, as far as calls of this method saw them
            retrieval/retriever_queries    queries answered since the actors' last start
            retrieval/retriever_batch      mean queries per batch
            retrieval/retriever_busy       share of the time spent on batches, 0 to 1

        Of all clients, as they last reported (every ``client.REFRESH_S`` while they search)::

            retrieval/waiting              queries in the clients' queues
            retrieval/outstanding          queries at replicas
            retrieval/failed_attempts      batches that a replica did not answer, since the start
            retrieval/cache_hit_rate       share of the queries answered from the clients' caches, 0 to 1
        """
        metrics: dict[str, float] = {}
        clients: dict[str, tuple[float, ClientLoad]] = {}
        for fleet in self._fleets():
            loads: dict[str, ActorLoad] = answers(
                {name: handle.load.remote() for name, handle in fleet.handles.items()}
            )
            for name, load in loads.items():
                self._num_restarts[fleet.kind] += self._has_restarted(name, load)
                for client, report in load.clients.items():
                    clients[client] = min(report, clients.get(client, report), key=lambda report: report[0])
            metrics |= _fleet_metrics(fleet, list(loads.values()), self._num_restarts[fleet.kind])
        return metrics | _client_metrics(list(clients.values())) if metrics else {}

    def _has_restarted(self, name: str, load: ActorLoad) -> bool:
        before = self._incarnations.get(name)
        self._incarnations[name] = load.started
        return before is not None and before != load.started

    def stop(self) -> None:
        """End all actors, without a restart. Searches in flight fail."""
        for fleet in self._fleets():
            fleet.stop()

    def _fleets(self) -> list[ActorFleet]:
        return [fleet for fleet in (self._retrievers, self._encoders) if fleet is not None]


def _num_threads(num_cpus: float) -> int:
    return max(1, math.ceil(num_cpus))


def _check_fleet(settings: RetrievalSettings, manifest: Manifest) -> None:
    if settings.num_shards > 1 and (not manifest.is_dense or manifest.has_bm25):
        raise ConfigError(
            f"retrieval.num_shards: got {settings.num_shards} over an index of type {manifest.index_type!r}, of which "
            "only vectors can be cut over actors; set it to 1"
        )
    if settings.num_shards > max(1, len(manifest.shards)):
        raise ConfigError(
            f"retrieval.num_shards: got {settings.num_shards}, but the index has {len(manifest.shards)}; lower it, or "
            f"build the index with --shards {settings.num_shards}"
        )
    if settings.num_encoders and not manifest.is_dense:
        raise ConfigError(
            f"retrieval.num_encoders: got {settings.num_encoders} over an index of type {manifest.index_type!r}, which "
            "has no vectors; set it to 0"
        )


def _make_retrievers(index_dir: Path, settings: RetrievalSettings, manifest: Manifest, num_threads: int) -> ActorFleet:
    actor_class: Any = ray.remote(RetrieverActor)
    options = _options(settings.num_cpus_per_retriever, settings.num_gpus_per_retriever)

    def start(member: str) -> Mapping[str, ActorHandle[Any]]:
        handles = {}
        for number in range(settings.num_shards):
            name = f"{member}.{number}"
            shards = tuple(range(number, len(manifest.shards), settings.num_shards))
            actor_settings = ActorSettings(
                str(index_dir),
                num_threads,
                _device(settings.num_gpus_per_retriever),
                settings.reranker,
                settings.options,
                shards if settings.num_shards > 1 else None,
                encodes=manifest.is_dense and not settings.num_encoders,
            )
            handles[name] = actor_class.options(name=name, **options).remote(actor_settings)
        return handles

    fleet = ActorFleet("retriever", start)
    fleet.scale_to(settings.num_retrievers)
    return fleet


def _make_encoders(index_dir: Path, settings: RetrievalSettings) -> ActorFleet:
    actor_class: Any = ray.remote(EncoderActor)
    options = _options(settings.num_cpus_per_encoder, settings.num_gpus_per_encoder)
    actor_settings = ActorSettings(
        str(index_dir), _num_threads(settings.num_cpus_per_encoder), _device(settings.num_gpus_per_encoder)
    )

    def start(member: str) -> Mapping[str, ActorHandle[Any]]:
        return {member: actor_class.options(name=member, **options).remote(actor_settings)}

    fleet = ActorFleet("encoder", start)
    fleet.scale_to(settings.num_encoders)
    return fleet


def _options(num_cpus: float, num_gpus: float) -> dict[str, Any]:
    """Ray restarts the actors without limit, but no call: the client retries, on another replica."""
    return {"num_cpus": num_cpus, "num_gpus": num_gpus, "max_restarts": -1, "max_task_retries": 0}


def _device(num_gpus: float) -> str:
    return "cuda" if num_gpus else "cpu"


def _fleet_metrics(fleet: ActorFleet, loads: Sequence[ActorLoad], num_restarts: int) -> dict[str, float]:
    num_queries, num_batches = sum(load.queries for load in loads), sum(load.batches for load in loads)
    busy_s, up_s = sum(load.busy_s for load in loads), sum(load.up_s for load in loads)
    found = {
        "actors": len(loads),
        "lost": len(fleet.handles) - len(loads),
        "restarts": num_restarts,
        "queries": num_queries,
        "batch": num_queries / num_batches if num_batches else 0.0,
        "busy": busy_s / up_s if up_s else 0.0,
    }
    return {f"retrieval/{fleet.kind}_{name}": float(value) for name, value in found.items()}


def _client_metrics(reports: Sequence[tuple[float, ClientLoad]]) -> dict[str, float]:
    searching = [load for age_s, load in reports if age_s < _REPORT_EXPIRES_S]
    num_queries = sum(load.queries for _, load in reports)
    return {
        "retrieval/waiting": float(sum(load.waiting for load in searching)),
        "retrieval/outstanding": float(sum(load.outstanding for load in searching)),
        "retrieval/failed_attempts": float(sum(load.failed_attempts for _, load in reports)),
        "retrieval/cache_hit_rate": sum(load.cached for _, load in reports) / num_queries if num_queries else 0.0,
    }
