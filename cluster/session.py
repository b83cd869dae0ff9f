"""The Ray session of a run: join the cluster there is, or start a local one that belongs to nobody else."""

from __future__ import annotations

import logging
import math
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ragr1_actors.core.errors import FleetError, UserError
from ragr1_actors.core.text import one_line

OBJECT_STORE_BYTES = 512 * 1024 * 1024
"""Of a local session: trajectories and weights of small policies."""

_SYSTEM_CONFIG = {"timeout_ms_task_wait_for_death_info": 0}
"""A call to an actor whose process was killed fails at once. By default it waits 1 to 2 s for the cause of the death,
which nobody hears of where the actor is started again."""


class Session:
    """Holds Ray for as long as a run needs it.

    Under ``ray job submit``, or with ``RAY_ADDRESS`` set, it joins that cluster. Otherwise it starts a local one, never
    attaching to a cluster that happens to run on the machine.
    """

    def __init__(self, num_cpus: float = 0.0, num_gpus: float = 0.0) -> None:
        """Say what the actors will ask for together.

        A local session has at least as many CPUs, as they are only counted: actors may share a core. GPUs it has or
        has not. A cluster may have to grow first, and is waited for.
        """
        self._num_cpus = num_cpus
        self._num_gpus = num_gpus
        self._started = False

    def __enter__(self) -> Self:
        """Connect.

        Raises:
            UserError: the cluster does not answer, or wants another token; this machine has too few GPUs.
            FleetError: a local session did not come up.
        """
        import ray

        if ray.is_initialized():
            return self
        address = os.environ.get("RAY_ADDRESS")
        common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
        try:
            if address:
                ray.init(address=address, **common)
            else:
                ray.init(
                    address="local",
                    num_cpus=max(os.cpu_count() or 1, math.ceil(self._num_cpus)),
                    include_dashboard=False,
                    object_store_memory=OBJECT_STORE_BYTES,
                    _system_config=_SYSTEM_CONFIG,
                    runtime_env={"env_vars": {"PYTHONPATH": _python_path(), "TOKENIZERS_PARALLELISM": "false"}},
                    _temp_dir=tempfile.mkdtemp(prefix="ragr1-", dir="/tmp"),  # socket paths have 107 characters
                    **common,
                )
        except ConnectionError as error:
            raise UserError(
                f"no Ray cluster answers at {address or 'this machine'}: {error}; if the cluster asks for a token, set "
                "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to the cluster's"
            ) from error
        except Exception as error:  # Ray's own, where one of the processes that it starts does not come up
            if type(error) is not Exception:
                raise
            raise FleetError(
                f"Ray did not start: {one_line(error)}; try again when this machine is less busy"
            ) from error
        self._started = True
        num_gpus = ray.cluster_resources().get("GPU", 0.0)
        if not address and self._num_gpus > num_gpus:
            self.__exit__(None, None, None)
            raise UserError(
                f"the actors ask for {self._num_gpus:g} GPUs, this machine has {num_gpus:g}; lower "
                "num_gpus_per_env_runner, num_gpus_per_retriever and num_gpus_per_learner, or run on a cluster"
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Disconnect, and end a local session's processes."""
        if self._started:
            import ray

            ray.shutdown()
            self._started = False


def _python_path() -> str:
    """Workers import the five packages from where the driver did, installed or not, and the user's own modules."""
    root = str(Path(__file__).resolve().parent.parent)
    existing = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(part for part in (root, os.getcwd(), existing) if part)
