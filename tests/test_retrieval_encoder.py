"""The static encoder: deterministic, lexical, and safe on odd text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from processes import run_python

from ragr1_actors.core.errors import ConfigError, DataError
from retrieval.base import Passage
from retrieval.encoders.encoder import Encoder, batch_by_length
from retrieval.encoders.families import make_static_encoder

TEXTS = [
    "Ana Bell was born in Riga in 1902.",
    "Bo Cole was born in Łódź, not in Riga.",
    "Zoë O'Neill wrote «Дом» in 1987.",
    "東京 is a city.",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_static_encoder(tmp_path_factory.mktemp("static") / "encoder", TEXTS, seed=3)


@pytest.fixture(scope="module")
def encoder(folder: Path) -> Encoder:
    return Encoder.load(folder)


@pytest.mark.parametrize(
    ("query", "nearest"),
    [
        ("ANA BELL", 0),
        ("Cole", 1),
        ("Lodz", 1),
        ("Łódź", 1),
        ("zoe", 2),
        ("дом?", 2),
        ("1987", 2),
        ("1902", 0),
        ("東京", 3),
    ],
)
def test_a_word_finds_its_text(encoder: Encoder, query: str, nearest: int) -> None:
    passages = encoder.encode_passages([Passage(str(i), "", text) for i, text in enumerate(TEXTS)])
    scores = encoder.encode_queries([query]) @ passages.T
    if query == "Lodz":  # the stroke of Ł is no accent
        assert np.allclose(scores, 0)
    else:
        assert scores.argmax() == nearest
        assert scores.max() > 0.2


def test_vectors_are_float32_of_length_one(encoder: Encoder) -> None:
    vectors = encoder.encode_queries(["Ana Bell", "born in Riga"])
    assert vectors.shape == (2, encoder.dimension) == (2, 512)
    assert vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)


@pytest.mark.integration
def test_a_folder_is_one_of_sentence_transformers_which_is_not_loaded(folder: Path) -> None:
    script = f"""
        import sys
        from retrieval.encoders.encoder import Encoder
        Encoder.load({str(folder)!r}).encode_queries(["Ana Bell"])
        print([name for name in ("sentence_transformers", "transformers", "sklearn") if name in sys.modules])
    """
    assert run_python(script) == "[]\n"
    from sentence_transformers import SentenceTransformer

    queries = ["Ana Bell", "was born in Riga in 1902, not 1987", "Дом qwerty"]
    theirs = SentenceTransformer(str(folder), device="cpu").encode_query(queries, normalize_embeddings=True)
    assert np.allclose(Encoder.load(folder).encode_queries(queries), theirs, atol=1e-6)


def test_unknown_words_count_nothing(encoder: Encoder) -> None:
    vectors = encoder.encode_queries(["Ana Bell", "Ana qwerty Bell xyzzy", "qwerty", "", " ?! ", "\ud800"])
    assert np.allclose(vectors[0], vectors[1], atol=1e-6)
    assert not vectors[2:].any()
    assert encoder.encode_queries([]).shape == (0, 512)
    assert encoder.encode_passages([]).shape == (0, 512)
    assert not encoder.encode_queries([""]).any()


@given(query=st.text(st.characters(codec=None), max_size=30))
def test_no_text_breaks_it(encoder: Encoder, query: str) -> None:
    vector = encoder.encode_queries([query])[0]
    assert np.isfinite(vector).all()
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-5) or not vector.any()


def test_same_inputs_same_files_and_another_seed_another_fingerprint(folder: Path, tmp_path: Path) -> None:
    again = make_static_encoder(tmp_path / "again", iter(TEXTS), seed=3)
    names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    assert names == sorted(path.relative_to(again) for path in again.rglob("*") if path.is_file())
    assert all((folder / name).read_bytes() == (again / name).read_bytes() for name in names)
    prints = [
        Encoder.load(folder).fingerprint,
        Encoder.load(again).fingerprint,
        Encoder.load(make_static_encoder(tmp_path / "seed", TEXTS, seed=4)).fingerprint,
        Encoder.load(make_static_encoder(tmp_path / "texts", TEXTS[:3], seed=3)).fingerprint,
    ]
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


def test_rare_words_weigh_more_than_common_ones(encoder: Encoder) -> None:
    pair, rare, common = encoder.encode_queries(["in Bell", "Bell", "in"])
    assert pair @ rare > 2 * (pair @ common)


def test_a_text_without_words_makes_no_encoder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="words"):
        make_static_encoder(tmp_path / "e", ["?!", ""])


def test_a_title_counts_twice(encoder: Encoder) -> None:
    assert encoder.plan.pooling == "static"
    title, text, both = encoder.encode_queries(["Ana Bell", "Riga", "Ana Bell Ana Bell Riga"])
    assert np.allclose(encoder.encode_passages([Passage("p", "Ana Bell", "Riga")])[0], both, atol=1e-6)
    assert both @ title > both @ text


@pytest.mark.parametrize("count", [1, 2, 300])
def test_a_vector_is_the_same_in_any_batch(encoder: Encoder, count: int) -> None:
    queries = [f"{TEXTS[i % 4]} {i}" for i in range(count)]
    together = encoder.encode_queries(queries)
    assert np.array_equal(together, np.concatenate([encoder.encode_queries([query]) for query in queries]))


def test_names_that_are_no_encoder_say_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    for name, said in [
        (tmp_path / "nowhere", "no encoder folder"),
        (tmp_path, "is no model"),
        (tmp_path / "file", "is a file; give the folder"),
        ("", "is empty; give a folder or a hub name"),
        ("nobody/nothing", "is no folder and cannot be loaded from the hub"),
        ("a b\x00\n", "is no folder and cannot be loaded from the hub"),
    ]:
        with pytest.raises(DataError, match=said) as caught:
            Encoder.load(name)
        assert len(str(caught.value).splitlines()) == 1


def test_devices_and_dtypes_are_checked(folder: Path) -> None:
    with pytest.raises(ConfigError, match="unknown device 'tpu5'; expected cpu or cuda"):
        Encoder.load(folder, device="tpu5")
    with pytest.raises(ConfigError, match="unknown dtype 'fp8' of an encoder; expected auto, float32"):
        Encoder.load(folder, dtype="fp8")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="torch sees no GPU here; use cpu"):
            Encoder.load(folder, device="cuda")


@given(
    lengths=st.lists(st.integers(0, 40), max_size=60), max_tokens=st.integers(1, 200), spare_tokens=st.integers(0, 100)
)
def test_batches_hold_every_text_once_and_little_padding(
    lengths: list[int], max_tokens: int, spare_tokens: int
) -> None:
    batches = batch_by_length(lengths, max_tokens, spare_tokens)
    order = [position for batch in batches for position in batch]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[position] for position in order] == sorted(lengths, reverse=True)
    for batch in batches:
        longest = lengths[batch[0]]
        assert len(batch) == 1 or longest * len(batch) <= max_tokens
        assert sum(longest - lengths[position] for position in batch) <= spare_tokens
