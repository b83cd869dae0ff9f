"""Images from outside, and contents of texts and images on their way to a file, an endpoint and a policy."""

from __future__ import annotations

import io
import pickle
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import PIL.Image
import pyarrow as pa
import pytest
from view_world import attempt

from ragr1_actors.core.content import Content, Image, PlacedImage, changed, images_of, joined, text_of
from ragr1_actors.core.errors import DataError
from ragr1_actors.core.images import MAX_BYTES, cropped, decoded, encoded, read_image, size_of
from ragr1_actors.core.schema import (
    groups_from_record_batch,
    groups_to_record_batch,
    read_trajectories,
    write_trajectories,
)
from ragr1_actors.core.types import Record, TrajectoryGroup


def picture(width: int = 6, height: int = 4, mode: str = "RGB", seed: int = 0) -> PIL.Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return PIL.Image.fromarray(values).convert(mode)


def saved(given: PIL.Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    given.save(file, kind, **options)
    return file.getvalue()


def bomb() -> bytes:
    """A PNG of a few bytes whose header promises 50,000 x 50,000 pixels."""
    whole = saved(picture())
    header = struct.pack(">II", 50_000, 50_000) + whole[24:29]
    return whole[:16] + header + struct.pack(">I", zlib.crc32(b"IHDR" + header)) + whole[33:]


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_a_still_picture_is_read(kind: str) -> None:
    data = saved(picture(), kind)
    image = read_image(data, "page.x")
    assert image == Image(data, f"image/{kind.lower()}") and size_of(image) == (6, 4)
    assert image != read_image(saved(picture(seed=1), kind), "page.x")


def test_the_same_bytes_are_one_object() -> None:
    data = saved(picture())
    assert read_image(data, "a") is read_image(bytes(bytearray(data)), "b")


BAD = {
    "truncated": (saved(picture(60, 40))[:-400], "cannot be read as an image"),
    "truncated JPEG": (saved(picture(60, 40), "JPEG")[:-400], "cannot be read as an image"),
    "truncated WebP": (saved(picture(60, 40), "WEBP")[:-400], "cannot be read as an image"),
    "text": (b"a page", "cannot be read as an image in PNG, JPEG or WebP; save it as one"),
    "empty": (b"", "cannot be read as an image"),
    "bomb": (bomb(), "expected at most 64,000,000"),
    "pixels": (saved(PIL.Image.new("1", (8100, 8000))), "got an image of 8,100 x 8,000 pixels"),
    "thin": (saved(picture(1, 201)), "got an image of 1 x 201 pixels, expected at most 200 to 1; crop it"),
    "bytes": (bytes(MAX_BYTES + 1), "got an image of 33,554,433 bytes"),
    "animated PNG": (
        saved(picture(), save_all=True, append_images=[picture(seed=1)]),
        "got an animation of 2 frames, expected a still picture",
    ),
    "animated WebP": (saved(picture(), "WEBP", save_all=True, append_images=[picture(seed=1)]), "2 frames"),
    "GIF": (saved(picture(), "GIF"), "cannot be read as an image in PNG, JPEG or WebP"),
    "CMYK": (saved(picture(mode="CMYK"), "JPEG"), "got an image in the colours CMYK, expected grey or RGB"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_is_one_sentence_with_its_file(name: str) -> None:
    data, expected = BAD[name]
    with pytest.raises(DataError) as refused:
        read_image(data, "page_7.png")
    said = str(refused.value)
    assert said.startswith("page_7.png: ") and expected in said and "\n" not in said


def test_transparent_pixels_are_white() -> None:
    clear = encoded(PIL.Image.new("RGBA", (2, 2), (0, 0, 0, 0)))
    assert decoded(clear).getpixel((0, 0)) == (255, 255, 255)


def test_a_part_is_cut_and_enlarged() -> None:
    page = encoded(picture(10, 8))
    part = cropped(page, (0.5, 0.25, 1, 0.75))
    assert (np.asarray(decoded(part)) == np.asarray(picture(10, 8))[2:6, 5:10]).all()
    assert size_of(cropped(page, (0.5, 0.25, 1, 0.75), min_side=16)) == (20, 16)
    assert size_of(cropped(page, (0.999, 0.999, 1, 1))) == (1, 1)  # never empty


@pytest.mark.parametrize(
    "box", [(0, 0, 1.01, 1), (-0.1, 0, 1, 1), (0.5, 0, 0.5, 1), (0, 0.6, 1, 0.5), (0, 0, float("nan"), 1)]
)
def test_a_box_outside_the_page_is_refused(box: tuple[float, float, float, float]) -> None:
    with pytest.raises(ValueError, match="is not in the image: expected"):
        cropped(encoded(picture()), box)


def test_contents() -> None:
    image = encoded(picture())
    mixed: Content = ("Page 7:", image, "?")
    assert joined("a", "b") == "ab" and joined("a", mixed) == ("a", "Page 7:", image, "?")
    assert text_of(mixed) == "Page 7:?" and images_of("a", mixed, (image,)) == [image, image]
    assert changed(mixed, str.upper) == ("PAGE 7:", image, "?") and changed("a", str.upper) == "A"


def test_files_hold_an_image_once_per_trajectory(tmp_path: Path) -> None:
    page, other = encoded(picture(40, 40)), encoded(picture(seed=1))
    whole = attempt("t")
    call = replace(whole.turns[0].calls[0], records=(Record("p", "Page", "a caption", 0.5, page), Record("q", "", "")))
    places = tuple(PlacedImage(*one) for one in ((page, 0, 1, 2), (other, 2, 1, 1), (page, 3, 2, 1)))
    seen = replace(whole, turns=(replace(whole.turns[0], calls=(call,)), whole.turns[1]), images=places)
    path = tmp_path / "t.arrow"
    write_trajectories(path, [groups_to_record_batch([TrajectoryGroup(whole.task, (seen, whole))])])
    assert [len(images) for images in pa.ipc.open_file(path).read_all().column("images").to_pylist()] == [2, 0]
    read, text = read_trajectories(path)[0].trajectories
    assert (read.images, text.images) == (places, ()) and read.turns == seen.turns
    assert read.images[0].image.data == page.data
    found = [*(one.image for one in read.images), read.turns[0].calls[0].records[0].image]
    again = read_trajectories(path)[0].trajectories[0]
    found += [one.image for one in again.images]
    assert len({id(one) for one in found}) == 2  # the bytes are in memory once, also those of other attempts


def as_batches(pages: Sequence[Image | None]) -> list[pa.RecordBatch]:
    """Attempts of two groups; each has a page among its tokens twice, and as a record."""
    made = []
    for number, shown in enumerate(pages):
        whole = attempt(str(number))
        call = replace(whole.turns[0].calls[0], records=(Record("p", "Page", "a caption", 0.5, shown),))
        places = (PlacedImage(shown, 0, 1, 2), PlacedImage(shown, 3, 2, 1)) if shown is not None else ()
        made.append(replace(whole, turns=(replace(whole.turns[0], calls=(call,)), whole.turns[1]), images=places))
    groups = [TrajectoryGroup(made[0].task, tuple(part)) for part in (made[:8], made[8:])]
    return [groups_to_record_batch(groups), *(groups_to_record_batch([group]) for group in groups)]


def test_a_batch_grows_with_its_distinct_images_and_not_with_their_uses(tmp_path: Path) -> None:
    """A batch of 16 attempts in memory, as Ray sends it, in a file, and in a file into which two batches merge."""
    shown, path = encoded(picture(256, 256)), tmp_path / "t.arrow"

    def sizes(pages: Sequence[Image | None]) -> dict[str, int]:
        whole, *parts = as_batches(pages)
        sent: list[pickle.PickleBuffer] = []
        head = pickle.dumps(whole, protocol=5, buffer_callback=sent.append)
        found = {"batch": whole.get_total_buffer_size(), "sent": len(head) + sum(len(one.raw()) for one in sent)}
        for name, batches in (("file", [whole]), ("merged", parts)):
            write_trajectories(path, batches)
            found[name] = path.stat().st_size
        return found

    text, once, shared = (sizes(pages) for pages in ([None] * 16, [shown, *[None] * 15], [shown] * 16))
    distinct = sizes([encoded(picture(256, 256, seed=seed)) for seed in range(16)])
    print(
        f"bytes of a page: {len(shown.data)}; text: {text}; used once: {once}; by all: {shared}; distinct: {distinct}"
    )
    for name, size in shared.items():
        assert once[name] - text[name] == pytest.approx(len(shown.data), rel=0.01)
        assert size - once[name] < 0.01 * len(shown.data)  # 45 further uses
        assert distinct[name] - size == pytest.approx(15 * len(shown.data), rel=0.01)


def test_rows_that_share_an_image_are_read_alone() -> None:
    shown, other = encoded(picture()), encoded(picture(seed=1))
    pages = [shown, other, *[shown] * 14]
    whole, *_ = as_batches(pages)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, whole.schema) as writer:
        writer.write_batch(whole.slice(1, 1))
    moved = pa.ipc.open_stream(sink.getvalue()).read_all().to_batches()[0]
    plain = pa.list_(pa.struct({"media_type": pa.string(), "data": pa.large_binary()}))  # as other tools write it
    at = whole.schema.get_field_index("images")
    other_type = whole.set_column(at, "images", whole.column("images").cast(plain))
    read = [groups_from_record_batch(batch) for batch in (moved, whole.slice(1), other_type)]
    rows = [[t for group in groups for t in group.trajectories] for groups in read]
    assert [[t.images[1].image for t in row] for row in rows] == [[other], pages[1:], pages]
    assert rows[0][0].turns[0].calls[0].records[0].image is rows[2][1].images[0].image
    assert rows[0][0].images[0].image.data == other.data
    lazy = groups_from_record_batch(whole.slice(1, 1), decode_texts=False)[0].trajectories[0]
    assert lazy.turns == rows[0][0].turns
    assert len({id(one.image) for row in rows for t in (*row, lazy) for one in t.images}) == 2
