"""LearnerGroup: all learner ranks as one object, a Learner in the driver or N Ray actors that step together.

``LearnerGroup`` is in the driver, and each rank is a ``LearnerWorker``. They exist for all stages: ``build("sft",
folder)``, later ``build("grpo", other_folder)`` in the same processes, which join their process group once. The import
loads neither torch nor transformers.

If a rank fails, the group restarts all ranks and repeats the calls since the last checkpoint::

    build ──► update, update ──► begin_save ... saved ──► update, update, update ──► update
                                                │         └── references held ──┘      └ a rank is killed
    new actors, new rendezvous ──► build ──► load_state ──► the same three updates ──► the call again

The group holds references to batches and the path of the newest checkpoint; it fetches no state. An update depends on
state and batch only, so the new ranks get the state of the old ones, on CPUs to the bit.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import ray
from numpy.typing import NDArray
from ray.exceptions import (
    ActorUnavailableError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
)
from safetensors import SafetensorError

from cluster.supervision.fleet import Fleet, Process, Pulse, last_line
from cluster.supervision.watchdog import show_life
from learners.options import LEARNERS
from learners.ranks.call_history import CallHistory, StepClock
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.disk.digests import LIST_FILE, Digests, digest_files
from ragr1_actors.core.disk.files import ADAPTER_FOLDER, POLICY_FOLDER, is_no_room, sync_tree
from ragr1_actors.core.disk.folders import AnyFolder, Folder, FolderWriter, answer_probe, compared, on_this_node
from ragr1_actors.core.disk.learner_state import (
    LEARNER_FILE,
    LEARNER_PREFIX,
    TensorPart,
    Tensors,
    learner_files,
    rank_part,
    read_learner,
    write_parts,
)
from ragr1_actors.core.errors import FleetError, RagR1Error, UserError
from ragr1_actors.core.resolve import load_object
from ragr1_actors.core.schema import groups_from_record_batch

if TYPE_CHECKING:  # only the process of the learner imports torch and transformers
    from learners.learner import Learner
    from learners.models.export import PolicyCopy

T = TypeVar("T")
Arrays = dict[str, NDArray[Any]]
ActorOptions = Callable[[int], Mapping[str, Any]]

logger = logging.getLogger(__name__)

BLOCKED_S = 120.0
"""Longest silence in seconds of a process that ends a profile: reading the profile holds Python's lock."""
FIRST_ANSWER_S = 600.0
"""Longest time in seconds until the first answer: Ray starts the process, for which a place is reserved."""
REPEATED_CALLS = ("update", "begin_save", "scale_lr")
"""Calls that change a learner or its files: a restart repeats those since the last checkpoint."""
WAIT_INTERVAL_S = 1.0
"""Seconds between two looks at the ranks during a call."""

_HEALTH = "health"
"""Ray's concurrency group for the pulses."""
_RESUME = "continue from the last checkpoint with --resume"


class _BrokenRankError(FleetError):
    """A rank failed in a way that a restart may repair: killed, crashed, out of memory, or a CUDA error."""


@dataclass(frozen=True, slots=True)
class Progress(Pulse):
    """Pulse of a learner rank."""

    num_micro_batches: int
    """Number of micro-batches since its learner was built."""


