"""Lease: shows which machine works in a run at a URI, since file locks are not seen from other machines.

An object beside the run, ``lease.json``, is replaced every few seconds while a process works in it, and removed at its
end::

    {"machine": "gpu-7 4f5c2b1e-...", "renewals": 12}

A process that finds the lease of another machine waits for two renewals: if one comes, the run is in use; if none
comes, that process was killed. No clocks are compared.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from dataclasses import replace
from pathlib import Path

from cluster.storage import Storage
from ragr1_actors.core.disk.json_files import validated
from ragr1_actors.core.errors import RunDirectoryError, UserError

LEASE_FILE = "lease.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
logger = logging.getLogger(__name__)


def this_machine() -> str:
    """Return the host's name and the id of its last boot, if the system has one: ``gpu-7 4f5c2b1e-...``."""
    boot_id = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot_id}".strip()


class Lease:
    """The lease of this process; two processes of one machine are kept apart by a lock, see ``RunStore.held``."""

    def __init__(self, storage: Storage, interval_s: float) -> None:
        """Prepare the lease at ``storage``, which the caller renews every ``interval_s``."""
        self._storage = replace(storage, retry_s=0)  # a run continues without its lease
        self._interval_s = interval_s
        self._machine = this_machine()
        self._num_renewals = 0

    def take(self) -> None:
        """Begin to hold the run; raises ``RunDirectoryError`` if a process of another machine works in it."""
        found = self._read()
        if found is not None and found.get("machine") != self._machine:
            self._wait_for_end_of(found)
        self.renew()

    def _wait_for_end_of(self, found: dict[str, object]) -> None:
        host = str(found.get("machine", "")).partition(" ")[0]
        wait_s = 2.5 * self._interval_s
        logger.warning(
            "%s was used from %s, and was not given back: waiting up to %.0f s to see whether it is in use",
            *(self._storage, host, wait_s),
        )
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            time.sleep(min(1.0, self._interval_s / 4))
            newest = self._read()
            if newest is None:
                return
            if newest != found:
                raise RunDirectoryError(
                    f"a process on {host} works in {self._storage}; wait until it ends, or choose another --run-dir"
                )

    def renew(self) -> None:
        """Tell other machines that the run is in use; errors of the storage are ignored."""
        self._num_renewals += 1
        content = {"machine": self._machine, "renewals": self._num_renewals}
        try:
            self._storage.write(LEASE_FILE, json.dumps(content).encode())
        except UserError as error:
            logger.warning("%s; other machines do not see that the run is in use", error)

    def give_back(self) -> None:
        """Remove the lease, so that other machines can begin at once."""
        try:
            self._storage.remove([LEASE_FILE])
        except UserError as error:
            logger.warning("%s; another machine waits for it when it continues the run", error)

    def _read(self) -> dict[str, object] | None:
        try:
            content = self._storage.read(LEASE_FILE)
            return None if content is None else validated(dict[str, object], content, LEASE_FILE)
        except UserError:  # the storage does not answer, or the object is not a lease
            return None
