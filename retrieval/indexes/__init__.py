"""Indexes: building and searching every type, by vectors and by words."""