class LearnerGroup:
    """Learner ranks. Every method returns when every rank has returned."""

    def __init__(self, config: RunConfig, actor_options: ActorOptions | None = None, spare_cpus: int = 0) -> None:
        """Start the actors of ``config.learners``; with ``num_learners = 0`` the learner is in this process.

        ``actor_options`` returns the Ray options of a rank's actor, such as its placement. ``spare_cpus`` is the number
        of CPUs of its node that no actor reserves: a single rank that reserves none uses as many threads.

        Raises:
            FleetError: an actor did not start.
        """
        self.config = config
        self._actor_options = actor_options
        is_alone = config.learners.num_learners == 1 and not config.learners.num_cpus_per_learner
        self._spare_cpus = spare_cpus if is_alone else 0
        self._fault_tolerance = config.debugging.fault_tolerance
        self.num_restarts = 0
        """Number of restarts of the group, at most ``max_learner_restarts``."""
        self._local: LearnerWorker | None = None
        hang_timeout_s = self._fault_tolerance.hang_timeout_s
        self._fleet = Fleet[Progress]("learner rank", self._start_rank, _ask, hang_timeout_s, is_gang=True)
        self._clocks = [StepClock(hang_timeout_s) for _ in range(config.learners.num_learners)]
        self._history: CallHistory | None = None
        if config.learners.num_learners == 0:
            self._local = LearnerWorker(config)
            if config.debugging.num_threads:
                import torch

                torch.set_num_threads(config.debugging.num_threads)
        else:
            self._fleet.scale_to(config.learners.num_learners)
            self._let_meet()

    @property
    def actors(self) -> list[Any]:
        """Actors of the ranks; empty if the driver learns, or if a rank failed and was not restarted."""
        return [rank.actors[0] for rank in self._fleet.members if not rank.is_lost]

    def _let_meet(self) -> None:
        """Wait until the ranks have loaded their libraries and met; start all again if one hangs or dies before."""
        while True:
            try:
                host, port = self._call_once("prepare")[0]
                self._call_once("join", host, port)
            except _BrokenRankError as failure:
                self._count_restart(failure)
                logger.warning("%s while it was started; all ranks start again", failure)
                self._fleet.restart()
            else:
                return

    def _count_restart(self, failure: _BrokenRankError, *, can_start: bool = True) -> None:
        """Count a restart; raises ``FleetError`` if none is possible or the allowed number is used up."""
        if not can_start or self.num_restarts == self._fault_tolerance.max_learner_restarts:
            self._fleet.end_all()
            raise FleetError(f"{failure}; {_RESUME}") from failure.__cause__
        self.num_restarts += 1

    def _start_rank(self, rank: int) -> list[Any]:
        settings = self.config.learners
        actor_class = ray.remote(  # type: ignore[call-overload]  # which lacks concurrency_groups
            num_cpus=settings.num_cpus_per_learner,
            num_gpus=settings.num_gpus_per_learner,
            concurrency_groups={_HEALTH: 1},  # a thread that no update blocks
        )(LearnerWorker)
        options = self._actor_options(rank) if self._actor_options is not None else {}
        arguments = (self.config, rank, settings.num_learners, self._spare_cpus)
        return [actor_class.options(**options).remote(*arguments)]

    @property
    def is_stopped(self) -> bool:
        """Whether no rank is left: ``stop`` was called, or a rank failed and was not restarted."""
        return self._local is None and not self.actors

    def build(self, learner_name: str, policy_dir: AnyFolder) -> None:
        """Build the learner of a stage on every rank: ``grpo``, ``ppo``, ``sft`` or ``my_module:MyLearner``."""
        policy_dir = _absolute(policy_dir)
        self._history = None  # ranks that restart in this call build this learner only
        self._call("build", learner_name, policy_dir)
        # the first call of another learner may take long again
        self._clocks = [StepClock(clock.timeout_s) for clock in self._clocks]
        self._history = CallHistory(learner_name, policy_dir)

    def update(self, batch_refs: list[Any]) -> dict[str, float]:
        """Learn from record batches of trajectory groups, or from references to them; return the update's metrics.

        With actors the batches stay in the object store until a later state is saved; see ``begin_save``.
        """
        if self._local is None:
            batch_refs = [ref if isinstance(ref, ray.ObjectRef) else ray.put(ref) for ref in batch_refs]
        metrics: dict[str, float] = self._call("update", batch_refs)[0]
        return metrics

    def find_lost(self, batch_refs: list[Any]) -> list[int]:
        """Return the positions of the batches that are lost, because the node that had them ended.

        The other batches are then on the nodes of all ranks, where ``update`` reads them.
        """
        return sorted({index for found in self._call("find_lost", batch_refs) for index in found})

    def foreach_learner(self, function: Callable[[Learner], T], *, is_blocking: bool = False) -> list[T]:
        """Call a function with the learner of every rank and return the results, by rank.

        If a rank fails, the function is called again after the restart. A later restart loses its changes to a learner.
        With ``is_blocking`` it may keep Python's lock for a minute, in which a rank cannot answer.
        """
        with self._fleet.patient(BLOCKED_S) if is_blocking else nullcontext():
            return self._call("apply", function)

    def answer_probe(self, probe: Path) -> list[str]:
        """Return ``files.answer_probe`` of every rank; rank 0 replies. No learner has to be built."""
        return self._call("answer_probe", probe)

    def get_weights(self) -> Arrays:
        """Return the policy's weights by Hugging Face name."""
        return self.foreach_learner(lambda learner: learner.get_weights())[0]

    def weights_ref(self) -> Any:
        """Return a reference to the published weights, which bypass the driver; without actors, return the weights.

        The driver owns the reference, so it stays valid when the rank ends.
        """
        if self._local is not None:
            return self._local.learner.published_weights()
        return self._call("weights_apart", num_returns=2)[0]

    def get_state(self) -> Arrays:
        """Return the state that a resumed run needs besides the folder of the policy: whole tensors by name.

        The state is the same for any ZeRO stage and number of ranks: weights and both moments in fp32, 12 bytes per
        trained parameter. A checkpoint does not need it: every rank writes its part.
        """
        return dict(Tensors(self.foreach_learner(lambda learner: learner.get_parts())))

    def load_state(self, folder: AnyFolder) -> None:
        """Continue from the state that ``begin_save`` wrote into a folder with any number of ranks.

        Every rank reads all parts, one tensor at a time. Keep the files until the next save: a restart reads them.

        Raises:
            DataError: a file is damaged, or its state belongs to another model.
        """
        folder = _absolute(folder)
        self._call("load_state", folder)
        if self._history is not None:
            self._history.begin_at(folder)

    def scale_lr(self, factor: float) -> None:
        """Set the factor of the configuration's learning rate on every rank; a restart keeps it."""
        self._call("scale_lr", factor)

    def offload_states(self) -> int:
        """Move all trained tensors to the hosts' memory; return the device bytes that all ranks freed.

        An engine on the same devices can then generate. The next call that needs the tensors reloads them.
        """
        return sum(self.foreach_learner(lambda learner: learner.offload_states()))

    def save_policy(self, writer: FolderWriter) -> None:
        """Write the policy as a Hugging Face folder."""
        self._call("save_policy", writer)

    def begin_save(self, writer: FolderWriter) -> None:
        """Copy policy and state; write them as ``policy/`` and ``learner_files`` while the group continues.

        Each rank writes its part of the state, and rank 0 the policy.
        """
        self._call("begin_save", writer)

    def is_written(self) -> bool:
        """Whether the write of ``begin_save`` has ended, with success or not."""
        return all(self._call("is_saved"))

    def finish_save(self) -> Digests:
        """Wait for the write of ``begin_save``, and return the digests of the files of all ranks.

        Raises:
            OSError: the disk is full; or ``SafetensorError``.
            UserError: the write failed for another reason.
        """
        return {name: digest for written in self._call("finish_save") for name, digest in written.items()}

    def saved(self, writer: FolderWriter, final: AnyFolder) -> None:
        """Let a restart begin at ``final``, the folder that now has the output of ``begin_save(writer)``."""
        if self._history is not None:
            self._history.saved(writer, _absolute(final))

    def stop(self) -> None:
        """Kill the actors, or close the learner in the driver."""
        self._history = None
        self._fleet.stop()
        if self._local is not None:
            self._local.close()
            self._local = None

    # -- one call on every rank, and restarts ------------------------------------------------------------------------

    def _call(self, method: str, *arguments: Any, num_returns: int = 1) -> list[Any]:
        """Call a method of every rank at the same time: the ranks wait for each other in collectives."""
        failure: _BrokenRankError | None = None
        while True:
            try:
                if failure is not None:
                    self._start_again(failure, method)
                results = self._call_once(method, *arguments, num_returns=num_returns)
            except _BrokenRankError as error:
                failure = error
                continue
            # a learner in the driver ends with the driver
            if method in REPEATED_CALLS and self._local is None and self._history is not None:
                self._history.add(method, *arguments)
            return results

    def _call_once(self, method: str, *arguments: Any, num_returns: int = 1) -> list[Any]:
        if self._local is not None:
            return [getattr(self._local, method)(*arguments)]
        if self._fleet.failure:
            raise _BrokenRankError(self._fleet.failure)  # a rank hung while no call was open
        if self.is_stopped:
            raise FleetError("the learner group was stopped; create a new LearnerGroup")
        actors = [rank.actors[0] for rank in self._fleet.members]  # a call of a rank that was ended meanwhile fails
        if num_returns == 1:
            return self._wait([getattr(actor, method).remote(*arguments) for actor in actors], method)
        results = [getattr(a, method).options(num_returns=num_returns).remote(*arguments) for a in actors]
        self._wait([first for first, *_ in results], method)
        return [last for *_, last in results]

    def _start_again(self, failure: _BrokenRankError, method: str) -> None:
        """Start new ranks and bring them to the state of the old ones before the call of ``method``."""
        history = self._history
        self._count_restart(failure, can_start=method == "build" if history is None else history.is_whole)
        calls = history.calls if history is not None else []
        logger.warning(
            "%s; restart %d of %d: %d updates are repeated, and %s",
            *(failure, self.num_restarts, self._fault_tolerance.max_learner_restarts),
            *(sum(name == "update" for name, _ in calls), method),
        )
        started = time.monotonic()
        try:
            self._fleet.restart()
            self._let_meet()
            if history is not None:
                self._call_once("build", history.learner_name, history.policy_dir)
                if history.state is not None:
                    self._call_once("load_state", history.state)
            for name, argument in calls:
                self._call_once(name, argument)
        except KeyboardInterrupt:  # a half-restored state must not be saved
            self._fleet.end_all()
            raise
        logger.warning("learner group is back after %.0f s", time.monotonic() - started)

    def _wait(self, refs: list[Any], method: str) -> list[Any]:
        """Wait for every rank. The first error ends all ranks, as the others would wait forever in a collective."""
        pending, is_update, began = list(refs), method == "update", time.monotonic()
        results: dict[Any, Any] = {}
        for clock in self._clocks:
            clock.begin_work()
        while pending:
            done, pending = ray.wait(pending, timeout=WAIT_INTERVAL_S)
            if not done:
                self._find_stuck(time.monotonic() - began, is_update=is_update)
                continue
            try:
                results[done[0]] = ray.get(done[0])
            except RayError as error:
                rank = self._fleet.members[refs.index(done[0])]
                if isinstance(error, ActorUnavailableError):
                    self._fleet.wait_for_verdict(rank)
                cause = _cause(error, rank.name, self._fleet.failure)
                if isinstance(cause, _BrokenRankError):
                    self._fleet.fail(str(cause))
                else:
                    self._fleet.end_all()
                raise cause from error
        if is_update:
            for clock in self._clocks:
                clock.end_work()
        return [results[ref] for ref in refs]

    def _find_stuck(self, waited_s: float, *, is_update: bool) -> None:
        """End all ranks, and so their calls, if one makes no progress or has not answered yet."""
        for rank, clock in zip(self._fleet.members, self._clocks, strict=True):
            pulse = rank.pulses.get(0)
            if is_update and (reason := clock.look(None if pulse is None else pulse.num_micro_batches)):
                self._fleet.fail(f"{rank.name} hangs: {reason}")
            if waited_s > FIRST_ANSWER_S and not rank.is_up:
                self._fleet.fail(f"{rank.name} has not answered in the {FIRST_ANSWER_S:g} s since it was started")


