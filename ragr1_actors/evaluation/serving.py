"""``ragr1 serve``: a trained policy with the API of the gateway, for people and their OpenAI clients.

::

    the request brings tools, or the run has an agent    one turn of the policy
    the environment calls tools (env: tools)             the conversation is the prompt; the tools run here
    any other environment (env: search)                  the last message is the question, as in ``ragr1 ask``

No state is kept between requests. Temperature, top_p and seed of a request have an effect here; 0 is the temperature
of a request without one.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field

from cluster.http import HttpServer, Limits, announce, run_until_signal
from envs.base import StepResult, TextEnv, reads_calls
from envs.grammars.calls import ToolSchema
from ragr1_actors.core.content import PlacedImage, images_of
from ragr1_actors.core.errors import ConfigError, EngineDeadError, EngineError, RetrievalError, ServiceError, UserError
from ragr1_actors.core.resolve import raised_at
from ragr1_actors.core.types import (
    Completion,
    FinishReason,
    GenerateFn,
    Message,
    OnText,
    Sampling,
    StopReason,
    Task,
    Trajectory,
)
from ragr1_actors.evaluation.asking import answer_as_json, trained
from ragr1_actors.rollout.chat_format import TagsFormat
from ragr1_actors.rollout.engines.base import show_images
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.gateway.messages import (
    ApiError,
    ChatRequest,
    Reply,
    checked_as,
    context_is_full,
    in_front,
    visible,
)
from ragr1_actors.rollout.gateway.server import MAX_BODY_BYTES, answer_chat, models
from ragr1_actors.rollout.gateway.session import Session
from ragr1_actors.rollout.groups import GroupRequest
from ragr1_actors.rollout.recorder import EnvAttempt, Recorder

logger = logging.getLogger(__name__)


class _Wanted(BaseModel):
    """Sampling options of a request."""

    model_config = ConfigDict(strict=True)

    temperature: float = Field(0.0, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    seed: int | None = Field(None, ge=0, lt=2**63)


class ServedPolicy(EnvRunner):
    """Loaded policy that answers requests for chat completions."""

    death = ""
    """Reason why the engine answers no further request; empty while it does."""
    _num_requests = 0

    async def complete(self, request: ChatRequest, on_text: OnText | None = None) -> Reply:
        """Answer a request; ``on_text`` gets the text of a policy's only turn as it grows.

        Raises:
            ApiError: 400 beyond the context, or for messages that the policy cannot take; 503 if its engine, the
                retriever or a tool's service failed.
        """
        question = next((one.text for one in reversed(request.messages) if one.role == "user"), "")
        self._num_requests += 1  # a part of the sampling seed, and of the engine's request id
        group = GroupRequest(f"serve/{self._num_requests}", Task("serve", question, ()), 1, 0.0)
        record = partial(self._recorder, group, 0, "", self._generate(request))
        brings_tools = bool(request.tools) or any(one.role == "tool" for one in request.messages)
        if brings_tools and isinstance(self._chat, TagsFormat):
            raise ApiError(400, "tools: the policy searches in tags and calls no other tools; leave them out")
        async with self._room:
            if self._paced is not None:
                await self._paced.wait_for_room()
            try:
                if brings_tools or self._agents is not None:
                    return await self._turn(request, record, on_text)
                return await self._solve(request, group.task, record)
            except (EngineError, RetrievalError, ServiceError) as error:
                logger.warning("a request failed: %s", error)
                if isinstance(error, EngineDeadError) and not self.death:
                    self.death = str(error)
                    signal.raise_signal(signal.SIGTERM)  # the server ends, so that it is started again
                raise ApiError(503, f"{error.__class__.__name__}: {error}") from None
            except ApiError:
                raise
            except Exception as error:  # users' environments and tools may raise anything; other requests continue
                problem = raised_at(error, self._env_class)
                logger.warning("a request failed: %s", problem)
                raise ApiError(500, problem) from None
            finally:
                self.engine.release(group.trajectory_id(0))

    def _generate(self, request: ChatRequest) -> GenerateFn:
        """Return the engine's ``generate`` with the sampling of a request."""
        wanted = checked_as(_Wanted, request.overridden)
        given: dict[str, Any] = {name: value for name, value in wanted if value is not None}

        def generate(
            prompt_token_ids: Sequence[int],
            sampling: Sampling,
            *,
            request_id: str,
            on_text: OnText | None = None,
            images: Sequence[PlacedImage] = (),
        ) -> Awaitable[Completion]:
            if images:
                show_images(self.engine, request_id, images)
            room = min(sampling.max_new_tokens, request.max_tokens or sampling.max_new_tokens)
            sampling = replace(sampling, max_new_tokens=room, **given)
            return self.engine.generate(prompt_token_ids, sampling, request_id=request_id, on_text=on_text)

        return generate

    async def _turn(self, request: ChatRequest, record: Callable[..., Recorder], on_text: OnText | None) -> Reply:
        session = Session(record, self.engine.release, self._chat, max_turns=1)
        try:
            return await session.complete(request, on_text)
        except ApiError:
            if session.failed.done():
                await session.failed  # raises the reason
            raise

    async def _solve(self, request: ChatRequest, task: Task, record: Callable[..., Recorder]) -> Reply:
        """Let the run's environment answer."""
        recorder = record()
        takes_chat = reads_calls(self._config.environment)
        seen = images_of(*(one.content for one in request.messages)) if takes_chat else []
        if not takes_chat and request.messages[-1].role != "user":
            raise ApiError(400, f"messages: the last one is of the {request.messages[-1].role}, expected a question")
        if not takes_chat and images_of(request.messages[-1].content):
            raise ApiError(400, "messages: the policy answers a question in text; leave images out")
        env = self._env_class(self._config.environment, replace(self._context, seed=recorder.seed, seen=seen))
        chat = _Conversation(env, request) if takes_chat else None
        attempt = EnvAttempt(chat or env, recorder)
        try:
            stop_reason = await attempt.run(task, None)
        except ConfigError as error:
            if chat is None or recorder.turns:
                raise
            raise ApiError(400, f"messages: {error}") from None  # the chat template refuses them
        ended = attempt.trajectory(task, stop_reason)
        if not ended.turns:
            raise context_is_full("shorten the messages")
        return _reply(ended, request, chat.text if chat is not None else "")


