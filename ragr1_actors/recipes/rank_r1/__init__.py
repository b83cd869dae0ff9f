"""Rank-R1: the policy reasons about candidates that a retriever found, and names the most relevant one."""
