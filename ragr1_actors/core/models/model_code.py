"""Python code in the folder of a model: refused, unless the recipe trusts it.

transformers imports such code if ``auto_map`` in a configuration of the folder names it, and asks on the terminal first
unless ``trust_remote_code`` is given. Every caller of transformers gives it.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ragr1_actors.core.disk.json_files import read_json
from ragr1_actors.core.errors import ConfigError, DataError


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
