"""Env runners as actors: their group, its queue, its weights, and the fleets of a process."""
