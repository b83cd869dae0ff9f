"""The learning algorithms by name; what they pull in is imported where they are wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from learners.learner import Learner

LEARNERS: dict[str, type[Learner] | str] = {
    "grpo": "learners.grpo:GRPOLearner",
    "ppo": "learners.ppo:PPOLearner",
    "sft": "learners.sft:SFTLearner",
}
