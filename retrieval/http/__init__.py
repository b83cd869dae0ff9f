"""Retrieval over HTTP: the /retrieve server and client, and web search."""
