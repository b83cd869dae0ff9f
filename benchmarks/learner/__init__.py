"""Learning: packed rows against padded ones, and what only a GPU shows."""
