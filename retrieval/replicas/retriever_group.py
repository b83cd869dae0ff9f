"""RetrieverGroup: the retrieval of a run: a fleet of actors, an index in this process, or a custom retriever."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ray.actor import ActorHandle

from cluster.placement import ActorOptions, labelled
from cluster.storage import Storage, is_uri, without_secrets
from cluster.supervision.watchdog import HANG_TIMEOUT_S
from ragr1_actors.core.config import RetrievalSettings
from ragr1_actors.core.disk.folders import AnyFolder, Folder, Share, part_of
from ragr1_actors.core.errors import ConfigError, DataError
from ragr1_actors.core.schema import TRAJECTORIES
from retrieval.base import Retriever
from retrieval.indexes.manifest import ENCODER_FOLDER, MANIFEST_FILE, Manifest
from retrieval.local import open_retriever
from retrieval.replicas.batching import ClientLoad, PoolArguments
from retrieval.replicas.client import RetrieverClient
from retrieval.replicas.replica_set import (
    REPORT_EXPIRES_S,
    ActorArguments,
    ActorLoad,
    EncoderActor,
    ReplicaSet,
    RetrieverActor,
    client_reports,
)

START_TIMEOUT_S = 600.0
"""Limit for all replicas to load, in seconds: reading an index of tens of gigabytes from disk takes minutes."""


class RetrieverGroup:
    """Retrieval of a run, with its fleets of ``RetrieverActor`` and ``EncoderActor`` if it has any.

    Ray restarts an actor that dies; clients do not use it until it answers a ping.
    """

    def __init__(
        self,
        index_dir: str | Path | None,
        settings: RetrievalSettings,
        share: Share = lambda folder: folder,
        retriever_options: ActorOptions | None = None,
        encoder_options: ActorOptions | None = None,
        hang_timeout_s: float = HANG_TIMEOUT_S,
    ) -> None:
        """Start ``settings.num_retrievers`` replicas and ``num_encoders``; ``wait_until_ready`` waits for them.

        Args:
            index_dir: made by ``build_index``; None where ``settings.type`` needs no index.
            settings: the recipe's ``retrieval`` section. With 0 retrievers no actor is started.
            share: returns the form in which actors get a folder: index, encoder, reranker, recorded searches.
            retriever_options: where the first, second, ... retriever runs; by default on any node with the labels of
                ``settings.label_selector``.
            encoder_options: the same for encoders.
            hang_timeout_s: of ``ReplicaSet``.

        Raises:
            DataError: no index in ``index_dir``.
            ConfigError: the index does not fit ``num_shards`` or ``num_encoders``.
        """
        self._settings = settings
        self._index_dir = None if index_dir is None else str(Path(index_dir).resolve())
        self.fleets: list[ReplicaSet] = []
        """Fleet of the retrievers, then the encoders' if they are separate actors; empty without actors."""
        self._options = dict(settings.options)
        if settings.type == "replay" and "run" in self._options:
            self._options["run"] = _recorded(str(self._options["run"]), share)
        if self._index_dir is None:
            return
        manifest = Manifest.read(self._index_dir)  # here, since an actor would wrap the error in a traceback
        if not settings.num_retrievers:
            return
        _check_fleet(settings, manifest)
        retrievers, encoder = _actor_arguments(self._index_dir, manifest, settings, share)
        self.fleets.append(
            ReplicaSet(
                RetrieverActor,
                [(each,) for each in retrievers],
                num_cpus=settings.num_cpus_per_retriever,
                num_gpus=settings.num_gpus_per_retriever,
                actor_options=retriever_options or labelled(settings.label_selector),
                hang_timeout_s=hang_timeout_s,
            )
        )
        if settings.encoders.num_encoders:
            self.fleets.append(
                ReplicaSet(
                    EncoderActor,
                    [(encoder,)],
                    num_cpus=settings.encoders.num_cpus,
                    num_gpus=settings.encoders.num_gpus,
                    actor_options=encoder_options or labelled(settings.label_selector),
                    hang_timeout_s=hang_timeout_s,
                )
            )
        self.scale_to(settings.num_retrievers, settings.encoders.num_encoders or None)

    @property
    def handles(self) -> list[ActorHandle[Any]]:
        """Actors that hold the index and are not stopped."""
        return self.fleets[0].actors if self.fleets else []

    def wait_until_ready(self) -> None:
        """Return once every actor has loaded its index and searched once.

        Raises:
            FleetError: an actor did not start; all are stopped.
        """
        try:
            for fleet in self.fleets:
                fleet.fleet.wait_until_up(START_TIMEOUT_S)
        except BaseException:
            self.stop()
            raise

    def retriever(self) -> Retriever:
        """Return the retriever, which pickles, so that it can be sent to any actor.

        It is a client of the fleet; with 0 retrievers a ``LocalRetriever``; without an index the class that
        ``retrieval.type`` names.
        """
        settings = self._settings
        if self._index_dir is None:
            return open_retriever(None, settings.model_copy(update={"options": self._options}))
        if not self.fleets:
            return open_retriever(self._index_dir, settings)
        encoder_fleet = self.fleets[1].name if settings.encoders.num_encoders else ""
        pool = PoolArguments(**settings.requests.model_dump())
        # a reranker needs the passages, which only the actors rerank
        index_dir = "" if settings.reranker else self._index_dir
        return RetrieverClient(self.fleets[0].name, settings.num_shards, encoder_fleet, pool, index_dir)

    def scale_to(self, num_retrievers: int, num_encoders: int | None = None) -> None:
        """Grow or shrink the fleets while they are used; clients follow within ``replica_set.REFRESH_S``.

        A new replica is searched once it has answered a ping; one that ends answers its calls first.

        Args:
            num_retrievers: number of replicas, at least 1.
            num_encoders: number of encoders, at least 1; None changes nothing.
        """
        retrievers, *encoders = self.fleets
        assert num_retrievers >= 1, num_retrievers
        retrievers.scale_to(num_retrievers)
        if num_encoders is not None:
            assert num_encoders >= 1, num_encoders
            encoders[0].scale_to(num_encoders)

    def metrics(self) -> dict[str, float]:
        """Return the health and load of the fleets, named as in docs/metrics.md; ``{}`` without a fleet.

        It waits up to 5 seconds for lost actors. Clients report every ``replica_set.REFRESH_S`` while they search.
        """
        metrics: dict[str, float] = {}
        reports: list[tuple[float, ClientLoad]] = []
        for fleet in self.fleets:
            loads = fleet.loads()
            reports = reports or client_reports(loads.values())
            metrics |= _fleet_metrics(fleet, list(loads.values()))
        return metrics | _client_metrics(reports) if metrics else {}

    def stop(self) -> None:
        """End all actors, without a restart. Searches in flight fail."""
        for fleet in self.fleets:
            fleet.stop()


