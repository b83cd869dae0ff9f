"""`ragr1 index adopt` with MiniLM: a file that sentence-transformers and faiss made is told from a wrong one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import adopt_world
import numpy as np
import pytest
import real_model
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from envs.tasks.world import make_world
from ragr1_actors.core.errors import DataError
from retrieval.adopt import Adoption
from retrieval.base import Passage

pytestmark = [pytest.mark.slow, pytest.mark.engine]
PASSAGES = list(make_world(0).passages[:300])


@pytest.fixture(scope="module")
def vectors() -> NDArray[np.float32]:
    """Title and text on two lines, encoded with nothing of this project."""
    real_model.require_models()
    encoder = SentenceTransformer(str(real_model.ENCODER), device="cpu")
    return encoder.encode([f"{one.title}\n{one.text}" for one in PASSAGES], normalize_embeddings=True)


def adopt(vectors: NDArray[np.float32], folder: Path, passages: list[Passage]) -> Adoption:
    file = adopt_world.write(adopt_world.make_index(vectors), folder / "made.index")
    return adopt_world.adopt(file, folder / "index", real_model.ENCODER, passages)


def test_a_file_of_sentence_transformers_is_adopted(vectors: NDArray[np.float32], tmp_path: Path) -> None:
    match = adopt(vectors, tmp_path, PASSAGES)
    assert (match.layout, match.cosine) == (adopt_world.LINE, pytest.approx(1, abs=1e-5))


def refused_with(vectors: NDArray[np.float32], folder: Path, passages: list[Passage]) -> float:
    with pytest.raises(DataError, match="mean cosine") as caught:
        adopt(vectors, folder, passages)
    return float(str(caught.value).split("mean cosine ")[1].split()[0])


def test_an_offset_by_one_is_refused(vectors: NDArray[np.float32], tmp_path: Path) -> None:
    assert 0.4 < refused_with(np.roll(vectors, 1, axis=0), tmp_path, PASSAGES) < 0.55


def test_a_corpus_without_titles_is_refused(vectors: NDArray[np.float32], tmp_path: Path) -> None:
    untitled = [replace(one, title="") for one in PASSAGES]
    assert 0.98 < refused_with(vectors, tmp_path, untitled) < 0.99
