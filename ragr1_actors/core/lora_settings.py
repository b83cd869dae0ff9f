"""What ``learners.lora`` may hold, and what an engine is told of adapters, read without torch."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.validation import first_problem, nearest

LINEAR_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Of a decoder layer of Qwen2, Llama and Mistral."""

MERGING_ENGINES = ("transformers", "vllm")
"""Engines that are sent adapters alone, and merge them themselves. One of a user's own is sent merged weights."""

BASE_KEY = "lora_base"
"""Where an update of weights holds an ``AdapterBase`` as JSON: the rest of it is adapters."""


class AdapterBase(BaseModel):
    """What adapters are merged into: ``AdapterBase(folder="/runs/mine/policy_sft", scaling=2.0)``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: str
    """The policy that the stage began with: a Hugging Face folder, or a name on the hub."""
    scaling: float
    """A weight W is used as W + scaling * B A."""


class LoraSettings(BaseModel):
    """Low-rank adapters (Hu et al., arXiv:2106.09685): a weight W is used as W + alpha / rank * B A."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    rank: int = Field(16, ge=1)
    """Rows of A and columns of B."""
    alpha: int = Field(32, ge=1)
    dropout: float = Field(0, ge=0, le=0)
    """0: tokens are sampled without dropout, so that a ratio against them with dropout would be noise."""
    target_modules: list[str] = Field(LINEAR_LAYERS, min_length=1)
    """Last parts of the names of the linear layers that get an adapter."""

    @field_validator("target_modules")
    @classmethod
    def _leave_the_vocabulary_alone(cls, names: list[str]) -> list[str]:
        for name in names:
            if name in ("lm_head", "embed_tokens") or "." in name or not name:
                raise ValueError(f"{name!r} is none of a decoder layer's linear layers, such as 'q_proj'")
        return names


def read_lora(options: dict[str, Any]) -> LoraSettings | None:
    """Return the settings of ``learners.lora``; None where it is empty.

    Raises:
        ConfigError: an unknown key, or a value that none can have.
    """
    if not options:
        return None
    known = list(LoraSettings.model_fields)
    for key in options:
        if key not in known:
            raise ConfigError(f"unknown key learners.lora.{key}{nearest(key, known)}")
    try:
        return LoraSettings.model_validate(options)
    except ValidationError as error:
        name, found, problem = first_problem(error)
        raise ConfigError(f"learners.lora.{name}: got {found!r}; {problem}") from error
