"""FAQ fetch or skip (arXiv:2401.06800): before each query of a chat a policy says whether the bot fetches a passage.

The bot, its retriever and who rates its answers are the environment. The policy sees the queries and its own actions::

    What is the fee of Alma?   <act>fetch</act>
    Why is this fee so high?   <act>skip</act>       the bot still has the passage
    Thank you!                 <act>skip</act>

Each turn has a reward by its action and by the rating of the answer. A good answer without a fetch pays most, a bad one
without a fetch least. The values are this project's; those of the paper are not known to it::

              good   bad
    fetch       0    -1
    skip        2    -2
    else       -2    -2
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from envs.base import EnvContext, StepResult, TextEnv
from envs.sources import Split, TaskSource
from ragr1_actors import Completion, Passage, Task, ToolCall
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.types import MALFORMED, Message, Sampling

FETCH, SKIP = "fetch", "skip"
REWARDS: Mapping[str, tuple[float, float]] = {FETCH: (-1.0, 0.0), SKIP: (-2.0, 2.0), MALFORMED: (-2.0, -2.0)}
"""By action: the reward of a bad answer, and of a good one."""
_ACT = re.compile(rf"\s*<act>\s*({FETCH}|{SKIP})\s*</act>\s*")


class FaqEnv(TextEnv):
    """A session: ``task.meta`` has its ``queries``, and ``needs``, the id of the passage that answers each, or "".

    An answer is good where the bot has read the passage, in this turn or before. With ``environment.models: {bot: ..,
    judge: ..}`` the bot writes an answer, and the judge rates it.
    """

    stop = ("</act>",)
    measures: ClassVar = {
        "accuracy": lambda ended: ended.metrics.get("good", 0.0) / max(1, len(ended.turns)),
        "fetched_tokens": lambda ended: ended.metrics.get("tokens_fetched", 0.0),
    }

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        """Keep the prompt and what the bot asks."""
        self._prompt, self._context, self._max_queries = settings.prompt, context, settings.max_turns
        self._said: list[Message] = []
        self._read: set[str] = set()

    async def reset(self, task: Task) -> list[Message]:
        """Return the prompt, with the first query as the question."""
        self._waiting = list(zip(task.meta["queries"], task.meta["needs"], strict=True))[: self._max_queries]
        return [Message("user", self._prompt.replace("{question}", task.meta["queries"][0]))]

    async def act(self, turn: Completion) -> StepResult:
        """Let the bot answer the query, and go on to the next one."""
        action = found[1] if (found := _ACT.fullmatch(turn.text)) else MALFORMED
        query, needed = self._waiting.pop(0)
        calls = (await self._fetch(query),) if action == FETCH else ()
        texts = [record.text for call in calls for record in call.records]
        is_good = await self._is_good(query, needed, texts)
        num_tokens = sum(len(self._context.encode(text)) for text in texts)
        return StepResult(
            notice=self._waiting[0][0] if self._waiting else "",
            reward=REWARDS[action][is_good],
            terminated=not self._waiting,
            action=action,
            calls=calls,
            metrics={"good": float(is_good), "tokens_fetched": float(num_tokens)},
        )

    async def _fetch(self, query: str) -> ToolCall:
        (found,) = await self._context.retriever.search([query], 1)
        self._read.update(passage.id for passage in found)
        return ToolCall("fetch", {"query": query}, records=tuple(found))

    async def _is_good(self, query: str, needed: str, texts: Sequence[str]) -> bool:
        if "judge" not in self._context.models:
            return not needed or needed in self._read
        self._said.append(Message("user", "\n".join([*texts, query])))
        answer = await self._context.models["bot"].chat(self._said, Sampling(256, temperature=0.0))
        self._said.append(Message("assistant", answer))
        asked = Message("user", "Did your last answer settle my last query? Say yes or no.")
        rating = await self._context.models["judge"].chat([*self._said, asked], Sampling(4, temperature=0.0))
        return rating.strip().lower().startswith("yes")


CARDS = ("Alma", "Brio", "Cora", "Dune", "Echo", "Fern", "Gala", "Halo", "Iris", "Juno", "Kite", "Luna")
ASPECTS = ("fee", "limit", "rate", "bonus", "insurance", "deadline")
"""72 questions that are asked often, as many as in the paper."""
ASKED = "What is the {} of {}?"
FOLLOW_UPS = ("Why is this {} so high?", "Can I change this {}?", "Since when is this {} so?")
SMALL_TALK = ("Hello!", "Thank you!", "That helps.", "One moment please.")
NUM_QUERIES = 6
NUM_TASKS: Mapping[Split, int] = {"train": 12_000, "eval": 300}


class FaqSessions(TaskSource):
    """Chats of six queries about 72 questions: new ones, the same again, follow-ups, and small talk."""

    def __init__(self, environment: EnvironmentSettings, options: Mapping[str, Any]) -> None:
        """Take ``fetch``, the share of the turns of a demonstration that fetch."""
        super().__init__(environment, {})
        self._share = float(options.get("fetch", 0.5))

    def passages(self) -> Sequence[Passage]:
        """Return the 72 questions with their answers."""
        rng = random.Random(0)
        return [
            Passage(f"{aspect} of {card}", f"{aspect} of {card}", f"The {aspect} of {card} is {rng.randint(10, 99)}.")
            for card in CARDS
            for aspect in ASPECTS
        ]

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return 12,000 sessions for training, or 300 others."""
        rng = random.Random(f"faq {split}")
        return [_session(f"faq/{split}/{n}", rng) for n in range(NUM_TASKS[split])]

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return an action for each query, at random: what to fetch is for RL to find out."""
        acts = (FETCH if rng.random() < self._share else SKIP for _ in task.meta["queries"])
        return [f"<act>{act}</act>" for act in acts]

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield every query, and both actions."""
        yield from (query for task in tasks for query in task.meta["queries"])
        yield from (f"<act>{action}</act>" for action in (FETCH, SKIP))


def _session(task_id: str, rng: random.Random) -> Task:
    queries: list[str] = []
    needs: list[str] = []
    topics: list[tuple[str, str]] = []
    while len(queries) < NUM_QUERIES:
        kind = rng.choice(("new", "again", "follow_up", "follow_up", "small_talk")) if topics else "new"
        if kind in ("new", "again"):
            topics.append((rng.choice(ASPECTS), rng.choice(CARDS)) if kind == "new" else rng.choice(topics))
        aspect, card = topics[-1]
        text = {"follow_up": rng.choice(FOLLOW_UPS), "small_talk": rng.choice(SMALL_TALK)}.get(kind, ASKED)
        queries.append(text.format(aspect, card))
        needs.append("" if kind == "small_talk" else f"{aspect} of {card}")
    return Task(task_id, "\n".join(queries), (), meta={"queries": queries, "needs": needs})
