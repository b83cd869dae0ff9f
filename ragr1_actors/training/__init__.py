"""The training loop: data preparation, the algorithm, its buffer, stages and checks before a run."""
