"""Configuration of a run of the last release in this release's keys: such a run can be read, but not resumed."""

from __future__ import annotations

from typing import Any

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.resolve import RENAMED

_NONE_IF_EMPTY = {"env_runners.autoscaling", "retrieval.autoscaling", "retrieval.encoder_autoscaling", "learners.lora"}
"""Groups of keys that the last release turned off by ``{}``."""
_OF_SOME_ALGORITHMS = {"training.clip_low", "training.clip_high", "training.tis_clip"}


def is_of_last_release(sections: Any) -> bool:
    """Return whether the last release wrote the content of a ``config.yaml``; False if it is damaged."""
    is_whole = isinstance(sections, dict) and all(isinstance(keys, dict) for keys in sections.values())
    return is_whole and "world_seed" in sections.get("environment", {})


def as_this_release(sections: Any) -> Any:
    """Return the content of a ``config.yaml`` in the keys of this release, to which it may already belong."""
    if not is_of_last_release(sections):
        return sections
    now: dict[str, dict[str, Any]] = RunConfig().model_dump()
    old = {f"{section}.{key}": value for section, keys in sections.items() for key, value in keys.items()}
    for name in sorted(old, key=RENAMED.__contains__):  # keys that move into options follow the options
        if name in _OF_SOME_ALGORITHMS and not old[name]:
            continue  # the default, which other algorithms do not have
        moved_to, *path = RENAMED.get(name, name).split(".")
        inner = now.setdefault(moved_to, {})
        for part in path[:-1]:
            inner = inner[part]
        inner[path[-1]] = None if name in _NONE_IF_EMPTY and not old[name] else old[name]
    environment = now["environment"]
    if environment["env"] in ("direct", "rag"):
        environment["options"]["mode"], environment["env"] = environment["env"], "search"
    seed = environment.pop("world_seed")
    if seed and environment["tasks"] == "world":
        environment["tasks"] = [{"source": "world", "options": {"seed": seed}}]
    return now
