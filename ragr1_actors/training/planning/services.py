"""Asks the services that trajectories need, before anything is loaded: a dead address ends a command within seconds."""

from __future__ import annotations

import asyncio

from ragr1_actors.core.config import SamplerConfig
from ragr1_actors.core.errors import ConfigError, UserError, one_line
from ragr1_actors.core.resolve import load_object
from ragr1_actors.rollout.engines.chat_client import ChatClient, open_models
from retrieval.base import RETRIEVERS, ProbedRetriever, needs_index
from retrieval.local import open_retriever


def check_services(config: SamplerConfig) -> None:
    """Ask each model of ``environment.models`` at an endpoint a question, and have the retriever ask its service one.

    The retriever does so if it is one that can (``ProbedRetriever``).

    Raises:
        ConfigError: a service does not answer; the message has its address and the error.
    """
    for model in open_models(config.environment.models).values():
        if isinstance(model, ChatClient):
            asyncio.run(model.probe())
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
