"""ARENA: the policy names the passages that matter, analyses them and answers; a bonus where all of it is right."""
