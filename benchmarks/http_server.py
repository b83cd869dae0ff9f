"""The other side of ``bench retrieval``: a retrieval server of the shape that Search-R1 made usual.

    python -m benchmarks.http_server INDEX_DIR PORT      (an index of the benchmark; "stub" for INDEX_DIR finds at once)

One JSON request a caller; a pool of 40 threads as Starlette gives to plain functions; each request encodes its own
queries, searches its own index call with faiss's own settings, and copies the documents into dictionaries. Nothing is
batched across requests, nothing remembered. In its favour: the passages are mapped and not a list of dictionaries, no
cache is emptied after a request, and connections are kept alive.
"""

from __future__ import annotations

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from aiohttp import web

from retrieval.corpus import Corpus
from retrieval.encoder import Encoder
from retrieval.manifest import Manifest

NUM_THREADS = 40
STUB = "stub"


class Server:
    """Answers ``/retrieve``."""

    def __init__(self, index_dir: Path) -> None:
        manifest = Manifest.read(index_dir)
        self._encoder = Encoder.load(manifest.encoder)
        self._corpus = Corpus.open(index_dir)
        self._index = faiss.read_index(str(index_dir / manifest.shards[0].file.name))

    def retrieve(self, queries: list[str], k: int) -> list[list[dict[str, Any]]]:
        vectors = self._encoder.encode_queries(queries)
        scores, rows = self._index.search(np.ascontiguousarray(vectors), k)
        return [
            [
                {"document": {"id": p.id, "contents": f'"{p.title}"\n{p.text}'}, "score": float(score)}
                for p, score in zip(self._corpus.take(query_rows.tolist()), query_scores, strict=True)
            ]
            for query_rows, query_scores in zip(rows, scores, strict=True)
        ]


class StubServer:
    """Finds the same passages for every query, at no cost: what is left is the transport."""

    def retrieve(self, queries: list[str], k: int) -> list[list[dict[str, Any]]]:
        from benchmarks.stubs import stub_passages

        return [
            [
                {"document": {"id": p.id, "contents": f'"{p.title}"\n{p.text}'}, "score": p.score}
                for p in stub_passages(query, k)
            ]
            for query in queries
        ]


def main() -> None:
    """Serve until killed."""
    index_dir, port = sys.argv[1], int(sys.argv[2])
    server: Any = StubServer() if index_dir == STUB else Server(Path(index_dir))
    threads = ThreadPoolExecutor(NUM_THREADS)

    async def handle(request: web.Request) -> web.Response:
        body = await request.json()
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(threads, server.retrieve, body["queries"], body["topk"])
        return web.json_response({"result": found})

    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_post("/retrieve", handle)
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


if __name__ == "__main__":
    main()
