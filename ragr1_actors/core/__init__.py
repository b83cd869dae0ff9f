"""Types, Arrow schema, errors, configuration and files, which every other package may import. Imports none of these."""
