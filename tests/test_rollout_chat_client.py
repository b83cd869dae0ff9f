"""Language models that rewards, environments and retrievers ask."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from fakes import ByteTokenizer, OnePassage
from http_stub import always, free_port, served, stub_server
from recorded_run import record

from envs.measures import RewardContext
from envs.search import SearchEnv
from ragr1_actors.core.config import EnvironmentSettings, ModelSettings, SamplerConfig
from ragr1_actors.core.content import Image
from ragr1_actors.core.errors import ConfigError, RetrievalError
from ragr1_actors.core.types import ChatModel, Message, Sampling, StopReason, Task, Trajectory, TrajectoryGroup
from ragr1_actors.planning.preflight import check_classes, check_services
from ragr1_actors.planning.tiny_policy import make_tiny_policy
from ragr1_actors.rollout.engines import chat_client
from ragr1_actors.rollout.engines.base import ScriptedEngine
from ragr1_actors.rollout.engines.chat_client import EngineChat, open_models
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.groups import GroupRequest, summarize
from retrieval.base import AskingRetriever, Passage, Retriever
from retrieval.local import inner_retriever

HERE = __name__
QUESTION = [Message("user", "Is Riga right?")]
SHORT = Sampling(8, temperature=0.0)


def said(text: str) -> dict[str, Any]:
    return {"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}


def config(url: str, reward: str = "judged", **environment: Any) -> SamplerConfig:
    models = {"judge": {"url": url, "model": "big", "max_retries": 0}}
    keys = {"reward": f"{HERE}:{reward}", "models": models, **environment}
    return SamplerConfig(environment=EnvironmentSettings.model_validate(keys))


async def judged(trajectory: Trajectory, context: RewardContext) -> float:
    answer = await context.models["judge"].chat([Message("user", trajectory.answer)], SHORT)
    return float(answer == "yes") * context.options.get("worth", 1.0)


async def play(settings: SamplerConfig, retriever: Retriever | None = None) -> Trajectory:
    tokenizer, task = ByteTokenizer(), Task("t", "Where?", ("Riga",))
    request = GroupRequest("t", task, 1, 0.0)
    engine = ScriptedEngine({"t/0": ["<search>Riga</search>", "<answer>Riga</answer>"]}, tokenizer.encode)
    runner = EnvRunner(settings, tokenizer, retriever or OnePassage(), engine)
    return (await runner.sample_group(request)).trajectories[0]


async def test_a_reward_asks_a_model_and_reads_its_options() -> None:
    asked: list[Any] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        return web.json_response(said("yes"))

    async with stub_server(answer) as url:
        found = await play(config(url, reward_options={"worth": 0.5}))
    assert (found.stop_reason, found.reward) == (StopReason.ANSWERED, 0.5)
    assert asked[0]["model"] == "big" and asked[0]["messages"] == [{"role": "user", "content": "Riga"}]


async def test_a_judge_that_does_not_answer_is_a_failure_of_the_infrastructure() -> None:
    async with stub_server(always({"error": "out of memory"}, 500)) as url:
        found = await play(config(url))
    assert found.stop_reason is StopReason.SERVICE_FAILED
    assert url in found.error and 'answered 500: "out of memory" (1 attempts)' in found.error


async def test_a_failure_without_a_message_is_named_by_its_type() -> None:
    class Silent(OnePassage):
        async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
            raise RetrievalError(str(TimeoutError()))

    async with stub_server(always(said("yes"))) as url:
        found = await play(config(url), Silent())
    assert (found.stop_reason, found.error) == (StopReason.RETRIEVAL_FAILED, "RetrievalError")
    silent = replace(found, error="")  # as an environment of another version wrote it
    assert summarize(TrajectoryGroup(found.task, (silent,))).errors == ("",)


async def test_no_more_questions_are_asked_at_once_than_allowed() -> None:
    in_flight, most = 0, 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await asyncio.sleep(0.02)
        in_flight -= 1
        return web.json_response(said("yes"))

    async with stub_server(answer) as url:
        models = open_models({"judge": ModelSettings(url=url, model="big", max_in_flight=2)})
        await asyncio.gather(*(models["judge"].chat(QUESTION, SHORT) for _ in range(7)))
    assert most == 2


def test_a_dead_model_ends_the_command_before_anything_loads() -> None:
    with served(always(said("yes"))) as url:
        check_services(config(url))
    dead = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match=rf"environment\.models\.judge\.url: {dead}.*see whether the server runs"):
        check_services(config(dead))
    refused = r"with environment\.models\.judge\.key_env"
    with served(always({"error": "no"}, 401)) as url, pytest.raises(ConfigError, match=refused):
        check_services(config(url))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"model": "m"}, "got url '' and engine '', expected one of them"),
        ({"model": "m", "url": "http://a", "engine": "vllm"}, "expected one of them"),
        ({"model": "m", "url": "ftp://a"}, r"environment\.models\.judge\.url"),
        (
            {"model": "m", "url": "http://a", "key_env": "NOT_SET"},
            r"models\.judge\.key_env: the environment",
        ),
        ({"model": "m", "engine": "endpoint"}, r"models\.judge\.engine: got endpoint; leave it empty"),
        ({"model": "./none", "engine": "transformers"}, r"environment\.models\.judge\.model: .*none"),
        ({"model": "m", "engine": f"{HERE}:judged"}, r"environment\.models\.judge\.engine"),
    ],
)
def test_wrong_settings_of_a_model_are_refused_before_a_run(settings: dict[str, Any], problem: str) -> None:
    keys = {"models": {"judge": settings}}
    with pytest.raises(ConfigError, match=problem):
        check_classes(SamplerConfig(environment=EnvironmentSettings.model_validate(keys)))


@pytest.mark.engine
async def test_an_engine_answers_as_an_endpoint_does(tmp_path: Path) -> None:
    make_tiny_policy(tmp_path / "policy", ["Is Riga right?"], seed=0)
    settings = ModelSettings(model=str(tmp_path / "policy"), engine="transformers", max_context_tokens=64)
    (model,) = open_models({"judge": settings}).values()
    assert isinstance(model, EngineChat)
    first, again = [await model.chat(QUESTION, Sampling(6, temperature=0.0)) for _ in range(2)]
    assert first == again
    with pytest.raises(ValueError, match=r"tokens, expected fewer than 64; shorten it, or raise its max"):
        await model.chat([Message("user", "Is Riga right? " * 99)], SHORT)


async def test_an_engine_loads_in_the_context_that_it_gets() -> None:
    entered: list[str] = []

    @contextmanager
    def loading() -> Iterator[None]:
        entered.append("loading")
        yield
        entered.append("left")

    settings = ModelSettings(model="/none", engine="transformers")
    (model,) = open_models({"judge": settings}, loading).values()
    assert entered == []  # it loads with the first question
    with pytest.raises(ConfigError, match="cannot load a tokenizer from /none"):
        await model.chat(QUESTION, SHORT)
    assert entered == ["loading"]


async def test_an_engine_draws_with_the_seed_of_the_question() -> None:
    asked: list[Sampling] = []

    class Noting(ScriptedEngine):
        async def generate(self, ids: Any, sampling: Sampling, **named: Any) -> Any:
            asked.append(sampling)
            return await super().generate(ids, sampling, **named)

    model = EngineChat(ModelSettings(model="big", engine="transformers", max_context_tokens=64))
    tokenizer = ByteTokenizer()
    vars(model)["_loaded"] = tokenizer, Noting({"chat/0": ["yes"]}, tokenizer.encode)
    assert await model.chat(QUESTION, Sampling(8, seed=7)) == "yes"
    assert asked == [Sampling(8, seed=7)]


async def test_the_images_of_a_conversation_that_is_too_long_do_not_stay_in_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: set[str] = set()

    class Seeing(ScriptedEngine):
        def release(self, request_id: str) -> None:
            held.discard(request_id)

    class Tokenizer(ByteTokenizer):
        def place(self, prompt_ids: Any, images: Any) -> Any:
            return []

    monkeypatch.setattr(chat_client, "show_images", lambda engine, request_id, images: held.add(request_id))
    model = EngineChat(ModelSettings(model="big", engine="transformers", max_context_tokens=128))
    tokenizer = Tokenizer()
    vars(model)["_loaded"] = tokenizer, Seeing({"chat/0": ["yes"], "chat/1": ["yes"]}, tokenizer.encode)
    image = Image(b"", "image/png")
    assert await model.chat([Message("user", ("Who?", image))], Sampling(8)) == "yes"
    with pytest.raises(ValueError, match="expected fewer than 128"):
        await model.chat([Message("user", ("Who?" * 20, image))], Sampling(8))
    assert not held


class Rewriting:
    """Asks a model for a better query, and an inner retriever for the passages."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._options, self._inner = options, inner_retriever(options["inner"])
        self._models: dict[str, ChatModel] = {}

    def use_models(self, models: dict[str, ChatModel]) -> None:
        self._models = dict(models)

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        better = [await self._models["judge"].chat([Message("user", query)], SHORT) for query in queries]
        return await self._inner.search(better, k)


