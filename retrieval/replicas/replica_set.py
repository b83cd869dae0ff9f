"""ReplicaSet: a fleet of actors that clients find by name, while their number changes.

::

    scale_to(3)        retriever-5f0c-0.0   retriever-5f0c-1.0   retriever-5f0c-2.0
        │                      ▲                ▲
        └─► list of names ─────┴────────────────┘   which clients read every ``REFRESH_S``

The list is in Ray's key-value store. A member that is removed is taken off the list first, and ended ``LEAVE_S`` later,
when no client uses it any more.

An actor is a replica of the index or a shard of it, or an encoder without an index.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import ray
from numpy.typing import NDArray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from cluster.autoscaler import FleetState
from cluster.metrics import observe
from cluster.placement import ActorOptions, anywhere
from cluster.rpc import RpcAddress, RpcServer, encode
from cluster.supervision.fleet import Fleet, Member, MemberState, Process, Pulse
from cluster.supervision.watchdog import HANG_TIMEOUT_S, beating
from ragr1_actors.core.disk.folders import AnyFolder, on_this_node
from retrieval.base import Passage
from retrieval.indexes.manifest import FLAT, Manifest
from retrieval.replicas.batching import ClientLoad

CODEC = pa.Codec("zstd", compression_level=1)


@dataclass(frozen=True, slots=True)
class ActorArguments:
    """Arguments of an actor of the fleet."""

    index: AnyFolder
    num_threads: int
    device: str
    """Device of encoder, vectors and reranker: ``cpu`` or ``cuda``."""
    encoder: AnyFolder = ""
    """Folder of the index's encoder, if it is not in the index."""
    reranker: AnyFolder = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    shards: tuple[int, ...] | None = None
    """Numbers of the index's shards that this actor holds; None means all."""
    encodes: bool = True
    """Whether the actor encodes queries itself."""
    shard_files: AnyFolder = ""
    """Folder with the files of these shards, apart from the rest of the index, which the actors of a node share."""


class RowHits(NamedTuple):
    """Rows that a batch of queries found, for a client whose node also has the corpus."""

    index_version: str
    scores: NDArray[np.float32]
    """Scores, ``[num_queries, depth]``."""
    rows: NDArray[np.int64]
    """Corpus rows, ``[num_queries, depth]``; ``ABSENT`` if fewer were found."""


class PackedHits(NamedTuple):
    """Passages that a batch of queries found, for a client without the corpus."""

    index_version: str
    num_bytes: int
    """Number of bytes before compression."""
    data: bytes
    """Rows, ids, titles, texts and scores, ``[num_queries][<= depth]``: an ``rpc`` message, compressed by ``CODEC``."""


def pack(found: Sequence[Sequence[Passage]], index_version: str, rows: NDArray[np.int64] | None = None) -> PackedHits:
    """Pack the passages found for each query.

    Args:
        found: ``[num_queries][<= depth]``
        index_version: version of the searched index.
        rows: ``[num_queries, depth]``, the passages' corpus rows, which order equal scores; None if none has to.
    """
    if rows is None:
        rows = np.zeros((len(found), max(map(len, found), default=0)), np.int64)
    message = encode(
        [
            [(row, p.id, p.title, p.text, p.score) for row, p in zip(query_rows, passages, strict=False)]
            for query_rows, passages in zip(rows.tolist(), found, strict=True)
        ]
    )
    return PackedHits(index_version, len(message), CODEC.compress(message, asbytes=True))


@dataclass(frozen=True, slots=True)
class ActorLoad(Pulse):
    """Load of an actor since its process started."""

    up_s: float
    busy_s: float
    queries: int
    batches: int
    clients: Mapping[str, tuple[float, ClientLoad]]
    """Last report of each client that reports to this actor, with its age in seconds."""


