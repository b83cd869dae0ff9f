"""Write ``docs/configuration.md`` from the settings classes: ``python docs/generate_configuration.py``.

``tests/test_docs.py`` fails when the file does not match the code.
"""

from __future__ import annotations

import ast
import inspect
import itertools
import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, create_model
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from envs.options import SearchOptions, ToolOptions  # noqa: E402
from learners.options import OPTIONS  # noqa: E402
from ragr1_actors.core.config import RunConfig  # noqa: E402
from ragr1_actors.core.section import Section  # noqa: E402
from retrieval.http.retriever import HttpOptions  # noqa: E402
from retrieval.http.web import WebOptions  # noqa: E402
from retrieval.images import ImageOptions  # noqa: E402
from retrieval.indexes.manifest import (  # noqa: E402
    FOREIGN,
    FOREIGN_OPTIONS,
    INDEX_TYPES,
    RETRIEVER_OPTIONS,
)

OUTPUT = ROOT / "docs" / "configuration.md"
LONG_DEFAULT = 40
"""Characters. A longer default is shown below the table."""
FIRST = (
    *("environment.tasks", "environment.eval_tasks", "environment.prompt", "environment.reward"),
    *("environment.max_turns", "environment.options", "policy.model", "policy.dtype"),
    *("env_runners.num_env_runners", "env_runners.num_gpus_per_env_runner", "env_runners.engine"),
    *("env_runners.max_context_tokens", "env_runners.max_new_tokens_per_turn"),
    *("retrieval.index", "retrieval.corpus", "retrieval.type", "retrieval.encoder", "retrieval.num_retrievers"),
    *("sft.num_steps", "sft.demonstrations", "sft.lr"),
    *(
        "training.algorithm",
        "training.num_iterations",
        "training.train_batch_size",
        "training.group_size",
        "training.lr",
    ),
    *("learners.num_learners", "learners.num_gpus_per_learner", "learners.zero_stage", "evaluation.num_tasks"),
)
"""The keys that most runs set."""
_BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))

_HEAD = """# Configuration

<!-- Written by docs/generate_configuration.py. Do not edit: change the settings classes and run the program. -->

A configuration has two levels, `section.key`. The names are the same in three places:

- in a recipe file: `training: {lr: 1.0e-6}`
- on the command line: `ragr1 train quickstart training.lr=1e-6`
- in Python: `AlgorithmConfig.from_recipe("quickstart").training(lr=1e-6)`

A key may be a group of keys, such as `training.guard`, or a mapping of options. `training.guard.action=warn` sets one
of them on the command line and leaves the others; `"training.guard={action: warn}"` sets all.

A value on the command line is read as YAML. Quote it for the shell if it holds spaces or brackets:
`"retrieval.options={ef_search: 256}"`. An unknown key is an error that names a similar key, or all known
ones. The resolved configuration, every key with its value, is stored as `config.yaml` in the run directory.
"""


def page() -> str:
    """Return the text of ``docs/configuration.md``."""
    parts = [_HEAD, f"## {len(FIRST)} keys to start with\n\n{_first_table()}"]
    for name, field in RunConfig.model_fields.items():
        section = type(field.default)
        parts.append(f"## {name}\n\n{_prose(inspect.getdoc(section) or '')}\n\n{_model_table([section], f'{name}.')}")
    parts.append(
        "## Options of an environment\n\nKeys of `environment.options`, for `environment.env=search`.\n\n"
        f"{_model_table([SearchOptions], '')}\nFor `environment.env=tools`:\n\n{_model_table([ToolOptions], '')}"
    )
    parts.append(_algorithm_options())
    parts.append(
        "## Options of an index\n\nKeys of `retrieval.options`, and of `--option` of `ragr1 index`, by "
        f"`retrieval.type`.\n\n{_index_table()}"
    )
    parts.append(f"## Options of retrieval.type=http\n\n{_model_table([HttpOptions], '')}")
    parts.append(f"## Options of retrieval.type=web\n\n{_model_table([WebOptions], '')}")
    parts.append(f"## Options of retrieval.type=images\n\n{_model_table([ImageOptions], '')}")
    parts.append(
        "## Options of retrieval.type=replay\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
        "| `run` | text | required | A run directory whose recorded searches are answered again. |\n"
    )
    for title, group in _groups().items():
        parts.append(f"## Keys of {title}\n\n{_prose(inspect.getdoc(group) or '')}\n\n{_model_table([group], '')}")
    return "\n".join(parts)


def _first_table() -> str:
    rows: dict[str, str] = {}
    for name, field in RunConfig.model_fields.items():
        lines = _model_table([type(field.default)], f"{name}.").splitlines()
        rows |= {line.split("`")[1]: line for line in lines if line.startswith("| `")}
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *(rows[key] for key in FIRST), ""])


def _groups() -> dict[str, type[Section]]:
    """Return the classes of the keys and options that are groups of keys, by the names of all that take one."""
    owners: dict[type[Section], list[str]] = {}
    for name, field in RunConfig.model_fields.items():
        section = type(field.default)
        for key in section.model_fields:
            if (group := section.section_in(key)) is not None:
                owners.setdefault(group, []).append(f"{name}.{key}")
    for options in OPTIONS.values():
        for key in options.model_fields:
            if (group := options.group(key)) is not None:
                owners.setdefault(group, [f"training.options.{key}"])
    return {" and ".join(names): group for group, names in owners.items()}


