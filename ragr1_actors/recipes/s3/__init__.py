"""s3: a searcher that is trained against a frozen generator."""
