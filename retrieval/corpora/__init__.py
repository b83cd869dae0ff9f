"""Passages: reading corpus files, splitting and normalising text, and the memory-mapped corpus."""