class RpcActor(RpcServer):
    """Actor whose methods clients call over ZeroMQ, or by Ray if they cannot connect."""

    kind = "retriever"
    """Name of its fleet, also in Prometheus: the label of ``batch_seconds`` and ``batch_queries``."""

    def __init__(self) -> None:
        """Start the thread that loads and answers; clients can connect after ``open``."""
        super().__init__()
        self._started = time.monotonic()
        self._num_queries = self._num_batches = 0
        self._busy_s = 0.0
        self._reports: dict[str, tuple[float, ClientLoad]] = {}

    def ping(self) -> None:
        """Return once everything is loaded and the calls before this one are answered."""
        self.run(int)

    def rpc_address(self) -> RpcAddress | None:
        """Return the address at which clients connect, or None if the actor cannot listen at this node's address."""
        return self.address

    def report(self, client: str, load: ClientLoad) -> None:
        """Keep a client's report; ``load`` returns it."""
        self._reports[client] = (time.monotonic(), load)

    def load(self) -> ActorLoad:
        """Return the load of this actor, and the reports of its clients."""
        now = time.monotonic()
        return ActorLoad(
            Process.current(),
            now - self._started,
            self._busy_s,
            self._num_queries,
            self._num_batches,
            {client: (now - at, report) for client, (at, report) in self._reports.copy().items()},
        )

    def serve(self, *methods: Callable[..., Any]) -> None:
        """Let clients connect and call ``methods``, whose first argument is a batch of queries; count their load."""
        self.open({method.__name__: partial(self._run_batch, method) for method in methods})

    def _run_batch(self, method: Callable[..., Any], queries: list[str], *arguments: Any) -> Any:
        started = time.monotonic()
        found = method(queries, *arguments)
        took_s = time.monotonic() - started
        self._num_queries += len(queries)
        self._num_batches += 1
        self._busy_s += took_s
        observe("batch_seconds", took_s, fleet=self.kind)
        observe("batch_queries", len(queries), fleet=self.kind)
        return found


class RetrieverActor(RpcActor):
    """Holds the index or some of its shards. One search at a time, on all of the actor's threads."""

    def __init__(self, settings: ActorArguments) -> None:
        """Open the index and search once, so that the first caller finds everything loaded.

        Raises:
            DataError: this node has no usable index.
        """
        super().__init__()
        self._reranks = bool(settings.reranker)
        with beating():
            self.run(self._load_index, settings)
        self.serve(self.search_batch, self.rank_batch, self.open_batch)

    def _load_index(self, settings: ActorArguments) -> None:
        from retrieval.local import LocalRetriever

        index_dir = on_this_node(settings.index)
        if settings.encodes or Manifest.read(Path(index_dir)).vector_type == FLAT:  # else torch is not imported
            import torch

            torch.set_num_threads(settings.num_threads)
        self._retriever = LocalRetriever(
            index_dir,
            settings.num_threads,
            device=settings.device,
            encoder_dir=_path_or_name(settings.encoder) if settings.encodes else "",
            reranker=_path_or_name(settings.reranker),
            options=settings.options,
            shards=settings.shards,
            load_encoder=settings.encodes,
            shards_dir=_path_or_name(settings.shard_files),
        )
        manifest = self._retriever.manifest
        vectors = None
        if manifest.is_dense and not settings.encodes:
            vectors = np.eye(1, manifest.dimension, dtype=np.float32)
        self._retriever.search_rows(["warm up"], 1, vectors)

    def search_batch(self, queries: list[str], k: int, vectors: NDArray[np.float32] | None) -> PackedHits:
        """Return the passages; ``vectors`` are the encoded queries, float32 ``[len(queries), dimension]``, or None."""
        if self._reranks:
            return pack(self._retriever.search_batch(queries, k, vectors), self._retriever.version)
        ranking, found = self._retriever.search_rows(queries, k, vectors)
        return pack(found, self._retriever.version, ranking.rows)

    def rank_batch(self, queries: list[str], k: int, vectors: NDArray[np.float32] | None) -> RowHits:
        """Return the rows of the passages that ``search_batch`` finds, before reranking."""
        return RowHits(self._retriever.version, *self._retriever.rank(queries, k, vectors))

    def open_batch(self, titles: list[str]) -> tuple[PackedHits, list[tuple[str, ...]]]:
        """Return the passages of the page of each title, and the ``Page.near`` of each."""
        pages = self._retriever.open_batch(titles)
        return pack(pages, self._retriever.version), [page.near for page in pages]


