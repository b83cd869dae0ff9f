"""Grammars: the text of a turn as an action or as calls of tools, and back."""
