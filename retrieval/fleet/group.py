"""RetrieverGroup: a run's retrieval, be it a fleet of actors, an index in this process, or a server elsewhere."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError

from cluster.actor_fleet import PING_TIMEOUT_S, ActorFleet
from ragr1_actors.core.config import RetrievalSettings
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.plugins import load_object
from retrieval.base import RETRIEVERS, SHARED_KEYS, Retriever
from retrieval.fleet.actor import ActorSettings, EncoderActor, RetrieverActor
from retrieval.fleet.client import RetrieverClient
from retrieval.fleet.pooled import PoolSettings
from retrieval.indexes.manifest import Manifest

START_TIMEOUT_S = 600.0
"""For all replicas to load; an index of tens of gigabytes is read once from a cold disk."""


class RetrieverGroup:
    """The retrieval of a run, and the fleets of ``RetrieverActor`` and ``EncoderActor`` behind it where there are any.

    Every node of the fleets must see the index directory. Ray restarts an actor that dies; clients leave it out until
    it answers again.
    """

    def __init__(
        self,
        settings: RetrievalSettings,
        index_dir: Path | None,
        num_threads: int = 1,
        retrievers: ActorFleet | None = None,
        encoders: ActorFleet | None = None,
    ) -> None:
        """Hold fleets that were started; use ``create``."""
        self._settings = settings
        self._index_dir = index_dir
        self._num_threads = num_threads
        self._retrievers = retrievers
        self._encoders = encoders

    @classmethod
    def create(cls, index_dir: str | Path | None, settings: RetrievalSettings, num_threads: int = 0) -> Self:
        """Start ``settings.num_retrievers`` replicas and ``num_encoders``; ``wait_until_ready`` waits for them.

        Args:
            index_dir: made by ``build_index``; None where ``settings.type`` needs no index.
            settings: the recipe's ``retrieval`` section. With 0 retrievers no actor is started.
            num_threads: of one retriever; 0 takes ``num_cpus_per_retriever``, rounded up.

        Raises:
            DataError: no index in ``index_dir``.
            ConfigError: the index cannot be cut into ``settings.num_shards``.
        """
        if index_dir is None:
            return cls(settings, None)
        index_dir = Path(index_dir).resolve()
        manifest = Manifest.read(index_dir)  # one sentence here, rather than a traceback from an actor
        num_threads = num_threads or _num_threads(settings.num_cpus_per_retriever)
        if settings.num_retrievers == 0:
            return cls(settings, index_dir, num_threads)
        _check_fleet(settings, manifest)
        encoders = _make_encoders(index_dir, settings) if settings.num_encoders else None
        retrievers = _make_retrievers(index_dir, settings, manifest, num_threads)
        return cls(settings, index_dir, num_threads, retrievers, encoders)

    @property
    def handles(self) -> list[ActorHandle[Any]]:
        """The actors that hold the index, started and not stopped."""
        return list(self._retrievers.handles.values()) if self._retrievers else []

    @property
    def num_healthy(self) -> int:
        """Of ``handles``, those that answer a ping within 5 seconds. Blocks for as long as they are busy."""
        return self._retrievers.num_healthy() if self._retrievers else 0

    def wait_until_ready(self) -> None:
        """Return once every actor has answered a ping: all is loaded and a search has been run.

        Raises:
            FleetError: one did not start; all are stopped.
        """
        try:
            for fleet in self._fleets():
                fleet.wait_until_ready(START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise

    def retriever(self) -> Retriever:
        """Return what to search with. It pickles, so it can be handed to any actor.

        A client of the fleet; with 0 retrievers the index in this process; or what ``retrieval.type`` names.
        """
        if self._index_dir is None:
            settings = self._settings
            shared = {key: getattr(settings, key) for key in SHARED_KEYS.get(settings.type, ())}
            made: Retriever = load_object(settings.type, RETRIEVERS)(shared | settings.options)
            return made
        if self._retrievers is None:
            from retrieval.local import LocalRetriever  # faiss and the encoder's libraries, in the caller's process

            settings = self._settings
            return LocalRetriever(
                self._index_dir, self._num_threads, reranker=settings.reranker, options=settings.options
            )
        pool = PoolSettings(self._settings.timeout_s, self._settings.max_retries, self._settings.cache_size)
        encoder_fleet = self._encoders.name if self._encoders else ""
        # A reranker orders passages, not rows.
        index_dir = "" if self._settings.reranker else str(self._index_dir)
        return RetrieverClient(self._retrievers.name, self._settings.num_shards, encoder_fleet, pool, index_dir)

    def scale_to(self, num_retrievers: int, num_encoders: int | None = None) -> None:
        """Grow or shrink the fleets while they are used; clients see it within ``client.REFRESH_S``.

        A new replica is searched once it has answered a ping; one that goes first answers what it was asked.

        Args:
            num_retrievers: replicas, at least 1.
            num_encoders: at least 1; None leaves them as they are.
        """
        assert self._retrievers is not None, "a retriever in this process does not scale"
        assert num_retrievers >= 1, num_retrievers
        self._retrievers.scale_to(num_retrievers)
        if num_encoders is not None:
            assert self._encoders is not None, "the retrievers encode themselves"
            assert num_encoders >= 1, num_encoders
            self._encoders.scale_to(num_encoders)

    def metrics(self) -> dict[str, float]:
        """Return how busy each fleet has been since its start, of the actors that answer within 5 seconds.

        ``{"retrieval/retriever_queries": 812.0, "retrieval/retriever_batch": 21.4, "retrieval/retriever_busy": 0.31,
        "retrieval/retriever_actors": 2.0}``, and the same of the encoders.
        """
        return {name: value for fleet in self._fleets() for name, value in _load(fleet).items()}

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

    def start(member: str) -> Mapping[str, ActorHandle[Any]]:
        handles = {}
        for number in range(settings.num_shards):
            shards = tuple(range(number, len(manifest.shards), settings.num_shards))
            actor_settings = ActorSettings(
                str(index_dir),
                num_threads,
                "cuda" if settings.num_gpus_per_retriever else "cpu",
                settings.reranker,
                settings.options,
                shards if settings.num_shards > 1 else None,
                encodes=manifest.is_dense and not settings.num_encoders,
            )
            name = f"{member}.{number}"
            handles[name] = actor_class.options(
                name=name,
                num_cpus=settings.num_cpus_per_retriever,
                num_gpus=settings.num_gpus_per_retriever,
                max_restarts=-1,
                max_task_retries=0,  # the client retries, on another replica
            ).remote(actor_settings)
        return handles

    fleet = ActorFleet("retriever", start)
    fleet.scale_to(settings.num_retrievers)
    return fleet


def _make_encoders(index_dir: Path, settings: RetrievalSettings) -> ActorFleet:
    actor_class: Any = ray.remote(EncoderActor)
    device = "cuda" if settings.num_gpus_per_encoder else "cpu"
    actor_settings = ActorSettings(str(index_dir), _num_threads(settings.num_cpus_per_encoder), device)

    def start(member: str) -> Mapping[str, ActorHandle[Any]]:
        options = {"num_cpus": settings.num_cpus_per_encoder, "num_gpus": settings.num_gpus_per_encoder}
        return {
            member: actor_class.options(name=member, max_restarts=-1, max_task_retries=0, **options).remote(
                actor_settings
            )
        }

    fleet = ActorFleet("encoder", start)
    fleet.scale_to(settings.num_encoders)
    return fleet


def _load(fleet: ActorFleet) -> dict[str, float]:
    calls: list[Any] = [handle.load.remote() for handle in fleet.handles.values()]
    answered, _ = ray.wait(calls, num_returns=len(calls), timeout=PING_TIMEOUT_S)
    loads = []
    for call in answered:
        try:
            loads.append(ray.get(call))
        except RayError:
            continue
    total = {name: sum(load[name] for load in loads) for name in ("queries", "batches", "busy_s", "up_s")}
    return {
        f"retrieval/{fleet.kind}_actors": float(len(loads)),
        f"retrieval/{fleet.kind}_queries": total["queries"],
        f"retrieval/{fleet.kind}_batch": total["queries"] / total["batches"] if total["batches"] else 0.0,
        f"retrieval/{fleet.kind}_busy": total["busy_s"] / total["up_s"] if total["up_s"] else 0.0,
    }