class EncoderActor(RpcActor):
    """Holds the encoder of an index, without the index."""

    kind = "encoder"

    def __init__(self, settings: ActorArguments) -> None:
        """Load the encoder and encode once.

        Raises:
            DataError: the encoder is not the one of the index.
        """
        super().__init__()
        with beating():
            self.run(self._load_encoder, settings)
        self.serve(self.encode)

    def _load_encoder(self, settings: ActorArguments) -> None:
        import torch

        from retrieval.indexes.vector_index import open_encoder

        index_dir = Path(on_this_node(settings.index))
        torch.set_num_threads(settings.num_threads)
        manifest = Manifest.read(index_dir)
        self._encoder = open_encoder(index_dir, manifest, settings.device, _path_or_name(settings.encoder))
        self._encoder.encode_queries(["warm up"])

    def encode(self, queries: list[str]) -> NDArray[np.float32]:
        """Return the vectors of the queries, float32 ``[len(queries), dimension]``."""
        return self._encoder.encode_queries(queries)


def _path_or_name(folder: AnyFolder) -> str:
    return str(on_this_node(folder))


REFRESH_S = 2.0
"""Seconds between two reads of a fleet's member list by a client, while queries come."""
LEAVE_S = 3 * REFRESH_S
"""Seconds from taking a member off the list to its end. A client uses no list older than ``2 * REFRESH_S``."""
_NAMESPACE = "ragr1"
_HEALTH = "health"
"""Ray's concurrency group for the calls of ``load``."""
_ANSWER_TIMEOUT_S = 5.0
REPORT_EXPIRES_S = 5 * REFRESH_S
"""Age in seconds from which a client's report is ignored: the client has no queries out."""


