"""Commands in messages, in a form that can be copied into the shell."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path


def command_name() -> str:
    """Return the command by which this shell finds the running program: ``ragr1``, or ``.venv/bin/ragr1``."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "ragr1" and shutil.which("ragr1") is None else "ragr1"


def advised(*words: str) -> str:
    """Return a command with its words quoted: ``advised("ask", "runs/a", "Where?") == "ragr1 ask runs/a 'Where?'"``."""
    return shlex.join([command_name(), *words])
