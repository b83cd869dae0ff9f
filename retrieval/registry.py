"""What ``retrieval.type`` may name beside the types of an index: retrievers that bring their own evidence."""

from __future__ import annotations

RETRIEVERS = {
    "http": "retrieval.http.retriever:HttpRetriever",
    "web": "retrieval.http.web:WebRetriever",
    "replay": "retrieval.replay:ReplayRetriever",
}
"""Made as ``SomeRetriever(options)`` with the recipe's ``retrieval.options``, as a ``my_module:MyRetriever`` is."""

SHARED_KEYS = {"http": ("timeout_s", "max_retries", "cache_size"), "web": ("timeout_s", "max_retries")}
"""Keys of the recipe's ``retrieval`` section that a type takes among its options, where these do not name them."""


def needs_index(retrieval_type: str) -> bool:
    """Return whether this type is a kind of index, to be built and served, rather than a retriever of its own."""
    return retrieval_type not in RETRIEVERS and ":" not in retrieval_type
