"""One rank of the learner group: a Ray actor, or an object in the driver. The import loads no torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from numpy.typing import NDArray
from safetensors import SafetensorError

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import UserError
from ragr1_actors.core.files import (
    ADAPTER_FOLDER,
    LEARNER_FILE,
    POLICY_FOLDER,
    is_no_room,
    read_tensors,
    sync_tree,
    write_tensors,
)
from ragr1_actors.core.schema import groups_from_record_batch

if TYPE_CHECKING:  # only the process of the learner imports torch and transformers
    from learners.learner import Learner
    from learners.models.export import PolicyCopy

T = TypeVar("T")
Arrays = dict[str, NDArray[Any]]


class LearnerWorker:
    """One learner rank: the class of the group's Ray actors, and the learner of a group without actors."""

    def __init__(self, config: RunConfig, rank: int = 0, world_size: int = 1) -> None:
        """Store the rank; nothing heavy is imported yet."""
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._learner: Learner | None = None
        self._store: Any = None
        self._writer = ThreadPoolExecutor(1, "save checkpoint")
        self._writing: Future[None] | None = None

    def prepare(self) -> tuple[str, int]:
        """Import torch and, on rank 0 of several, open the store of the rendezvous; return its host and port.

        The store listens from now on: another process could take a port that was only looked up. Torch reads the number
        of threads once.
        """
        threads = self._config.debugging.num_threads or max(1, int(self._config.learners.num_cpus_per_learner))
        os.environ["OMP_NUM_THREADS"] = str(threads)
        import ray
        import torch
        from torch._C._distributed_c10d import TCPStore

        torch.set_num_threads(threads)
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

    def build(self, learner_name: str, policy_dir: Path) -> None:
        """Build the learner of a stage, and close the previous one."""
        from learners.options import LEARNERS
        from ragr1_actors.core.resolve import load_object

        self.close()
        name = str(policy_dir)
        if not policy_dir.is_dir():  # the learner reads configuration and tokenizer too
            from huggingface_hub import snapshot_download

            policy_dir = Path(snapshot_download(name))
        learner_class = load_object(learner_name, LEARNERS)
        learner: Learner = learner_class(self._config, policy_dir, self._rank, self._world_size)
        learner.policy_name = name
        learner.build()  # a build that fails leaves nothing to close
        self._learner = learner

    def close(self) -> None:
        """Close the learner of this stage; a checkpoint that is being written is a copy, and continues."""
        if self._learner is not None:
            self._learner.close()
            self._learner = None

    @property
    def learner(self) -> Learner:
        """The learner of this stage."""
        if self._learner is None:
            raise RuntimeError("the learner group has no learner; call build() first")
        return self._learner

    def update(self, batches: Sequence[Any]) -> dict[str, float]:
        """Learn from all groups of record batches, or of references to them; no passage text is decoded."""
        import ray

        found = [ray.get(batch) if isinstance(batch, ray.ObjectRef) else batch for batch in batches]
        return self.learner.update(
            [group for batch in found for group in groups_from_record_batch(batch, decode_texts=False)]
        )

    def apply(self, function: Callable[[Learner], T]) -> T:
        """Return ``function(learner)``."""
        return function(self.learner)

    def weights_apart(self) -> tuple[None, Arrays]:
        """Return the weights as the second of two results, so that the caller can wait for the first only."""
        return None, self.learner.published_weights()

    def get_state(self) -> Arrays:
        """Return the learner's state on rank 0; the other ranks take part in the gather."""
        state = self.learner.get_state(keep=self._rank == 0)
        return state if self._rank == 0 else {}

    def load_state(self, path: Path) -> None:
        """Continue from a state file; the ranks of a node share its pages in memory."""
        self.learner.set_state(read_tensors(path))

    def begin_save(self, directory: Path) -> None:
        """Copy policy and state; a thread of rank 0 writes them into ``directory``."""
        policy, state = self.learner.take_policy(), self.learner.get_state(keep=self._rank == 0)
        if self._rank == 0:
            self._writing = self._writer.submit(_write_learner, directory, policy, state)

    def is_saved(self) -> bool:
        """Whether the thread has ended, with success or not."""
        return self._writing is None or self._writing.done()

    def finish_save(self) -> None:
        """Wait for the thread.

        Raises:
            OSError: the disk is full; or ``SafetensorError``.
            UserError: the thread could not write for another reason.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result()
            except (OSError, SafetensorError) as error:
                if is_no_room(error):
                    raise
                raise UserError(f"cannot write a checkpoint: {error}") from error  # the rank did not fail


def _write_learner(directory: Path, policy: PolicyCopy, state: Arrays) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    policy.write(directory / POLICY_FOLDER)
    if policy.adapter is not None:
        policy.adapter.write(directory / ADAPTER_FOLDER)
    write_tensors(directory / LEARNER_FILE, state)
    sync_tree(directory)  # the driver syncs too, but only the node that wrote can flush to a shared file system
