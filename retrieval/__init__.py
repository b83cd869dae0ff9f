"""Evidence: corpora, encoders, indexes and the fleet that serves them."""
