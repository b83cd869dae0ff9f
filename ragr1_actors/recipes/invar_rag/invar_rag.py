"""Invar-RAG (arXiv:2411.07021): tune an encoder to find the same in any wording, freeze it, then learn to answer.

Stage 1, ``InvarRetriever``, on questions q, each with its passage d+ and a rewrite q' in a longer context::

    P(d | q) = softmax over d of (cos(q, d) / t)                                   d: passages of the batch
    loss     = -log P(d+ | q)  +  invariance * KL(P(. | q) || P(. | q'))        InfoNCE, and the invariance loss
    vectors  = E + A B                                                          of words; low rank, E is frozen
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from envs.sources import Split, WorldSource
from envs.tasks.world import YEARS, make_world
from ragr1_actors import Passage, SearchEnv, Task, ToolCall, Trajectory
from ragr1_actors.core.disk.digests import write_list
from ragr1_actors.core.section import Section
from ragr1_actors.core.types import Message
from retrieval.encoders.encoder import passage_text
from retrieval.encoders.families import StaticModel, make_static_encoder

DIMENSION, RANK, BATCH_SIZE, LR, TEMPERATURE, NUM_STEPS = 32, 16, 64, 0.01, 0.05, 300
WORDINGS: Mapping[Split, Sequence[str]] = {
    "train": ("{}", "A friend from {place} asks : {}", "For a quiz in {place} : {}", "I was in {place} in {year} . {}"),
    "eval": ("{} A friend asks in {place} .", "In {year} I was in {place} . {}", "{} I was in {place} for a quiz ."),
}


def reworded(question: str, rng: random.Random, split: Split = "train") -> str:
    """Return a question in other words: ``"A friend from Riga in Latvia asks : Where was Ana Bell born?"``."""
    city = rng.choice(make_world(0).passages[-80:])  # the world's last passages: "Riga is a city in Latvia."
    place = city.text.replace("is a city in", "in").rstrip(".")
    return rng.choice(WORDINGS[split]).format(question, place=place, year=rng.choice(YEARS))


class InvarWorld(WorldSource):
    """Questions about one hop in other words; their ``paraphrases`` are the plain question and one more wording."""

    def tasks(self, split: Split) -> Sequence[Task]:
        """Return the world's tasks; the wordings of evaluations are new to both stages."""
        rng, plain = random.Random(f"wordings {split}"), super().tasks(split)
        others = [{"paraphrases": [one.question, reworded(one.question, rng, split)]} for one in plain]
        pairs = zip(plain, others, strict=True)
        return [replace(one, question=reworded(one.question, rng, split), meta=meta) for one, meta in pairs]

    def demonstrate(self, task: Task, rng: random.Random) -> list[str]:
        """Return the answer, with the name in the thought: the passage is in the prompt."""
        return [super().demonstrate(task, rng)[-1].replace("<think>", f"<think> {task.plan[0][0]} ,", 1)]

    def texts(self, tasks: Sequence[Task]) -> Iterator[str]:
        """Yield the wordings too."""
        yield from (*super().texts(tasks), *(task.question for task in tasks))


def firsts(trajectory: Trajectory) -> list[str]:
    """Return the id of the first passage that the question found, and that each paraphrase did: ``["p1", "p1"]``."""
    return [call.records[0].id if call.records else "" for call in trajectory.calls] or [""]


class InvarEnv(SearchEnv):
    """Stage 2, by SFT: an answer from the passage in the prompt (mode ``rag``), and a search with each paraphrase."""

    measures: ClassVar = {  # shares that find first: of paraphrases, what the question does; of all, the evidence
        "agreement": lambda ended: fmean(one == firsts(ended)[0] for one in firsts(ended)[1:] or firsts(ended)),
        "recall_at_1": lambda ended: fmean(one in ended.task.supporting_ids for one in firsts(ended)),
    }

    async def reset(self, task: Task) -> list[Message]:
        """Return the prompt with what the question found."""
        prompt = await super().reset(task)
        asked = list(task.meta.get("paraphrases", ()))
        found = zip(asked, await self._context.retriever.search(asked, 1), strict=True)
        self._called_before += tuple(ToolCall("paraphrase", {"query": q}, records=tuple(hits)) for q, hits in found)
        return prompt


