"""One file per algorithm, its options, and the registry of names."""
