"""Vectors and terms to ranked passages: building and searching every type of index."""
