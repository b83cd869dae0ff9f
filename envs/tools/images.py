"""The tools ``crop`` and ``zoom``: a closer look at a part of an image that the policy has seen."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from envs.grammars.calls import ToolSchema
from envs.tools.base import Arguments, Tool, ToolResult
from ragr1_actors.core.content import Image, text_of
from ragr1_actors.core.images import Box, cropped, size_of
from ragr1_actors.core.process.users_code import in_thread
from ragr1_actors.core.types import ToolCall

_MAX_FACTOR = 16
_NUMBER = {
    "type": "integer",
    "description": "Number of the image, from 1 on in the order of sight; the newest if left out.",
}


def _schema(name: str, description: str, **properties: dict[str, Any]) -> ToolSchema:
    parameters = {"type": "object", "properties": properties | {"image": _NUMBER}, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class CropTool(Tool):
    """Cuts a part out of an image, in all its pixels: a policy sees a large image reduced."""

    schema = _schema(
        "crop",
        "Look at a part of an image.",
        box={
            "type": "array",
            "items": {"type": "number"},
            "minItems": 4,
            "maxItems": 4,
            "description": "Left, top, right and bottom of the part, from 0 to 1.",
        },
    )

    async def call(self, calls: Sequence[Arguments]) -> list[ToolResult]:
        """Answer with the parts; a wrong number or box is a result that says so."""
        return list(await asyncio.gather(*map(self._call, calls)))

    async def _call(self, arguments: Arguments) -> ToolResult:
        started_s = asyncio.get_running_loop().time()
        seen, number = self.context.seen, arguments.get("image", len(self.context.seen))
        content: str | tuple[Image, ...]
        if not 1 <= number <= len(seen):
            content = f"There is no image {number}: {len(seen)} were seen."
        else:
            try:
                content = (await in_thread(self.part, seen[int(number) - 1], arguments),)
            except ValueError as error:
                content = str(error)
        latency_s = asyncio.get_running_loop().time() - started_s
        call = ToolCall(self.name, dict(arguments), text_of(content), latency_s=latency_s, waited_s=latency_s)
        return ToolResult(content, (call,), is_error=isinstance(content, str))

    def part(self, image: Image, arguments: Arguments) -> Image:
        """Return the part; ``ValueError`` with a sentence for the policy if it is not in the image."""
        return cropped(image, _box(*arguments["box"]))


class ZoomTool(CropTool):
    """Enlarges the surroundings of a point of an image."""

    schema = _schema(
        "zoom",
        "Enlarge the surroundings of a point of an image.",
        x={"type": "number", "description": "Place of the point from left, 0, to right, 1."},
        y={"type": "number", "description": "Place of the point from top, 0, to bottom, 1."},
        factor={"type": "number", "description": f"Factor by which it is enlarged, from 1 to {_MAX_FACTOR}."},
    )

    def part(self, image: Image, arguments: Arguments) -> Image:
        """Return the surroundings, in the size of the image."""
        x, y, factor = arguments["x"], arguments["y"], arguments["factor"]
        if not (0 <= x <= 1 and 0 <= y <= 1 and 1 <= factor <= _MAX_FACTOR):
            raise ValueError(
                f"The point {[x, y]} at the factor {factor} is not in the image: expected 0 <= x <= 1, 0 <= y <= 1 and "
                f"1 <= factor <= {_MAX_FACTOR}."
            )
        side = 1 / factor
        left, top = (min(max(0.0, place - side / 2), 1 - side) for place in (x, y))
        return cropped(image, (left, top, min(1.0, left + side), min(1.0, top + side)), min_side=min(size_of(image)))


def _box(left: float, top: float, right: float, bottom: float) -> Box:
    return left, top, right, bottom
