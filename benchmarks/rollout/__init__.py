"""The loop of trajectories on an engine: its speed, its ceiling, its scaling, its pauses."""
