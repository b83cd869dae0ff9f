"""The viewer of a run's trajectories: a small index on disk, filters over it, and a local web page."""
