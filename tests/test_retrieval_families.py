"""Pooling and prompts of transformers, tiny but real: read from the folder or known by the family, never guessed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from encoder_world import MAX_TOKENS, SPECIAL, change_json, write_modules, write_plain
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, AutoTokenizer

from ragr1_actors.core.errors import DataError
from retrieval.base import Passage
from retrieval.encoders.encoder import Encoder
from retrieval.encoders.families import plan_encoder

pytestmark = pytest.mark.engine

INSTRUCTION = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery: "
BGE = "Represent this sentence for searching relevant passages: "
BGE_ZH = "为这个句子生成表示以用于检索相关文章："  # noqa: RUF001
QUERIES = ["born in Riga ?", "a", "", "the oslo passage : a b c d e f"]
SETTINGS = "config_sentence_transformers.json"
NO_PROMPTS = {"query": "", "document": ""}
"""What sentence-transformers writes where no prompts are set."""


def by_hand(folder: Path, texts: list[str], pooling: str) -> NDArray[np.float32]:
    """Encode with transformers alone, one text at a time, as the model cards do."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    vectors = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=MAX_TOKENS)["input_ids"]
        with torch.inference_mode():
            hidden = model(input_ids=ids).last_hidden_state[0]
        vector = {"mean": hidden.mean(0), "cls": hidden[0], "lasttoken": hidden[-1]}[pooling]
        vectors.append((vector / vector.norm()).numpy())
    return np.stack(vectors)


@pytest.mark.parametrize(
    ("name", "pooling", "query_prompt", "passage_prompt"),
    [
        ("e5-base-v2", "mean", "query: ", "passage: "),
        ("e5-small", "mean", "query: ", "passage: "),
        ("multilingual-e5-large", "mean", "query: ", "passage: "),
        ("multilingual-e5-large-instruct", "mean", INSTRUCTION, ""),
        ("e5-mistral-7b-instruct", "lasttoken", INSTRUCTION, ""),
        ("bge-small-en", "cls", BGE, ""),
        ("BAAI_bge-large-en-v1.5", "cls", BGE, ""),
        ("bge-base-zh-v1.5", "cls", BGE_ZH, ""),
        ("bge-m3", "cls", "", ""),
        ("gte-large", "mean", "", ""),
        ("gte-large-zh", "cls", "", ""),
        ("gte-base-en-v1.5", "cls", "", ""),
        ("gte-multilingual-base", "cls", "", ""),
        ("gte-modernbert-base", "cls", "", ""),
        ("gte-Qwen2-1.5B-instruct", "lasttoken", INSTRUCTION, ""),
        ("all-MiniLM-L6-v2", "mean", "", ""),
        ("all-mpnet-base-v2", "mean", "", ""),
    ],
)
def test_a_known_family_pools_and_prompts_as_its_cards_say(
    tmp_path: Path, name: str, pooling: str, query_prompt: str, passage_prompt: str
) -> None:
    encoder = Encoder.load(write_plain(tmp_path / name))
    plan = encoder.plan
    assert (plan.pooling, plan.query_prompt, plan.passage_prompt) == (pooling, query_prompt, passage_prompt)
    assert len(encoder.plan.notes) == 1  # the folder itself says none of it
    assert "the folder names none" in encoder.plan.notes[0]
    found = encoder.encode_queries(QUERIES)
    assert np.allclose(found, by_hand(tmp_path / name, [query_prompt + q for q in QUERIES], pooling), atol=1e-5)
    passages = encoder.encode_passages([Passage("p", "Riga", "a b")])
    assert np.allclose(passages, by_hand(tmp_path / name, [f"{passage_prompt}Riga\na b"], pooling), atol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["bert-base-uncased", "e5", "my-e5-basement", "bge-reranker-base", "gte-reranker-modernbert-base", "bge-en-icl"],
)
def test_transformers_alone_of_no_known_family_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"does not say how it pools: .* tell no known family"):
        Encoder.load(write_plain(tmp_path / name))


def _card(folder: Path, text: str) -> None:
    (folder / "README.md").write_text(text)


