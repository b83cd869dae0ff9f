"""The learning algorithms by name. Imports torch and transformers, so it is imported where they are needed."""

from __future__ import annotations

from learners.grpo import GRPOLearner
from learners.learner import Learner
from learners.ppo import PPOLearner
from learners.sft import SFTLearner

LEARNERS: dict[str, type[Learner]] = {"grpo": GRPOLearner, "ppo": PPOLearner, "sft": SFTLearner}
