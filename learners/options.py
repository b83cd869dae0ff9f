"""The registry of algorithms, and the options of each: ``training.options`` of a recipe.

This module imports no torch, so a recipe is checked before any heavy import. Defaults are those of the algorithm's
paper; the docstring of a learner states where its code differs from the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

from pydantic import Field, field_validator

from ragr1_actors.core.config import Section, TrainingSettings
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.resolve import load_object

if TYPE_CHECKING:  # imports torch
    from learners.learner import Learner

KLEstimator = Literal["k1", "k2", "k3"]
"""Estimators of KL(policy, reference); ``learners/losses.py`` has their formulas and gradients."""
GROUP_EPSILON = 1e-6
"""Added to the standard deviation of a group's rewards."""
Aggregation = Literal["token_mean", "trajectory_mean", "constant"]
"""How the token losses of a step are averaged; ``learners.losses.trajectory_weights`` has the formulas."""


class LearnerOptions(Section):
    """Options of an algorithm without options, and the base of all options."""

    min_group_size: ClassVar[int] = 1
    """Least ``training.group_size``."""


class PolicyGradientOptions(LearnerOptions):
    """Options of every policy gradient."""

    kl_in: Literal["loss", "reward"] = "loss"
    """Where ``training.kl_coeff`` times the divergence from the reference is added."""
    kl_estimator: KLEstimator = "k3"
    dual_clip: float = Field(0.0, ge=0)
    """Largest ratio, above 1 such as 3, that the loss of a token with a negative advantage counts; 0 is no bound."""
    llds_coeff: float = Field(0.0, ge=0)
    """Coefficient of the likelihood-displacement regulariser (LLDS); 0 is off."""
    llds_gate: Literal["turn", "trajectory"] = "turn"
    """The unit whose total likelihood must fall before its tokens are regularised."""

    @field_validator("dual_clip")
    @classmethod
    def _above_1(cls, value: float) -> float:
        if 0 < value <= 1:
            raise ValueError("expected more than 1, such as 3, or 0 for no bound")
        return value


class PPOOptions(PolicyGradientOptions):
    """Options of PPO; the defaults are those of Search-R1 and RAG-R1."""

    kl_in: Literal["loss", "reward"] = "reward"
    kl_estimator: KLEstimator = "k1"
    gamma: float = Field(1.0, ge=0, le=1)
    lambda_: float = Field(1.0, ge=0, le=1)
    vf_lr: float | None = Field(None, gt=0)
    """Learning rate of the critic; null is ten times ``training.lr``, as in Search-R1 and RAG-R1 (1e-5, 1e-6)."""
    vf_warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the critic's learning rate warms up."""
    vf_clip: float = Field(0.5, gt=0)


class GroupOptions(PolicyGradientOptions):
    """Options of GRPO and of every algorithm that compares within a group."""

    min_group_size: ClassVar[int] = 2
    drop_zero_variance: bool | None = None
    """Leave out groups whose rewards are all equal: their advantages are 0. ``null`` (default) leaves them out only
    where neither ``training.kl_coeff`` nor ``training.entropy_coeff`` gives them a gradient."""
    max_sampled_batches: int = Field(1, ge=1)
    """Dynamic sampling: most batches of tasks sampled to fill one with groups whose rewards differ; 1 is off."""
    aggregation: Aggregation = "token_mean"
    max_model_tokens: int = Field(0, ge=0)
    """Most MODEL tokens per trajectory: the constant of ``aggregation`` and the limit of ``overlong_share``; 0 is the
    number that ``environment.max_turns`` and ``env_runners.max_new_tokens_per_turn`` allow."""
    overlong_share: float = Field(0.0, ge=0, lt=1)
    """Overlong shaping: the reward falls by 1 over this last share of ``max_model_tokens``; 0 is off."""


class DrGRPOOptions(GroupOptions):
    """Options of Dr.GRPO."""

    aggregation: Aggregation = "constant"


class DAPOOptions(GroupOptions):
    """Options of DAPO: its paper shapes from 16,384 of 20,480 tokens; its code samples at most ten batches."""

    drop_zero_variance: bool | None = True
    max_sampled_batches: int = Field(10, ge=1)
    overlong_share: float = Field(0.2, ge=0, lt=1)


