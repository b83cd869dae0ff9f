"""Toy worlds that several methods share."""
