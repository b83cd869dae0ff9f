"""IM-RAG: a progress tracker pays each round for the evidence that it found, and PPO learns each at its round."""
