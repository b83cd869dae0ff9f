"""From sections of keys to a checked ``RunConfig``: recipes, overrides, unknown and conflicting keys."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.lora_settings import read_lora
from ragr1_actors.core.validation import check_value, first_problem, nearest, parse_yaml, read_yaml_file, shortened
from ragr1_actors.core.weight_transport import check_transport

Sections = dict[str, dict[str, Any]]
"""Keys that differ from the defaults, such as ``{"training": {"lr": 1e-4}}``."""


def resolve(sections: Sections) -> RunConfig:
    """Return the configuration with every key.

    Raises:
        ConfigError: names the first key that is unknown or has a value that does not fit.
    """
    for section, settings in sections.items():
        check_keys(section, settings)
    try:
        config = RunConfig.model_validate(sections)
    except ValidationError as error:
        name, found, problem = first_problem(error)
        raise ConfigError(f"{name}: got {found!r}; {problem}") from error
    _check_settings(config)
    return config


def check_keys(section: str, settings: dict[str, Any]) -> None:
    """Refuse an unknown section or key, and a value that no key can have.

    Raises:
        ConfigError: names the nearest known key.
    """
    known = RunConfig.model_fields
    if section not in known:
        raise ConfigError(f"unknown section {section!r}{nearest(str(section), list(known))}")
    section_class = known[section].annotation
    assert section_class is not None
    keys = list(section_class.model_fields)
    for key, value in settings.items():
        if key not in keys:
            raise ConfigError(f"unknown key {section}.{key}{nearest(str(key), keys)}")
        check_value(f"{section}.{key}", value)


def override(sections: Sections, assignments: Iterable[str]) -> Sections:
    """Return the sections after ``section.key=value`` assignments, whose values are read as YAML.

    Raises:
        ConfigError: an assignment has another form, or names an unknown key.
    """
    changed = {section: dict(settings) for section, settings in sections.items()}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        section, dot, key = name.partition(".")
        if not equals or not dot:
            raise ConfigError(f"got {assignment!r}, expected section.key=value, such as training.lr=1e-4")
        settings = {key: parse_yaml(value, name) if value else ""}
        check_keys(section, settings)
        changed[section] = changed.get(section, {}) | settings
    return changed


def read_recipe(name_or_path: str) -> Sections:
    """Return the sections of a recipe of the project, by name, or of a YAML file, by path.

    Raises:
        ConfigError: there is no such recipe, or the file does not hold sections of keys.
    """
    if Path(name_or_path).suffix in (".yaml", ".yml"):
        instead = f"give an existing YAML file or one of: {', '.join(recipe_names())}"
        sections = read_yaml_file(Path(name_or_path), instead)
    elif name_or_path in recipe_names():
        sections = parse_yaml(_recipe_text(name_or_path), name_or_path)
    else:
        raise ConfigError(f"unknown recipe {name_or_path[:80]!r}{nearest(name_or_path, recipe_names())}")
    sections = {} if sections is None else sections
    if not isinstance(sections, dict) or not all(isinstance(keys, dict) for keys in sections.values()):
        raise ConfigError(f"{name_or_path}: expected sections of keys, such as 'training: {{lr: 1e-6}}'")
    for section, settings in sections.items():
        check_keys(section, settings)
    return sections


def recipe_names() -> list[str]:
    """Names of the recipes that ship with the project."""
    files = resources.files("ragr1_actors.recipes").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def recipe_descriptions() -> dict[str, str]:
    """The first line of each recipe's opening comment, by the recipe's name."""
    return {name: _recipe_text(name).partition("\n")[0].lstrip("# ") for name in recipe_names()}


def _recipe_text(name: str) -> str:
    return resources.files("ragr1_actors.recipes").joinpath(f"{name}.yaml").read_text(encoding="utf-8")


def _check_settings(config: RunConfig) -> None:
    """Refuse settings that are each possible, but not together or not for what they mean.

    Raises:
        ConfigError: names the key.
    """
    prompt = config.environment.prompt
    if "{question}" not in prompt:
        raise ConfigError(
            f"environment.prompt: got {shortened(repr(prompt))}, expected {{question}} in it, where a task's question "
            "is put; without it the policy would never see what to answer"
        )
    policy = config.policy
    if policy.model == "tiny":
        head_size, rest = divmod(policy.hidden_size, policy.num_heads)
        if rest or head_size % 2 or not head_size:
            possible = max(4, (head_size + 1) // 2 * 2) * policy.num_heads
            raise ConfigError(
                f"policy.hidden_size: got {policy.hidden_size} with policy.num_heads={policy.num_heads}, expected an "
                f"even multiple of the heads, such as {possible}: rotary positions turn pairs of numbers"
            )
    if config.training.algorithm in ("dpo", "ipo") and config.training.group_size < 2:
        raise ConfigError(
            f"training.group_size: got 1 with training.algorithm={config.training.algorithm}, expected at least 2: a "
            "pair is of one group"
        )
    _check_offload(config)
    check_transport(config)


def _check_offload(config: RunConfig) -> None:
    """Refuse what would be offloaded to no effect."""
    learners = config.learners
    lora = read_lora(learners.lora)
    needed = {"optimizer": (1, 2, 3), "params": (3,)}
    for name, stages in needed.items():
        if name in learners.offload and learners.zero_stage not in stages:
            raise ConfigError(
                f"learners.offload: got {name} with learners.zero_stage={learners.zero_stage}, expected "
                f"learners.zero_stage={' or '.join(map(str, stages))}: it is ZeRO that moves them"
            )
    if "reference" in learners.offload and lora is not None:
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
    has_reference = training.kl_coeff > 0 or training.algorithm in ("dpo", "ipo")
    if "reference" in learners.offload and is_known and not has_reference:
        raise ConfigError("learners.offload: got reference with training.kl_coeff=0, which needs none; take it out")
