"""``ragr1 ask``: one policy in this process that answers question after question, and shows how.

``RolloutFleets`` would do the same, but it loads Ray, the learners and what builds an index. Here a person waits: only
the engine, the environment and the retriever are loaded, and the policy writes while a thread loads the retriever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

from envs.measures import num_queries, num_rounds, searches
from ragr1_actors.core.config import SamplerConfig
from ragr1_actors.core.process.driver_loop import DriverLoop
from ragr1_actors.core.types import Task, Trajectory, Turn
from ragr1_actors.evaluation.evaluated_policy import index_of, sampler_config
from ragr1_actors.planning.fit import check_gpus
from ragr1_actors.planning.preflight import check_services
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.groups import GroupRequest
from ragr1_actors.rollout.recorder import Watch
from ragr1_actors.runs.run_directory import find_checkpoint, open_run_directory
from retrieval.base import Page, PageRetriever, Passage, Retriever, needs_index
from retrieval.local import named_index, open_retriever, retriever_class

NOT_SHOWN = Watch(lambda text: None, lambda turn: None)


def trained(path: str | Path) -> tuple[SamplerConfig, Path, Callable[[], Retriever]]:
    """Return the configuration of the policy at a path, its folder, and a function that opens its retriever."""
    store, policy_dir = find_checkpoint(path)
    run = open_run_directory(store)
    retrieval = {"num_retrievers": 0, "index": str(index_of(run, store))}
    config = sampler_config(run, env_runners={"num_env_runners": 0}, retrieval=retrieval)
    check_gpus(config)
    config = check_services(config, store)
    index_dir = named_index(config.retrieval) if needs_index(config.retrieval.type) else None
    return config, policy_dir, lambda: open_retriever(index_dir, config.retrieval)


class Asker:
    """Policy and its retriever, loaded once for all questions; use it as a context manager."""

    def __init__(self, path: str | Path) -> None:
        """Load a checkpoint, or a run's newest one, and the run's index.

        Raises:
            RunDirectoryError: there is no run or no checkpoint.
            UserError: policy, index or a setting cannot be used, or a search server does not answer.
        """
        config, policy_dir, open_its_retriever = trained(path)
        opens_pages = issubclass(retriever_class(config.retrieval.type), PageRetriever)
        self._retriever = (_LoadingPages if opens_pages else _LoadingRetriever)(open_its_retriever)
        self._runner = EnvRunner.load(config, policy_dir, self._retriever)
        self._retriever.start()  # not earlier: two threads that import the same packages take longer than one
        self._loop = DriverLoop()
        self._num_asked = 0

    def __enter__(self) -> Self:
        """Do nothing: the policy is loaded."""
        return self

    def __exit__(self, *error: object) -> None:
        """Free the policy. Work that an interrupt left is cancelled."""
        self._loop.close(self._runner.close())

    def ask(self, question: str, watch: Watch = NOT_SHOWN) -> Trajectory:
        """Answer ``question`` greedily; ``watch`` gets text and searches as they come.

        Raises:
            UserError: the retriever cannot be loaded.
        """
        request = GroupRequest(f"ask/{self._num_asked}", Task("ask", question, ()))
        self._num_asked += 1  # a part of the sampling seed, and of the engine's request id
        trajectory = self._loop.run(self._runner.sample(request, 0, watch=watch))
        self._retriever.check()
        return trajectory


class _LoadingRetriever:
    """Retriever that a thread loads; a search waits for it."""

    def __init__(self, load: Callable[[], Retriever]) -> None:
        self._load = load
        self._loaded: Future[Retriever] = Future()

    def start(self) -> None:
        threads = ThreadPoolExecutor(1, "load retriever")
        self._loaded = threads.submit(self._load)
        threads.shutdown(wait=False)

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        retriever = await asyncio.wrap_future(self._loaded)
        return await retriever.search(queries, k)

    def check(self) -> None:
        """Raise the error of the thread, if it has ended with one; a trajectory holds only its text."""
        if self._loaded.done():
            self._loaded.result()


class _LoadingPages(_LoadingRetriever):
    """Retriever that also opens pages."""

    async def open_pages(self, titles: list[str]) -> list[Page]:
        retriever = await asyncio.wrap_future(self._loaded)
        assert isinstance(retriever, PageRetriever)
        return await retriever.open_pages(titles)


def ask(path: str | Path, question: str) -> Trajectory:
    """Answer one question with a checkpoint or a run's newest one; see ``Asker``."""
    with Asker(path) as asker:
        return asker.ask(question)


def answer_as_json(trajectory: Trajectory) -> dict[str, Any]:
    """Return the output of ``ragr1 ask --json`` for one question."""
    return {
        "question": trajectory.task.question,
        "turns": [_turn_as_json(turn) for turn in trajectory.turns],
        "answer": trajectory.answer,
        "stop_reason": trajectory.stop_reason.value,
        "error": trajectory.error,
        "counts": {
            "turns": len(trajectory.turns),
            "rounds": int(num_rounds(trajectory)),
            "queries": int(num_queries(trajectory)),
            "documents": sum(len(call.records) for call in trajectory.calls),
            "model_tokens": trajectory.num_model_tokens,
            "context_tokens": trajectory.num_tokens,
        },
    }


def _turn_as_json(turn: Turn) -> dict[str, Any]:
    calls = searches(turn.calls)
    queries = [call.asked for call in calls]
    documents = [
        {"query": call.asked, "id": one.id, "title": one.title, "text": one.text, "score": one.score}
        for call in calls
        for one in call.records
    ]
    return {"text": turn.completion_text, "action": turn.action, "queries": queries, "documents": documents}
