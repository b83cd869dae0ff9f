"""Inputs of a text model with images: embeddings of tokens, with those of an image in the places of its placeholders.

The vision tower runs once per distinct image of a pass; its embeddings are copied to every use, and their gradients add
up. Qwen3-VL adds further features of the images to its first layers (DeepStack, arXiv:2406.04334).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ragr1_actors.core.content import Image, PlacedImage
from ragr1_actors.core.models.vision import ImageReader


class VisionInputs:
    """Maker of the inputs of a policy's text model; it holds no parameters."""

    def __init__(self, model: Any, policy_dir: str | Path) -> None:
        """Take a model of one of ``vision.FAMILIES``, also without its head, and the folder with its image settings."""
        self._model = model
        self._reader = ImageReader(policy_dir)
        self._takes_features = model.config.model_type == "qwen3_vl"

    def __call__(
        self, token_ids: Tensor, images: Sequence[PlacedImage], *, runs_always: bool = False
    ) -> dict[str, Any]:
        """Return the arguments of the text model for ``token_ids``, ``[rows, T]``.

        ``images`` are placed in the rows one after another. With ``runs_always`` the tower runs without images too, on
        a grey one whose embeddings count nothing: the ranks of a learner gather and reduce its weights together.
        """
        embeds: Tensor = self._model.get_input_embeddings()(token_ids)
        if not images and not runs_always:
            return {"inputs_embeds": embeds}
        distinct = {image: number for number, image in enumerate(dict.fromkeys(one.image for one in images))}
        pooled, features = self._features([*distinct])
        if not images:
            unused = [*pooled, *(part for layer in features for part in layer)]
            return {"inputs_embeds": embeds + 0 * torch.cat(unused).sum().to(embeds.dtype)}
        chosen = [distinct[one.image] for one in images]
        places = torch.from_numpy(np.concatenate([one.start + np.arange(one.num_tokens) for one in images]))
        places = places.to(embeds.device)
        own = torch.cat([pooled[number] for number in chosen]).to(embeds.dtype)
        made: dict[str, Any] = {"inputs_embeds": embeds.flatten(0, 1).index_copy(0, places, own).view_as(embeds)}
        if self._takes_features:
            mask = torch.zeros(token_ids.shape, dtype=torch.bool, device=embeds.device)
            mask.view(-1)[places] = True
            order = places.argsort()  # the model fills the mask's places in their order
            deep = [torch.cat([layer[number] for number in chosen])[order] for layer in features]
            made |= {"visual_pos_masks": mask, "deepstack_visual_embeds": deep}
        return made

    def _features(self, images: Sequence[Image]) -> tuple[Sequence[Tensor], Sequence[Sequence[Tensor]]]:
        """Return the embeddings of each image, and with Qwen3-VL the further ones of each layer and image."""
        if images:
            patches, grids = self._reader.patches(images)
        else:
            patches, grids = self._reader.blank()
        device = self._model.get_input_embeddings().weight.device
        found = self._model.base_model.get_image_features(
            torch.from_numpy(patches).to(device), torch.from_numpy(grids).to(device)
        )
        return found.pooler_output, found.deepstack_features if self._takes_features else ()
