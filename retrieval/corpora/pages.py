"""Pages as images: those of a folder, and of PDFs, which pypdfium2 renders."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from math import sqrt
from pathlib import Path

from ragr1_actors.core.content import Image
from ragr1_actors.core.errors import ConfigError, DataError, one_line
from ragr1_actors.core.images import MAX_PIXELS, encoded

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
