"""A*: a language model learns a heuristic, from nodes that are drawn near the goal more often."""
