"""Learner ranks: one Learner in the driver, or one actor per rank, which step together and restart together."""
