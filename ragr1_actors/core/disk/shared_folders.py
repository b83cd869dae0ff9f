"""Checks that several nodes see one folder."""

from __future__ import annotations

import socket
from pathlib import Path

from ragr1_actors.core.errors import DataError


def check_seen(name: str | Path) -> None:
    """Return if ``name`` is a folder on this node, or no absolute path, and so maybe a name on a model hub.

    Raises:
        DataError: the node of the driver has this folder, and this node does not.
    """
    if Path(name).is_absolute() and not Path(name).is_dir():
        raise DataError(
            f"node {socket.gethostname()} does not see the folder {name}; put it on a file system that all nodes share "
            "or --run-dir on a storage, such as s3://bucket/runs/mine"
        )


def answer_probe(probe: Path, *, replies: bool) -> str:
    """Return the name of this node if it does not see the file ``probe``, else an empty text.

    With ``replies`` it writes ``reply_to(probe)``; a node that cannot is returned, too.
    """
    try:
        if not probe.is_file():
            return socket.gethostname()
        if replies:
            reply_to(probe).touch()
    except OSError:
        return socket.gethostname()
    return ""


def reply_to(probe: Path) -> Path:
    """Return the file that ``answer_probe`` writes."""
    return probe.with_name(f"{probe.name}_reply")