class ReplicaSet:
    """Members of one kind; each has one actor, or one for each shard of an index."""

    def __init__(
        self,
        actor_class: type[RpcActor],
        arguments: Sequence[tuple[Any, ...]],
        *,
        num_cpus: float = 0.0,
        num_gpus: float = 0.0,
        actor_options: ActorOptions = anywhere,
        hang_timeout_s: float = HANG_TIMEOUT_S,
    ) -> None:
        """Begin without members.

        Args:
            actor_class: class of every actor.
            arguments: arguments of the actors of a member, one tuple for each actor.
            num_cpus: CPUs of one actor, as ``num_gpus`` its GPUs.
            actor_options: returns the placement of the first, second, ... actor that is started.
            hang_timeout_s: see ``Fleet``.
        """
        self.kind = actor_class.kind
        self.name = f"{self.kind}-{uuid.uuid4().hex[:12]}"
        """Beginning of the names of all actors."""
        # Ray restarts the actors without limit, but no call: the client retries, on another replica.
        with_options = ray.remote(  # type: ignore[call-overload]  # which lacks concurrency_groups
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            max_restarts=-1,
            max_task_retries=0,
            concurrency_groups={_HEALTH: 1},  # a thread that no search blocks
        )
        self._actor_class: Any = with_options(actor_class)
        self._actor_options = actor_options
        self._arguments = arguments
        self._leaving: dict[int, threading.Timer] = {}
        """Timers of the members that are off the list, by index."""
        self._done: dict[Process, tuple[float, int]] = {}
        """Seconds of work and number of answered queries of each process, at the last call of ``state``."""
        self._hang_timeout_s = hang_timeout_s
        self.fleet = Fleet[ActorLoad](self.kind, self._start, _ask, hang_timeout_s, on_change=self._publish)

    def _start(self, index: int) -> list[ActorHandle[Any]]:
        started = []
        for number, arguments in enumerate(self._arguments):
            options = self._actor_options(index * len(self._arguments) + number)
            name = self._name(index, number)
            started.append(self._actor_class.options(name=name, **options).remote(*arguments))
        return started

    def _name(self, index: int, number: int) -> str:
        return f"{self.name}-{index}.{number}"

    @property
    def _listed(self) -> list[Member[ActorLoad]]:
        return [member for member in self.fleet.members if member.index not in self._leaving]

    @property
    def handles(self) -> dict[str, ActorHandle[Any]]:
        """Listed actors by name: name of the fleet, number of the member, number of the actor in it."""
        return {self._name(m.index, number): handle for m in self._listed for number, handle in enumerate(m.actors)}

    @property
    def actors(self) -> list[ActorHandle[Any]]:
        """Actors that are listed."""
        return list(self.handles.values())

    def scale_to(self, num_members: int) -> None:
        """Start members, or end some while clients continue: first those that still start, then the newest."""
        with self.fleet.changed:
            self._take_off(self.fleet.scale_to(num_members))

    def _take_off(self, leaving: Sequence[Member[ActorLoad]]) -> None:
        for member in leaving:
            timer = threading.Timer(LEAVE_S, self._end, [member])
            timer.daemon = True
            self._leaving[member.index] = timer
            timer.start()
        self._publish()

    def _end(self, member: Member[ActorLoad]) -> None:
        """End the actors of a member that no client uses any more, after they answered their calls."""
        if member.index not in self._leaving:  # the fleet was stopped
            return
        with contextlib.suppress(RayError):
            drained: list[Any] = [actor.drain.remote() for actor in member.actors]
            ray.wait(drained, num_returns=len(drained), timeout=self._hang_timeout_s)
            self.fleet.end(member)

    def _publish(self) -> None:
        names = {self._name(m.index, n): m.is_serving for m in self._listed for n in range(len(m.actors))}
        _internal_kv_put(self.name, json.dumps(names), namespace=_NAMESPACE)

    def loads(self) -> dict[str, ActorLoad]:
        """Return the load of each actor that answers within 5 seconds, by name."""
        calls = {_ask(handle): name for name, handle in self.handles.items()}
        found = {}
        if calls:
            for call in ray.wait(list(calls), num_returns=len(calls), timeout=_ANSWER_TIMEOUT_S)[0]:
                with contextlib.suppress(RayError):  # the watchdog reports it
                    found[calls[call]] = ray.get(call)
        return {name: found[name] for name in self.handles if name in found}

    def state(self) -> FleetState:
        """Return the load for the fleet's autoscaler, from the last answers of the actors. Requests are queries."""
        with self.fleet.changed:
            draining = [member for member in self._listed if member.is_draining]
            num_ready, num_starting = self.fleet.num(MemberState.READY), self.fleet.num(MemberState.STARTING)
            if draining and num_ready and not num_starting:
                self._take_off(draining)
            loads = [load for member in self.fleet.members for load in member.pulses.values()]
        self._done |= {load.process: (load.busy_s, load.queries) for load in loads}
        searching = [report for age_s, report in client_reports(loads) if age_s < REPORT_EXPIRES_S]
        return FleetState(
            time.monotonic(),
            num_ready,
            num_starting,
            ongoing=float(sum(report.outstanding for report in searching)),
            queued=float(sum(report.waiting for report in searching)),
            busy_s=sum(busy_s for busy_s, _ in self._done.values()) / len(self._arguments),
            num_answered=sum(number for _, number in self._done.values()) / len(self._arguments),
        )

    def stop(self) -> None:
        """End all actors, without a restart. Their calls fail."""
        leaving, self._leaving = self._leaving, {}
        for timer in leaving.values():
            timer.cancel()
        self.fleet.stop()
        _internal_kv_del(self.name, namespace=_NAMESPACE)


def _ask(actor: Any) -> Any:
    return actor.load.options(concurrency_group=_HEALTH).remote()


def client_reports(loads: Iterable[ActorLoad]) -> list[tuple[float, ClientLoad]]:
    """Return the newest report of each client, with its age in seconds."""
    clients: dict[str, tuple[float, ClientLoad]] = {}
    for load in loads:
        for client, report in load.clients.items():
            clients[client] = min(report, clients.get(client, report), key=lambda report: report[0])
    return list(clients.values())


def find_actors(fleet_name: str, *, only_running: bool = False) -> list[str]:
    """Return the sorted names of a fleet's actors; ``only_running`` leaves out those that load, unless all do."""
    value = _internal_kv_get(fleet_name, namespace=_NAMESPACE)
    found: Mapping[str, bool] = json.loads(value) if value else {}
    running = [name for name, is_running in found.items() if is_running]
    return sorted(running if only_running and running else found)