def _algorithm_options() -> str:
    """Return a table for every options class that adds options, and one of the defaults that an algorithm changes."""
    classes = {name: options for name, options in OPTIONS.items() if name != "sft"}  # sft is stage 1
    owners: dict[type[BaseModel], list[str]] = {}
    for name, options in classes.items():
        for base in options.__mro__:
            if issubclass(base, BaseModel) and set(_own_fields(base)) - _inherited(base):
                owners.setdefault(base, []).append(name)
    parts = ["## Options of an algorithm\n\nKeys of `training.options`, by `training.algorithm`.\n"]
    for base, names in sorted(owners.items(), key=lambda item: -len(item[1])):
        title = ", ".join(f"`{name}`" for name in names)
        new = set(_own_fields(base)) - _inherited(base)
        parts.append(f"Options of {title}:\n\n{_model_table([base], '', only=new)}")
    lines = ["| algorithm | option | default |", "|---|---|---|"]
    for name, options in classes.items():
        for key, field in options.model_fields.items():
            origin = next(base for base in reversed(options.__mro__) if key in _own_fields(base))
            if field.default != origin.model_fields[key].default:
                lines.append(f"| `{name}` | `{key}` | {_default(field)} |")
    return "\n".join([*parts, "Defaults that differ from the tables above:\n", *lines, ""])


def _own_fields(model: type[Any]) -> list[str]:
    """Return the fields that the class body names, new ones and overridden ones."""
    fields = getattr(model, "model_fields", {}) if issubclass(model, BaseModel) and model is not BaseModel else {}
    return [name for name in fields if name in model.__annotations__]


def _inherited(model: type[BaseModel]) -> set[str]:
    return {name for base in model.__mro__[1:] for name in _own_fields(base)}


def _model_table(models: Iterable[type[BaseModel]], prefix: str, only: set[str] | None = None) -> str:
    lines = ["| key | type | default | meaning |", "|---|---|---|---|"]
    below = []
    for model in models:
        meanings = _meanings(model)
        for key, field in model.model_fields.items():
            if only is not None and key not in only:
                continue
            default = _default(field)
            if len(default) > LONG_DEFAULT:
                below.append(f"Default of `{prefix}{key}`:\n\n```text\n{_wrap(field.default)}\n```\n")
                default = "below"
            meaning = _cell(_prose(meanings.get(key, "")))
            lines.append(f"| `{prefix}{key}` | {_cell(_type(field))} | {_cell(default)} | {meaning} |")
    return "\n".join([*lines, "", *below])


def _index_table() -> str:
    lines = ["| type | key | default | meaning |", "|---|---|---|---|"]
    for name, options in {**INDEX_TYPES, FOREIGN: FOREIGN_OPTIONS}.items():
        lines += _option_rows(f"`{name}`", options)
    lines += _option_rows("every type", RETRIEVER_OPTIONS)
    return "\n".join([*lines, ""])


def _option_rows(owner: str, options: Any) -> list[str]:
    fields = create_model(owner, **options).model_fields
    meanings = {key: _cell(_prose(field.description or "")) for key, field in fields.items()}
    return [f"| {owner} | `{key}` | `{fields[key].default}` | {meaning} |" for key, meaning in meanings.items()]


def _meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring below every field, those of base classes included."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not (issubclass(base, BaseModel) and base is not BaseModel):
            continue
        tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
        for statement, following in itertools.pairwise(body):
            is_field = isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
            if is_field and isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                found[statement.target.id] = inspect.cleandoc(str(following.value.value))
    return found


def _type(field: FieldInfo) -> str:
    bounds = [
        f"{sign} {getattr(item, name)}"
        for item in field.metadata
        for name, sign in _BOUNDS
        if getattr(item, name, None) is not None
    ]
    return ", ".join([_annotation(field.annotation), *bounds])


def _annotation(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(_literal(value) for value in arguments)
    if origin in (list, tuple):
        return f"list of {_annotation(arguments[0])}"
    if origin is dict:
        return "mapping"
    if arguments:  # a union
        return " or ".join(_annotation(argument) for argument in arguments)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "group of keys"
    names = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null"}
    return names.get(annotation, str(annotation))


def _literal(value: str | int) -> str:
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return f"`{value!r}`" if value == "" else f"`{value}`"


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "required"
    if default is None:
        return "`null`"
    if isinstance(default, Section):
        return "its keys' own"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return "empty" if default == "" else f"`{default}`"


def _prose(text: str) -> str:
    """Return a docstring as Markdown on one line."""
    return re.sub(r"``([^`]+)``", r"`\1`", " ".join(text.split()))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _wrap(default: Any) -> str:
    return "\n".join(textwrap.fill(line, 110) for line in str(default).splitlines())


if __name__ == "__main__":
    OUTPUT.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{OUTPUT} written\n")
