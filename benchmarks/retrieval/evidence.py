"""What ``bench retrieval`` searches: 200,000 made-up passages, vectors of a stated kind, and an encoder of a real size.

The vectors are weakly clustered (2,000 centres, noise 1.2 times as long as a centre), which is hard for a compressed
index: real embeddings gather more. The encoder has MiniLM-L6's shape (6 layers, width 384, 12 heads; 10.6 million
parameters and its vocabulary) with random weights, so that encoding a query takes its real time, and its vector is
searched like any other; recall is measured with queries drawn as the vectors are. Encoding 200,000 passages for real
would take hours on two cores and change no time that is measured here.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from retrieval.base import Passage
from retrieval.corpora.corpus import CORPUS_FILE, write_corpus
from retrieval.encoders.encoder import Encoder
from retrieval.indexes.manifest import FileRecord, Manifest, Shard
from retrieval.indexes.vector_index import VectorIndex

NUM_PASSAGES, NUM_PASSAGES_QUICK = 200_000, 20_000
DIMENSION = 384
NUM_CENTRES = 2_000
NOISE = 1.2
PASSAGE_WORDS = 100
QUERY_WORDS = 10
_BLOCK = 10_000

Vectors = NDArray[np.float32]


def words() -> list[str]:
    """Six thousand made-up words, of which the encoder's tokenizer knows every one."""
    rng = random.Random(0)
    return sorted({"".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3)) for _ in range(9000)})[
        :6000
    ]


def queries(num_queries: int, seed: int = 1) -> list[str]:
    """Questions of ``QUERY_WORDS`` words, none twice."""
    rng = random.Random(seed)
    known = words()
    return [f"q{seed}x{number} " + " ".join(rng.choices(known, k=QUERY_WORDS)) for number in range(num_queries)]


def vectors(num_vectors: int, seed: int) -> Vectors:
    """Unit vectors, float32 ``[num_vectors, DIMENSION]``, around centres that every seed shares."""
    centres = np.random.default_rng(0).standard_normal((NUM_CENTRES, DIMENSION), dtype=np.float32)
    rng = np.random.default_rng(seed + 1)
    found = centres[rng.integers(0, NUM_CENTRES, num_vectors)]
    found += NOISE * rng.standard_normal(found.shape, dtype=np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def passages(num_passages: int) -> Iterator[Passage]:
    """Passages of ``PASSAGE_WORDS`` words, about 700 bytes each."""
    rng = random.Random(2)
    known = words()
    for number in range(num_passages):
        yield Passage(f"p{number}", f"title {number}", " ".join(rng.choices(known, k=PASSAGE_WORDS)))


def make_encoder(directory: Path) -> Path:
    """Write the encoder as a sentence-transformers folder: mean pooling, vectors of length 1."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    vocabulary = {token: number for number, token in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *words()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    torch.manual_seed(0)
    shape = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=DIMENSION,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=4 * DIMENSION,
    )
    folder = directory / "minilm-shaped"
    BertModel(shape).save_pretrained(folder)
    fast.save_pretrained(folder)
    transformer = Transformer(str(folder), max_seq_length=256)
    pooling = Pooling(DIMENSION, pooling_mode="mean")
    SentenceTransformer(modules=[transformer, pooling, Normalize()], device="cpu").save_pretrained(
        str(directory / "encoder"), create_model_card=False
    )
    return directory / "encoder"


def make_index(directory: Path, encoder_dir: Path, index_type: str, num_passages: int) -> Path:
    """Write an index directory as ``build_index`` does, but for where the vectors come from."""
    out = directory / index_type
    out.mkdir()
    write_corpus(passages(num_passages), out)
    encoder = Encoder.load(encoder_dir)
    made = vectors(num_passages, seed=0)
    blocks = (made[start : start + _BLOCK] for start in range(0, num_passages, _BLOCK))
    VectorIndex.build(blocks, DIMENSION, index_type, count=num_passages).save(out / "shard-0000.faiss")
    Manifest(
        index_type=index_type,
        vector_type=index_type,
        count=num_passages,
        corpus=FileRecord.of(out, CORPUS_FILE),
        files=(),
        metric="inner_product",
        encoder=str(encoder_dir),
        encoder_fingerprint=encoder.fingerprint,
        pooling=encoder.plan.pooling,
        query_prompt=encoder.plan.query_prompt,
        passage_prompt=encoder.plan.passage_prompt,
        dimension=DIMENSION,
        shards=(Shard(0, num_passages, FileRecord.of(out, "shard-0000.faiss")),),
    ).write(out)
    return out
