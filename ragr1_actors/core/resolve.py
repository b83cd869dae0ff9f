"""Resolves recipes: sections of keys to a checked ``RunConfig``, and names to objects.

A name is a word of a table, or ``my_module:MyThing``. The errors name the wrong key.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
import re
import shutil
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, get_origin

import yaml

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.credentials import refuse_secrets
from ragr1_actors.core.errors import ConfigError, RagR1Error, nearest, one_line, shortened
from ragr1_actors.core.section import Section
from ragr1_actors.core.weight_transport import check_transport

T = TypeVar("T")
Sections = dict[str, dict[str, Any]]
"""Keys that differ from the defaults, such as ``{"training": {"lr": 1e-4}}``."""
MAX_DEPTH = 16
"""Levels of lists and mappings in one value: ``env_runners.engine_options`` needs a few."""
RECIPE_ENDINGS = (".yaml", ".yml")
"""Endings of a recipe's file, which tell it from a recipe's name."""
TINY = ("tiny", "tiny_vision")
"""Words for policies that are made; see ``planning/tiny_policy.py``."""
STATIC = "static"
CORRECT = "correct"
MIXTURE = "mixture"
RENAMED = {
    "environment.max_queries_per_turn": "environment.options.max_queries_per_turn",
    "environment.query_format": "environment.options.query_format",
    "environment.observation_format": "environment.options.observation_format",
    "environment.top_k": "environment.options.top_k",
    "environment.max_observation_tokens_per_query": "environment.options.max_observation_tokens_per_query",
    "environment.max_observation_tokens": "environment.options.max_observation_tokens",
    "policy.tiny": "policy.options",
    "retrieval.num_encoders": "retrieval.encoders.num_encoders",
    "retrieval.num_cpus_per_encoder": "retrieval.encoders.num_cpus",
    "retrieval.num_gpus_per_encoder": "retrieval.encoders.num_gpus",
    "retrieval.encoder_autoscaling": "retrieval.encoders.autoscaling",
    "retrieval.timeout_s": "retrieval.requests.timeout_s",
    "retrieval.max_retries": "retrieval.requests.max_retries",
    "retrieval.cache_size": "retrieval.requests.cache_size",
    "training.clip_low": "training.options.clip_low",
    "training.clip_high": "training.options.clip_high",
    "training.tis_clip": "training.options.tis_clip",
}
"""Keys that had another name in the last release."""
_MAX_BITS = 64
_ROOT = Path(__file__).parents[2]
_OURS = tuple(f"{_ROOT / package}{os.sep}" for package in ("cluster", "envs", "learners", "ragr1_actors", "retrieval"))
_INSTALLED = tuple(
    f"{folder}{os.sep}" for folder in {sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib")}
)
RECIPES = _ROOT / "ragr1_actors" / "recipes"
"""Folder of the recipes: a folder per method, with its recipes, Python and claims; and recipes without a method."""
CLAIM_FILE = "claim.yaml"
"""File with the claims of a method, see ``ragr1_actors.lab.claim``; not a recipe."""
_MODULE_NAME = re.compile(r"([A-Za-z_]\w*):([A-Za-z_]\w*)", re.ASCII)


def path_of(value: str | Path, *words: str) -> Path | None:
    """Return the path in the value of a key or an option, or None if it is one of the known ``words``.

    A word wins over a file or folder of its name, so that the current folder does not change the meaning of a recipe:
    ``path_of("tiny", *TINY) is None``, and ``./tiny`` is the path. A ``Path`` is not a word, as it has lost its ``./``.
    """
    return None if isinstance(value, str) and value in words else Path(value)


def named_folder(value: str, *words: str) -> Path | None:
    """Return the folder that ``value`` names; None if it is a word, or a name on a model hub without a folder here.

    If a folder and a hub name are equal, the folder is taken, as transformers does.
    """
    path = path_of(value, *words)
    return path if path is not None and value and path.is_dir() else None


def resolve(sections: Sections) -> RunConfig:
    """Return the configuration with every key; ``ConfigError`` for the first key or value that does not fit."""
    for section, settings in sections.items():
        check_keys(section, settings)
    config = RunConfig(**{section: _settings_of(section).read(keys, section) for section, keys in sections.items()})
    check_settings(config)
    return config


def check_keys(section: str, settings: dict[str, Any]) -> None:
    """Refuse an unknown section or key, and a value that no key can have, with a ``ConfigError``."""
    if section not in RunConfig.model_fields:
        raise ConfigError(f"unknown section {section!r}{nearest(str(section), RunConfig.model_fields)}")
    for key, value in settings.items():
        if new := RENAMED.get(f"{section}.{key}"):
            raise ConfigError(f"{section}.{key} is {new} now; rename it")
        if (section, key) == ("environment", "world_seed"):
            raise ConfigError(
                f"environment.world_seed is an option of the source now; write 'environment.tasks={{source: world, "
                f"options: {{seed: {value}}}}}'"
            )
        if (section, key) == ("environment", "env") and value in ("direct", "rag"):
            raise ConfigError(
                f"environment.env: {value} is a mode of the search environment now; write "
                f"environment.options.mode={value}"
            )
    _settings_of(section).check_keys(settings, section)
    for key, value in settings.items():
        check_value(f"{section}.{key}", value)


def _settings_of(section: str) -> type[Section]:
    return type(RunConfig.model_fields[section].default)


def split_assignment(assignment: str) -> tuple[str, str | None]:
    """Return name and value of ``name=value``; the value is None if there is no ``=``."""
    name, equals, value = assignment.partition("=")
    return name, value if equals else None


def override(sections: Sections, assignments: Iterable[str]) -> Sections:
    """Return the sections after ``section.key=value`` assignments; ``ConfigError`` for another form or unknown key.

    ``section.key.name=value`` sets one name of a group of keys or of options and leaves the others;
    ``section.key.name.name=value`` does so in a group inside.
    """
    changed = {section: dict(settings) for section, settings in sections.items()}
    for assignment in assignments:
        name, value = split_assignment(assignment)
        section, dot, key = name.partition(".")
        if value is None or not dot:
            raise ConfigError(f"got {assignment!r}, expected section.key=value, such as training.lr=1e-4")
        parsed = parse_yaml(value, name) if value else ""
        key, *inner = key.split(".")
        check_keys(section, {key: _with(None, inner, parsed)})
        settings = _settings_of(section)
        if inner and settings.group(key) is None and get_origin(settings.model_fields[key].annotation) is not dict:
            raise ConfigError(f"got {name}; {section}.{key} is one value: write {section}.{key}=...")
        before = changed.get(section, {})
        given = before.get(key)
        if inner and given and isinstance(given, str) and settings.group(key) is not None:  # such as a function's name
            given = getattr(settings.read({key: given}, section), key).model_dump(exclude_unset=True)
        changed[section] = before | {key: _with(given, inner, parsed)}
    return changed


def _with(before: Any, path: Sequence[str], value: Any) -> Any:
    """Return ``before`` with a value set at a path of names; without names, the value."""
    if not path:
        return value
    names = before if isinstance(before, dict) else {}
    return names | {path[0]: _with(names.get(path[0]), path[1:], value)}


def read_recipe(name_or_path: str) -> Sections:
    """Return the sections of a recipe by name, or of a YAML file by path; keys are not checked yet.

    ``my:X`` becomes a name that every process finds if ``my.py`` is a file beside the recipe.

    Raises ``ConfigError`` if there is no such recipe, or it does not hold sections of keys.
    """
    known = recipe_files()
    path = known[name_or_path] if path_of(name_or_path, *known) is None else Path(name_or_path)
    if path.suffix not in RECIPE_ENDINGS:
        raise ConfigError(f"unknown recipe {name_or_path[:80]!r}{nearest(name_or_path, known)}")
    sections = read_yaml_file(path, "give an existing YAML file or the name of a recipe; `ragr1 recipes` lists them")
    sections = {} if sections is None else sections
    if not isinstance(sections, dict) or not all(isinstance(keys, dict) for keys in sections.values()):
        raise ConfigError(f"{name_or_path}: expected sections of keys, such as 'training: {{lr: 1e-6}}'")
    found: Sections = with_modules_beside(sections, path.parent)
    return found


def recipe_files() -> dict[str, Path]:
    """Return the recipes of the project, by name: ``{"quickstart": .../recipes/rag_r1/quickstart.yaml}``."""
    files = (file for pattern in ("*.yaml", "*/*.yaml") for file in RECIPES.glob(pattern) if file.name != CLAIM_FILE)
    return {file.stem: file for file in sorted(files, key=lambda file: file.stem)}


def recipe_descriptions() -> dict[str, str]:
    """Return the first line of each recipe's opening comment, by the recipe's name."""
    texts = {name: file.read_text(encoding="utf-8") for name, file in recipe_files().items()}
    return {name: text.partition("\n")[0].lstrip("# ") for name, text in texts.items()}


def with_modules_beside(value: Any, folder: Path, known: dict[int, Any] | None = None) -> Any:
    """Return the values of a recipe or a claim, with names ``my:X`` of files in its folder made absolute.

    In a recipe of the project they become ``ragr1_actors.recipes.METHOD.my:X``, in others ``FOLDER/my.py:X``.
    """
    known = {} if known is None else known  # by identity: YAML's aliases may repeat one list, or contain themselves
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, dict):
        filled = known[id(value)] = dict[Any, Any]()
        filled |= {key: with_modules_beside(inner, folder, known) for key, inner in value.items()}
        return filled
    if isinstance(value, list):
        listed = known[id(value)] = list[Any]()
        listed += [with_modules_beside(inner, folder, known) for inner in value]
        return listed
    found = _MODULE_NAME.fullmatch(value) if isinstance(value, str) else None
    if found is None or not (file := folder / f"{found[1]}.py").is_file():
        return value
    if folder.is_relative_to(RECIPES):
        return ".".join((*folder.relative_to(_ROOT).parts, value))
    return f"{file}:{found[2]}"


def check_settings(config: RunConfig) -> None:
    """Refuse settings that are possible alone, but not together or not with this meaning."""
    prompt = config.environment.prompt
    if "{question}" not in prompt:
        raise ConfigError(
            f"environment.prompt: got {shortened(repr(prompt))}, expected {{question}} in it, where a task's question "
            "is put; without it the policy would never see what to answer"
        )
    if config.learners.gradient_checkpointing == "selective" and config.learners.stage == 3:
        raise ConfigError(
            "learners.gradient_checkpointing: got selective with learners.zero_stage=3, expected true or "
            "learners.zero_stage=0, 1 or 2: DeepSpeed gathers weights within a layer, which torch's selective "
            "checkpointing does not accept"
        )
    _check_offload(config)
    _check_autoscaling(config)
    check_transport(config)
    _check_gpus(config)


def _check_offload(config: RunConfig) -> None:
    """Refuse offloading that has no effect."""
    learners = config.learners
    needed = {"optimizer": (1, 2, 3), "params": (3,)}
    for name, stages in needed.items():
        if name in learners.offload and learners.stage not in stages:
            source = ", its default here" if learners.zero_stage is None else ""
            raise ConfigError(
                f"learners.offload: got {name} with learners.zero_stage={learners.stage}{source}, expected "
                f"learners.zero_stage={' or '.join(map(str, stages))}: it is ZeRO that moves them"
            )
    if "reference" in learners.offload and learners.lora is not None:
        raise ConfigError(
            "learners.offload: got reference with learners.lora, where the reference is the policy without its "
            "adapters; take reference out"
        )
    training = config.training
    is_known = ":" not in training.algorithm
    if "critic" in learners.offload and is_known and training.algorithm != "ppo":
        raise ConfigError(
            f"learners.offload: got critic with training.algorithm={training.algorithm}, which has none; take it out"
        )
    if "reference" in learners.offload and is_known and not has_reference(config):
        raise ConfigError("learners.offload: got reference with training.kl_coeff=0, which needs none; take it out")


def has_reference(config: RunConfig) -> bool:
    """Return whether a known algorithm also scores each batch under the policy at the start of the stage."""
    return config.training.kl_coeff > 0 or config.training.algorithm in ("dpo", "ipo")


def _check_gpus(config: RunConfig) -> None:
    """Refuse numbers of GPUs that Ray, or an engine over several GPUs, cannot have."""
    runners, retrieval = config.env_runners, config.retrieval
    asked = {
        "env_runners.num_gpus_per_env_runner": runners.num_gpus_per_env_runner,
        "retrieval.num_gpus_per_retriever": retrieval.num_gpus_per_retriever,
        "retrieval.encoders.num_gpus": retrieval.encoders.num_gpus,
    }
    for key, num_gpus in asked.items():
        if num_gpus > 1 and num_gpus % 1:
            raise ConfigError(f"{key}: got {num_gpus:g}, expected a part of one GPU, such as 0.5, or a whole number")
    sizes = [runners.engine_options.get(f"{name}_parallel_size", 1) for name in ("tensor", "pipeline")]
    if not all(isinstance(size, int) for size in sizes):
        return  # the engine refuses it
    num_devices = math.prod(sizes)
    if num_devices > 1 and 0 < runners.num_gpus_per_env_runner < num_devices:
        raise ConfigError(
            f"env_runners.num_gpus_per_env_runner: got {runners.num_gpus_per_env_runner:g} with "
            f"tensor_parallel_size={sizes[0]} and pipeline_parallel_size={sizes[1]} in env_runners.engine_options, "
            f"expected {num_devices}: an engine's GPUs are those of its runner"
        )


def _check_autoscaling(config: RunConfig) -> None:
    """Refuse a fleet that cannot follow its load, because it has no actors or starts outside its bounds."""
    runners, retrieval = config.env_runners, config.retrieval
    encoders = retrieval.encoders
    fleets = [
        ("env_runners", "num_env_runners", runners.num_env_runners, runners.autoscaling),
        ("retrieval", "num_retrievers", retrieval.num_retrievers, retrieval.autoscaling),
        ("retrieval.encoders", "num_encoders", encoders.num_encoders, encoders.autoscaling),
    ]
    for group, key, size, settings in fleets:
        if settings is not None and not settings.min_replicas <= size <= settings.max_replicas:
            raise ConfigError(
                f"{group}.{key}: got {size} with {group}.autoscaling, expected {settings.min_replicas} to "
                f"{settings.max_replicas}, its min_replicas and max_replicas: it is the number at the start"
            )


def read_yaml_file(path: Path, instead: str) -> Any:
    """Return the content of a YAML file in UTF-8; ``ConfigError``, with the advice ``instead``, if it is unreadable."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (FileNotFoundError, IsADirectoryError) as error:
        raise ConfigError(f"no recipe file {path}; {instead}") from error
    except OSError as error:
        raise ConfigError(f"recipe file {shortened(str(path))} cannot be read: {error.strerror}; {instead}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from error
    return parse_yaml(text, str(path))


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that is given twice; YAML's loaders would take the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping; the ``YAMLError`` names a key that occurs twice."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"the key {key.value} twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


# PyYAML reads YAML 1.1, where 1e-3 and 1.5e3 are texts; in YAML 1.2 they are numbers.
_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)[eE][-+]?[0-9]+\Z")
_UniqueKeys.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, [*"-+.0123456789"])


