"""Inputs of vLLM with images: patches as the learner computes them, at the places of the placeholders.

vLLM would make the patches itself, by an image processor that rounds differently, and put placeholders in the place of
ids: a token that the policy sampled could become an image. Its input after that step is made here instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch
from vllm.inputs import MultiModalInput
from vllm.inputs.engine import mm_input
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    MultiModalKwargsOptionalItems,
    PlaceholderRange,
)
from vllm.v1.engine.async_llm import AsyncLLM

from ragr1_actors.core.content import Image, PlacedImage
from ragr1_actors.core.models.vision import ImageReader

_KIND = "image"  # vLLM's name of the modality


class ImageInputs:
    """Maker of vLLM's inputs; patches that the engine's process has are not made and sent again."""

    def __init__(self, llm: AsyncLLM, policy_dir: str | Path) -> None:
        """Take an engine and its policy's folder or hub name."""
        self._llm = llm
        self._reader = ImageReader(policy_dir)

    async def prompt(
        self, token_ids: Sequence[int], images: Sequence[PlacedImage], *, sends_all: bool
    ) -> MultiModalInput:
        """Return the input for ``token_ids`` with ``images``; with ``sends_all`` all patches are in it.

        It must be given to the engine at once: vLLM knows what the engine's process has by the order of the requests.

        Raises:
            ConfigError: the policy reads no images.
        """
        cache = None if sends_all else self._llm.renderer.mm_processor_cache
        made: dict[Image, MultiModalKwargsItem] = {}
        distinct = {one.image for one in images}
        # more than once if the cache lost an image meanwhile
        while missing := [
            image for image in distinct - made.keys() if cache is None or not cache.is_cached_item(image.digest)
        ]:
            made |= await asyncio.to_thread(self._items, missing)
        digests = [one.image.digest for one in images]
        items = [made.get(one.image) for one in images]
        if cache is not None:
            for digest in digests:
                cache.touch_sender_cache_item(digest)
            found = zip(items, digests, strict=True)
            items = [cache.get_and_update_item(item and (item, ()), digest)[0] for item, digest in found]
        kwargs: MultiModalKwargsOptionalItems = MultiModalKwargsItems({_KIND: items})
        places = [PlaceholderRange(one.start, one.num_tokens) for one in images]
        return mm_input([*token_ids], kwargs, {_KIND: digests}, {_KIND: places})

    def _items(self, images: Sequence[Image]) -> dict[Image, MultiModalKwargsItem]:
        """Return the patches of images and how many there are, in vLLM's form."""
        patches, grids = map(torch.from_numpy, self._reader.patches(images))
        fields = {
            "pixel_values": MultiModalFieldConfig.flat_from_sizes(_KIND, grids.prod(-1)),
            "image_grid_thw": MultiModalFieldConfig.batched(_KIND, keep_on_cpu=True),
        }
        values = {"pixel_values": patches.to(self._llm.model_config.dtype), "image_grid_thw": grids}
        return dict(zip(images, MultiModalKwargsItems.from_hf_inputs(values, fields)[_KIND], strict=True))
