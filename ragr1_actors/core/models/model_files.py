"""Files of a model's folder: damaged files, weights that do not fit the configuration, and untrusted code are refused.

transformers reads each kind of file with another library, with other exceptions. It fills missing weights with random
numbers, and drops weights that the model does not have. It imports code if ``auto_map`` in a configuration of the
folder names it, and asks on the terminal first unless ``trust_remote_code`` is given. Every caller gives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ragr1_actors.core.disk.digests import check_digests
from ragr1_actors.core.disk.json_files import read_json
from ragr1_actors.core.errors import ConfigError, DataError, one_line
from ragr1_actors.core.models.vision import reads_images

_JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
ADVICE = "copy the folder again, or take another model or checkpoint"
LOAD_ERRORS = (OSError, ValueError, TypeError, AttributeError, ArithmeticError)
"""Errors that transformers raises for a damaged configuration, besides ``StrictDataclassError``."""


_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json")


def is_weight(name: str) -> bool:
    """Return whether a file of a model's folder holds weights, or maps weights to files."""
    return name.endswith(_WEIGHT_SUFFIXES)


def check_files(folder: str | Path, *, weights: bool = False) -> None:
    """Compare a model's folder with its list, and read its JSON files and the headers of its weights.

    The headers show a file that was cut if a folder has no list. With ``weights`` the weights are read, else only their
    size is compared. A hub name is not checked. Raises ``DataError``, which names the file.
    """
    try:
        check_digests(Path(folder), is_read=lambda name: weights or not is_weight(name))
    except DataError as error:
        raise DataError(f"{error}; {ADVICE}") from error
    present = [path for name in _JSON_FILES if (path := Path(folder, name)).is_file()]
    for path in (*present, *sorted(Path(folder).glob("*.safetensors"))):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, framework="np"):
                    pass
            elif not isinstance(read_json(path), dict):
                raise DataError(f"{path} cannot be read: it holds no JSON object")
        except DataError as error:
            raise DataError(f"{error}; {ADVICE}") from error
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path} cannot be read: {error}; {ADVICE}") from error


def load_model(policy: str | Path, *, trust_remote_code: bool, **options: Any) -> Any:
    """Return a causal language model, with ``options`` of its class's ``from_pretrained``.

    With ``device_map="meta"`` no weights are read. ``check_files`` has read the files before.

    Raises:
        DataError: there is no such model, or the weights do not fit the model in ``config.json``.
    """
    from huggingface_hub.errors import StrictDataclassError

    from ragr1_actors.core.models.huggingface import AutoModelForCausalLM, AutoModelForImageTextToText
    from ragr1_actors.core.models.process_memory import limit_kernel_caches

    limit_kernel_caches()
    try:
        with quiet_transformers():
            loader: Any = AutoModelForImageTextToText if reads_images(policy) else AutoModelForCausalLM
            loaded: Any = loader.from_pretrained(
                policy,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                trust_remote_code=trust_remote_code,
                **options,
            )
    except (*LOAD_ERRORS, StrictDataclassError) as error:
        raise DataError(f"cannot load a model from {policy}: {one_line(error, 200)}; {ADVICE}") from error
    model, found = loaded
    modules = dict(model.named_modules())
    problems = {
        "missing": found["missing_keys"],
        "of another shape": {name for name, *_ in found["mismatched_keys"]},
        # the module belongs to this model: a published model may have more modules, such as heads for other tasks
        "too many": {name for name in found["unexpected_keys"] if name.rpartition(".")[0] in modules},
    }
    for problem, names in problems.items():
        if names:
            raise DataError(
                f"{policy}: the weights are not those of its config.json ({len(names)} {problem}, such as "
                f"{min(names)}); {ADVICE}"
            )
    return model


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers from printing a progress bar and a table of the weights; the error says what is wrong."""
    from transformers.utils import logging

    verbosity, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()


def find_code(folder: Path) -> str:
    """Return the file of a model's folder that names code to import, such as ``config.json``; "" if there is none."""
    for path in sorted(folder.glob("*config.json")):  # tokenizer_config.json, processor_config.json
        with suppress(DataError):  # the loading reports a damaged file
            content = read_json(path)
            if isinstance(content, dict) and content.get("auto_map"):
                return path.name
    return ""


def check_code(policy: str | Path, *, trusted: bool) -> None:
    """Refuse the folder of a policy that brings code. For a hub name, transformers refuses the code.

    Raises:
        ConfigError: the folder brings code, and ``policy.trust_remote_code`` is not set.
    """
    if not trusted and (file := find_code(Path(policy))):
        raise code_refused(policy, f"auto_map in {file}")


def code_refused(policy: str | Path, where: str) -> ConfigError:
    """Return the error of a policy that needs code of its repository; ``where`` names it."""
    return ConfigError(
        f"policy.model: {policy} brings Python code ({where}), which is not run; read the code and set "
        "policy.trust_remote_code=true if you trust it, or take a model of an architecture that transformers knows"
    )