def _ask(actor: Any) -> Any:
    return actor.progress.options(concurrency_group=_HEALTH).remote()


def _cause(error: RayError, rank: str, hang: str) -> BaseException:
    """Return the cause of Ray's error from the call of a rank; ``hang`` says why all ranks were ended, if they were."""
    cause: BaseException = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, RagR1Error) or is_no_room(cause):
        return cause
    if hang:
        return _BrokenRankError(hang)
    if cause is error and isinstance(cause, RayActorError | OutOfMemoryError):
        return _BrokenRankError(f"{rank} died: {last_line(error)}")
    if cause is error or isinstance(cause, RuntimeError | OSError):  # an error of Ray, torch, CUDA or gloo
        return _BrokenRankError(f"{rank} failed: {cause!r}")
    return FleetError(f"{rank} failed: {cause!r}; {_RESUME}")


class LearnerWorker:
    """Learner rank: the class of the group's Ray actors, and the learner of a group without actors."""

    def __init__(self, config: RunConfig, rank: int = 0, world_size: int = 1, spare_cpus: int = 0) -> None:
        """Store the rank; no heavy import yet. ``spare_cpus`` are used besides the CPUs that Ray reserves."""
        show_life()
        self._config = config
        self._spare_cpus = spare_cpus
        self._rank = rank
        self._world_size = world_size
        self._learner: Learner | None = None
        self._store: Any = None
        self._writer = ThreadPoolExecutor(1, "save checkpoint")
        self._writing: Future[Digests] | None = None

    def prepare(self) -> tuple[str, int]:
        """Import learners' libraries and, on rank 0 of several, open the rendezvous' store; return its host and port.

        The store listens from now on: another process could take a port that was only looked up. Torch reads the number
        of threads once.
        """
        reserved = int(self._config.learners.num_cpus_per_learner)
        threads = self._config.debugging.num_threads or max(1, reserved + self._spare_cpus)
        os.environ["OMP_NUM_THREADS"] = str(threads)
        import torch
        from torch._C._distributed_c10d import TCPStore

        torch.set_num_threads(threads)
        load_object("sft", LEARNERS)  # imports transformers and DeepSpeed
        if self._rank or self._world_size == 1:  # a single rank needs no rendezvous
            return "", 0
        host: str = ray.util.get_node_ip_address()
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def join(self, host: str, port: int) -> None:
        """Set the environment from which torch and DeepSpeed read rank and rendezvous."""
        os.environ |= {
            "RANK": str(self._rank),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_RANK": "0",  # an actor sees only the GPU it was given
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            # rank 0 connects to the store as a client, like the other ranks
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
        }

    def build(self, learner_name: str, policy_dir: AnyFolder) -> None:
        """Build the learner of a stage, and close the previous one."""
        self.close()
        name, directory = str(policy_dir), Path(on_this_node(policy_dir))
        if not directory.is_dir():  # the learner reads configuration and tokenizer too
            from huggingface_hub import snapshot_download

            directory = Path(snapshot_download(name))
        learner_class = load_object(learner_name, LEARNERS)
        learner: Learner = learner_class(self._config, directory, self._rank, self._world_size)
        learner.policy_name = name
        learner.policy_reference = policy_dir.reference() if isinstance(policy_dir, Folder) else ""
        learner.build()  # a build that fails leaves nothing to close
        self._learner = learner

    def close(self) -> None:
        """Close the learner of this stage; a checkpoint that is being written is a copy, and continues."""
        if self._learner is not None:
            from ragr1_actors.core.models.process_memory import release_cache

            device = self._learner.device
            self._learner.close()
            self._learner = None
            gc.collect()  # a model refers to itself: the next stage starts in the memory that it held
            release_cache(device)

    @property
    def learner(self) -> Learner:
        """Learner of this stage."""
        if self._learner is None:
            raise RuntimeError("the learner group has no learner; call build() first")
        return self._learner

    def update(self, batches: list[Any]) -> dict[str, float]:
        """Learn from all groups of record batches, or of references to them; no passage text is decoded."""
        found = [ray.get(batch) if isinstance(batch, ray.ObjectRef) else batch for batch in batches]
        groups = [group for batch in found for group in groups_from_record_batch(batch, decode_texts=False)]
        return self.learner.update(groups)

    def find_lost(self, batches: list[Any]) -> list[int]:
        """Return the positions of references to batches that no node has any more."""
        lost = []
        for index, batch in enumerate(batches):
            try:
                if isinstance(batch, ray.ObjectRef):
                    ray.get(batch)
            except (ObjectLostError, RayActorError):  # RayActorError: its sampler died
                lost.append(index)
        return lost

    def progress(self) -> Progress:
        """Return the number of micro-batches so far; called in a separate thread during other calls."""
        return Progress(Process.current(), self._learner.num_micro_batches if self._learner is not None else 0)

    def answer_probe(self, probe: Path) -> str:
        """Return ``files.answer_probe`` of this rank."""
        return answer_probe(probe, replies=self._rank == 0)

    def apply(self, function: Callable[[Learner], T]) -> T:
        """Return ``function(learner)``."""
        return function(self.learner)

    def weights_apart(self) -> tuple[None, Arrays]:
        """Return the weights as the second of two results, so that the caller can wait for the first only."""
        return None, self.learner.published_weights()

    def load_state(self, folder: AnyFolder) -> None:
        """Continue from state files once they match their list; the ranks of a node share their pages in memory."""
        path = compared(folder, LEARNER_PREFIX, (self._rank, self._world_size))
        self.learner.set_state(read_learner(path / LEARNER_FILE))

    def scale_lr(self, factor: float) -> None:
        """See ``Learner.scale_lr``."""
        self.learner.scale_lr(factor)

    def save_policy(self, writer: FolderWriter) -> None:
        """Write the policy; rank 0 writes, and the others take part in it."""
        with writer.part(rank_part(0)) if self._rank == 0 else nullcontext(Path()) as directory:
            self.learner.save_policy(directory)

    def begin_save(self, writer: FolderWriter) -> None:
        """Copy policy and state; a thread writes this rank's part of them."""
        from ragr1_actors.core.models.process_memory import trim_heap

        policy, parts = self.learner.take_policy(), self.learner.get_parts()
        source = f"update {self.learner.num_updates}"
        self._writing = self._writer.submit(_write_learner, writer, self._rank, policy, parts, source)
        self._writer.submit(trim_heap)  # the copy is freed by now; else the heap keeps it until the next update

    def is_saved(self) -> bool:
        """Whether the thread has ended, with success or not."""
        return self._writing is None or self._writing.done()

    def finish_save(self) -> Digests:
        """Wait for the thread, and return the digests of its files.

        Raises:
            OSError: the disk is full; or ``SafetensorError``.
            UserError: the thread could not write for another reason.
        """
        writing, self._writing = self._writing, None
        if writing is None:
            return {}
        try:
            return writing.result()
        except (OSError, SafetensorError) as error:
            if is_no_room(error):
                raise
            raise UserError(f"cannot write a checkpoint: {error}") from error  # the rank did not fail


def _write_learner(
    writer: FolderWriter, rank: int, policy: PolicyCopy, parts: Mapping[str, TensorPart], source: str
) -> Digests:
    """Write a rank's part of a checkpoint, and return the digests of its files; a folder is written with its list."""
    with writer.part(rank_part(rank)) as directory:
        # the driver syncs too, but only the node that wrote can flush to a shared file system
        names = [learner_files(rank + 1)[rank]]
        write_parts(directory / names[0], parts, source)
        if rank == 0:
            folders = {POLICY_FOLDER: policy, ADAPTER_FOLDER: policy.adapter}
            for name, copy in folders.items():
                if copy is not None:
                    copy.write(directory / name)
                    sync_tree(directory / name)
                    names.append(f"{name}/{LIST_FILE}")
        return digest_files(directory, names)


def _absolute(folder: AnyFolder) -> AnyFolder:
    """Return the absolute path of a folder; a name on a model hub and a ``Folder`` stay as they are."""
    return folder if isinstance(folder, Folder) or not Path(folder).is_dir() else Path(folder).absolute()
