"""Passages: reading corpus files, splitting, the memory-mapped corpus, auditing it against tasks."""