@pytest.mark.parametrize(
    "tell",
    [
        lambda folder: change_json(folder / "config.json", _name_or_path="/cache/BAAI_bge-base-en/"),
        lambda folder: _card(folder, "---\ntags:\n- mteb\nmodel-index:\n- name: bge-base-en-v1.5\n---\n<h1>Flag</h1>"),
        lambda folder: _card(folder, "---\nlicense: mit\n---\n\n# bge-small-en\n\n## Usage\n"),
    ],
)
def test_the_family_is_told_by_the_models_own_files(tmp_path: Path, tell: Callable[[Path], None]) -> None:
    tell(write_plain(tmp_path / "model"))
    assert Encoder.load(tmp_path / "model").plan.query_prompt == BGE


def test_a_model_of_the_hubs_cache_is_known_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--intfloat--e5-small-v2"
    write_plain(repository / "snapshots" / ("1" * 40))
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("1" * 40)
    monkeypatch.setenv("SENTENCE_TRANSFORMERS_HOME", str(tmp_path))
    encoder = Encoder.load("intfloat/e5-small-v2")
    assert (encoder.name, encoder.plan.pooling, encoder.plan.query_prompt) == (
        "intfloat/e5-small-v2",
        "mean",
        "query: ",
    )
    by_folder = Encoder.load(repository / "snapshots" / ("1" * 40))
    assert (by_folder.fingerprint, by_folder.plan.query_prompt) == (encoder.fingerprint, "query: ")


def test_another_model_made_of_one_is_not_of_its_family(tmp_path: Path) -> None:
    folder = write_modules(tmp_path / "mine", "lasttoken", NO_PROMPTS)
    _card(folder, "# SentenceTransformer based on BAAI/bge-base-en-v1.5\n")
    encoder = Encoder.load(folder)
    assert (encoder.plan.pooling, encoder.plan.query_prompt, encoder.plan.notes) == ("lasttoken", "", ())


def test_two_families_are_refused(tmp_path: Path) -> None:
    folder = write_plain(tmp_path / "bge-base-en", _name_or_path="intfloat/e5-base")
    with pytest.raises(DataError, match=r"two families, bge-en by its name 'bge-base-en' and e5 by its config\.json"):
        Encoder.load(folder)


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken", "max", "weightedmean"])
@pytest.mark.parametrize("prompts", [None, NO_PROMPTS, {"query": "query: ", "passage": "the "}])
def test_the_folders_own_pooling_and_prompts(tmp_path: Path, pooling: str, prompts: dict[str, str] | None) -> None:
    folder = write_modules(tmp_path / "model", pooling, prompts)
    encoder = Encoder.load(folder)
    used = prompts or {}
    assert (encoder.plan.pooling, encoder.plan.notes) == (pooling, ())
    assert (encoder.plan.query_prompt, encoder.plan.passage_prompt) == (used.get("query", ""), used.get("passage", ""))
    library = SentenceTransformer(str(folder), device="cpu")
    theirs = library.encode_query(QUERIES)
    assert np.allclose(encoder.encode_queries(QUERIES), theirs / np.linalg.norm(theirs, axis=1)[:, None], atol=1e-5)


def test_a_pooling_that_is_not_the_familys_is_refused(tmp_path: Path) -> None:
    folder = write_modules(tmp_path / "e5-base-v2", "cls")
    with pytest.raises(DataError, match="its files name pooling 'cls', but the e5 family pools 'mean'; correct"):
        Encoder.load(folder)


def test_a_pooling_file_that_names_no_mode_is_refused(tmp_path: Path) -> None:
    folder = write_modules(tmp_path / "model", "cls")
    for content in ({"embedding_dimension": 16}, {"embedding_dimension": 16, "pooling_mode_mean_tokens": False}):
        (folder / "1_Pooling/config.json").write_text(json.dumps(content))
        with pytest.raises(DataError, match="names no pooling mode, and sentence-transformers would take the mean"):
            Encoder.load(folder)
    (folder / "1_Pooling/config.json").write_text(
        json.dumps({"word_embedding_dimension": 16, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True})
    )
    encoder = Encoder.load(folder)
    assert (encoder.plan.pooling, encoder.dimension) == ("cls+mean", 32)


