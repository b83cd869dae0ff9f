"""Storage of a run: its directory, its URI, the folders that are whole or absent, and who works in it."""
