"""Pages about runs: ``report.html`` of one run, and the viewer of its trajectories."""
