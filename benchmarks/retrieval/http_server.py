"""The other side of ``bench retrieval``: a retrieval server of the shape that Search-R1 made usual.

    python -m benchmarks.retrieval.http_server INDEX_DIR PORT

``INDEX_DIR`` is an index of the benchmark; ``stub`` in its place finds at once.

FastAPI, a plain function behind one JSON request per caller, run by Starlette's pool of 40 threads. Each request
encodes its own queries, searches by a separate index call with faiss's defaults, and returns dictionaries. Nothing is
batched across requests, nothing remembered. In its favour: the passages are mapped and not a list of dictionaries, no
GPU cache is emptied after a request, and a load's connections are kept alive.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from retrieval.base import Passage

STUB = "stub"


class QueryRequest(BaseModel):
    """The body of a request."""

    queries: list[str]
    topk: int = 3
    return_scores: bool = False


class Server:
    """Searches an index directory: one request at a time per thread."""

    def __init__(self, index_dir: Path) -> None:
        import faiss

        from retrieval.corpora.corpus import Corpus
        from retrieval.encoders.encoder import Encoder
        from retrieval.indexes.manifest import Manifest

        manifest = Manifest.read(index_dir)
        self._encoder = Encoder.load(manifest.encoder)
        self._corpus = Corpus.open(index_dir)
        self._index = faiss.read_index(str(index_dir / manifest.shards[0].file.name))

    def search(self, queries: list[str], k: int) -> list[list[tuple[Passage, float]]]:
        vectors = self._encoder.encode_queries(queries)
        scores, rows = self._index.search(np.ascontiguousarray(vectors), k)
        return [
            list(zip(self._corpus.take(query_rows), query_scores, strict=True))
            for query_rows, query_scores in zip(rows.tolist(), scores.tolist(), strict=True)
        ]


class StubServer:
    """Finds passages for every query at no cost: what is left is the transport."""

    def search(self, queries: list[str], k: int) -> list[list[tuple[Passage, float]]]:
        from benchmarks.retrieval.stubs import stub_passages

        return [[(passage, passage.score) for passage in stub_passages(query, k)] for query in queries]


def make_app(server: Any) -> FastAPI:
    """The one route."""
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve(request: QueryRequest) -> dict[str, Any]:
        found = server.search(request.queries, request.topk)
        return {
            "result": [
                [{"document": {"id": p.id, "contents": f'"{p.title}"\n{p.text}'}, "score": score} for p, score in hits]
                for hits in found
            ]
        }

    return app


def main() -> None:
    """Serve until killed."""
    index_dir, port = sys.argv[1], int(sys.argv[2])
    server = StubServer() if index_dir == STUB else Server(Path(index_dir))
    uvicorn.run(make_app(server), host="127.0.0.1", port=port, log_level="error", access_log=False)


if __name__ == "__main__":
    main()
