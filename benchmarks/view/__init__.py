"""The viewer of trajectories."""
