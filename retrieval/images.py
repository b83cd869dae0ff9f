"""ImageRetriever: finds images of a folder, such as pages, by the embeddings of a model of texts and images.

::

    retrieval:
      type: images
      options: {folder: pages, model: google/siglip-base-patch16-224}

Each process that searches embeds the folder at its first search, and compares with all images: it is for some thousand
pages. A text file beside an image, ``page_7.txt`` for ``page_7.png``, is its caption, in UTF-8.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ragr1_actors.core.content import Image
from ragr1_actors.core.errors import ConfigError, DataError, one_line
from ragr1_actors.core.images import decoded, read_image
from ragr1_actors.core.models.model_code import find_code
from ragr1_actors.core.section import Section
from retrieval.base import Hits, Passage

_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
logger = logging.getLogger(__name__)


class ImageOptions(Section):
    """Options of ``retrieval.type: images``."""

    folder: str
    """Folder with images in PNG, JPEG or WebP, also in folders of it."""
    model: str
    """Folder or hub name of a model that embeds texts and images, such as CLIP or SigLIP."""
    batch_size: int = Field(16, ge=1)
    """Number of images that are embedded together."""


class ImageRetriever:
    """Retriever of images; it pickles as its arguments."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Check the options and the folder; nothing is loaded before the first search.

        Raises:
            ConfigError: an option is wrong, or the folder holds no image.
        """
        self._arguments = dict(options)
        self._options = ImageOptions.read(options, "retrieval.options")
        folder = Path(self._options.folder)
        self._files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES)
        if not self._files:
            raise ConfigError(
                f"retrieval.options.folder: {folder} holds no image, expected files in {', '.join(_SUFFIXES)}"
            )
        if find_code(Path(self._options.model)):
            raise ConfigError(f"retrieval.options.model: {self._options.model} brings code, which is not run")
        self._lock = asyncio.Lock()

    def __reduce__(self) -> tuple[type[ImageRetriever], tuple[Any, ...]]:
        """Pickle as the arguments of the constructor."""
        return ImageRetriever, (self._arguments,)

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return up to ``k`` images for each query, best first; a score is a cosine. See ``Retriever``.

        Raises:
            DataError: the model cannot be loaded, or no file of the folder can be read.
        """
        async with self._lock:  # the model loads once
            return await asyncio.to_thread(self._search, queries, k)

    def _search(self, queries: list[str], k: int) -> list[list[Passage]]:
        if not queries:
            return []
        passages, vectors = self._embedded
        scores = self._model.texts(queries) @ vectors.T
        best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
        return [
            Hits(replace(passages[index], score=float(row[index])) for index in order)
            for row, order in zip(scores, best, strict=True)
        ]

    @cached_property
    def _model(self) -> _Embedder:
        return _Embedder(self._options.model)

    @cached_property
    def _embedded(self) -> tuple[list[Passage], NDArray[np.float32]]:
        """Passages and unit vectors, ``[num_images, size]``; a file that cannot be read is left out with a warning."""
        root, passages = Path(self._options.folder), list[Passage]()
        for path in self._files:
            try:
                image = read_image(path.read_bytes(), str(path))
                caption = path.with_suffix(".txt")
                text = caption.read_text(encoding="utf-8-sig").strip() if caption.is_file() else ""
            except UnicodeDecodeError as error:
                logger.warning(
                    "an image is left out: %s: not UTF-8 text (byte %s); save it as UTF-8", caption, error.start
                )
                continue
            except (DataError, OSError) as error:
                logger.warning("an image is left out: %s", one_line(error))
                continue
            passages.append(Passage(path.relative_to(root).as_posix(), path.stem, text, image=image))
        if not passages:
            raise DataError(f"{root}: none of {len(self._files)} images can be read; the warnings say why")
        images, size = [one.image for one in passages if one.image is not None], self._options.batch_size
        parts = [self._model.images(images[first : first + size]) for first in range(0, len(images), size)]
        return passages, np.concatenate(parts)


class _Embedder:
    """Model of texts and images, on the CPU."""

    def __init__(self, name: str) -> None:
        from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

        try:
            self._model: Any = AutoModel.from_pretrained(name, trust_remote_code=False).eval()
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            self._processor: Any = AutoImageProcessor.from_pretrained(name, backend="pil", trust_remote_code=False)
            self._model.get_text_features, self._model.get_image_features  # noqa: B018
        except Exception as error:  # safetensors and tokenizers raise their own exceptions for a damaged file
            raise DataError(
                f"retrieval.options.model: {name!r} cannot be loaded ({one_line(error)}); give a model of texts and "
                "images, such as CLIP or SigLIP"
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
