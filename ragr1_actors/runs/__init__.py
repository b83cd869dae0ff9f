"""What a run leaves on disk: its directory, checkpoints, metrics, trajectories and report."""