def parse_yaml(text: str, source: str) -> Any:
    """Return the value of a YAML text, or raise a ``ConfigError`` that begins with ``source``."""
    try:
        loader = _UniqueKeys(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except RecursionError as error:
        raise ConfigError(f"{source}: nested too deeply, expected sections of keys") from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an impossible date or number
        problem = one_line(error).replace('in "<unicode string>", ', "at ")
        raise ConfigError(f"{source}: not valid YAML: {problem}; mend it there, and quote what is text") from error


def check_value(name: str, value: Any) -> None:
    """Refuse values that no key can hold: a date, a set, bytes, keys that are not text, NaN, deep nesting, secrets."""
    level: list[tuple[str, Any]] = [(name, value)]
    for _ in range(MAX_DEPTH):  # level by level, so that deep nesting does not exhaust the stack
        below: dict[int, tuple[str, Any]] = {}  # by identity: YAML's aliases may repeat one list a billion times
        for where, item in level:
            _check_kind(where, item)
            refuse_secrets(item, where)
            if isinstance(item, dict):
                below |= {id(child): (f"{where}.{key}", child) for key, child in item.items()}
            elif isinstance(item, list | tuple):
                below |= {id(child): (f"{where}[{index}]", child) for index, child in enumerate(item)}
        if not below:
            return
        level = list(below.values())
    raise ConfigError(f"{name}: nested more than {MAX_DEPTH} levels deep; write it flatter")


def _check_kind(where: str, item: Any) -> None:
    if isinstance(item, dict):
        for key in item:
            if not isinstance(key, str):
                raise ConfigError(f"{where}: got the key {key!r}, expected text; quote it")
    elif isinstance(item, float | int):
        if isinstance(item, float) and not math.isfinite(item):
            raise ConfigError(f"{where}: got {item}, expected a finite number")
        if isinstance(item, int) and item.bit_length() > _MAX_BITS:
            raise ConfigError(f"{where}: got a number of {item.bit_length()} bits, expected one of at most {_MAX_BITS}")
    elif isinstance(item, str):
        if any("\ud800" <= char <= "\udfff" or char == "\0" for char in item):
            raise ConfigError(f"{where}: got {shortened(repr(item))}, expected text without lone surrogates and NUL")
    elif item is not None and not isinstance(item, list | tuple):
        raise ConfigError(
            f"{where}: got {shortened(str(item))}, a {type(item).__name__}, expected text, a number, true, false, a "
            "list or a mapping; quote it if it is text"
        )


def load_object(name: str, known: Mapping[str, T | str]) -> T:
    """Return ``known[name]``, or import ``name`` if it has the form ``module:attribute``.

    Entries of ``known`` may have that form, too, so that they are imported at their first use. The current folder is
    importable, so that ``my_env:MyEnv`` finds ``./my_env.py``. A module may be the path of its file,
    ``methods/my_env.py:MyEnv``; its folder then is importable.

    Raises:
        ConfigError: the name is neither, the module or attribute does not exist, or the module cannot be imported.
    """
    entry = known.get(name, name)
    if not isinstance(entry, str):
        return entry
    module_name, colon, attribute = entry.rpartition(":")
    if not colon:
        raise ConfigError(f"got {name!r}, expected one of {', '.join(sorted(known))} or my_module:MyName")
    file = _module_file(module_name) if module_name.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ConfigError(f"{name!r}: there is no file {module_name}; put it there, or start where it is")
    module_name, folder = (file.stem, str(file.parent)) if file else (module_name, os.getcwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = _import(name, module_name, is_known=name in known)
    if file is not None and (taken := Path(f"{module.__file__}").resolve()) != file:
        raise ConfigError(f"{name!r}: Python has another module {module_name} already, {taken}; rename {file.name}")
    if attribute not in vars(module):
        raise ConfigError(f"{name!r}: module {module_name} has no {attribute!r}; write it there, or mend the name")
    found: T = vars(module)[attribute]
    return found


def _module_file(written: str) -> Path:
    """Return the file of a module by its path from the folder that the driver started in.

    An actor may run in another folder, but has the driver's in its ``sys.path``.
    """
    files = (Path(folder, written) for folder in (os.getcwd(), *sys.path))
    return next((file for file in files if file.is_file()), Path(written)).resolve()


def _import(name: str, module_name: str, is_known: bool) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or module_name
        if not is_known and f"{module_name}.".startswith(f"{missing}."):
            raise ConfigError(
                f"{name!r}: {error}; put {module_name}.py beside the recipe or into the folder you start from"
            ) from error
        raise ConfigError(f"{name!r} needs the package {missing!r}; install it beside this one") from error
    except SyntaxError as error:
        where = f"{error.filename}, line {error.lineno}"
        raise ConfigError(f"{name!r}: {where} is not Python ({error.msg}); mend it") from error
    except Exception as error:  # a user's module may raise anything while it is imported
        raise ConfigError(f"{name!r}: importing {module_name!r} failed at {raised_at(error)}") from error


def place_of(written: Any) -> str:
    """Return the place of a class, a function or an object's class: ``/home/ana/my_env.py, line 12``.

    It is empty if there is no file, or a file of this project.
    """
    try:
        file, line = inspect.getsourcefile(_written(written)), inspect.getsourcelines(_written(written))[1]
    except (OSError, TypeError):  # typed at a prompt, or built in
        return ""
    return "" if f"{file}".startswith(_OURS) else f"{file}, line {line}"


def named(written: Any) -> str:
    """Return name and place, as the beginning of a message: ``Mine.act (/home/ana/my_env.py, line 12)``."""
    place = place_of(written)
    return f"{_written(written).__qualname__} ({place})" if place else f"{_written(written).__qualname__}"


def _written(part: Any) -> Any:
    return part if inspect.isclass(part) or inspect.isroutine(part) else type(part)


def raised_at(error: BaseException, called: Any = None) -> str:
    """Return place and text of an error: ``/home/ana/my_env.py, line 14: KeyError: 'gold'``.

    The line is the last one of the user's code, even if a function that it calls raised. If none of it ran, as with a
    wrong number of arguments, it is the line of ``called``; the errors of this project already name it.
    """
    text = shortened(" ".join(f"{type(error).__name__}: {error}".split()), 500)
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(("<", *_OURS, *_INSTALLED))]
    if not users and isinstance(error, RagR1Error):
        return one_line(error)
    if not users and (place := place_of(called)):
        return f"{place}: {text}"
    last = [*frames, *users][-1]
    return f"{last.filename}, line {last.lineno}: {text}"


@contextmanager
def blamed(key: str, called: Callable[..., Any]) -> Iterator[None]:
    """Turn an error of a user's class or function into a ``ConfigError`` for ``key``, with the file and the line."""
    try:
        yield
    except RagR1Error:
        raise
    except Exception as error:  # a user's code may raise anything
        raise ConfigError(f"{key}: {called.__qualname__} failed at {raised_at(error, called)}; mend it") from error


def make_part(key: str, name: str, known: Mapping[str, type[T] | str], options: Mapping[str, Any]) -> T:
    """Make the class that a recipe names under ``key``, with the options under ``key_options``.

    Its ``options_class`` reads them; without one, the constructor gets them unchanged.

    Raises:
        ConfigError: there is no such class, it cannot be made, or its options do not fit.
    """
    found: Any = load_object(name, known)
    read = part_options(found, options, key, f"{key}_options")
    with blamed(key, found):
        made: T = found(options if read is None else read)
        return made


def part_options(part: Any, options: Mapping[str, Any], key: str, options_key: str) -> Section | None:
    """Return the options as the ``options_class`` of a part reads them; None without one. Raises ``ConfigError``."""
    reader = part.options_class
    if reader is None:
        return None
    if not (inspect.isclass(reader) and issubclass(reader, Section)):
        raise ConfigError(
            f"{key}: options_class of {named(part)} is {reader!r}, expected a subclass of "
            "ragr1_actors.core.section.Section, or None"
        )
    found: Section = reader.read(options, options_key)
    return found


def recipe_methods() -> dict[str, str]:
    """Return the method of every recipe, or "": ``{"rank_r1_7b": "rank_r1", "hotpotqa_small": ""}``."""
    folders = {name: file.parent for name, file in recipe_files().items()}
    return {name: "" if folder == RECIPES else folder.name for name, folder in folders.items()}


def method_recipes() -> dict[str, list[str]]:
    """Return the recipes of every method by its name: ``{"rank_r1": ["rank_r1", "rank_r1_7b"]}``."""
    found: dict[str, list[str]] = {}
    for name, method in recipe_methods().items():
        if method:
            found.setdefault(method, []).append(name)
    return dict(sorted(found.items()))


def copy_method(method: str, folder: Path) -> list[Path]:
    """Copy the recipes, the Python and the claim of a method to a new folder, and return its recipes.

    Raises:
        ConfigError: there is no such method, or the folder is not empty or cannot be written.
    """
    known = method_recipes()
    if method not in known:
        raise ConfigError(f"unknown method {method!r}{nearest(method, known)}; see: ragr1 recipes")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty; name a new folder")
    ignored = shutil.ignore_patterns("__init__.py", "__pycache__")
    try:
        shutil.copytree(RECIPES / method, folder, ignore=ignored, dirs_exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {one_line(error)}; name another folder") from error
    return [folder / f"{name}.yaml" for name in known[method]]
