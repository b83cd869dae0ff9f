"""MMOA-RAG (arXiv:2501.15228): a rewriter, a selector and a generator share one policy and the F1 of the answer.

One trajectory is a pass through the pipeline; each role begins a conversation, which is a row::

    rewriter    question                        <questions> Ana Bell\\n Bo Cole</questions>
    (retriever) top_k documents, shared out over the sub-questions: of ten 10, 5+5, 4+3+3 or 3+3+2+2
    selector    question and documents          <documents>Document0,Document5</documents>
    generator   question and chosen documents   <answer> 1931</answer>

Every role is rewarded by the F1 of the answer, less its own penalty:

    rewriter    0.5   more than 4 sub-questions, or more than 300 characters
    selector    1     what is no list of different documents that there are
    generator   1     more than 30 words
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from envs.base import EnvContext
from envs.options import TopKOptions
from envs.sources import WorldSource
from learners.algorithms.grpo import PPOLearner
from ragr1_actors import Completion, Passage, StepResult, Task, TextEnv, ToolCall, Trajectory
from ragr1_actors.core.config import EnvironmentSettings
from ragr1_actors.core.types import MALFORMED, Message, TrajectoryGroup

MAX_QUESTIONS, MAX_CHARACTERS, MAX_WORDS = 4, 300, 30
FAULTS = 0.6
"""Share of the demonstrations in which the rewriter, and of those in which the selector, leaves something out."""
_LABELS = re.compile(r"\s*Document\d+(\s*,\s*Document\d+)*\s*")


def _inside(tag: str, text: str) -> str:
    return text.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]


def places(task: Task, count: int) -> list[int]:
    """Return the label of each document by its place in the retriever's order: shuffled, by the question."""
    return random.Random(task.question).sample(range(count), count)


def shares(total: int, count: int) -> list[int]:
    """Return how many documents each sub-question has: ``shares(10, 3) == [4, 3, 3]``."""
    return [total // count + (number < total % count) for number in range(count)]


class PipelineEnv(TextEnv):
    """Three turns, one for each role."""

    options_class = TopKOptions
    stop = ("</questions>", "</documents>", "</answer>")

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        """Keep the prompt and the retriever."""
        self._prompt, self._context = settings.prompt, context
        self._top_k = TopKOptions.read(settings.options, "environment.options").top_k
        self._roles = iter((self._rewrite, self._select, self._generate))

    async def reset(self, task: Task) -> list[Message]:
        """Return the prompt of the rewriter."""
        self._task = task
        return self._ask("Rewriter", ())

    def _ask(self, role: str, documents: Sequence[tuple[int, Passage]]) -> list[Message]:
        shown = "".join(f"Document{label}: {self._context.defuse(one.text)}\n" for label, one in documents)
        prompt = self._prompt.replace("{role}", role).replace("{question}", self._task.question)
        return [Message("user", prompt.replace("{documents}", shown))]

    async def act(self, turn: Completion) -> StepResult:
        """Let the next role act."""
        return await next(self._roles)(turn.text)

    async def _rewrite(self, text: str) -> StepResult:
        written = _inside("questions", text)
        lines = [line.strip() for line in written.splitlines() if line.strip()]
        is_over = len(lines) > MAX_QUESTIONS or len(written) > MAX_CHARACTERS
        asked = lines[:MAX_QUESTIONS] or [self._task.question]
        counts = shares(self._top_k, len(asked))
        found = await self._context.retriever.search(asked, max(counts))
        calls = tuple(
            ToolCall("search", {"query": query, "k": count}, records=tuple(hits[:count]))
            for query, count, hits in zip(asked, counts, found, strict=True)
        )
        documents = [Passage(one.id, one.title, one.text) for call in calls for one in call.records]
        labelled = zip(places(self._task, len(documents)), documents, strict=True)
        self._documents = sorted(labelled, key=lambda one: one[0])
        action = "rewrite" if written else MALFORMED
        restart = tuple(self._ask("Selector", self._documents))
        return StepResult(action=action, calls=calls, reward=-0.5 * is_over, restart=restart)

    async def _select(self, text: str) -> StepResult:
        written = _inside("documents", text)
        labels = [int(number) for number in re.findall(r"\d+", written)]
        known = {label for label, _ in self._documents}
        is_valid = bool(_LABELS.fullmatch(written)) and len(set(labels)) == len(labels) and known >= set(labels)
        chosen = [one for one in self._documents if one[0] in labels] if is_valid else self._documents
        restart = tuple(self._ask("Generator", chosen))
        return StepResult(action="select" if is_valid else MALFORMED, reward=-1.0 * (not is_valid), restart=restart)

    async def _generate(self, text: str) -> StepResult:
        answer = _inside("answer", text).strip()
        is_over = len(answer.split()) > MAX_WORDS
        return StepResult(terminated=True, action="answer", answer=answer, reward=-1.0 * is_over)


class GeneratorLearner(PPOLearner):
    """PPO of the generator alone: the baseline, in which the other roles stay as SFT has taught them."""

    def connect(self, groups: Sequence[TrajectoryGroup]) -> Sequence[TrajectoryGroup]:
        """Keep the row of the last turn."""
        kept = ([_last_row(one) for one in group.trajectories if len(one.turns) == 3] for group in groups)
        pairs = zip(groups, kept, strict=True)
        return [replace(group, trajectories=tuple(members)) for group, members in pairs if members]


def _last_row(one: Trajectory) -> Trajectory:
    row, own = one.rows[-1], one.reward - sum(one.turn_rewards[:-1])  # without the penalties of the other roles
    names = ("token_ids", "kinds", "logprobs", "policy_versions")
    columns = {name: getattr(one, name)[row] for name in names}
    return replace(one, reward=own, turns=one.turns[-1:], row_lengths=(), **columns)


class RoleWorld(WorldSource):
    """Comparisons of the generated world, with demonstrations of all three roles."""

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return three turns; the rewriter may ask for the first thing only, and the selector leave one out."""
        names = list(task.plan[0])[: 1 if rng.random() < FAULTS else None]
        counts = shares(self.search.top_k, len(names))
        labels, chosen = places(task, self.search.top_k), list(range(len(names)))
        if len(chosen) > 1 and rng.random() < FAULTS:
            chosen.remove(rng.choice(chosen))
        asked = "\n".join(f" {name}" for name in names)
        label_of = {number: labels[sum(counts[:number])] for number in chosen}
        found = " ,".join(f" {names[number]} Document{label}" for number, label in label_of.items())
        listed = ",".join(f"Document{label}" for label in label_of.values())
        years = [self._world.entities[names[number]].year or 0 for number in sorted(chosen, key=label_of.__getitem__)]
        answer = f"<think> {' , '.join(map(str, years))} , first {min(years)}</think><answer> {min(years)}</answer>"
        return [f"<questions>{asked}</questions>", f"<think>{found}</think><documents>{listed}</documents>", answer]

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield the words of the world, the labels and the roles."""
        yield from super().texts(tasks)
        yield "Rewriter Selector Generator <questions></questions><documents></documents> , first"
        yield from (f"Document{number}" for number in range(self.search.top_k))
