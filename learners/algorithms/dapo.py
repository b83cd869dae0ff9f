"""DAPO: GRPO with a higher upper clip, a mean over tokens, groups that differ, and a price on running long."""

from __future__ import annotations

from typing import ClassVar

from learners.algorithms.grpo import GRPOLearner
from learners.algorithms.options import DAPOOptions, LearnerOptions


class DAPOLearner(GRPOLearner):
    """Decoupled clip and dynamic sampling policy optimization (Yu et al., arXiv:2503.14476).

    Its four parts: the clip of 0.2 below and 0.28 above; groups whose rewards are all alike are replaced by others
    (``max_sampled_batches``, in the algorithm's loop); the mean over tokens; overlong shaping (``overlong_share``).
    Deviations: length counts MODEL tokens alone, which is all that the policy has a say in, and the reward of the
    environment decides whether a group's rewards are alike, before shaping.
    """

    options_class: ClassVar[type[LearnerOptions]] = DAPOOptions
    default_clip: ClassVar[tuple[float, float]] = (0.2, 0.28)
