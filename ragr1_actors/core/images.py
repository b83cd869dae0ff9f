"""Images: a file from outside is checked once, with one sentence for what is wrong with it; parts are cut and enlarged.

``read_image`` stands at the edge: its result can be decoded whole, in a memory that is known before.
"""

from __future__ import annotations

import io
import re
import struct
from base64 import b64decode, b64encode
from weakref import WeakKeyDictionary, WeakValueDictionary

import PIL.Image

from ragr1_actors.core.content import Image, digest_of
from ragr1_actors.core.errors import DataError, one_line, shortened

MAX_BYTES = 32 << 20
"""Limit of the bytes of a file."""
MAX_PIXELS = 64_000_000
"""Limit of pixels: an A4 page at 600 dpi has 35 million; each takes 3 bytes once it is decoded."""
_MAX_RATIO = 200
"""Limit of the longer side over the shorter one: policies refuse thinner images."""
_FORMATS = ("PNG", "JPEG", "WEBP")
_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA")
_BOMBS = (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning)
_DAMAGES = (OSError, ValueError, SyntaxError, ArithmeticError, LookupError, TypeError, struct.error, EOFError)
"""Errors of Pillow for damaged files, whose headers it parses in Python."""

_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+(;[^,;]*)*;base64,", re.IGNORECASE)

_READ: WeakValueDictionary[str, Image] = WeakValueDictionary()  # images that were read, by digest
_SIZES: WeakKeyDictionary[Image, tuple[int, int]] = WeakKeyDictionary()  # of images that were checked


def read_image(data: bytes, name: str) -> Image:
    """Return the image of a file's bytes; ``name`` is for the message.

    The same bytes are one object, and are decoded once, while something holds it.

    Raises:
        DataError: it is no whole still picture in PNG, JPEG or WebP, in grey or RGB, within the limits.
    """
    if len(data) > MAX_BYTES:
        raise DataError(f"{name}: got an image of {len(data):,} bytes, expected at most {MAX_BYTES:,}; make it smaller")
    if (known := _READ.get(digest_of(data))) is not None:
        return known
    try:
        with PIL.Image.open(io.BytesIO(data), formats=_FORMATS) as picture:
            problem = _problem(picture)
            if not problem:
                picture.load()
                found = Image(data, f"image/{str(picture.format).lower()}")
                return _READ.setdefault(found.digest, found)
    except _BOMBS:
        problem = f"got an image of more pixels than fit into memory, expected at most {MAX_PIXELS:,}; make it smaller"
    except PIL.UnidentifiedImageError:
        problem = "cannot be read as an image in PNG, JPEG or WebP; save it as one"
    except _DAMAGES as error:
        problem = f"cannot be read as an image in PNG, JPEG or WebP: {one_line(error)}; save it again"
    raise DataError(f"{name}: {problem}")


def _problem(picture: PIL.Image.Image) -> str:
    """Return what in a file's header is refused; empty if nothing is."""
    width, height = picture.size
    if width * height > MAX_PIXELS:
        return f"got an image of {width:,} x {height:,} pixels, expected at most {MAX_PIXELS:,} pixels; make it smaller"
    if max(width, height) > _MAX_RATIO * min(width, height):
        return f"got an image of {width:,} x {height:,} pixels, expected at most {_MAX_RATIO} to 1; crop it"
    if (num_frames := vars(picture).get("n_frames", 1)) > 1:
        return f"got an animation of {num_frames} frames, expected a still picture; save one frame"
    if picture.mode not in _MODES:
        return f"got an image in the colours {picture.mode}, expected grey or RGB; convert it to RGB"
    return ""


def size_of(image: Image) -> tuple[int, int]:
    """Return width and height in pixels, once it is known that all pixels can be decoded; errors as ``read_image``.

    So an image that code made of other bytes is found before it reaches an engine, where it would end all requests.
    """
    if (known := _SIZES.get(image)) is None:
        read_image(image.data, f"image {image.digest[:12]}")
        with PIL.Image.open(io.BytesIO(image.data), formats=_FORMATS) as picture:
            known = _SIZES[image] = picture.size
    return known


def data_url(image: Image) -> str:
    """Return an image as it is sent in JSON: ``"data:image/png;base64,iVBORw0.."``."""
    return f"data:{image.media_type};base64,{b64encode(image.data).decode()}"


def read_data_url(url: str, name: str) -> Image:
    """Return the image of a ``data:`` URL in base64; no other address is fetched. Errors as ``read_image``."""
    if (head := _DATA_URL.match(url[:200])) is None:
        raise DataError(
            f"{name}: got {shortened(repr(url[:200]))}, expected data:image/png;base64,.. with the image's file"
        )
    try:
        data = b64decode(url[head.end() :], validate=True)
    except ValueError as error:  # binascii's, and Python's for other characters than ASCII
        raise DataError(f"{name}: got a data: URL that is no base64: {error}; encode the image's file") from None
    return read_image(data, name)


def decoded(image: Image) -> PIL.Image.Image:
    """Return the pixels in RGB, transparent ones over white."""
    with PIL.Image.open(io.BytesIO(image.data), formats=_FORMATS) as picture:
        if "A" not in picture.getbands() and "transparency" not in picture.info:
            return picture.convert("RGB")
        layer = picture.convert("RGBA")
    ground = PIL.Image.new("RGBA", layer.size, "white")
    return PIL.Image.alpha_composite(ground, layer).convert("RGB")


def encoded(picture: PIL.Image.Image) -> Image:
    """Return a picture as an image in PNG."""
    file = io.BytesIO()
    picture.save(file, "PNG")
    return Image(file.getvalue(), "image/png")


def cropped(image: Image, box: tuple[float, float, float, float], *, min_side: int = 1) -> Image:
    """Return a part of an image, enlarged so that its shorter side has at least ``min_side`` pixels.

    ``box`` has left, top, right and bottom, each from 0 to 1; ``(0, 0, 1, 0.5)`` is the upper half.

    Raises:
        ValueError: the box is empty, too thin or too large, or reaches out of the image; the message is for the policy.
    """
    left, top, right, bottom = box
    if not (0 <= left < right <= 1 and 0 <= top < bottom <= 1):
        raise ValueError(
            f"The box {[*box]} is not in the image: expected [left, top, right, bottom], with 0 <= left < right <= 1 "
            "and 0 <= top < bottom <= 1."
        )
    picture = decoded(image)
    width, height = picture.size
    x, y = min(int(left * width), width - 1), min(int(top * height), height - 1)
    part = picture.crop((x, y, max(x + 1, round(right * width)), max(y + 1, round(bottom * height))))
    factor = min_side / min(part.size)
    if factor > 1:
        part = part.resize((round(part.width * factor), round(part.height * factor)), PIL.Image.Resampling.BICUBIC)
    if max(part.size) > _MAX_RATIO * min(part.size):
        raise ValueError(f"The part of {part.width} x {part.height} pixels is too thin to be shown; take a wider one.")
    if len((found := encoded(part)).data) > MAX_BYTES:
        raise ValueError(
            f"The part of {part.width} x {part.height} pixels is too large to be shown; take a smaller one."
        )
    return found
