"""The learner ranks as one thing: a Learner in the driver, or N Ray actors that step together.

The group outlives the stages: ``build("sft", folder)``, later ``build("grpo", other_folder)`` in the same processes,
which join their process group once. Importing this module imports neither torch nor transformers.

A rank that fails takes the group along, and the group starts anew where the failed call began::

    build ──► update, update ──► begin_save ... saved ──► update, update, update ──► update
                                                │         └── references held ──┘      └ a rank is killed
    new actors, new rendezvous ──► build ──► load_state ──► the same three updates ──► the call again

What is held are references to batches, and the newest checkpoint on disk: no state is fetched for it. An update depends
on nothing but state and batch, so that the ranks end where they would have been, on CPUs to the bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from learners.learner_worker import Arrays, LearnerWorker
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import FleetError, RagR1Error
from ragr1_actors.core.files import LEARNER_FILE, is_no_room

if TYPE_CHECKING:  # torch and transformers are imported where the learner lives
    from learners.learner import Learner

T = TypeVar("T")
ActorOptions = Callable[[int], Mapping[str, Any]]

logger = logging.getLogger(__name__)

MAX_HELD_CALLS = 256
"""Updates whose batches are held after a state was saved; past them a rank that fails ends the run, as it ends one
without restarts."""

_GO_ON = "go on from the last checkpoint with --resume"


class _BrokenRankError(FleetError):
    """A rank failed in a way that another start may mend: killed, crashed, out of memory, an error of CUDA's."""


@dataclass
class _History:
    """How new ranks come to where the old ones are."""

    learner_name: str
    policy_dir: Path
    state: Path | Any = None
    """Where to begin: a file, or a reference to a state; None is what ``build`` made."""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """What was done since, ``("update", batch references)`` and ``("begin_save", directory)``."""

    is_whole: bool = True
    """Whether ``calls`` are all that was done since."""

    def add(self, method: str, argument: Any) -> None:
        """Hold a call, unless nothing could begin there."""
        if not self.is_whole and method == "update" and not any(held == "begin_save" for held, _ in self.calls):
            return
        if len(self.calls) == MAX_HELD_CALLS:
            self.calls, self.is_whole = [], False
            logger.warning(
                "%d updates since the last checkpoint: their batches are let go, and a learner rank that fails now "
                "ends the run; save more often",
                MAX_HELD_CALLS,
            )
        self.calls.append((method, argument))

    def begin_at(self, state: Any) -> None:
        """Begin at a state that was just set."""
        self.state, self.calls, self.is_whole = state, [], True

    def is_saved(self, directory: Path, final: Path) -> None:
        """The state that ``begin_save(directory)`` took lies in ``final``: begin there from now on."""
        begun = ("begin_save", directory)
        if begun in self.calls:  # else too much was done while it was being written
            later = self.calls[self.calls.index(begun) + 1 :]
            self.begin_at(final / LEARNER_FILE)
            self.calls = later


