"""The system on machines: Ray sessions, placement, autoscaling, calls between actors, jobs, storage and its cache."""
