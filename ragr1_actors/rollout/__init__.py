"""Trajectories: the loop between engine and environment, the runners that run it, and their fleet."""
