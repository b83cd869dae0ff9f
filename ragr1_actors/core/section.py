"""Section: base of all groups of keys and of all parts' options; and types of values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator

from ragr1_actors.core.disk.json_files import checked
from ragr1_actors.core.errors import ConfigError, nearest, shortened

_LABEL = r"[A-Za-z0-9](?:[\w.-]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = re.compile(rf"(?:[A-Za-z0-9.-]{{1,253}}/)?{_LABEL}", re.ASCII)
_LABEL_VALUE = re.compile(rf"!?(?:{_LABEL}|in\({_LABEL}(?:, ?{_LABEL})*\))", re.ASCII)


def _check_labels(label_selector: dict[str, str]) -> dict[str, str]:
    """Refuse labels that Ray's ``label_selector`` does not accept."""
    for key, value in label_selector.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            raise ValueError(f"{key}: {value} is no label and value such as role: runner, '!runner' or 'in(a, b)'")
    return label_selector


LabelSelector = Annotated[dict[str, str], AfterValidator(_check_labels)]
Checkpointing = Literal[False, True, "selective"]
"""Values of ``learners.gradient_checkpointing``."""


class Section(BaseModel):
    """Group of keys: frozen, without unknown keys, and without NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse a truth value for a number: YAML reads ``on`` and ``yes`` as true, which Python takes for 1."""
        kinds = {annotation := cls.model_fields[str(info.field_name)].annotation, *get_args(annotation)}
        if isinstance(value, bool) and bool not in kinds and kinds & {int, float}:
            raise ValueError("expected a number")
        return value

    @classmethod
    def check_keys(cls, options: Mapping[str, Any], key: str) -> None:
        """Refuse a name in ``options`` that is no key, with a ``ConfigError`` that names the most similar key."""
        known = list(cls.model_fields)
        for name, value in options.items():
            if name not in known:
                instead = nearest(str(name), known) if known else f"; it has no keys: leave {key} empty"
                raise ConfigError(f"unknown key {key}.{name}{instead}")
            if not isinstance(value, Mapping | list) or (group := cls.section_in(name)) is None:
                continue
            groups: dict[str, Any] = {f"{key}.{name}": value}
            if isinstance(value, list):  # such as the checks of a claim
                groups = {f"{key}.{name}.{index}": keys for index, keys in enumerate(value)}
            elif cls._is_mapping(name):  # such as environment.models, groups by name
                groups = {f"{key}.{name}.{inner}": keys for inner, keys in value.items()}
            for inner, keys in groups.items():
                if isinstance(keys, Mapping):
                    group.check_keys(keys, inner)

    @classmethod
    def group(cls, name: str) -> type[Section] | None:
        """Return the class of a key that is a group of keys, such as ``training.guard``; None for other keys."""
        return None if cls._is_mapping(name) else cls.section_in(name)

    @classmethod
    def _is_mapping(cls, name: str) -> bool:
        return get_origin(cls.model_fields[name].annotation) is dict

    @classmethod
    def section_in(cls, name: str) -> type[Section] | None:
        """Return the class of a key's group of keys, or of the groups that it has by name; None for other keys."""
        annotation = cls.model_fields[name].annotation
        for kind in (annotation, *get_args(annotation)):
            if isinstance(kind, type) and issubclass(kind, Section):
                return kind
        return None

    @classmethod
    def read(cls, options: Mapping[str, Any], key: str) -> Self:
        """Check a mapping under ``key``, such as ``retrieval.options``; ``ConfigError`` for a wrong name or value."""
        cls.check_keys(options, key)

        def refuse(name: str, got: Any, problem: str) -> ConfigError:
            if not name:  # a rule about several keys says itself what it got
                return ConfigError(f"{key}: {problem}")
            return ConfigError(f"{key}.{name}: got {shortened(repr(got), 200)}; {problem}")

        return checked(cls, dict(options), refuse)
