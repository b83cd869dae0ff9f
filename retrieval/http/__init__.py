"""Retrieval over HTTP: server and client of ``/retrieve``, and web search."""
