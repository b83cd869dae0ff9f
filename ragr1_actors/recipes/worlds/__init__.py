"""Worlds that the toy recipes of several methods share."""
