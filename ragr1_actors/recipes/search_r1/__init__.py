"""Search-R1: one query per turn, PPO or GRPO, and a reward for the format."""
