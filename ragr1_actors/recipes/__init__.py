"""Recipes: what ``ragr1 train`` can be told to do by a name. A folder is a method."""
