"""OREO: offline learning from stored trajectories, by a policy and a value that keep the soft Bellman equation."""
