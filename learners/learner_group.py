"""The learner ranks as one thing: a Learner in the driver, or N Ray actors that step together.

The group outlives the stages: ``build("sft", folder)``, later ``build("grpo", other_folder)`` in the same processes,
which join their process group once. Importing this module imports neither torch nor transformers.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ragr1_actors.checkpoint import is_no_room
from ragr1_actors.config import RunConfig
from ragr1_actors.errors import FleetError, RagR1Error
from ragr1_actors.schema import groups_from_record_batch

if TYPE_CHECKING:  # torch and transformers are imported where the learner lives
    from learners.learner import Learner

T = TypeVar("T")
Arrays = dict[str, NDArray[Any]]


class LearnerWorker:
    """One rank: what a Ray actor of the group is made of, and what the driver holds where there are no actors."""

    def __init__(self, config: RunConfig, rank: int = 0, world_size: int = 1) -> None:
        """Remember the place in the group; nothing heavy is imported yet."""
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._learner: Learner | None = None

    def address(self) -> tuple[str, int]:
        """Return this node's address and a free port: where the ranks meet."""
        import ray

        with socket.socket() as probe:
            probe.bind(("", 0))
            return ray.util.get_node_ip_address(), int(probe.getsockname()[1])

    def join(self, address: str, port: int) -> None:
        """Prepare this process to be a rank. DeepSpeed and torch read the environment, and threads, once."""
        os.environ |= {
            "RANK": str(self._rank),
            "WORLD_SIZE": str(self._world_size),
            "LOCAL_RANK": "0",  # an actor sees only the GPU it was given
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
        }
        threads = self._config.debugging.num_threads or max(1, int(self._config.learners.num_cpus_per_learner))
        os.environ["OMP_NUM_THREADS"] = str(threads)
        import torch

        torch.set_num_threads(threads)

    def build(self, learner_name: str, policy_dir: Path) -> None:
        """Make the learner of a stage, in place of the one before."""
        from learners.registry import LEARNERS
        from ragr1_actors.plugins import load_object

        self.close()
        learner_class = load_object(learner_name, LEARNERS)
        learner: Learner = learner_class(self._config, policy_dir, self._rank, self._world_size)
        learner.build()  # one that fails has nothing to close
        self._learner = learner

    def close(self) -> None:
        """Let go of the learner of this stage."""
        if self._learner is not None:
            self._learner.close()
            self._learner = None

    @property
    def learner(self) -> Learner:
        """The learner of this stage."""
        if self._learner is None:
            raise RuntimeError("call build() before anything else of a learner group")
        return self._learner

    def update(self, batches: Sequence[Any]) -> dict[str, float]:
        """Decode record batches, or references to them, and learn from all their groups."""
        import ray

        found = [ray.get(batch) if isinstance(batch, ray.ObjectRef) else batch for batch in batches]
        return self.learner.update([group for batch in found for group in groups_from_record_batch(batch)])

    def apply(self, function: Callable[[Learner], T]) -> T:
        """Call a function with the learner."""
        return function(self.learner)

    def get_weights(self) -> Arrays:
        """Return the policy's weights on rank 0."""
        return self.learner.get_weights()

    def put_weights(self) -> list[Any]:
        """Put the weights into the object store; return the reference in a list, where Ray leaves it a reference."""
        import ray

        return [ray.put(self.learner.published_weights())]

    def get_state(self) -> Arrays:
        """Return the learner's state on rank 0; the other ranks help to gather it."""
        state = self.learner.get_state()
        return state if self._rank == 0 else {}

    def offload_states(self) -> int:
        """Give this rank's device memory back."""
        return self.learner.offload_states()

    def reload_states(self) -> None:
        """Take it again."""
        self.learner.reload_states()

    def set_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from a state."""
        self.learner.set_state(state)

    def save_policy(self, directory: Path) -> None:
        """Write the policy as a Hugging Face folder, from rank 0."""
        self.learner.save_policy(directory)


class LearnerGroup:
    """All the ranks. Every method returns once every rank is done."""

    def __init__(self, config: RunConfig) -> None:
        """Start the actors of ``config.learners``; with ``num_learners = 0`` learn in this process.

        Raises:
            FleetError: an actor did not start.
        """
        self.config = config
        self._local: LearnerWorker | None = None
        self._actors: list[Any] = []
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
        self._actors = [
            actor_class.remote(self.config, rank, settings.num_learners) for rank in range(settings.num_learners)
        ]
        address, port = self._wait([self._actors[0].address.remote()])[0]
        self._call("join", address, port)

    @property
    def num_learners(self) -> int:
        """Ranks in Ray actors; 0 where the driver learns."""
        return len(self._actors)

    def build(self, learner_name: str, policy_dir: str | Path) -> None:
        """Make the learner of a stage on every rank: ``grpo``, ``ppo``, ``sft`` or ``my_module:MyLearner``."""
        self._call("build", learner_name, Path(policy_dir).absolute())

    def update(self, batch_refs: list[Any]) -> dict[str, float]:
        """Learn from record batches of trajectory groups, given as references or, without actors, as they are."""
        metrics: dict[str, float] = self._call("update", batch_refs)[0]
        return metrics

    def foreach_learner(self, function: Callable[[Learner], T]) -> list[T]:
        """Call a function with the learner of every rank, and return what each returned."""
        return self._call("apply", function)

    def get_weights(self) -> Arrays:
        """Return the policy's weights by their Hugging Face names."""
        weights: Arrays = self._call("get_weights")[0]
        return weights

    def weights_ref(self) -> Any:
        """Return a reference to the weights, which then never pass through the driver; without actors, the weights."""
        if self._local is not None:
            return self._local.learner.published_weights()
        return self._call("put_weights")[0][0]

    def get_state(self) -> Arrays:
        """Return all that a resumed run needs beside the folder the learner was built from."""
        state: Arrays = self._call("get_state")[0]
        return state

    def set_state(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Continue from ``get_state``, whatever the number of ranks was."""
        state = {name: np.asarray(value) for name, value in state.items()}
        if self._actors:
            import ray

            self._call("set_state", ray.put(state))
        else:
            self._call("set_state", state)

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

    def stop(self) -> None:
        """End the actors. A learner in the driver is closed."""
        if self._actors:
            import ray

            for actor in self._actors:
                ray.kill(actor)
            self._actors = []
        if self._local is not None:
            self._local.close()
            self._local = None

    def _call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every rank at once: they wait for one another inside."""
        if self._local is not None:
            return [getattr(self._local, method)(*arguments)]
        if not self._actors:
            raise FleetError("the learner group has been stopped; make another one")
        return self._wait([getattr(actor, method).remote(*arguments) for actor in self._actors])

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
                self.stop()
                cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
                if isinstance(cause, RagR1Error) or is_no_room(cause):
                    raise cause from None
                rank = f"learner rank {refs.index(done[0])} of {len(refs)}"
                if isinstance(cause, ray.exceptions.ActorDiedError):
                    raise FleetError(
                        f"{rank} died: its process was killed, crashed or ran out of memory; go on from the last "
                        "checkpoint with --resume"
                    ) from error
                raise FleetError(f"{rank} failed: {cause!r}; go on from the last checkpoint with --resume") from error
        return [results[ref] for ref in refs]