def _num_threads(num_cpus: float) -> int:
    return max(1, math.ceil(num_cpus))


def _check_fleet(settings: RetrievalSettings, manifest: Manifest) -> None:
    if settings.num_shards > 1 and (not manifest.is_dense or manifest.has_bm25):
        raise ConfigError(
            f"retrieval.num_shards: got {settings.num_shards} over an index of type {manifest.index_type!r}, of which "
            "only vectors can be cut over actors; set it to 1"
        )
    if settings.num_shards > 1 and manifest.is_adopted:
        raise ConfigError(
            f"retrieval.num_shards: got {settings.num_shards}, but an adopted index is one file; set it to 1"
        )
    if settings.num_shards > max(1, len(manifest.shards)):
        raise ConfigError(
            f"retrieval.num_shards: got {settings.num_shards}, but the index has {len(manifest.shards)}; lower it, or "
            f"build the index with --shards {settings.num_shards}"
        )
    if (num_encoders := settings.encoders.num_encoders) and not manifest.is_dense:
        raise ConfigError(
            f"retrieval.encoders.num_encoders: got {num_encoders} over an index of type {manifest.index_type!r}, which "
            "has no vectors; set it to 0"
        )


def _recorded(run: str, share: Share) -> AnyFolder:
    """Return the form in which actors get the recorded searches of a run, or its path if it is already a ``Folder``."""
    if is_uri(run):
        found = Storage(run).find(TRAJECTORIES)
        if found is None:
            raise DataError(f"no recorded searches in {without_secrets(run)}; give the URI of a run that kept them")
        return found
    records = share(Path(run) / TRAJECTORIES)
    return records if isinstance(records, Folder) else run


