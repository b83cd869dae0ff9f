"""Retrieval actors: replicas, their client, batching across trajectories."""
