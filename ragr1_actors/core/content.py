"""Contents of messages: texts and images in their order, and the places of images among token ids.

A content without images is a plain text, and is handled as before there were images.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Image:
    """Still picture, as the bytes of its file; two of the same bytes are equal. ``core/images.py`` makes them."""

    data: bytes = field(repr=False, compare=False)
    media_type: str
    """Type of the file: ``"image/png"``."""
    digest: str = field(init=False)
    """Digest of the bytes, 32 hexadecimal digits."""

    def __post_init__(self) -> None:
        """Compute the digest."""
        object.__setattr__(self, "digest", digest_of(self.data))


def digest_of(data: bytes) -> str:
    """Return the digest by which images are compared, 32 hexadecimal digits."""
    return blake2b(data, digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class PlacedImage:
    """Image among token ids: ``rows * cols`` placeholders, whose embeddings come from its pixels."""

    image: Image
    start: int
    """Position of the first placeholder."""
    rows: int
    cols: int

    @property
    def num_tokens(self) -> int:
        """Number of placeholders."""
        return self.rows * self.cols


def shifted(images: Sequence[PlacedImage], by: int) -> list[PlacedImage]:
    """Return places behind ``by`` further token ids."""
    return [replace(one, start=one.start + by) for one in images]


Content = str | tuple[str | Image, ...]
"""Text, or texts and images in their order: ``("Page 7:", Image(...), "What is its title?")``."""


def parts_of(content: Content) -> tuple[str | Image, ...]:
    """Return the parts of a content; a text is one part."""
    return (content,) if isinstance(content, str) else content


def text_of(content: Content) -> str:
    """Return the texts of a content, one after another, without its images."""
    return content if isinstance(content, str) else "".join(part for part in content if isinstance(part, str))


def images_of(*contents: Content) -> list[Image]:
    """Return the images of contents, in their order."""
    return [part for content in contents if not isinstance(content, str) for part in content if isinstance(part, Image)]


def joined(*contents: Content) -> Content:
    """Return contents one after another."""
    if all(isinstance(content, str) for content in contents):
        return "".join(map(text_of, contents))
    return tuple(part for content in contents for part in parts_of(content))


def changed(content: Content, change: Callable[[str], str]) -> Content:
    """Return a content with each of its texts changed."""
    return joined(*(change(part) if isinstance(part, str) else (part,) for part in parts_of(content)))
