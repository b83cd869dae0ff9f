"""Registry of algorithms, and the options of each: ``training.options`` of a recipe.

This module imports no torch, so a recipe is checked before any heavy import. Defaults are from the algorithm's paper;
the docstring of a learner states where its code differs from the paper.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import Field, create_model, field_validator, model_validator

from ragr1_actors.core.config import RunConfig, TrainingSettings
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.resolve import load_object
from ragr1_actors.core.section import Section

if TYPE_CHECKING:  # imports torch
    from learners.learner import Learner

KLEstimator = Literal["k1", "k2", "k3"]
"""Estimators of KL(policy, reference); ``learners/losses.py`` has their formulas and gradients."""
GROUP_EPSILON = 1e-6
"""Number that is added to the standard deviation of a group's rewards."""
Aggregation = Literal["token_mean", "trajectory_mean", "constant"]
"""Mean over the token losses of a step; ``learners.losses.trajectory_weights`` has the formulas."""


CorrectionKind = Literal["truncate", "mask", "geometric_mask", "reject"]
"""Kind of sequence correction; ``learners.losses.sequence_weights`` has the formulas and their sources."""
_BOUNDS: dict[CorrectionKind, tuple[float, float]] = {
    "truncate": (0.0, 2.0),
    "mask": (0.5, 2.0),
    "geometric_mask": (0.99, 1.01),
    "reject": (1e-4, 100.0),
}
"""Default bounds: from verl's presets ``decoupled_seq_is`` and ``decoupled_seq_is_rs``, then from SkyRL's page on
off-policy correction."""


class SequenceCorrection(Section):
    """Weights of whole trajectories that correct for the gap between engine and learner, and for a lag.

    A ratio is the probability under the learner divided by the probability under the engine that sampled.
    """

    kind: CorrectionKind
    """``truncate`` weighs a trajectory by its ratio, ``high`` at most; ``mask`` by its ratio, or by 0 if it is outside
    the bounds. ``geometric_mask`` weighs it by 0 if the geometric mean of its tokens' ratios is outside, and ``reject``
    if the ratio of any of its tokens is; else by 1."""
    low: float | None = Field(None, ge=0, lt=1)
    """Least legal ratio; not with ``truncate``. null is 0.5 for ``mask``, 0.99 for ``geometric_mask``, 0.0001 for
    ``reject``."""
    high: float | None = Field(None, ge=1, le=1e6)
    """Largest legal ratio. null is 2 for ``truncate`` and ``mask``, 1.01 for ``geometric_mask``, 100 for ``reject``."""

    @property
    def bounds(self) -> tuple[float, float]:
        """Least and largest legal ratio; the least is 0 for ``truncate``."""
        low, high = _BOUNDS[self.kind]
        return low if self.low is None else self.low, high if self.high is None else self.high

    @property
    def is_weight(self) -> bool:
        """Whether the ratio itself is a factor of the loss."""
        return self.kind in ("truncate", "mask")

    @model_validator(mode="after")
    def _truncates_from_above(self) -> Self:
        if self.kind == "truncate" and self.low is not None:
            raise ValueError("truncate has no low, it bounds weights from above; leave low out, or take kind: mask")
        return self


class TurnCredit(Section):
    """Advantages per turn, besides the advantages of trajectories, after GiGPO."""

    weight: float = Field(1.0, gt=0)
    """Factor of a turn's advantage; the trajectory's is 1. Default: GiGPO's run with searches, like ``gamma``."""
    gamma: float = Field(0.95, ge=0, le=1)
    """Discount per turn."""


class LearnerOptions(Section):
    """Options of an algorithm without options, and base of all options."""

    min_group_size: ClassVar[int] = 1
    """Least ``training.group_size``."""

    def check(self, config: RunConfig) -> None:
        """Refuse, with a ``ConfigError``, options that contradict other keys of the run."""

    @classmethod
    def with_defaults(cls, **defaults: Any) -> type[Self]:
        """Return the same options with other defaults, by name."""
        known = {name: cls.model_fields[name] for name in defaults}
        fields: dict[str, Any] = {
            name: (Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation, defaults[name])
            for name, info in known.items()
        }
        return create_model(cls.__name__, __base__=cls, **fields)