async def test_a_retriever_asks_a_model_and_wraps_another(tmp_path: Path) -> None:
    await record(tmp_path, ["Oslo"])  # what the inner one knows
    retriever = Rewriting({"inner": {"type": "replay", "options": {"run": str(tmp_path)}}})
    assert isinstance(retriever, AskingRetriever)
    sent: Rewriting = pickle.loads(pickle.dumps(retriever))  # as it reaches an env runner
    async with stub_server(always(said("Oslo"))) as url:
        found = await play(config(url, reward="none_at_all", options={"top_k": 2}), sent)
    (call,) = found.calls
    assert call.arguments["query"] == "Riga" and call.records[0].title == "Oslo"


async def none_at_all(trajectory: Trajectory, context: RewardContext) -> float:
    return 0.0


class Hinted(SearchEnv):
    """Puts what a model says behind the question."""

    async def reset(self, task: Task) -> list[Message]:
        (prompt,) = await super().reset(task)
        hint = await self._context.models["judge"].chat([prompt], SHORT)
        return [Message("user", f"{prompt.content} Hint: {hint}")]


async def test_an_environment_asks_a_model() -> None:
    async with stub_server(always(said("It is in Latvia."))) as url:
        found = await play(config(url, reward="none_at_all", env=f"{HERE}:Hinted"))
    assert "Hint: It is in Latvia." in ByteTokenizer().decode(found.token_ids.tolist())
