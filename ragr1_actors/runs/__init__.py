"""Directory of a run: checkpoints, metrics, trajectories and report."""