@pytest.mark.parametrize("prompts", [None, NO_PROMPTS])
def test_a_family_lends_its_prompts_to_a_folder_without(tmp_path: Path, prompts: dict[str, str] | None) -> None:
    encoder = Encoder.load(write_modules(tmp_path / "e5-base", "mean", prompts))
    assert (encoder.plan.query_prompt, encoder.plan.passage_prompt) == ("query: ", "passage: ")
    assert encoder.plan.notes == (
        "query prompt 'query: ' is that of the e5 family: the folder carries none",
        "passage prompt 'passage: ' is that of the e5 family: the folder carries none",
    )


def test_the_folders_prompts_come_before_the_familys(tmp_path: Path) -> None:
    own = {"query": "instruct: ", "document": "passage: ", "classify": "x"}
    encoder = Encoder.load(write_modules(tmp_path / "e5-base", "mean", own))
    assert (encoder.plan.query_prompt, encoder.plan.passage_prompt) == ("instruct: ", "passage: ")
    assert encoder.plan.notes == ("query prompt 'instruct: ' is the folder's own; that of the e5 family is 'query: '",)


def test_prompts_under_other_names_are_mentioned(tmp_path: Path) -> None:
    encoder = Encoder.load(write_modules(tmp_path / "model", "mean", {"search_query": "q: ", "search_document": "d: "}))
    assert (encoder.plan.query_prompt, encoder.plan.passage_prompt) == ("", "")
    assert encoder.plan.notes == ("no prompt is used: the folder's own are for search_document, search_query",)


def test_prompts_that_are_not_pooled(tmp_path: Path) -> None:
    folder = write_modules(tmp_path / "model", "mean", {"query": "the instruct : "})
    change_json(folder / "1_Pooling/config.json", include_prompt=False)
    theirs = SentenceTransformer(str(folder), device="cpu").encode_query(QUERIES[:2])
    found = Encoder.load(folder).encode_queries(QUERIES[:2])
    assert np.allclose(found, theirs / np.linalg.norm(theirs, axis=1)[:, None], atol=1e-5)


def test_texts_end_with_the_token_that_is_pooled(tmp_path: Path) -> None:
    """Where the tokenizer leaves it out, as those of decoders do, it is added, once."""
    folder = write_plain(tmp_path / "e5-mistral-7b-instruct", tokenizer_adds=False)
    encoder = Encoder.load(folder)
    texts = ["a b", "born in riga", "the " * 100]
    ends = [f"{INSTRUCTION}{text}[SEP]" for text in texts[:2]]
    found = encoder.encode_queries(texts)
    assert np.allclose(found[:2], by_hand(folder, ends, "lasttoken"), atol=1e-5)
    cut = AutoTokenizer.from_pretrained(folder)(f"{INSTRUCTION}{texts[2]}", truncation=True, max_length=MAX_TOKENS - 1)
    with torch.inference_mode():
        ids = torch.tensor([[*cut["input_ids"], SPECIAL["[SEP]"]]])
        expected = AutoModel.from_pretrained(folder)(input_ids=ids).last_hidden_state[0, -1]
    assert np.allclose(found[2], expected / expected.norm(), atol=1e-5), "a long text is cut in front of the token"


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(tmp_path: Path, side: str) -> None:
    folder = write_modules(tmp_path / "model", "lasttoken")
    change_json(folder / "tokenizer_config.json", padding_side=side)
    encoder = Encoder.load(folder)
    if side == "right":  # BERT's positions are absolute, so that only pads behind a text leave it as it is
        together = encoder.encode_queries(QUERIES)
        assert np.allclose(together, np.concatenate([encoder.encode_queries([query]) for query in QUERIES]), atol=1e-5)
    else:
        theirs = SentenceTransformer(str(folder), device="cpu").encode_query(QUERIES)
        assert np.allclose(encoder.encode_queries(QUERIES), theirs / np.linalg.norm(theirs, axis=1)[:, None], atol=1e-5)


