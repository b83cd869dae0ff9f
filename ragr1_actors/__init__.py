"""RAGR1-Actors: train language models to reason and search with reinforcement learning, on Ray actors.

The names below are the public surface; everything else is an internal address. They are imported when first used, so
that ``import ragr1_actors`` costs nothing and pulls in neither torch nor Ray.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # type checkers do not see what ``__getattr__`` imports
    from envs.base import StepResult as StepResult
    from envs.base import TextEnv as TextEnv
    from envs.grammars.tags import Answer as Answer
    from envs.grammars.tags import Malformed as Malformed
    from envs.grammars.tags import Search as Search
    from envs.measures import RewardContext as RewardContext
    from envs.measures import RewardResult as RewardResult
    from envs.search import SearchEnv as SearchEnv
    from envs.sources import TaskSource as TaskSource
    from envs.tasks.curriculum import Curriculum as Curriculum
    from learners.learner import Learner as Learner
    from ragr1_actors.core.types import Completion as Completion
    from ragr1_actors.core.types import Record as Record
    from ragr1_actors.core.types import StopReason as StopReason
    from ragr1_actors.core.types import Task as Task
    from ragr1_actors.core.types import TokenKind as TokenKind
    from ragr1_actors.core.types import ToolCall as ToolCall
    from ragr1_actors.core.types import Trajectory as Trajectory
    from ragr1_actors.core.types import TrajectoryGroup as TrajectoryGroup
    from ragr1_actors.rollout.groups import RolloutStrategy as RolloutStrategy
    from ragr1_actors.training.algorithm import Algorithm as Algorithm
    from ragr1_actors.training.algorithm_config import AlgorithmConfig as AlgorithmConfig
    from retrieval.base import Passage as Passage
    from retrieval.base import Retriever as Retriever

_NAMES = {
    "envs.base": "StepResult TextEnv",
    "envs.grammars.tags": "Answer Malformed Search",
    "envs.measures": "RewardContext RewardResult",
    "envs.search": "SearchEnv",
    "envs.sources": "TaskSource",
    "envs.tasks.curriculum": "Curriculum",
    "learners.learner": "Learner",
    "ragr1_actors.core.types": "Completion Record StopReason Task TokenKind ToolCall Trajectory TrajectoryGroup",
    "ragr1_actors.rollout.groups": "RolloutStrategy",
    "ragr1_actors.training.algorithm": "Algorithm",
    "ragr1_actors.training.algorithm_config": "AlgorithmConfig",
    "retrieval.base": "Passage Retriever",
}
_PUBLIC = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'ragr1_actors' has no attribute {name!r}; it has: {', '.join(__all__)}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def _check_siblings() -> None:
    """Refuse to start where a folder of the user's shadows one of the project's own top-level packages."""
    home = Path(__file__).resolve().parent.parent
    for package in ("envs", "learners", "retrieval", "cluster"):
        spec = importlib.util.find_spec(package)
        found = Path(spec.origin).resolve().parent if spec is not None and spec.origin else None
        if found != home / package:
            raise ImportError(
                f"ragr1_actors needs its own package {package!r} at {home / package}, but Python finds "
                f"{found or 'a folder without __init__.py, or none'}; rename your {package!r} folder"
            )


_check_siblings()
