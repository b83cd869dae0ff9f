"""ImageRetriever: finds images of a folder, such as pages, by the embeddings of a model of texts and images.

::

    retrieval:
      type: images
      options: {folder: pages, model: google/siglip-base-patch16-224}      # or {folder: INDEX}

A query is compared with all images. Of a folder each process embeds the images at its first search; ``ragr1 index
build`` does it once, for PDFs too, whose pages pypdfium2 renders. A text file beside an image, ``page_7.txt`` for
``page_7.png``, is its caption, in UTF-8.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.util import find_spec
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ragr1_actors.core.content import Image
from ragr1_actors.core.disk.files import stamp_of, write_folder
from ragr1_actors.core.disk.json_files import read_json_as, write_json
from ragr1_actors.core.errors import ConfigError, DataError, one_line
from ragr1_actors.core.images import MAX_PIXELS, decoded, encoded, read_image
from ragr1_actors.core.models.model_files import find_code
from ragr1_actors.core.section import Section
from retrieval.base import Hits, Passage

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
_PDF = ".pdf"
_POINTS = 72
"""Points per inch, in which a PDF measures its pages."""
logger = logging.getLogger(__name__)


def is_pages(corpus: Path) -> bool:
    """Return whether a corpus is of pages: a folder, or a PDF."""
    return corpus.is_dir() or corpus.suffix.lower() == _PDF


def image_files(folder: Path) -> list[Path]:
    """Return the images in a folder and in folders of it, in the order of their names."""
    return sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)


def copy_pages(source: Path, target: Path, dpi: int) -> None:
    """Copy the images of a folder with their captions, and render the pages of its PDFs, or of one PDF.

    The seventh page of ``deep/report.pdf`` is ``deep/report.pdf/report_0007.png``. What cannot be read of a
    PDF is left out with a warning.

    Raises:
        ConfigError: there is a PDF, and pypdfium2 is not installed.
    """
    root = source if source.is_dir() else source.parent
    for path in image_files(source) if source.is_dir() else []:
        for file in (path, path.with_suffix(".txt")):
            if file.is_file():
                (target / file.relative_to(root)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target / file.relative_to(root))
    for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
        if path.suffix.lower() != _PDF or not path.is_file():
            continue
        folder = target / path.relative_to(root)
        try:
            for number, page in enumerate(_rendered(path, dpi), 1):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{path.stem}_{number:04}.png").write_bytes(page.data)
        except DataError as error:
            logger.warning("%s", one_line(error))


def _rendered(path: Path, dpi: int) -> Iterator[Image]:
    if find_spec("pypdfium2") is None:
        raise ConfigError(f"{path} needs the package pypdfium2, which is not installed; pip install -e '.[pdf]'")
    import pypdfium2

    try:
        with pypdfium2.PdfDocument(path) as document:
            for page in document:
                width, height = page.get_size()
                scale = min(dpi / _POINTS, 0.99 * sqrt(MAX_PIXELS / max(1, width * height)))
                yield encoded(page.render(scale=scale).to_pil().convert("RGB"))
    except (pypdfium2.PdfiumError, OSError) as error:
        raise DataError(
            f"{path}: pages are left out, as they cannot be read: {one_line(error)}; save it again"
        ) from error


INDEX_FILE, VECTORS_FILE = "images.json", "vectors.npy"


class ImageOptions(Section):
    """Options of ``retrieval.type: images``."""

    folder: str
    """Folder with images in PNG, JPEG or WebP, also in folders of it; or an index of ``ragr1 index build``."""
    model: str = ""
    """Folder or hub name of a model that embeds texts and images, such as CLIP or SigLIP; by default that of the
    index."""
    batch_size: int = Field(16, ge=1)
    """Number of images that are embedded together."""


class PageOptions(Section):
    """Options of ``ragr1 index build`` for pages."""

    dpi: int = Field(144, ge=36, le=600)
    """Resolution in which PDFs are rendered, in pixels per inch."""
    batch_size: int = Field(16, ge=1)
    """Number of images that are embedded together."""


@dataclass(frozen=True)
class ImageIndex:
    """Contents of ``images.json``: what the rows of ``vectors.npy`` are."""

    model: str
    """Model that embedded them."""
    names: tuple[str, ...]
    """Paths below the folder."""


def build_image_index(source: Path, out: Path, model: str, options: Mapping[str, Any]) -> int:
    """Write copies of the pages of a folder or a PDF, with their embeddings; return the number of pages.

    Raises:
        ConfigError: an option is wrong, or pypdfium2 is missing.
        DataError: ``out`` exists, the model cannot be loaded, or no page can be read.
    """
    settings = PageOptions.read(options, "--option")
    if not source.exists():
        raise DataError(f"there is no {source}; give an existing folder or PDF")
    if out.exists():
        raise DataError(f"{out} exists already and is not overwritten; remove it or choose another directory")
    embedder, names = _Embedder(model), list[str]()

    def write(writing: Path) -> None:
        copy_pages(source, writing, settings.dpi)
        found, vectors = _embed_folder(writing, embedder, settings.batch_size, shown=source)
        names.extend(found)
        np.save(writing / VECTORS_FILE, vectors)
        named = str(Path(model).resolve()) if Path(model).is_dir() else model  # an index is searched from any folder
        write_json(writing / INDEX_FILE, {"model": named, "names": names})

    write_folder(out, write, (INDEX_FILE, VECTORS_FILE))
    return len(names)


def image_index_info(folder: Path) -> dict[str, Any]:
    """Return model, number of pages and bytes of an index."""
    index = read_json_as(ImageIndex, folder / INDEX_FILE)
    num_bytes = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {"index_type": "images", "model": index.model, "count": len(index.names), "bytes": num_bytes}


def is_image_index(folder: Path) -> bool:
    """Return whether a folder is an index of images."""
    return (folder / INDEX_FILE).is_file()


class ImageRetriever:
    """Retriever of images; it pickles as its arguments."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Check the options and the folder; nothing is loaded before the first search.

        Raises:
            ConfigError: an option is wrong, or the folder holds no image.
        """
        self._arguments = dict(options)
        self._options = ImageOptions.read(options, "retrieval.options")
        self._root = Path(self._options.folder)
        if not image_files(self._root):
            raise ConfigError(
                f"retrieval.options.folder: {self._root} holds no image, expected files in {', '.join(SUFFIXES)}"
            )
        self._index = read_json_as(ImageIndex, self._root / INDEX_FILE) if is_image_index(self._root) else None
        self._model_name = self._options.model or (self._index.model if self._index else "")
        if not self._model_name or (self._index and self._index.model != self._model_name):
            expected = f"{self._index.model}, which made the index" if self._index else "a model of texts and images"
            raise ConfigError(f"retrieval.options.model: got {self._model_name!r}, expected {expected}")
        if find_code(Path(self._model_name)):
            raise ConfigError(f"retrieval.options.model: {self._model_name} brings code, which is not run")
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[ImageRetriever], tuple[Any, ...]]:
        """Pickle as the arguments of the constructor."""
        return ImageRetriever, (self._arguments,)

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return up to ``k`` images for each query, best first; a score is a cosine. See ``Retriever``.

        Raises:
            DataError: the model cannot be loaded, or no file of the folder can be read.
        """
        return await asyncio.to_thread(self.search_batch, queries, k)

    def search_batch(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """Return what ``search`` returns, in this thread."""
        if k < 1:
            raise ValueError(f"got k={k}, expected at least 1")
        if not queries:
            return []
        with self._lock:  # the model loads once
            names, vectors = self._embedded
            scores = self._model.texts(queries) @ vectors.T
        best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return [
            Hits(self._passage(names[index], float(row[index])) for index in order)
            for row, order in zip(scores, best, strict=True)
        ]

    def _passage(self, name: str, score: float) -> Passage:
        path = self._root / name
        return Passage(name, path.stem, _caption(path), score, image=_read(path))

    @cached_property
    def _model(self) -> _Embedder:
        return _Embedder(self._model_name)

    @cached_property
    def _embedded(self) -> tuple[Sequence[str], NDArray[np.float32]]:
        """Names and unit vectors, ``[num_images, size]``."""
        if self._index is None:
            return _embed_folder(self._root, self._model, self._options.batch_size, shown=self._root)
        path = self._root / VECTORS_FILE
        try:
            vectors = np.load(path)
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read: {one_line(error)}; build the index again") from error
        if vectors.shape[:1] != (len(self._index.names),):
            raise DataError(
                f"{path} has the shape {vectors.shape}, expected a row of each image; build the index again"
            )
        return self._index.names, vectors


def _read(path: Path) -> Image:
    try:
        return _read_version(path, stamp_of(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {one_line(error)}") from error


@lru_cache(256)  # the same pages are found again and again, and a check decodes them
def _read_version(path: Path, stamp: tuple[int, int]) -> Image:
    """Read an image; another folder may have taken the place of the one in which it was read before."""
    return read_image(path.read_bytes(), str(path))


def _caption(path: Path) -> str:
    file = path.with_suffix(".txt")
    try:
        return file.read_text(encoding="utf-8-sig").strip() if file.is_file() else ""
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: not UTF-8 text (byte {error.start}); save it as UTF-8") from error


def _embed_folder(
    root: Path, embedder: _Embedder, batch_size: int, shown: Path
) -> tuple[list[str], NDArray[np.float32]]:
    """Return names and unit vectors of a folder's images; warnings say which images of ``shown`` cannot be read."""
    files, names, vectors, batch = image_files(root), list[str](), list[NDArray[np.float32]](), list[Image]()
    for path in files:
        try:
            _caption(path)
            batch.append(_read(path))
        except DataError as error:
            logger.warning("an image is left out: %s", one_line(error).replace(str(root), str(shown)))
            continue
        names.append(path.relative_to(root).as_posix())
        if len(batch) == batch_size:
            vectors.append(embedder.images(batch))
            batch.clear()
    if not names:
        raise DataError(f"{root}: none of {len(files)} images can be read; the warnings say why")
    return names, np.concatenate([*vectors, *([embedder.images(batch)] if batch else [])])


class _Embedder:
    """Model of texts and images, on the CPU."""

    def __init__(self, name: str) -> None:
        from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

        try:
            self._model: Any = AutoModel.from_pretrained(name, trust_remote_code=False).eval()
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            self._processor: Any = AutoImageProcessor.from_pretrained(name, backend="pil", trust_remote_code=False)
            self._model.get_text_features, self._model.get_image_features  # noqa: B018
            if len(self._tokenizer) <= len(self._tokenizer.all_special_tokens):  # made by transformers without files
                raise ValueError("it has no tokenizer")
        except Exception as error:  # safetensors and tokenizers raise their own exceptions for a damaged file
            raise DataError(
                f"{name!r} cannot be loaded ({one_line(error)}); give a model of texts and images, such as SigLIP"
            ) from error

    def texts(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return unit vectors, ``[num_texts, size]``."""
        longest = self._model.config.text_config.max_position_embeddings
        tokens = self._tokenizer(
            [*texts], padding="max_length", truncation=True, max_length=longest, return_tensors="pt"
        )
        names = [name for name in ("input_ids", "attention_mask") if name in tokens]
        return self._unit(self._model.get_text_features, {name: tokens[name] for name in names})

    def images(self, images: Sequence[Image]) -> NDArray[np.float32]:
        """Return unit vectors, ``[num_images, size]``."""
        found = self._processor([decoded(image) for image in images], return_tensors="pt")
        return self._unit(self._model.get_image_features, {"pixel_values": found["pixel_values"]})

    def _unit(self, embed: Any, inputs: Mapping[str, Any]) -> NDArray[np.float32]:
        import torch

        with torch.inference_mode():
            vectors = embed(**inputs).pooler_output
        found: NDArray[np.float32] = torch.nn.functional.normalize(vectors.float(), dim=-1).numpy()
        return found
