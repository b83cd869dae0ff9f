"""Tiny policies that read images, and made-up pages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from transformers import AutoModelForImageTextToText

from ragr1_actors.core.content import Image
from ragr1_actors.core.images import encoded
from ragr1_actors.core.models.vision import ImageReader
from ragr1_actors.core.types import StopReason, Task, TokenKind, Trajectory, Turn
from ragr1_actors.planning.tiny_policy import make_tiny_vision_policy
from ragr1_actors.rollout.engines.base import PolicyTokenizer

TEXTS = ["What is on the page? Riga lies in Latvia. <search> Ana Bell</search>", "Look at the page again: x, y"]


def page(width: int = 24, height: int = 16, seed: int = 0) -> Image:
    """A page of random pixels; 24 x 16 are 2 rows of 3 placeholders for a tiny policy with patches of 4 pixels."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return encoded(PIL.Image.fromarray(values))


def make_seeing(directory: Path, family: str, *, seed: int = 0) -> Path:
    """Write a policy of 2 layers, whose distributions are not flat."""
    make_tiny_vision_policy(directory, TEXTS, seed=seed, family=family, hidden_size=32, num_heads=2, patch_size=4)
    return directory


def seen_trajectory(
    tokenizer: PolicyTokenizer,
    rng: np.random.Generator,
    prompt: Sequence[str | Image],
    turns: int = 2,
    rewritten: bool = False,
) -> Trajectory:
    """An attempt of random turns after a prompt; a page follows each turn, or begins a new row with ``rewritten``."""
    parts: list[tuple[list[int], TokenKind, list[Image]]] = []

    def add(kind: TokenKind, *contents: str | Image) -> None:
        for part in contents:
            is_image = isinstance(part, Image)
            parts.append((tokenizer.image_ids(part) if is_image else tokenizer.encode(part), kind, [part] * is_image))

    add(TokenKind.PROMPT, *prompt)
    lengths, made = [], list[Turn]()
    for number in range(turns):
        ids = rng.integers(3, 250, int(rng.integers(1, 6))).tolist()
        parts.append((ids, TokenKind.MODEL, []))
        made.append(Turn("", len(ids), "look"))
        if number + 1 < turns:
            if rewritten:
                lengths.append(sum(len(ids) for ids, *_ in parts) - sum(lengths))
            add(TokenKind.PROMPT if rewritten else TokenKind.OBSERVATION, "x", page(seed=int(rng.integers(3))), "y")
    token_ids = [token for ids, *_ in parts for token in ids]
    kinds = np.array([kind for ids, kind, _ in parts for _ in ids], np.uint8)
    is_model = kinds == TokenKind.MODEL
    images = [image for *_, found in parts for image in found]
    return Trajectory(
        trajectory_id=f"made/{rng.integers(1 << 30)}",
        task=Task("made", "?", ("Riga",)),
        token_ids=np.array(token_ids, np.int32),
        kinds=kinds,
        logprobs=np.where(is_model, -4, 0).astype(np.float32),
        policy_versions=np.where(is_model, 0, -1).astype(np.int32),
        turns=tuple(made),
        stop_reason=StopReason.ANSWERED,
        reward=float(rng.integers(2)),
        row_lengths=(*lengths, len(token_ids) - sum(lengths)) if lengths else (),
        images=tuple(tokenizer.place(token_ids, images)),
    )


class Alone:
    """A model of transformers that scores one sequence at a time, with its own positions and placeholders."""

    def __init__(self, folder: Path, reader: ImageReader) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        self._reader = reader

    def logits(self, token_ids: Sequence[int], images: Sequence[Image]) -> torch.Tensor:
        """Return ``[num_tokens, vocabulary]``."""
        found: torch.Tensor = self._run(token_ids, images).logits[0]
        return found

    def hidden(self, token_ids: Sequence[int], images: Sequence[Image]) -> torch.Tensor:
        """Return the hidden states before the head, ``[num_tokens, hidden_size]``."""
        found: torch.Tensor = self._run(token_ids, images, output_hidden_states=True).hidden_states[-1][0]
        return found

    def _run(self, token_ids: Sequence[int], images: Sequence[Image], **more: bool) -> Any:
        ids, given = torch.tensor([token_ids]), dict[str, Any](more)
        if images:
            patches, grids = map(torch.from_numpy, self._reader.patches(images))
            given |= {"pixel_values": patches, "image_grid_thw": grids}
        types = (ids == self._reader.token_ids[1]).int()
        return self.model(input_ids=ids, mm_token_type_ids=types, use_cache=False, **given)