class PolicyGradientOptions(LearnerOptions):
    """Options of every policy gradient."""

    clip_low: float | None = Field(None, ge=0)
    """Largest fall of the probability ratio below 1; null takes the algorithm's default, 0.2 for most."""
    clip_high: float | None = Field(None, ge=0)
    """Largest rise of the probability ratio above 1; null takes the algorithm's default, 0.2 for most."""
    tis_clip: float = Field(0.0, ge=0)
    """Truncated importance sampling: each token's loss is weighted by its probability under the learner divided by its
    probability under the engine, truncated at this value. 2 is usual; 0 (default) turns it off. An update of several
    steps needs one more forward pass."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Term to which ``training.kl_coeff`` times the divergence from the reference is added."""
    kl_estimator: KLEstimator = "k3"
    """Estimator of the KL divergence from the reference; k3 is usual in the loss, k1 in the reward."""
    dual_clip: float = Field(0.0, ge=0)
    """Largest ratio, such as 3, that counts in the loss of a token with a negative advantage; 0 sets no bound."""
    llds_coeff: float = Field(0.0, ge=0)
    """Coefficient of the likelihood-displacement regulariser (LLDS); 0 turns it off."""
    llds_gate: Literal["turn", "trajectory"] = "turn"
    """The unit whose total likelihood must fall before its tokens are regularised."""
    sequence_correction: SequenceCorrection | None = None
    """Weights or masks of whole trajectories for the gap between learner and engine: ``{kind: geometric_mask}``; null
    (default) is off. An update of several steps needs one more forward pass, as with ``tis_clip``."""

    def check(self, config: RunConfig) -> None:
        """Refuse a KL term that pulls nowhere, and a correction that uses the ratio twice or that has no ratio."""
        if config.training.kl_coeff and (self.kl_in, self.kl_estimator) == ("loss", "k1"):
            raise ConfigError(
                "training.options.kl_estimator: got k1 with kl_in: loss, where its mean gradient is 0; take k2 or k3, "
                "or kl_in: reward"
            )
        correction, top_p = self.sequence_correction, config.env_runners.top_p
        if correction is None:
            return
        key = f"training.options.sequence_correction: got kind: {correction.kind} with"
        if correction.is_weight and self.tis_clip:
            raise ConfigError(
                f"{key} tis_clip={self.tis_clip:g}, which counts every ratio twice; set tis_clip to 0, or "
                "take kind: geometric_mask or reject, which go with it"
            )
        if top_p < 1 and (correction.kind != "reject" or correction.bounds[0] > top_p):
            raise ConfigError(
                f"{key} env_runners.top_p={top_p:g}, under which the engine's log-probs are those of the nucleus and "
                "every token's ratio is below 1; expected top_p of 1, or kind: reject with low below top_p"
            )

    @field_validator("dual_clip")
    @classmethod
    def _above_1(cls, value: float) -> float:
        if 0 < value <= 1:
            raise ValueError("expected more than 1, such as 3, or 0 for no bound")
        return value


class PPOOptions(PolicyGradientOptions):
    """Options of PPO; the defaults are from Search-R1 and RAG-R1."""

    kl_in: Literal["loss", "reward"] = "reward"
    kl_estimator: KLEstimator = "k1"
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of later rewards per MODEL token; 1 discounts nothing."""
    lambda_: float = Field(1.0, ge=0, le=1)
    """Lambda of GAE: 1 has no bias from the critic, 0 the least variance."""
    vf_lr: float | None = Field(None, gt=0)
    """Learning rate of the critic; null is ten times ``training.lr``, as in Search-R1 and RAG-R1 (1e-5, 1e-6)."""
    vf_warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the critic's learning rate warms up."""
    vf_clip: float = Field(0.5, gt=0)
    """Largest move of the critic's value from its old one that lowers the value loss (PPO's value clipping)."""


