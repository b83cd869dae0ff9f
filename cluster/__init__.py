"""Where the system runs: Ray sessions, placement, autoscaling, calls between actors, jobs, storage and its cache."""
