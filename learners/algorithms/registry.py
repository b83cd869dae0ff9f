"""The learning algorithms by name; what they pull in is imported where they are wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from learners.algorithms import options
from ragr1_actors.core.plugins import load_object

if TYPE_CHECKING:
    from learners.learner import Learner
    from ragr1_actors.core.config import TrainingSettings

LEARNERS: dict[str, type[Learner] | str] = {
    "cispo": "learners.algorithms.cispo:CISPOLearner",
    "dapo": "learners.algorithms.dapo:DAPOLearner",
    "dpo": "learners.algorithms.dpo:DPOLearner",
    "dr_grpo": "learners.algorithms.dr_grpo:DrGRPOLearner",
    "grpo": "learners.algorithms.grpo:GRPOLearner",
    "gspo": "learners.algorithms.gspo:GSPOLearner",
    "ipo": "learners.algorithms.dpo:IPOLearner",
    "ppo": "learners.algorithms.ppo:PPOLearner",
    "reinforce_pp": "learners.algorithms.reinforce_pp:ReinforcePPLearner",
    "rloo": "learners.algorithms.rloo:RLOOLearner",
    "sft": "learners.algorithms.sft:SFTLearner",
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
