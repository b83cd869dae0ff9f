"""AlgorithmConfig: RLlib's fluent builder over the sections of ``core/config.py``.

::

    config = (
        AlgorithmConfig.from_recipe("quickstart")
        .training(lr=5e-4, group_size=8)
        .env_runners(num_env_runners=2)
        .debugging(seed=1)
    )
    algorithm = config.build_algo(run_dir="runs/mine")

An unknown key, a wrong type or a value out of range raises a ``ConfigError``; it names the nearest known key.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ragr1_actors.core import resolve
from ragr1_actors.core.config import RunConfig

if TYPE_CHECKING:  # imports Ray and torch
    from ragr1_actors.training.algorithm import Algorithm


def _section(name: str) -> Callable[..., AlgorithmConfig]:
    def set_keys(self: AlgorithmConfig, **settings: Any) -> AlgorithmConfig:
        return self._update(name, settings)

    set_keys.__name__ = name
    set_keys.__doc__ = f"Set keys of the section ``{name}``, as ``core/config.py`` describes them."
    return set_keys


class AlgorithmConfig:
    """Builder of a ``RunConfig``, with one method per section, which takes keys and returns ``self``, as in RLlib."""

    def __init__(self, sections: resolve.Sections | None = None) -> None:
        """Start from the defaults, or from ``{section: {key: value}}``."""
        self._sections: resolve.Sections = {}
        for section, settings in (sections or {}).items():
            self._update(section, settings)

    @classmethod
    def from_recipe(cls, name_or_path: str) -> Self:
        """Load a recipe of the project by name, or a YAML file by path."""
        return cls(resolve.read_recipe(name_or_path))

    def override(self, assignments: list[str]) -> Self:
        """Apply ``section.key=value`` strings, values read as YAML."""
        self._sections = resolve.override(self._sections, assignments)
        return self

    def _update(self, section: str, settings: dict[str, Any]) -> Self:
        resolve.check_keys(section, settings)
        self._sections[section] = self._sections.get(section, {}) | settings
        return self

    environment = _section("environment")
    policy = _section("policy")
    env_runners = _section("env_runners")
    retrieval = _section("retrieval")
    sft = _section("sft")
    training = _section("training")
    learners = _section("learners")
    evaluation = _section("evaluation")
    checkpointing = _section("checkpointing")
    debugging = _section("debugging")

    def freeze(self) -> RunConfig:
        """Validate everything and return the resolved configuration."""
        return resolve.resolve(self._sections)

    def build_algo(self, run_dir: str | Path) -> Algorithm:
        """Validate, make ``run_dir`` the directory of a new run, and start the algorithm that writes into it."""
        from ragr1_actors.training.algorithm import Algorithm  # imports Ray and torch

        return Algorithm.create(self.freeze(), run_dir)
