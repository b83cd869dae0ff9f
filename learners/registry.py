"""The learning algorithms by name; what they pull in is imported where they are wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from learners import options
from ragr1_actors.plugins import load_object

if TYPE_CHECKING:
    from learners.learner import Learner
    from ragr1_actors.config import TrainingSettings

LEARNERS: dict[str, type[Learner] | str] = {
    "cispo": "learners.cispo:CISPOLearner",
    "dapo": "learners.dapo:DAPOLearner",
    "dpo": "learners.dpo:DPOLearner",
    "dr_grpo": "learners.dr_grpo:DrGRPOLearner",
    "grpo": "learners.grpo:GRPOLearner",
    "gspo": "learners.gspo:GSPOLearner",
    "ipo": "learners.dpo:IPOLearner",
    "ppo": "learners.ppo:PPOLearner",
    "reinforce_pp": "learners.reinforce_pp:ReinforcePPLearner",
    "rloo": "learners.rloo:RLOOLearner",
    "sft": "learners.sft:SFTLearner",
}

OPTIONS: dict[str, type[options.LearnerOptions]] = {
    "cispo": options.CISPOOptions,
    "dapo": options.DAPOOptions,
    "dpo": options.PreferenceOptions,
    "dr_grpo": options.DrGRPOOptions,
    "grpo": options.GroupOptions,
    "gspo": options.GSPOOptions,
    "ipo": options.PreferenceOptions,
    "ppo": options.PPOOptions,
    "reinforce_pp": options.ReinforcePPOptions,
    "rloo": options.RLOOOptions,
    "sft": options.LearnerOptions,
}
"""``options_class`` of every learner, to be had without importing it."""


def learner_options(training: TrainingSettings) -> options.LearnerOptions:
    """Return the validated options of ``training.algorithm``; of the algorithms above, nothing is imported for it.

    Raises:
        ConfigError: an option is unknown or has a value that it cannot have; the algorithm is nothing that there is.
    """
    name = training.algorithm
    options_class = OPTIONS[name] if name in OPTIONS else load_object(name, LEARNERS).options_class
    return options.parse_options(options_class, training.options, name)