def _actor_arguments(
    index_dir: str, manifest: Manifest, settings: RetrievalSettings, share: Share
) -> tuple[list[ActorArguments], ActorArguments]:
    """Return the arguments of the actors of a retriever, one for each of its shards, and those of an encoder."""
    encoder = "" if manifest.encoder in ("", ENCODER_FOLDER) else share(manifest.encoder)
    index = share(index_dir)
    reranker = share(settings.reranker) if settings.reranker else ""
    # without the shards: all actors need it, and a node fetches it once
    rest = [MANIFEST_FILE, manifest.corpus.name, *(file.name for file in manifest.files), f"{ENCODER_FOLDER}/"]
    retrievers = []
    for number in range(settings.num_shards):
        shards = tuple(range(number, len(manifest.shards), settings.num_shards))
        files = [manifest.shards[shard].file.name for shard in shards]  # none for an index without vectors
        made = ActorArguments(
            part_of(index, *rest),
            _num_threads(settings.num_cpus_per_retriever),
            _device(settings.num_gpus_per_retriever),
            encoder,
            reranker,
            settings.options,
            shards if settings.num_shards > 1 else None,
            encodes=manifest.is_dense and not settings.encoders.num_encoders,
            shard_files=part_of(index, *files) if files else "",
        )
        retrievers.append(made)
    index_of_encoder = part_of(index, MANIFEST_FILE, f"{ENCODER_FOLDER}/")
    encoders = settings.encoders
    threads, device = _num_threads(encoders.num_cpus), _device(encoders.num_gpus)
    return retrievers, ActorArguments(index_of_encoder, threads, device, encoder)


def _device(num_gpus: float) -> str:
    return "cuda" if num_gpus else "cpu"


def _fleet_metrics(fleet: ReplicaSet, loads: Sequence[ActorLoad]) -> dict[str, float]:
    num_queries, num_batches = sum(load.queries for load in loads), sum(load.batches for load in loads)
    busy_s, up_s = sum(load.busy_s for load in loads), sum(load.up_s for load in loads)
    found = {
        "actors": len(loads),
        "lost": len(fleet.handles) - len(loads),
        "restarts": fleet.fleet.num_restarts,
        "hangs": fleet.fleet.num_hangs,
        "queries": num_queries,
        "batch": num_queries / num_batches if num_batches else 0.0,
        "busy": busy_s / up_s if up_s else 0.0,
        "busy_s": busy_s,
    }
    return {f"retrieval/{fleet.kind}_{name}": float(value) for name, value in found.items()}


def _client_metrics(reports: Sequence[tuple[float, ClientLoad]]) -> dict[str, float]:
    searching = [load for age_s, load in reports if age_s < REPORT_EXPIRES_S]
    num_queries = sum(load.queries for _, load in reports)
    return {
        "retrieval/waiting": float(sum(load.waiting for load in searching)),
        "retrieval/outstanding": float(sum(load.outstanding for load in searching)),
        "retrieval/failed_attempts": float(sum(load.failed_attempts for _, load in reports)),
        "retrieval/cache_hit_rate": sum(load.cached for _, load in reports) / num_queries if num_queries else 0.0,
    }
