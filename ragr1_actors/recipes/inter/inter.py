"""InteR (arXiv:2305.07402): a language model and a retriever in turn; nothing is trained.

::

    q_0 = the query;   D_t = the passages that q_t finds;   q_(t+1) = q_0 and what the model knows, having read D_t

The last query is searched for the caller. ``retrieval.options``::

    {inner: {type: bm25, index: DIR}, num_rounds: 2, num_read: 3, model: NAME}

``model`` is one of ``environment.models``. Instead of a model, ``rule: my_module:my_rule`` names a function of
query and passages. The toy's rule repeats the names that the passages mention, which is what a two-hop question lacks.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from envs.search import SearchEnv
from ragr1_actors import Passage
from ragr1_actors.core.resolve import load_object
from ragr1_actors.core.types import ChatModel, Message, Sampling
from ragr1_actors.recipes.worlds.evidence import recall
from retrieval.local import inner_retriever

_ASK = "Write what you know about the question, in a few sentences, after you have read:\n{passages}\nQuestion: {query}"
_NAME = re.compile(r"[A-Z]\w+(?: [A-Z]\w+)*")


class InterRetriever:
    """Finds what an expanded query finds."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Open the inner retriever."""
        self._inner, self._options = inner_retriever(options["inner"]), options

    def use_models(self, models: Mapping[str, ChatModel]) -> None:
        """Take the models of the recipe."""
        self._models = models

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return the passages of each expanded query, ``[len(queries)][<= k]``."""
        expanded = list(queries)
        for _ in range(int(self._options.get("num_rounds", 2))):
            found = await self._inner.search(expanded, int(self._options.get("num_read", 3)))
            known = await asyncio.gather(*map(self._known, queries, found))
            expanded = [f"{query} {text}".strip() for query, text in zip(queries, known, strict=True)]
        return await self._inner.search(expanded, k)

    async def _known(self, query: str, found: Sequence[Passage]) -> str:
        if rule := self._options.get("rule"):
            return str(load_object(rule, {})(query, found))
        asked = _ASK.replace("{query}", query).replace("{passages}", "\n".join(one.text for one in found))
        return await self._models[self._options["model"]].chat([Message("user", asked)], Sampling(256))


def names(query: str, found: Sequence[Passage]) -> str:
    """Return the names in the best passage, as a model would that knows no more than it has read."""
    return " ".join(dict.fromkeys(_NAME.findall(found[0].text))) if found else ""


class RecallEnv(SearchEnv):
    """The search environment, which measures the recall of the evidence."""

    measures: ClassVar = {"recall": recall}
