"""Environments a recipe names by a word; any other is named ``my_module:MyEnv``."""

from __future__ import annotations

from envs.base import TextEnv
from envs.search import SearchEnv

ENVS: dict[str, type[TextEnv]] = {"search": SearchEnv}
