"""Text to vectors: query and passage encoders, rerankers, stored embeddings and the actors that compute them."""
