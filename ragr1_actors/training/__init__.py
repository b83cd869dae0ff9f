"""The training loop: the algorithm, its data, buffer and stages, its plan, evaluation, and the loop in virtual time."""
