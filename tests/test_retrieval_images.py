"""Images of a folder are found by the embeddings of a model of texts and images."""

from __future__ import annotations

import asyncio
import logging
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import PIL.Image
import pytest
import torch
from small_world import invoke
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CLIPConfig, CLIPModel, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from typer.testing import CliRunner
from vision_world import page

from ragr1_actors.cli.main import app
from ragr1_actors.core.errors import ConfigError, DataError, UserError
from ragr1_actors.core.images import decoded, read_image, size_of
from retrieval.http.retriever import HttpRetriever
from retrieval.images import ImageRetriever, build_image_index

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random CLIP."""
    folder = tmp_path_factory.mktemp("clip")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    text = sizes | ids | {"vocab_size": 8, "max_position_embeddings": 6}
    vision = sizes | {"image_size": 16, "patch_size": 4}
    torch.manual_seed(0)
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(folder)
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, "red": 3, "blue": 4, "page": 5}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="page"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>").save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=16).save_pretrained(folder)
    return folder


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    for number in range(3):
        (tmp_path / "deep" / f"page_{number}.png").write_bytes(page(20, 30, seed=number).data)
    (tmp_path / "deep" / "page_1.txt").write_text("Its caption.\n", encoding="utf-8")
    return tmp_path


async def test_images_are_found_with_their_captions(model: Path, pages: Path, caplog: pytest.LogCaptureFixture) -> None:
    (pages / "broken.png").write_bytes(page().data[:-30])
    (pages / "noted.png").write_bytes(page().data)
    (pages / "noted.txt").write_bytes("café".encode("latin-1"))
    retriever = pickle.loads(pickle.dumps(ImageRetriever({"folder": str(pages), "model": str(model), "batch_size": 2})))
    with caplog.at_level(logging.WARNING):
        red, blue = await retriever.search(["red", "blue page"], 2)
    broken, caption = [one.getMessage() for one in caplog.records if "left out" in one.getMessage()]
    assert "broken.png: cannot be read as an image" in broken
    assert "noted.txt: not UTF-8 text (byte 3); save it as UTF-8" in caption
    assert await retriever.search([], 2) == []
    assert len(red) == len(blue) == 2 and red[0].score >= red[1].score
    (every,) = await retriever.search(["red"], 9)
    assert {(one.id, one.title, one.text) for one in every} == {
        ("deep/page_0.png", "page_0", ""),
        ("deep/page_1.png", "page_1", "Its caption."),
        ("deep/page_2.png", "page_2", ""),
    }
    assert every[0].image == page(20, 30, seed=int(every[0].title[-1]))
    # scores are cosines of the model's own features
    clip, processor = CLIPModel.from_pretrained(model), CLIPImageProcessorPil.from_pretrained(model)
    with torch.no_grad():
        pixels = processor(decoded(every[0].image), return_tensors="pt")["pixel_values"]
        image = clip.get_image_features(pixel_values=pixels).pooler_output[0]
        ids = torch.tensor([[3, 0, 0, 0, 0, 0]])
        mask = torch.tensor([[1, 0, 0, 0, 0, 0]])
        text = clip.get_text_features(input_ids=ids, attention_mask=mask).pooler_output[0]
    np.testing.assert_allclose(every[0].score, torch.cosine_similarity(image, text, dim=0).item(), atol=1e-5)


async def test_an_index_of_images_and_pdfs_is_found_as_its_folder(
    model: Path, pages: Path, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("pypdfium2")
    out = tmp_path_factory.mktemp("out") / "index"
    sheets = [PIL.Image.new("RGB", (72, 36), colour) for colour in ("red", "blue")]
    sheets[0].save(pages / "deep" / "two.pdf", save_all=True, append_images=sheets[1:], resolution=72)
    (pages / "broken.pdf").write_bytes(b"%PDF-1.4 no more")
    (pages / "broken.png").write_bytes(b"no page")
    build = ("index", "build", "--corpus", str(pages), "--out", str(out), "--encoder", str(model), "--option", "dpi=72")
    with caplog.at_level(logging.WARNING):
        assert f"5 pages in {out}" in invoke(*build, "--option", "batch_size=2")
    assert "broken.pdf: pages are left out, as they cannot be read" in caplog.text
    assert f"an image is left out: {pages / 'broken.png'}: cannot be read as an image" in caplog.text
    rendered = read_image((out / "deep" / "two.pdf" / "two_0002.png").read_bytes(), "page")
    assert size_of(rendered) == (72, 36)
    np.testing.assert_allclose(np.asarray(decoded(rendered), int), np.asarray(sheets[1], int), atol=8)  # by JPEG
    (found,) = await ImageRetriever({"folder": str(out)}).search(["red"], 9)
    assert {one.title for one in found} == {"page_0", "page_1", "page_2", "two_0001", "two_0002"}
    (expected,) = await ImageRetriever({"folder": str(pages), "model": str(model)}).search(["red"], 9)
    own = [one for one in found if not one.title.startswith("two")]
    assert [(one.id, one.text, one.image) for one in own] == [(one.id, one.text, one.image) for one in expected]
    np.testing.assert_allclose([one.score for one in own], [one.score for one in expected], atol=1e-6)
    printed = invoke("index", "search", str(out), "red", "-k", "1", "--json")
    assert f'"id": "{found[0].id}"' in printed and '"image": null' in printed
    command = [sys.executable, "-m", "ragr1_actors", "index", "serve", str(out), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            url = next(line.split()[0] for line in server.stderr if line.startswith("http://"))
            (served,) = await HttpRetriever({"url": url}).search(["red"], 9)
        finally:
            server.terminate()
    assert [(one.id, one.text, one.image) for one in served] == [(one.id, one.text, one.image) for one in found]
    refused = CliRunner().invoke(app, ["index", "serve", str(out), "--retrievers", "2"])
    assert isinstance(refused.exception, UserError) and "this process searches" in str(refused.exception)
    with pytest.raises(ConfigError, match="which made the index"):
        ImageRetriever({"folder": str(out), "model": "another"})
    np.save(out / "vectors.npy", np.zeros((2, 8), np.float32))
    with pytest.raises(DataError, match=r"has the shape \(2, 8\), expected a row of each image"):
        await ImageRetriever({"folder": str(out)}).search(["red"], 1)


def test_pages_are_not_written_over_and_take_no_options_of_passages(model: Path, pages: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="exists already and is not overwritten"):
        build_image_index(pages, pages, str(model), {})
    with pytest.raises(DataError, match=r"there is no gone\.pdf; give an existing folder or PDF"):
        build_image_index(Path("gone.pdf"), tmp_path / "index", str(model), {})
    with pytest.raises(ConfigError, match=r"--option\.dpi: got 1"):
        build_image_index(pages, tmp_path / "index", str(model), {"dpi": 1})
    refused = CliRunner().invoke(app, ["index", "build", "--corpus", str(pages), "--out", "x", "--type", "hnsw"])
    assert isinstance(refused.exception, UserError) and "got pages, which take only --corpus" in str(refused.exception)


def test_a_retriever_of_images_searches_in_one_loop_after_another(model: Path, pages: Path) -> None:
    retriever = ImageRetriever({"folder": str(pages), "model": str(model)})

    async def twice() -> int:
        return len(await asyncio.gather(*[retriever.search(["red"], 1) for _ in range(2)]))

    assert [asyncio.run(twice()) for _ in range(2)] == [2, 2]
    with pytest.raises(ValueError, match="got k=0"):
        retriever.search_batch(["red"], 0)


async def test_a_page_that_was_replaced_is_read_again(model: Path, tmp_path: Path) -> None:
    vectors = []
    for colour in ("red", "blue"):
        pages, out = tmp_path / "pages", tmp_path / "index"
        shutil.rmtree(out, ignore_errors=True)
        pages.mkdir(exist_ok=True)
        PIL.Image.new("RGB", (8, 8), colour).save(pages / "page.png")
        invoke("index", "build", "--corpus", str(pages), "--out", str(out), "--encoder", str(model))
        ((found,),) = await ImageRetriever({"folder": str(out)}).search(["red"], 1)
        assert found.image == read_image((pages / "page.png").read_bytes(), "page")
        vectors.append(np.load(out / "vectors.npy"))
    assert not np.allclose(*vectors)


async def test_an_index_is_searched_from_another_folder(
    model: Path, pages: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path_factory.mktemp("out") / "index"
    monkeypatch.chdir(model.parent)
    build_image_index(pages, out, model.name, {})
    monkeypatch.chdir(pages)
    assert len((await ImageRetriever({"folder": str(out)}).search(["red"], 2))[0]) == 2
    said = invoke("index", "info", str(out))
    assert str(model) in said and "3" in said


async def test_a_model_without_a_tokenizer_is_refused(model: Path, pages: Path, tmp_path: Path) -> None:
    deaf = Path(shutil.copytree(model, tmp_path / "deaf"))
    for path in deaf.glob("*token*"):
        path.unlink()
    with pytest.raises(DataError, match="it has no tokenizer"):
        await ImageRetriever({"folder": str(pages), "model": str(deaf)}).search(["red"], 1)


async def test_what_cannot_be_searched_is_refused(model: Path, pages: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no image, expected files in"):
        ImageRetriever({"folder": str(model), "model": str(model)})
    with pytest.raises(ConfigError, match="got '', expected a model of texts and images"):
        ImageRetriever({"folder": str(pages)})
    with pytest.raises(DataError, match="give a model of texts and images"):
        await ImageRetriever({"folder": str(pages), "model": str(pages)}).search(["red"], 1)
    for path in (pages / "deep").glob("*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(DataError, match="none of 3 images can be read"):
        await ImageRetriever({"folder": str(pages), "model": str(model)}).search(["red"], 1)
