"""What every other package may import: types, Arrow schema, errors, configuration, files. Imports none of them."""
