"""Passages: corpus files and their readers, splitting and normalising of text, and the memory-mapped corpus."""
