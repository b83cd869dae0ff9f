"""Exceptions that the project raises on purpose, with the words and commands that their messages share.

All of them pickle (Ray sends them between processes): they take one message and keep no other state.
"""

from __future__ import annotations

import difflib
import shlex
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path


class RagR1Error(Exception):
    """Base of every exception raised on purpose."""


class UserError(RagR1Error):
    """A request cannot be met; one sentence says what was got, what was expected and what to do."""


class ConfigError(UserError, ValueError):
    """A recipe, a section, a key or a value does not exist or does not fit."""


class DataError(UserError, ValueError):
    """A task file, a corpus or an index cannot be used as it is."""


class RunDirectoryError(UserError):
    """A run directory holds a run already, or holds none where one is needed."""


class ServiceError(RagR1Error):
    """A service that a trajectory needs, such as a judge, did not answer; the message has address and last error."""


class RetrievalError(ServiceError):
    """A search failed on every replica that was tried."""


class ToolError(RagR1Error):
    """A tool was called wrongly, or cannot do what the call asks; the policy reads the message."""


class RpcError(RagR1Error):
    """A remote call to an actor failed: no connection, or the method raised; the message has the cause."""


class TransferError(RagR1Error):
    """Weights did not arrive, or only in part; the engine needs all of them again."""


class EngineError(RagR1Error):
    """An engine did not start or did not answer."""


class EngineDeadError(EngineError):
    """An engine's process has ended: it answers no further request."""


class LearnerError(RagR1Error):
    """Learning cannot continue: no step changes the weights any more."""


class FleetError(RagR1Error):
    """A fleet has no live actor."""


def one_line(error: BaseException, max_length: int = 500) -> str:
    r"""Return the message of an error on one line, cut to ``max_length`` characters; its type if it has no message.

    ``one_line(ValueError("bad\n  header")) == "bad header"``
    """
    return shortened(" ".join(str(error).split()) or type(error).__name__, max_length)


def valid_unicode(text: str) -> str:
    r"""Join surrogate pairs and replace lone ones (JSON's ``"\ud800"``), which no UTF-8 file can hold."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def shortened(text: str, max_length: int = 80) -> str:
    """Return the text, cut to ``max_length`` characters of which the last three are dots."""
    return text if len(text) <= max_length else f"{text[: max_length - 3]}..."


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the end of a message on an unknown name: the most similar known name, or all known names.

    ``nearest("group_sze", ["lr", "group_size"]) == "; did you mean 'group_size'?"``
    """
    known = list(known)
    matches = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else f"; expected one of: {', '.join(known)}"


def command_name() -> str:
    """Return the command by which this shell finds the running program: ``ragr1``, or ``.venv/bin/ragr1``."""
    called = Path(sys.argv[0])
    return str(called) if called.name == "ragr1" and shutil.which("ragr1") is None else "ragr1"


def advised(*words: str) -> str:
    """Return a command with its words quoted: ``advised("ask", "runs/a", "Where?") == "ragr1 ask runs/a 'Where?'"``."""
    return shlex.join([command_name(), *words])
