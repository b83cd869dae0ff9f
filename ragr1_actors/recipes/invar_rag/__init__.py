"""Invar-RAG: an encoder tuned to find the same in any wording of a question, then SFT on what it finds."""
