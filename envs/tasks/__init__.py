"""Questions with their answers: task files and published sets, the small world, and demonstrations of both."""