class LearnerGroup:
    """All the ranks. Every method returns once every rank is done."""

    def __init__(self, config: RunConfig, actor_options: ActorOptions | None = None) -> None:
        """Start the actors of ``config.learners``; with ``num_learners = 0`` learn in this process.

        Args:
            config: of the run.
            actor_options: by rank, what Ray is told of an actor beside its resources, such as where it is to sit.

        Raises:
            FleetError: an actor did not start.
        """
        self.config = config
        self._actor_options = actor_options
        self.num_restarts = 0
        """Times the group was started anew, ``learners.max_restarts`` at most."""
        self.num_builds = 0
        """Stages begun."""
        self._local: LearnerWorker | None = None
        self._actors: list[Any] = []
        self._history: _History | None = None
        if config.learners.num_learners == 0:
            self._local = LearnerWorker(config)
            if config.debugging.num_threads:
                import torch

                torch.set_num_threads(config.debugging.num_threads)
        else:
            self._start_actors()

    def _start_actors(self) -> None:
        import ray

        settings = self.config.learners
        actor_class = ray.remote(num_cpus=settings.num_cpus_per_learner, num_gpus=settings.num_gpus_per_learner)(
            LearnerWorker
        )
        for rank in range(settings.num_learners):
            options = self._actor_options(rank) if self._actor_options is not None else {}
            self._actors.append(actor_class.options(**options).remote(self.config, rank, settings.num_learners))
        host, port = self._call_once("prepare")[0]
        self._call_once("join", host, port)

    @property
    def num_learners(self) -> int:
        """Ranks in Ray actors; 0 where the driver learns."""
        return len(self._actors)

    @property
    def is_stopped(self) -> bool:
        """Whether no rank is left: the group was stopped, or one failed for good."""
        return self._local is None and not self._actors

    def build(self, learner_name: str, policy_dir: str | Path) -> None:
        """Make the learner of a stage on every rank: ``grpo``, ``ppo``, ``sft`` or ``my_module:MyLearner``."""
        directory = Path(policy_dir)
        directory = directory.absolute() if directory.is_dir() else directory  # else a hub's name
        self._history = None  # ranks that start anew in here build this learner, and no other before
        self._call("build", learner_name, directory)
        self._history = _History(learner_name, directory)
        self.num_builds += 1

    def update(self, batch_refs: list[Any]) -> dict[str, float]:
        """Learn from record batches of trajectory groups, given as references or as they are.

        They are held until a state is saved, see ``begin_save``: in the object store, where there are actors.
        """
        if self._actors:
            import ray

            batch_refs = [ref if isinstance(ref, ray.ObjectRef) else ray.put(ref) for ref in batch_refs]
        metrics: dict[str, float] = self._call("update", batch_refs)[0]
        self._hold("update", batch_refs)
        return metrics

    def foreach_learner(self, function: Callable[[Learner], T]) -> list[T]:
        """Call a function with the learner of every rank, and return what each returned.

        It is called again where a rank fails meanwhile; what it changes in a learner is lost in a later restart.
        """
        return self._call("apply", function)

    def get_weights(self) -> Arrays:
        """Return the policy's weights by their Hugging Face names."""
        weights: Arrays = self._call("get_weights")[0]
        return weights

    def weights_ref(self) -> Any:
        """Return a reference to the weights, which then never pass through the driver; without actors, the weights.

        The reference is the driver's own, so that it outlives the rank.
        """
        if self._local is not None:
            return self._local.learner.published_weights()
        return self._call("weights_apart", num_returns=2)[0]

    def get_state(self) -> Arrays:
        """Return all that a resumed run needs beside the folder the learner was built from.

        A flat dictionary of whole tensors by name, the same for any ZeRO stage and any number of ranks. DeepSpeed's
        universal checkpoint comes to the same by converting the files of all ranks, a step of its own before every
        resume on other ranks, and those files are pickled; here it costs that rank 0's host holds weights and both
        moments in fp32, 12 bytes a parameter.
        """
        state: Arrays = self._call("get_state")[0]
        return state

    def set_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from ``get_state``, whatever the number of ranks was. The group holds the state; see ``load_state``.

        Raises:
            DataError: it is the state of another model, or not whole.
        """
        state = {name: np.asarray(value) for name, value in state.items()}
        if self._actors:
            import ray

            held = ray.put(state)
            self._call("set_state", held)
            if self._history is not None:
                self._history.begin_at(held)
        else:
            self._call("set_state", state)

    def load_state(self, path: str | Path) -> None:
        """Continue from a file that ``begin_save`` wrote, whatever the number of ranks was; every rank reads it.

        The file stays where it is until another state is saved or set.

        Raises:
            DataError: the file is damaged, or the state of another model.
        """
        path = Path(path).absolute()
        self._call("load_state", path)
        if self._history is not None:
            self._history.begin_at(path)

    def offload_states(self) -> int:
        """Move everything that is trained to the hosts' memory; return the bytes that all ranks freed of their devices.

        For an engine on the same devices, which generates meanwhile. The next call that needs it reloads.
        """
        return sum(self._call("offload_states"))

    def reload_states(self) -> None:
        """Undo ``offload_states``."""
        self._call("reload_states")

    def save_policy(self, directory: str | Path) -> None:
        """Write the policy as a Hugging Face folder."""
        self._call("save_policy", Path(directory).absolute())

    def begin_save(self, directory: str | Path) -> None:
        """Copy policy and state, and write them while the group goes on: ``policy/`` and ``learner.safetensors``.

        Rank 0 writes, so that no state passes through the driver. Its node and the driver's share ``directory``.
        """
        path = Path(directory).absolute()
        self._call("begin_save", path)
        self._hold("begin_save", path)

    def is_written(self) -> bool:
        """Whether what ``begin_save`` began is done, well or not."""
        return all(self._call("is_saved"))

    def finish_save(self) -> None:
        """Wait for what ``begin_save`` began.

        Raises:
            OSError: it could not be written; so does ``SafetensorError``.
        """
        self._call("finish_save")

    def saved(self, directory: str | Path, final: str | Path) -> None:
        """Take note that what ``begin_save(directory)`` wrote lies in ``final``, and stays until the next is saved."""
        if self._history is not None:
            self._history.is_saved(Path(directory).absolute(), Path(final).absolute())

    def stop(self) -> None:
        """End the actors. A learner in the driver is closed."""
        self._history = None
        self._kill_actors()
        if self._local is not None:
            self._local.close()
            self._local = None

    # -- one call on every rank, and what becomes of it where a rank fails -------------------------------------------

    def _hold(self, method: str, argument: Any) -> None:
        if self._actors and self._history is not None:  # the driver does not outlive a learner of its own
            self._history.add(method, argument)

    def _call(self, method: str, *arguments: Any, num_returns: int = 1) -> list[Any]:
        """Call a method of every rank at once: they wait for one another inside."""
        failure: _BrokenRankError | None = None
        while True:
            try:
                if failure is not None:
                    self._start_again(failure, method)
                return self._call_once(method, *arguments, num_returns=num_returns)
            except _BrokenRankError as error:
                failure = error

    def _call_once(self, method: str, *arguments: Any, num_returns: int = 1) -> list[Any]:
        if self._local is not None:
            return [getattr(self._local, method)(*arguments)]
        if not self._actors:
            raise FleetError("the learner group has been stopped; make another one")
        if num_returns == 1:
            return self._wait([getattr(actor, method).remote(*arguments) for actor in self._actors])
        results = [getattr(a, method).options(num_returns=num_returns).remote(*arguments) for a in self._actors]
        self._wait([first for first, *_ in results])
        return [last for *_, last in results]

    def _start_again(self, failure: _BrokenRankError, method: str) -> None:
        """Bring new ranks to where the old ones were before the call of ``method``."""
        history, max_restarts = self._history, self.config.learners.max_restarts
        can_start = method == "build" if history is None else history.is_whole
        if not can_start or self.num_restarts == max_restarts:
            raise FleetError(f"{failure}; {_GO_ON}") from failure.__cause__
        self.num_restarts += 1
        calls = history.calls if history is not None else []
        logger.warning(
            "%s; the learner group starts anew, %d of at most %d times: %d updates are repeated, and %s",
            *(failure, self.num_restarts, max_restarts, sum(name == "update" for name, _ in calls), method),
        )
        try:
            self._start_actors()
            if history is not None:
                self._call_once("build", history.learner_name, history.policy_dir)
                if history.state is not None:
                    self._call_once("load_state" if isinstance(history.state, Path) else "set_state", history.state)
            for name, argument in calls:
                self._call_once(name, argument)
        except KeyboardInterrupt:  # halfway there: nobody must save this
            self._kill_actors()
            raise

    def _wait(self, refs: list[Any]) -> list[Any]:
        """Wait for every rank. The first error ends them all: the others would wait for the failed one for ever."""
        import ray

        pending = list(refs)
        results: dict[Any, Any] = {}
        while pending:
            done, pending = ray.wait(pending)
            try:
                results[done[0]] = ray.get(done[0])
            except ray.exceptions.RayError as error:
                self._kill_actors()
                cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
                if isinstance(cause, RagR1Error) or is_no_room(cause):
                    raise cause from None
                rank = f"learner rank {refs.index(done[0])} of {len(refs)}"
                if isinstance(cause, ray.exceptions.RayActorError):
                    raise _BrokenRankError(
                        f"{rank} died: its process was killed, crashed or ran out of memory"
                    ) from error
                if cause is error or isinstance(cause, RuntimeError | OSError):  # Ray's own; torch's, CUDA's, gloo's
                    raise _BrokenRankError(f"{rank} failed: {cause!r}") from error
                raise FleetError(f"{rank} failed: {cause!r}; {_GO_ON}") from error
        return [results[ref] for ref in refs]

    def _kill_actors(self) -> None:
        """End every rank, also one that waits in a collective for another."""
        if self._actors:
            import ray

            for actor in self._actors:
                ray.kill(actor)
            self._actors = []
