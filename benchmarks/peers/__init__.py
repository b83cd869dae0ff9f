"""Other systems on the same work: a process per system, in an environment of its own."""
