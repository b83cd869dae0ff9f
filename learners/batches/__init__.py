"""Trajectories to training batches: packing without padding."""
