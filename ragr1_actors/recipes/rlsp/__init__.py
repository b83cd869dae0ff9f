"""RLSP: PPO on the outcome and on a separate reward for exploration, with a schedule."""
