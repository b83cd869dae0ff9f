"""The files and types that a trajectory, and a policy version, cross in one iteration of ``quickstart`` in the driver.

::

    python -m benchmarks.walks            # files and carriers of each of the two walks

An object of a class of this project that did not exist before the iteration is a carrier if it is given to a function
of another file than its caller's. A file counts on the walk of a trajectory if one of its functions is given such an
object; on the walk of a policy version, which is ``WeightSync.publish``, if code of it runs. With actors, the files and
types that talk to them come on top.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from ragr1_actors.rollout.runners.weight_sync import WeightSync
from ragr1_actors.training.algorithm import Algorithm
from ragr1_actors.training.algorithm_config import AlgorithmConfig

ROOT = Path(__file__).parents[1]
PACKAGES = ("ragr1_actors", "envs", "learners", "retrieval", "cluster")
_IN_THE_DRIVER = (
    "env_runners.num_env_runners=0",
    "learners.num_learners=0",
    "retrieval.num_retrievers=0",
    "sft.num_steps=0",
    "training.train_batch_size=4",
    "training.group_size=2",
    "training.num_iterations=2",
    "evaluation.num_tasks=4",
    "training.options.drop_zero_variance=false",
)


class Trace:
    """What is handed from file to file while it is on."""

    def __init__(self) -> None:
        """Note what exists now: it is no carrier."""
        self.files: defaultdict[str, set[str]] = defaultdict(set)
        """By walk."""
        self.carriers: defaultdict[str, set[str]] = defaultdict(set)
        self._old = {id(one): one for one in gc.get_objects()}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        """Look at one call, as ``sys.setprofile`` tells it."""
        name = _file_of(frame.f_code)
        if event != "call" or name is None:
            return
        caller = next(_callers(frame), None)
        walk = "policy version" if any(one is WeightSync.publish.__code__ for one in _codes(frame)) else "trajectory"
        if walk == "policy version":
            self.files[walk].add(name)
        for value in _arguments(frame):
            if id(value) in self._old or type(value).__module__.split(".")[0] not in PACKAGES:
                continue
            self.files[walk].add(name)
            if caller not in (None, name):
                self.carriers[walk].add(f"{type(value).__module__}.{type(value).__qualname__}")


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back


def _callers(frame: FrameType) -> Iterator[str]:
    return (name for code in _codes(frame.f_back) if (name := _file_of(code)) is not None)


def _file_of(code: CodeType) -> str | None:
    path = Path(code.co_filename)
    if not path.is_relative_to(ROOT) or path.relative_to(ROOT).parts[0] not in PACKAGES:
        return None
    return str(path.relative_to(ROOT))


def _arguments(frame: FrameType) -> Iterator[Any]:
    code = frame.f_code
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        value = frame.f_locals.get(name)
        yield value
        if isinstance(value, list | tuple):
            yield from value[:4]


def main() -> None:
    """Print both walks."""
    config = AlgorithmConfig.from_recipe("quickstart").override(list(_IN_THE_DRIVER)).freeze()
    with tempfile.TemporaryDirectory() as folder:
        algorithm = Algorithm.create(config, Path(folder) / "run")
        try:
            algorithm.train()
            trace = Trace()
            threading.setprofile(trace)
            sys.setprofile(trace)
            algorithm.train()
            sys.setprofile(None)
        finally:
            algorithm.stop()
    for walk in ("trajectory", "policy version"):
        files, carriers = sorted(trace.files[walk]), sorted(trace.carriers[walk])
        print(f"{walk}: {len(files)} files, {len(carriers)} carriers")
        print("\n".join(f"  {name}" for name in files + carriers))


if __name__ == "__main__":
    main()
