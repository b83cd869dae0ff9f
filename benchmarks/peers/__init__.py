"""Other systems on the same work: a process per system, each with separate packages."""
