"""VRAG-RL: a policy that reads page images searches for pages, and crops them to look closer."""
