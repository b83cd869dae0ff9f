"""Vision of a policy: the pixels, placeholders and positions of images, for the engine and the learner alike.

::

    Image ──grid──► rows x cols placeholders among the token ids
          ──patches──► the model's vision tower ──► an embedding per placeholder

The families are those of transformers whose text model takes embeddings and rotary positions in three axes (M-RoPE,
arXiv:2409.12191): Qwen2.5-VL and Qwen3-VL. A placeholder is known by its place and not by its id: the policy may sample
the id, which then is a token like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from ragr1_actors.core.content import Image, PlacedImage
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.images import decoded, size_of

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
"""Values of ``model_type`` whose images are read."""
KEPT_BYTES = 2 << 30
"""Limit of the bytes of patches that a process keeps: a page of 1240 x 1754 pixels has 52 MB."""
_TOKENS = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
_Patches = tuple[NDArray[np.float32], NDArray[np.int64]]
_KEPT: WeakKeyDictionary[Image, tuple[str, _Patches]] = WeakKeyDictionary()  # with the settings that made them
_LOCK = Lock()


class ImageReader:
    """Reader of images with the settings in a policy's folder; without vision, it refuses every image."""

    def __init__(self, policy_dir: str | Path) -> None:
        """Take a policy's folder or hub name; nothing is read before the first image."""
        self._policy_dir = policy_dir

    @cached_property
    def _config(self) -> dict[str, Any]:
        from transformers import PretrainedConfig

        found, _ = PretrainedConfig.get_config_dict(self._policy_dir)
        if found.get("model_type") not in FAMILIES:
            raise ConfigError(
                f"policy.model: got a message with an image, and {self._policy_dir} of the type "
                f"{found.get('model_type')} reads none here; take a model of the types {', '.join(FAMILIES)}"
            )
        return found

    @cached_property
    def _processor(self) -> Any:
        # by name: with torchvision AutoImageProcessor resizes with other rounding
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        assert self._config
        return Qwen2VLImageProcessorPil.from_pretrained(self._policy_dir)

    @cached_property
    def token_ids(self) -> tuple[int, int, int]:
        """Ids of the tokens before, of and after an image; ``ConfigError`` if the policy reads none."""
        before, placeholder, after = (int(self._config[name]) for name in _TOKENS)
        return before, placeholder, after

    def grid(self, image: Image) -> tuple[int, int]:
        """Return the rows and columns of an image's placeholders.

        Raises:
            ConfigError: the policy reads no images.
            DataError: the image cannot be decoded, or is too thin; see ``read_image``.
        """
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        processor, (width, height) = self._processor, size_of(image)
        factor, size = processor.patch_size * processor.merge_size, processor.size
        rows, cols = smart_resize(height, width, factor, size["shortest_edge"], size["longest_edge"])
        return rows // factor, cols // factor

    def patches(self, images: Sequence[Image]) -> _Patches:
        """Return the patches of images, ``[num_patches, size]``, and time, rows and columns of each, ``[n, 3]``.

        Those of an image are made once while it lives, for all readers of the same settings, within ``KEPT_BYTES``.
        """
        patches, grids = zip(*map(self._patches_of, images), strict=True)
        return np.concatenate(patches), np.concatenate(grids)

    def _patches_of(self, image: Image) -> _Patches:
        settings, kept = self._processor.to_json_string(), _KEPT.get(image)
        if kept is not None and kept[0] == settings:
            return kept[1]
        found = self._processor([decoded(image)])
        made = np.asarray(found["pixel_values"], np.float32), np.asarray(found["image_grid_thw"], np.int64)
        with _LOCK:
            if sum(patches.nbytes for _, (patches, _) in _KEPT.values()) + made[0].nbytes <= KEPT_BYTES:
                _KEPT[image] = settings, made
        return made

    def blank(self) -> _Patches:
        """Return the patches of a grey image of one placeholder."""
        processor = self._processor
        side = processor.merge_size
        size = 3 * processor.temporal_patch_size * processor.patch_size**2
        return np.zeros((side**2, size), np.float32), np.array([[1, side, side]])


def reads_images(policy_dir: str | Path) -> bool:
    """Return whether a policy in a folder or of a hub name is of ``FAMILIES``."""
    from transformers import PretrainedConfig

    try:
        return PretrainedConfig.get_config_dict(policy_dir)[0].get("model_type") in FAMILIES
    except (OSError, ValueError):  # what loads the model says what is wrong
        return False


def rope_positions(num_tokens: int, images: Sequence[PlacedImage], start: int = 0) -> NDArray[np.int64]:
    """Return the rotary positions of a row from ``start`` on, ``[3, num_tokens - start]``: time, height and width.

    A text's token has one position in all axes. The placeholders of an image share its first in time, and count its
    rows and columns from there; the text after it goes on behind the largest.
    """
    if all(one.start + one.num_tokens <= start for one in images):
        shift = sum(max(one.rows, one.cols) - one.num_tokens for one in images)
        return np.tile(np.arange(start, num_tokens) + shift, (3, 1))
    positions = np.empty((3, num_tokens), np.int64)
    done = position = 0
    for one in images:
        positions[:, done : one.start] = position + np.arange(one.start - done)
        position += one.start - done
        done = one.start + one.num_tokens
        here = positions[:, one.start : done].reshape(3, one.rows, one.cols)
        here[0], here[1], here[2] = position, position + np.arange(one.rows)[:, None], position + np.arange(one.cols)
        position += max(one.rows, one.cols)
    positions[:, done:] = position + np.arange(num_tokens - done)
    return positions[:, start:]
