"""The Ray session of a run: it joins the configured cluster, or starts a private local one."""

from __future__ import annotations

import logging
import math
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ragr1_actors.core.errors import FleetError, UserError, one_line

OBJECT_STORE_BYTES = 512 * 1024 * 1024
"""Object store of a local session; it holds trajectories and the weights of small policies."""

_SYSTEM_CONFIG = {"timeout_ms_task_wait_for_death_info": 0}
"""A call to an actor whose process was killed fails at once. By default it waits 1 to 2 s for the cause of death, which
is not reported if the actor restarts."""


class Session:
    """A context manager that connects to Ray.

    Under ``ray job submit``, or with ``RAY_ADDRESS`` set, it joins that cluster. Otherwise it starts a local cluster;
    it never joins another one that runs on the machine. If Ray is connected already, it does nothing.
    """

    def __init__(self, num_cpus: float = 0.0, num_gpus: float = 0.0) -> None:
        """Set the resources that all actors need together; on a joined cluster they are not checked.

        Args:
            num_cpus: a local session declares at least this many CPUs, more than the machine has if necessary: actors
                may share a core.
            num_gpus: a local session must have this many GPUs.
        """
        self._num_cpus = num_cpus
        self._num_gpus = num_gpus
        self._started = False

    def __enter__(self) -> Self:
        """Connect.

        Raises:
            UserError: the cluster does not answer or refuses the token, or this machine has too few GPUs.
            FleetError: the local session did not start.
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
                f"no Ray cluster answers at {address or 'this machine'}: {error}; if the cluster requires a token, set "
                "RAY_AUTH_MODE=token and RAY_AUTH_TOKEN"
            ) from error
        except Exception as error:  # Ray raises a plain Exception if a process that it starts fails
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
        """Disconnect, and end the processes of a local session."""
        if self._started:
            import ray

            ray.shutdown()
            self._started = False


def _python_path() -> str:
    """Workers import the packages and the user's modules from the same place as the driver, installed or not."""
    root = str(Path(__file__).resolve().parent.parent)
    existing = os.environ.get("PYTHONPATH", "")
    return os.pathsep.join(part for part in (root, os.getcwd(), existing) if part)