class InvarOptions(Section):
    """``retrieval.options``."""

    invariance: float = Field(1.0, ge=0)
    """Weight of the invariance loss; 0 is InfoNCE alone."""
    labels_rewrites: bool = False
    """Whether InfoNCE sees the rewrites as well, for comparison."""
    folder: str = ""
    """Where the encoder is kept, for ``retrieval.encoder`` of another recipe."""
    seed: int = 0


def invar_loss(plain: torch.Tensor, rewritten: torch.Tensor, options: InvarOptions) -> torch.Tensor:
    """Return the loss of cosines over t, ``[num_questions, num_passages]``; the passage of each question is its own."""
    logs, others = plain.log_softmax(-1), rewritten.log_softmax(-1)
    divergence = (logs.exp() * (logs - others)).sum(-1)
    known = (logs + others) / 2 if options.labels_rewrites else logs
    return (options.invariance * divergence - known.diagonal()).mean()


def embed(model: StaticModel, texts: list[str]) -> torch.Tensor:
    """Return vectors of length 1, ``[len(texts), DIMENSION]``."""
    return torch.nn.functional.normalize(model(model.preprocess(texts))["sentence_embedding"], dim=-1)


def tuned(folder: str, texts: Mapping[str, str], options: InvarOptions) -> StaticModel:
    """Return an encoder of words, tuned for passages of these texts by id; ``folder`` keeps it."""
    rng, tasks = random.Random(options.seed), make_world(0, {"one_hop": 1.0}).train_tasks
    words = [*texts.values(), *(reworded(one.question, rng) for one in tasks)]
    made = make_static_encoder(folder, words, dimension=DIMENSION, seed=options.seed)
    tokenizer = Tokenizer.from_file(str(made / "tokenizer.json"))
    frozen = load_file(made / "model.safetensors")["embedding.weight"]
    a, b = torch.zeros(len(frozen), RANK, requires_grad=True), torch.eye(RANK, DIMENSION, requires_grad=True)
    optimizer = torch.optim.Adam([a, b], lr=LR)
    for _ in range(NUM_STEPS):
        batch, model = rng.sample(tasks, BATCH_SIZE), StaticModel(tokenizer, frozen + a @ b)
        found = embed(model, [texts[one.supporting_ids[0]] for one in batch]).T / TEMPERATURE
        plain = embed(model, [one.question for one in batch]) @ found
        rewritten = embed(model, [reworded(one.question, rng) for one in batch]) @ found
        optimizer.zero_grad()
        invar_loss(plain, rewritten, options).backward()
        optimizer.step()
    weights = (frozen + a @ b).detach()
    save_file({"embedding.weight": weights}, made / "model.safetensors")
    write_list(made)
    return StaticModel(tokenizer, weights)


class InvarRetriever:
    """Finds passages of the world with an encoder that it tunes first; env runners get a copy of it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Tune the encoder."""
        own, self._passages = InvarOptions.read(options, "retrieval.options"), make_world(0).passages
        texts = {one.id: passage_text(one, 2) for one in self._passages}
        with TemporaryDirectory() as scratch:
            self._model = tuned(own.folder or scratch, texts, own)
        self._vectors = embed(self._model, list(texts.values()))  # [num_passages, DIMENSION]

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return the ``k`` passages with the largest cosine, ``[len(queries)][k]``."""
        best = (embed(self._model, queries) @ self._vectors.T).topk(k).indices.tolist() if queries else []
        return [[self._passages[row] for row in rows] for rows in best]
