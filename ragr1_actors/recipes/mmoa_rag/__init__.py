"""MMOA-RAG: query rewriter, selector and generator, one policy in three roles."""
