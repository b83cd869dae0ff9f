"""The options of every algorithm: ``training.options`` of a recipe, by the algorithm's own names.

Models without torch, so that a recipe is checked before anything heavy is imported. A default is that of the paper the
algorithm comes from; where the code of the paper says something else, the docstring of the learner has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.text import first_problem, nearest

KLEstimator = Literal["k1", "k2", "k3"]
"""Of KL(policy, reference): ``learners/losses.py`` has the formulas, and what the gradient of each is."""
Aggregation = Literal["token_mean", "trajectory_mean", "constant"]
"""How token losses become one: ``learners.losses.trajectory_weights`` has the formulas."""


class LearnerOptions(BaseModel):
    """Of an algorithm that has none; the base of all others, frozen and closed to unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PolicyGradientOptions(LearnerOptions):
    """Of everything that weighs log-probs by advantages."""

    kl_in: Literal["loss", "reward"] = "loss"
    """Where ``training.kl_coeff`` times the divergence from the reference goes."""
    kl_estimator: KLEstimator = "k3"
    dual_clip: float = Field(0.0, ge=0)
    """Bound of the loss of tokens with a negative advantage, as a ratio above 1 such as 3; 0 is none."""
    llds_coeff: float = Field(0.0, ge=0)
    """Of the likelihood-displacement regulariser (LLDS); 0 is off."""
    llds_gate: Literal["turn", "trajectory"] = "turn"
    """What has to have become less likely as a whole before its tokens are regularised."""

    @field_validator("dual_clip")
    @classmethod
    def _above_1(cls, value: float) -> float:
        if 0 < value <= 1:
            raise ValueError("expected more than 1, such as 3, or 0 for none")
        return value


class PPOOptions(PolicyGradientOptions):
    """Of PPO; the defaults are Search-R1's and RAG-R1's."""

    kl_in: Literal["loss", "reward"] = "reward"
    kl_estimator: KLEstimator = "k1"
    gamma: float = Field(1.0, ge=0, le=1)
    lambda_: float = Field(1.0, ge=0, le=1)
    vf_lr: float | None = Field(None, gt=0)
    """Of the critic; null is ten times ``training.lr``, as in Search-R1 and RAG-R1 (1e-5 against 1e-6)."""
    vf_warmup_steps: int = Field(0, ge=0)
    """Optimizer steps of the critic's own warm-up."""
    vf_clip: float = Field(0.5, gt=0)


class GroupOptions(PolicyGradientOptions):
    """Of GRPO and of what shares its baseline, the mean reward of a group."""

    drop_zero_variance: bool = True
    """Leave groups out whose rewards are all alike: their advantages are 0."""
    max_sampled_batches: int = Field(1, ge=1)
    """Dynamic sampling: batches of tasks that may be sampled to fill one with groups whose rewards differ; 1 is off."""
    aggregation: Aggregation = "token_mean"
    max_model_tokens: int = Field(0, ge=0)
    """MODEL tokens that a trajectory may have: the constant of ``aggregation`` and the limit of ``overlong_share``; 0
    is what ``environment.max_turns`` and ``env_runners.max_new_tokens_per_turn`` allow."""
    overlong_share: float = Field(0.0, ge=0, lt=1)
    """Overlong shaping: over this last share of ``max_model_tokens`` the reward falls by 1; 0 is off."""


class DrGRPOOptions(GroupOptions):
    """Of Dr.GRPO."""

    aggregation: Aggregation = "constant"


class DAPOOptions(GroupOptions):
    """Of DAPO: the shaping begins at 16,384 of 20,480 tokens in the paper; ten batches are its code's limit."""

    max_sampled_batches: int = Field(10, ge=1)
    overlong_share: float = Field(0.2, ge=0, lt=1)


class RLOOOptions(GroupOptions):
    """Of RLOO."""

    kl_in: Literal["loss", "reward"] = "reward"
    kl_estimator: KLEstimator = "k1"
    aggregation: Aggregation = "constant"


class ReinforcePPOptions(GroupOptions):
    """Of REINFORCE++ with baseline."""

    kl_estimator: KLEstimator = "k2"


class GSPOOptions(GroupOptions):
    """Of GSPO."""

    aggregation: Aggregation = "trajectory_mean"


class CISPOOptions(GroupOptions):
    """Of CISPO."""

    dual_clip: float = Field(0.0, ge=0, le=0)
    """0: the ratio is a weight here, and bounded as it is."""


class PreferenceOptions(LearnerOptions):
    """Of DPO and IPO."""

    beta: float = Field(0.1, gt=0)
    """Strength of the tie to the reference; IPO's tau."""


OptionsT = TypeVar("OptionsT", bound=LearnerOptions)


def parse_options(options_class: type[OptionsT], options: Mapping[str, Any], algorithm: str) -> OptionsT:
    """Validate the ``training.options`` of ``algorithm``.

    Raises:
        ConfigError: an unknown name, a wrong type or a value out of range; names the option.
    """
    known = list(options_class.model_fields)
    for name in options:
        if name not in known:
            instead = nearest(name, known) if known else "; it has no options: leave training.options empty"
            raise ConfigError(f"training.options: unknown option {name!r} of training.algorithm={algorithm}{instead}")
    try:
        return options_class.model_validate(dict(options))
    except ValidationError as error:
        name, found, problem = first_problem(error)
        raise ConfigError(f"training.options.{name}: got {found!r}; {problem}") from error
