"""Evaluation of a policy without a learner: ``ragr1 evaluate``, ``ragr1 select`` and ``ragr1 ask``."""