def test_a_text_without_a_token_is_the_zero_vector(tmp_path: Path) -> None:
    folder = write_modules(tmp_path / "model", "mean", tokenizer_adds=False)
    found = Encoder.load(folder).encode_queries(["a b", "", "\x00"])
    assert not found[1:].any()
    assert np.linalg.norm(found[0]) == pytest.approx(1, abs=1e-5)


ODD = ["", "\x00\x01\x7f", "\ud800 a \udfff", "\ud83d\ude00", "a " * 10_000, "x" * 50_000, "\u202eb", "A\u0301"]


@pytest.mark.parametrize("dtype", ["auto", "float16", "bfloat16"])
def test_odd_and_endless_texts_are_encoded(tmp_path: Path, dtype: str) -> None:
    encoder = Encoder.load(write_modules(tmp_path / "model", "mean"), dtype=dtype)
    vectors = np.concatenate([encoder.encode_queries(ODD), encoder.encode_passages([Passage("p", *ODD[3:5])])])
    assert vectors.dtype == np.float32
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)
    cut = encoder.encode_queries(["a " * (MAX_TOKENS - 2)])
    assert np.allclose(vectors[4], cut[0], atol=1e-5 if dtype == "auto" else 2e-2)


def test_positions_that_roberta_leaves_out_are_not_used(tmp_path: Path) -> None:
    from transformers import RobertaConfig, RobertaModel

    folder = write_modules(tmp_path / "model", "mean")
    shape = RobertaConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=MAX_TOKENS + 2, pad_token_id=1, type_vocab_size=2,
    )  # fmt: skip
    RobertaModel(shape).save_pretrained(folder)
    change_json(folder / "tokenizer_config.json", model_max_length=None, pad_token="[UNK]")
    encoder = Encoder.load(folder)
    vectors = encoder.encode_queries(["a " * 500, "a " * (MAX_TOKENS - 2)])
    assert np.allclose(vectors[0], vectors[1], atol=1e-5)


