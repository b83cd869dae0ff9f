"""Baselines of a policy that searches: a direct answer, and standard RAG (one search with the question).

Both are one turn with the same policy, the same retriever and the same scores: ``SearchEnv`` in another ``mode``, with
these prompts. A third baseline, one query per turn, is ``max_queries_per_turn=1`` and ``query_format=single``.
"""

from __future__ import annotations

from retrieval.base import NoRetriever  # noqa: F401 - stored scores have its path here in their digest

DIRECT_PROMPT = (
    "Answer the question below from what you know; nothing can be looked up. You may reason inside <think> and "
    "</think>. Then write only the short answer inside <answer> and </answer>.\nQuestion: {question}"
)
RAG_PROMPT = (
    "Answer the question below. A search for it found the documents inside <information> and </information>; nothing "
    "more can be looked up. You may reason inside <think> and </think>. Then write only the short answer inside "
    "<answer> and </answer>.\n{passages}\nQuestion: {question}"
)
