"""Questions with their answers: task files, their formats, and the sets of the papers."""
