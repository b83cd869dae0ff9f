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

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ragr1_actors.core import resolve
from ragr1_actors.core.config import RunConfig

if TYPE_CHECKING:  # pulls in Ray and torch
    from ragr1_actors.training.algorithm import Algorithm


class AlgorithmConfig:
    """Builder of a ``RunConfig``, with one method per section; each returns ``self``, as in RLlib."""

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

    def environment(self, **settings: Any) -> Self:
        """Set keys of ``EnvironmentSettings``."""
        return self._update("environment", settings)

    def policy(self, **settings: Any) -> Self:
        """Set keys of ``PolicySettings``."""
        return self._update("policy", settings)

    def env_runners(self, **settings: Any) -> Self:
        """Set keys of ``EnvRunnerSettings``."""
        return self._update("env_runners", settings)

    def retrieval(self, **settings: Any) -> Self:
        """Set keys of ``RetrievalSettings``."""
        return self._update("retrieval", settings)

    def sft(self, **settings: Any) -> Self:
        """Set keys of ``SFTSettings``."""
        return self._update("sft", settings)

    def training(self, **settings: Any) -> Self:
        """Set keys of ``TrainingSettings``."""
        return self._update("training", settings)

    def learners(self, **settings: Any) -> Self:
        """Set keys of ``LearnerSettings``."""
        return self._update("learners", settings)

    def evaluation(self, **settings: Any) -> Self:
        """Set keys of ``EvaluationSettings``."""
        return self._update("evaluation", settings)

    def checkpointing(self, **settings: Any) -> Self:
        """Set keys of ``CheckpointingSettings``."""
        return self._update("checkpointing", settings)

    def debugging(self, **settings: Any) -> Self:
        """Set keys of ``DebuggingSettings``."""
        return self._update("debugging", settings)

    def freeze(self) -> RunConfig:
        """Validate everything and return the resolved configuration."""
        return resolve.resolve(self._sections)

    def build_algo(self, run_dir: str | Path) -> Algorithm:
        """Validate, make ``run_dir`` the directory of a new run, and start the algorithm that writes into it."""
        from ragr1_actors.training.algorithm import Algorithm  # pulls in Ray and torch

        return Algorithm.create(self.freeze(), Path(run_dir))
