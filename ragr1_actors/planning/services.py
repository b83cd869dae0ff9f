"""Asks the services that trajectories need, before anything is loaded: a dead address ends a command within seconds."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from envs.checker import stand_in_context
from envs.options import ToolOptions
from envs.tools.mcp import all_tools, list_tools
from ragr1_actors.core.config import SamplerConfig
from ragr1_actors.core.errors import ConfigError, UserError, one_line
from ragr1_actors.core.resolve import load_object
from ragr1_actors.rollout.engines.chat_client import ChatClient, open_models
from ragr1_actors.runs.run_directory import stored_tools
from ragr1_actors.runs.storage.store import RunStore
from retrieval.base import RETRIEVERS, ProbedRetriever, needs_index
from retrieval.local import open_retriever

C = TypeVar("C", bound=SamplerConfig)


def check_services(config: C, store: RunStore | None = None) -> C:
    """Ask each model of ``environment.models`` at an endpoint a question, and let the retriever ask its service one.

    The retriever does so if it is a ``ProbedRetriever``. Each server of ``environment.mcp`` is asked for its tools. The
    returned configuration has these tools, or the tools at the start of the run in ``store``.

    Raises:
        ConfigError: a service does not answer; the message has its address and the error.
    """
    for model in open_models(config.environment.models).values():
        if isinstance(model, ChatClient):
            asyncio.run(model.probe())
    _check_retriever(config)
    return _with_tools(config, store) if config.environment.mcp else config


def _with_tools(config: C, store: RunStore | None) -> C:
    stored, servers = {} if store is None else stored_tools(store), {}
    for name, server in config.environment.mcp.items():
        known = stored.get(name)
        listed = asyncio.run(list_tools(name, server if known is None else server.with_tools(known)))
        servers[name] = server.with_tools(listed if known is None else known)
    environment = config.environment.model_copy(update={"mcp": servers})
    all_tools(environment, stand_in_context(environment), ToolOptions())  # raises if two have the same name
    return config.model_copy(update={"environment": environment})


def _check_retriever(config: SamplerConfig) -> None:
    retrieval = config.retrieval
    if needs_index(retrieval.type):
        return
    found: object = load_object(retrieval.type, RETRIEVERS)
    if not isinstance(found, type) or not issubclass(found, ProbedRetriever):
        return
    try:
        retriever = open_retriever(None, retrieval)
        assert isinstance(retriever, ProbedRetriever)
        asyncio.run(retriever.probe())
    except UserError:
        raise
    except Exception as error:  # a user's retriever may raise anything
        raise ConfigError(
            f"retrieval.type={retrieval.type}: {one_line(error)}; start the service, or correct retrieval.options"
        ) from error
