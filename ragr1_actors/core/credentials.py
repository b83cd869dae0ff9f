"""Secrets come from the environment only. An option or an address that holds one is refused: it would be stored.

A recipe's text is printed, stored with the run, and shown with the job by Ray's dashboard.
"""

from __future__ import annotations

import os
import re
from typing import Any

from ragr1_actors.core.errors import ConfigError

_OPTIONS = ("retrieval.options", "env_runners.engine_options")
"""Options that reach search APIs and engines, which need keys."""
_PASSWORD = re.compile(r"[A-Za-z0-9+.-]://[^/?#:]*+:(?!\d+/)|https?://[^/?#:]++\Z", re.IGNORECASE)
"""Pattern of the text before an ``@``: a user and a password, which may hold ``/``, ``?`` and ``#``, or a token instead
of a user. A port is neither. Like all patterns here it takes time linear in the text."""
_PARAMETER = re.compile(r"[?&]([^=?&#\s]+)=")
_SECRET_NAME = re.compile(
    r"(^|.*[-_.])(key|apikey|token|secret|password|passwd|pwd|auth|authorization|cookie|credentials?|sig|signature)",
    re.IGNORECASE,
)


def is_secret(name: str) -> bool:
    """Return whether an option, a header or a parameter of this name holds a secret.

    ``api_key``, ``X-Subscription-Token`` and ``Authorization`` do; ``key_env``, the name of a variable, does not.
    """
    return _SECRET_NAME.fullmatch(name) is not None


def refuse_credentials(text: str, where: str) -> None:
    """Refuse an address with a password, or with a parameter such as ``api_key``; the message does not quote it.

    Raises:
        ConfigError: ``text`` holds such an address; ``where`` names it in the message: ``--run-dir``.
    """
    before_at = (part for word in text.split() for part in word.split("@")[:-1])
    if any(map(_PASSWORD.search, before_at)) or ("://" in text and any(map(is_secret, _PARAMETER.findall(text)))):
        raise ConfigError(
            f"{where}: the address holds a password or a key, which would be stored and printed; take it out and give "
            "the secret in the environment of the processes that use it"
        )


def refuse_secrets(value: Any, key: str) -> None:
    """Refuse a secret in the value of a recipe's key: an address, or an option of a part that needs keys.

    Raises:
        ConfigError: as ``refuse_credentials``, or the name of an option says that it is a secret.
    """
    if isinstance(value, str):
        refuse_credentials(value, key)
    elif isinstance(value, dict) and key.startswith(_OPTIONS):
        for name in filter(is_secret, value):
            raise ConfigError(
                f"{key}.{name}: a secret in a recipe would be stored and printed; put it into an environment variable, "
                "and name the variable in an option such as token_env or key_env"
            )


def read_secret(key: str, variable: str) -> str:
    """Return the value of the environment variable that ``key`` names, or "" if ``variable`` is empty.

    Raises:
        ConfigError: the variable is not set, or an HTTP header cannot hold its value.
    """
    secret = os.environ.get(variable, "") if variable else ""
    if variable and not secret:
        raise ConfigError(f"{key}: the environment variable {variable!r} is not set; export it")
    if not is_token(secret):
        raise ConfigError(f"the environment variable {variable!r} holds spaces or odd characters, expected a token")
    return secret


def is_token(secret: str) -> bool:
    """Return whether an HTTP header can hold the secret: printable ASCII without spaces."""
    return secret.isascii() and secret.isprintable() and " " not in secret
