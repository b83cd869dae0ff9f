"""A corpus, an encoder that sees quotes and line ends, and FAISS files of it as other projects make them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, normalizers

from ragr1_actors.core.disk.digests import write_list
from retrieval.adopt import Adoption, adopt_index
from retrieval.base import Passage
from retrieval.encoders.encoder import Encoder
from retrieval.encoders.families import make_static_encoder
from retrieval.indexes.faiss_file import parts_of

COUNT, DIMENSION = 400, 32
TEXTS = [" ".join(f"w{(i * j * j + 7 * j) % 997}" for j in range(1, 12)) for i in range(COUNT)]
TOWNS = [Passage(f"t{i}", f"Town {i}", text) for i, text in enumerate(TEXTS)]
PROMPTS = {"query": "query: ", "document": "passage: "}
LINE, QUOTED = "{title}\n{text}", '"{title}"\n{text}'


def make_encoder(folder: Path, *, seed: int = 0, prompts: dict[str, str] | None = None) -> Path:
    """Write a static encoder that takes quotes and line ends for words, and has prompts as e5 does."""
    texts = [f"town {i} {text}" for i, text in enumerate(TEXTS)]
    make_static_encoder(folder, [*texts, "quote", "lineend", "query passage"], dimension=DIMENSION, seed=seed)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    marks = [normalizers.Replace('"', " quote "), normalizers.Replace("\n", " lineend ")]
    tokenizer.normalizer = normalizers.Sequence([*marks, tokenizer.normalizer])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = folder / "config_sentence_transformers.json"
    settings.write_text(
        json.dumps(json.loads(settings.read_text()) | {"prompts": PROMPTS if prompts is None else prompts})
    )
    write_list(folder)
    return folder


def encoded(encoder: Path, passages: list[Passage] = TOWNS, layout: str = LINE) -> NDArray[np.float32]:
    """Encode passages as somebody else would: the texts, and nothing that this project knows of passages."""
    loaded = Encoder.load(encoder)
    texts = [loaded.plan.passage_prompt + layout.format(title=p.title, text=p.text) for p in passages]
    return loaded.embed(loaded._tokenize(texts, ""))


def make_index(
    vectors: NDArray[np.float32],
    key: str = "Flat",
    metric: int = faiss.METRIC_INNER_PRODUCT,
    ids: NDArray[np.int64] | None = None,
) -> Any:
    """Make an index by faiss alone; ``key`` is that of ``faiss.index_factory``, its PQ with ``np``, which is quick."""
    faiss.omp_set_num_threads(1)  # threads that wait for each other take long beside other tests
    index: Any = faiss.index_factory(vectors.shape[1], key, metric)
    for part in parts_of(index):
        if isinstance(part, faiss.IndexPreTransform):
            transform = faiss.downcast_VectorTransform(part.chain.at(0))
            if isinstance(transform, faiss.OPQMatrix):
                transform.niter = transform.niter_pq = transform.niter_pq_0 = 1
    index.train(vectors)
    if ids is not None:
        index.add_with_ids(vectors, ids)
    elif key.startswith("IDMap"):
        index.add_with_ids(vectors, np.arange(len(vectors)))
    else:
        index.add(vectors)
    return index


def write(index: Any, path: Path) -> Path:
    """Write an index by faiss alone."""
    faiss.write_index(index, str(path))
    return path


def adopt(file: Path, out: Path, encoder: Path, passages: list[Passage] = TOWNS, **arguments: Any) -> Adoption:
    """Adopt a file without a bar."""
    return adopt_index(file, passages, out, encoder=str(encoder), progress=False, **arguments)