class RLOOOptions(GroupOptions):
    """Options of RLOO."""

    kl_in: Literal["loss", "reward"] = "reward"
    kl_estimator: KLEstimator = "k1"
    aggregation: Aggregation = "constant"


class ReinforcePPOptions(GroupOptions):
    """Options of REINFORCE++ with baseline; in groups of one, the baseline is the mean of the batch."""

    min_group_size: ClassVar[int] = 1
    drop_zero_variance: bool | None = False
    kl_estimator: KLEstimator = "k2"


class GSPOOptions(GroupOptions):
    """Options of GSPO."""

    aggregation: Aggregation = "trajectory_mean"


class CISPOOptions(GroupOptions):
    """Options of CISPO."""

    drop_zero_variance: bool | None = True
    dual_clip: float = Field(0.0, ge=0, le=0)
    """Only 0: CISPO bounds the ratio already."""


class PreferenceOptions(LearnerOptions):
    """Options of DPO and IPO, whose pairs are of one group."""

    min_group_size: ClassVar[int] = 2
    beta: float = Field(0.1, gt=0)
    """Strength of the pull towards the reference; tau in IPO's paper."""


OptionsT = TypeVar("OptionsT", bound=LearnerOptions)


def read_options(options_class: type[OptionsT], training: TrainingSettings) -> OptionsT:
    """Validate ``training.options``, and ``training.group_size`` for the algorithm that has them.

    Raises:
        ConfigError: an unknown name, a wrong type or a value out of range; names algorithm and option.
    """
    if training.group_size < options_class.min_group_size:
        raise ConfigError(
            f"training.group_size: got {training.group_size} with training.algorithm={training.algorithm}, expected at "
            f"least {options_class.min_group_size}: it compares the trajectories of a group; raise it, or take ppo or "
            "reinforce_pp, which need no group"
        )
    try:
        return options_class.read(training.options, "training.options")
    except ConfigError as error:
        raise ConfigError(f"training.algorithm={training.algorithm}: {error}") from error


_ALGORITHMS: dict[str, tuple[str, type[LearnerOptions]]] = {
    "cispo": ("grpo:CISPOLearner", CISPOOptions),
    "dapo": ("grpo:DAPOLearner", DAPOOptions),
    "dpo": ("dpo:DPOLearner", PreferenceOptions),
    "dr_grpo": ("grpo:DrGRPOLearner", DrGRPOOptions),
    "grpo": ("grpo:GRPOLearner", GroupOptions),
    "gspo": ("grpo:GSPOLearner", GSPOOptions),
    "ipo": ("dpo:IPOLearner", PreferenceOptions),
    "ppo": ("ppo:PPOLearner", PPOOptions),
    "reinforce_pp": ("grpo:ReinforcePPLearner", ReinforcePPOptions),
    "rloo": ("grpo:RLOOLearner", RLOOOptions),
    "sft": ("sft:SFTLearner", LearnerOptions),
}

LEARNERS: dict[str, type[Learner] | str] = {
    name: f"learners.algorithms.{learner}" for name, (learner, _) in _ALGORITHMS.items()
}
"""Learner classes by the value of ``training.algorithm``; a class is imported when it is used."""

OPTIONS = {name: options for name, (_, options) in _ALGORITHMS.items()}
"""``options_class`` of every learner, without importing the learner."""


def learner_options(training: TrainingSettings) -> LearnerOptions:
    """Return the validated options of ``training.algorithm``; only a custom algorithm is imported for it.

    Raises:
        ConfigError: an option is unknown or has an illegal value, or the algorithm does not exist.
    """
    name = training.algorithm
    options_class = OPTIONS[name] if name in OPTIONS else load_object(name, LEARNERS).options_class
    return read_options(options_class, training)


def has_variance(rewards: Sequence[float]) -> bool:
    """Return whether the rewards of a group differ. True for a group of one, which has no baseline."""
    return len(rewards) == 1 or (len(rewards) > 1 and max(rewards) - min(rewards) > GROUP_EPSILON)