class GroupOptions(PolicyGradientOptions):
    """Options of GRPO and of every algorithm that compares within a group."""

    min_group_size: ClassVar[int] = 2
    drop_zero_variance: bool | None = None
    """Whether groups whose rewards are all equal are left out: their advantages are 0. ``null`` (default) leaves them
    out if none of ``training.kl_coeff``, ``training.entropy_coeff``, ``overlong_share`` and ``turn_credit`` gives them
    a gradient."""
    max_sampled_batches: int = Field(1, ge=1)
    """Dynamic sampling: limit of batches of tasks sampled to fill one with groups whose rewards differ; 1 is off."""
    aggregation: Aggregation = "token_mean"
    """Mean of the token losses of a step: over all tokens, over trajectories, or sums divided by
    ``max_model_tokens``."""
    max_model_tokens: int = Field(0, ge=0)
    """Limit of MODEL tokens per trajectory: the constant of ``aggregation`` and the limit of ``overlong_share``; 0 is
    the number that ``environment.max_turns`` and ``env_runners.max_new_tokens_per_turn`` allow, at most
    ``env_runners.max_context_tokens``."""
    overlong_share: float = Field(0.0, ge=0, lt=1)
    """Overlong shaping: the reward falls by 1 over this last share of ``max_model_tokens``; 0 turns it off."""
    turn_credit: TurnCredit | None = None
    """Credit for turns, compared with turns of the group that begin in the same state: ``{weight: 1, gamma: 0.95}``;
    null (default) turns it off."""


class ReinforcePPOptions(GroupOptions):
    """Options of REINFORCE++ with baseline; in groups of one, the baseline is the mean of the batch."""

    min_group_size: ClassVar[int] = 1
    drop_zero_variance: bool | None = False
    kl_estimator: KLEstimator = "k2"


class CISPOOptions(GroupOptions):
    """Options of CISPO."""

    drop_zero_variance: bool | None = True
    dual_clip: float = Field(0.0, ge=0, le=0)
    """Only 0 is legal: CISPO already bounds the ratio."""


class PreferenceOptions(LearnerOptions):
    """Options of DPO and IPO; the two trajectories of a pair are in one group."""

    min_group_size: ClassVar[int] = 2
    beta: float = Field(0.1, gt=0)
    """Strength of the pull towards the reference; named tau in IPO's paper."""


OptionsT = TypeVar("OptionsT", bound=LearnerOptions)


def read_options(options_class: type[OptionsT], training: TrainingSettings) -> OptionsT:
    """Validate ``training.options``, and ``training.group_size``, for the algorithm of ``options_class``.

    Raises:
        ConfigError: a name is unknown, a type wrong or a value out of range; it names algorithm and option.
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
    # its paper shapes from 16,384 of 20,480 tokens; its code samples at most ten batches
    "dapo": (
        "grpo:DAPOLearner",
        GroupOptions.with_defaults(drop_zero_variance=True, max_sampled_batches=10, overlong_share=0.2),
    ),
    "dpo": ("dpo:DPOLearner", PreferenceOptions),
    "dr_grpo": ("grpo:DrGRPOLearner", GroupOptions.with_defaults(aggregation="constant")),
    "grpo": ("grpo:GRPOLearner", GroupOptions),
    "gspo": ("grpo:GSPOLearner", GroupOptions.with_defaults(aggregation="trajectory_mean")),
    "ipo": ("dpo:IPOLearner", PreferenceOptions),
    "ppo": ("grpo:PPOLearner", PPOOptions),
    "reinforce_pp": ("grpo:ReinforcePPLearner", ReinforcePPOptions),
    "rloo": (
        "grpo:RLOOLearner",
        GroupOptions.with_defaults(kl_in="reward", kl_estimator="k1", aggregation="constant"),
    ),
    "sft": ("sft:SFTLearner", LearnerOptions),
}

LEARNERS: dict[str, type[Learner] | str] = {
    name: f"learners.algorithms.{learner}" for name, (learner, _) in _ALGORITHMS.items()
}
"""Learner classes by the value of ``training.algorithm``; a class is imported at its first use."""

OPTIONS = {name: options for name, (_, options) in _ALGORITHMS.items()}
"""``options_class`` of every learner, without importing the learner."""


def learner_options(training: TrainingSettings) -> LearnerOptions:
    """Return the validated options of ``training.algorithm``; only a custom algorithm is imported.

    Raises:
        ConfigError: an option is unknown or has an illegal value, or the algorithm does not exist.
    """
    name = training.algorithm
    options_class = OPTIONS[name] if name in OPTIONS else load_object(name, LEARNERS).options_class
    return read_options(options_class, training)


def has_variance(rewards: Sequence[float]) -> bool:
    """Return whether the rewards of a group differ. True for a group of one, which has no baseline."""
    return len(rewards) == 1 or (len(rewards) > 1 and max(rewards) - min(rewards) > GROUP_EPSILON)