def _reply(ended: Trajectory, request: ChatRequest, last: str) -> Reply:
    """Return the answer of an environment; ``last`` is the last turn as a message, for its thought."""
    is_whole = ended.stop_reason is StopReason.ANSWERED and ended.turns[-1].finish_reason is FinishReason.STOP
    return Reply(
        visible(ended.answer, request.stop)[1],
        visible(last)[0],
        (),
        "stop" if is_whole else "length",
        ended.num_tokens - ended.num_model_tokens,
        ended.num_model_tokens,
        {"ragr1": answer_as_json(ended)},
    )


class _Conversation(TextEnv):
    """Environment whose prompt is the conversation of a request."""

    def __init__(self, env: TextEnv, request: ChatRequest) -> None:
        self._env, self._request = env, request
        self.text = ""  # of the last turn

    @property
    def tools(self) -> Sequence[ToolSchema]:  # type: ignore[override]
        """Tools of the environment, which may set them in ``reset``."""
        return self._env.tools

    @property
    def stop(self) -> tuple[str, ...]:  # type: ignore[override]
        """Stop strings of the environment, which may change them between turns, and of the request."""
        return (*self._env.stop, *self._request.stop)

    async def reset(self, task: Task) -> list[Message]:
        await self._env.reset(task)
        return in_front(self._request.messages)

    async def act(self, turn: Completion) -> StepResult:
        self.text = turn.text
        return await self._env.act(turn)

    def left_open(self, text: str) -> str:
        return self._env.left_open(text)

    def peek(self, partial: str) -> None:
        self._env.peek(partial)

    def close(self) -> None:
        self._env.close()


class PolicyServer(HttpServer):
    """Listens while its ``async with`` block runs, and frees the policy at its end."""

    def __init__(
        self,
        policy: ServedPolicy,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        token: str = "",
        allowed_hosts: Collection[str] = (),
    ) -> None:
        """Serve a policy; arguments and errors are those of ``HttpServer``."""
        self.policy = policy
        super().__init__(
            [web.post("/v1/chat/completions", self._complete), web.get("/v1/models", self._models)],
            host=host,
            port=port,
            allowed_hosts=allowed_hosts,
            limits=Limits(body_bytes=MAX_BODY_BYTES),
            token=token,
            no_token=ApiError(401, "expected the server's token as API key, in 'Authorization: Bearer TOKEN'"),
        )

    async def __aexit__(self, *error: object) -> None:
        """Answer the requests in flight, for a limited time, then stop."""
        await super().__aexit__(*error)
        await self.policy.engine.close()

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        return await answer_chat(request, await self.read_body(request), self.policy.complete)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(models())


def load_policy(path: str | Path) -> ServedPolicy:
    """Load the policy, like ``Asker`` and with its errors."""
    config, policy_dir, open_its_retriever = trained(path)
    return ServedPolicy.load(config, policy_dir, open_its_retriever())


def run_policy_server(server: PolicyServer) -> None:
    """Serve as ``run_until_signal`` does; ``UserError`` if the engine died."""
    run_until_signal(server, lambda url: announce(f"{url}/v1"))
    if server.policy.death:
        raise UserError(f"the engine died: {server.policy.death}; start the command again")