def test_vectors_that_are_not_finite_are_refused_by_name_and_text(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_modules(tmp_path / "model", "mean")
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.word_embeddings.weight"][4] = torch.nan  # "a"
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    encoder = Encoder.load(folder)
    assert np.isfinite(encoder.encode_queries(["b"])).all()
    with pytest.raises(DataError, match=r"encoder '.*model' gives NaN or infinity for 'the a (b ){29}'; its files"):
        encoder.encode_queries(["b", "c", "the a " + "b " * 100, "a"])


def test_what_the_fingerprint_covers(tmp_path: Path) -> None:
    first = write_modules(tmp_path / "a/model", "mean")
    again = write_modules(tmp_path / "b/other", "mean")
    (again / "README.md").write_text("# a card")
    (again / "onnx").mkdir()
    (again / "onnx/config.json").write_text("{}")
    assert Encoder.load(first).fingerprint == Encoder.load(again).fingerprint
    others = [
        write_modules(tmp_path / "c/model", "cls"),
        write_modules(tmp_path / "d/model", "mean", {"query": "the "}),
        write_modules(tmp_path / "e/e5-base", "mean"),  # the family's prompts, though all files are alike
        write_modules(tmp_path / "f/model", "mean", layer_norm_eps=1e-3),
    ]
    prints = {Encoder.load(folder).fingerprint for folder in [first, *others]}
    assert len(prints) == 5


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _lose_a_layer(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    kept = {key: value for key, value in weights.items() if "layer.1.output" not in key}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d: (d / "model.safetensors").unlink(), "cannot be loaded"),
        (lambda d: _cut(d / "model.safetensors"), "cannot be loaded"),
        (lambda d: (d / "model.safetensors").write_bytes(b""), "cannot be loaded"),
        (_lose_a_layer, r"4 weights are missing, such as encoder\.layer\.1\.output\.\S+, and would be random"),
        (lambda d: change_json(d / "config.json", num_hidden_layers=3), "16 weights are missing"),
        (lambda d: change_json(d / "config.json", hidden_size=32), "cannot be loaded"),
        (lambda d: change_json(d / "config.json", model_type="new"), "cannot be loaded"),
        (lambda d: change_json(d / "config.json", model_type=None), "cannot be loaded"),
        (lambda d: (d / "config.json").write_text("{"), r"config\.json cannot be read: .*; copy the encoder again"),
        (lambda d: (d / "config.json").write_text("[]"), r"config\.json is damaged: .* valid dictionary; copy"),
        (lambda d: (d / "config.json").unlink(), "cannot be loaded"),
        (lambda d: (d / "modules.json").write_text("[" * 100_000), r"modules\.json cannot be read"),
        (lambda d: (d / "modules.json").write_text("{}"), r"modules\.json is damaged: .* valid list"),
        (lambda d: (d / "modules.json").write_text("[]"), "names no pooling: its modules are none"),
        (lambda d: (d / "modules.json").write_text('[{"type": 1}]'), r"0\.type: input should be a valid string"),
        (lambda d: (d / "1_Pooling/config.json").unlink(), r"1_Pooling/config\.json cannot be read"),
        (lambda d: (d / "tokenizer.json").write_text("{"), "cannot be loaded"),
        (lambda d: (d / "tokenizer.json").unlink(), "cannot be loaded"),
        (
            lambda d: (d / SETTINGS).write_text('{"prompts": ["query: "]}'),
            "prompts: input should be a valid dictionary",
        ),
        (lambda d: (d / SETTINGS).write_text('{"model_type": "CrossEncoder"}'), "is a CrossEncoder; give a model"),
    ],
)
def test_damaged_folders_are_refused_in_one_sentence(
    tmp_path: Path, damage: Callable[[Path], object], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_modules(tmp_path / "model", "mean")
    damage(folder)
    capfd.readouterr()
    with pytest.raises(DataError, match=said) as caught:
        Encoder.load(folder)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""  # the libraries' own reports say no more


@pytest.mark.parametrize("write", [write_plain, lambda folder, **config: write_modules(folder, "cls", **config)])
def test_code_of_a_models_repository_is_not_run(tmp_path: Path, write: Callable[..., Path]) -> None:
    code = {"AutoConfig": "new-impl--configuration.NewConfig", "AutoModel": "new-impl--modeling.NewModel"}
    folder = write(tmp_path / "gte-base-en-v1.5", model_type="new", auto_map=code)
    with pytest.raises(DataError, match="brings Python code from its repository, which is never run here"):
        Encoder.load(folder)


def test_weights_that_no_pooling_uses_may_be_missing(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_modules(tmp_path / "model", "mean")
    before = Encoder.load(folder).encode_queries(QUERIES)
    weights = load_file(folder / "model.safetensors")
    kept = {f"bert.{key}": value for key, value in weights.items() if not key.startswith("pooler.")}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    assert np.array_equal(Encoder.load(folder).encode_queries(QUERIES), before)


def test_old_weight_files_are_read_and_checked(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = write_modules(tmp_path / "model", "mean")
    before = Encoder.load(folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    after = Encoder.load(folder)
    assert np.array_equal(after.encode_queries(QUERIES), before.encode_queries(QUERIES))
    assert after.fingerprint != before.fingerprint
    torch.save({key: value for key, value in weights.items() if "layer.1" not in key}, folder / "pytorch_model.bin")
    with pytest.raises(DataError, match="16 weights are missing"):
        Encoder.load(folder)


@pytest.mark.timeout(60)  # for each of these a pattern that goes back took hours
@pytest.mark.parametrize("unit", ["#", " ", "a ", "model-index:\n", "\n"])
def test_a_long_model_card_is_read_once(unit: str, tmp_path: Path) -> None:
    card = f"# a{unit * (1_000_000 // len(unit))}b"
    (tmp_path / "README.md").write_text(card)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert plan_encoder(tmp_path, "bge-base-en").pooling == "cls"
