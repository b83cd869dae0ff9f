"""Invar-RAG's loss and encoder, and the measures of its environment."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from envs.tasks.world import make_world
from ragr1_actors.recipes.invar_rag import invar_rag
from ragr1_actors.recipes.invar_rag.invar_rag import InvarOptions, InvarRetriever, invar_loss
from retrieval.encoders.encoder import Encoder

PLAIN = [[2.0, 0.5, -1.0], [0.0, 1.0, 0.5], [0.3, 0.2, 0.1]]
REWRITTEN = [[1.0, 1.5, -1.0], [0.0, 1.0, 0.5], [-0.3, 0.7, 0.4]]


def softmax(row: Sequence[float]) -> list[float]:
    weights = [math.exp(value) for value in row]
    return [weight / sum(weights) for weight in weights]


def expected(invariance: float, *, labels_rewrites: bool) -> float:
    total = 0.0
    for number, (own, other) in enumerate(zip(map(softmax, PLAIN), map(softmax, REWRITTEN), strict=True)):
        seen = [own, other] if labels_rewrites else [own]
        total += sum(-math.log(one[number]) for one in seen) / len(seen)
        total += invariance * sum(p * math.log(p / q) for p, q in zip(own, other, strict=True))
    return total / len(PLAIN)


@pytest.mark.parametrize("invariance", [0.0, 1.0, 0.5])
@pytest.mark.parametrize("labels_rewrites", [False, True])
def test_the_loss_is_that_of_the_docstring(invariance: float, labels_rewrites: bool) -> None:
    options = InvarOptions(invariance=invariance, labels_rewrites=labels_rewrites)
    loss = invar_loss(torch.tensor(PLAIN), torch.tensor(REWRITTEN), options)
    assert loss.item() == pytest.approx(expected(invariance, labels_rewrites=labels_rewrites), abs=1e-6)


async def test_an_encoder_that_is_kept_finds_the_same_under_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(invar_rag, "NUM_STEPS", 3)
    folder, question = tmp_path / "encoder", "I was in Riga in Latvia in 1955 . Who directed Silent River?"
    kept, other_seed = InvarRetriever({"folder": str(folder)}), InvarRetriever({"seed": 1})
    again = InvarRetriever({})
    encoder = Encoder.load(folder)
    passages = make_world(0).passages
    scores = encoder.encode_queries([question]) @ encoder.encode_passages(list(passages)).T
    best = [passages[row].id for row in np.argsort(-scores[0])[:5]]
    assert [one.id for one in (await kept.search([question], 5))[0]] == best
    assert await again.search([question], 5) == await kept.search([question], 5)
    assert await other_seed.search([question], 5) != await kept.search([question], 5)
