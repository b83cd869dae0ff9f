"""Files and folders on disk: whole or absent, locked, validated, with digests; and what is told about faulty ones."""
