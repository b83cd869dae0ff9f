"""The inverted index of this project beside tantivy's: recall, build memory, queries per second, bytes on disk.

    pip install tantivy==0.27.0
    python -m benchmarks.retrieval.bm25_tantivy ours|tantivy CORPUS QUESTIONS [COPIES]

One process per side, so that the peak memory is that of one builder. ``QUESTIONS`` is a JSON list in HotpotQA's format.
``COPIES`` repeats the corpus with other words, to measure at a larger size. Prints one JSON object.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ragr1_actors.core.disk.files import fingerprint_file
from retrieval.base import Passage
from retrieval.corpora.corpus import write_corpus
from retrieval.corpora.readers import read_passages
from retrieval.corpora.text import STOP_WORDS
from retrieval.indexes.bm25 import BM25Ranker, bm25_text, build_bm25
from retrieval.indexes.manifest import FileRecord, Manifest

Search = Callable[[str, int], list[int]]
REPEATS = 3


def passages(corpus: Path, copies: int) -> Iterator[Passage]:
    """Yield the corpus, then copies of it with other words for every "the"."""
    for copy in range(copies):
        for number, passage in enumerate(read_passages(corpus)):
            text = passage.text.replace(" the ", f" w{copy}x{number % 5000} ") if copy else passage.text
            yield Passage(f"{passage.id}~{copy}" if copy else passage.id, passage.title, text)


def ours(corpus: Path, copies: int, folder: Path) -> Callable[[], Search]:
    """Build this project's index; return what opens it."""
    build_bm25(map(bm25_text, passages(corpus, copies)), folder)

    def open_index() -> Search:
        with tempfile.TemporaryDirectory() as spare:
            count = write_corpus(passages(corpus, copies), spare)
        manifest = Manifest("bm25", count, FileRecord("corpus.arrow", 0, fingerprint_file(corpus)), ())
        ranker = BM25Ranker(folder, manifest)

        def search(query: str, k: int) -> list[int]:
            rows = ranker.rank([query], k).rows[0]
            return [int(row) for row in rows if row >= 0]

        return search

    return open_index


def tantivy(corpus: Path, copies: int, folder: Path) -> Callable[[], Search]:
    """Build tantivy's index, with the same stop words and stemmer; return what opens it."""
    import tantivy as library

    words = library.TextAnalyzerBuilder(library.Tokenizer.simple()).filter(library.Filter.lowercase())
    words = words.filter(library.Filter.ascii_fold()).filter(library.Filter.custom_stopword(sorted(STOP_WORDS)))
    analyzer = words.filter(library.Filter.stemmer("english")).build()
    builder = library.SchemaBuilder()
    builder.add_text_field("body", tokenizer_name="words", index_option="freq")
    builder.add_unsigned_field("row", fast=True)
    schema = builder.build()
    index = library.Index(schema, path=str(folder))
    index.register_tokenizer("words", analyzer)
    writer = index.writer(heap_size=128 * 2**20, num_threads=1)
    for row, passage in enumerate(passages(corpus, copies)):
        document = library.Document()
        document.add_text("body", bm25_text(passage))
        document.add_unsigned("row", row)
        writer.add_document(document)
    writer.commit()
    writer.wait_merging_threads()

    def open_index() -> Search:
        index.reload()
        searcher = index.searcher()

        def search(query: str, k: int) -> list[int]:
            terms = [
                (library.Occur.Should, library.Query.term_query(schema, "body", word, "freq"))
                for word in sorted(set(analyzer.analyze(query)))
            ]
            hits = searcher.search(library.Query.boolean_query(terms), k, count=False).hits
            return list(searcher.fast_field_values("row", [address for _, address in hits]))

        return search

    return open_index


def measure(side: str, corpus: Path, questions: list[dict[str, Any]], copies: int) -> dict[str, Any]:
    """Build, then search."""
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        began = time.perf_counter()
        open_index = {"ours": ours, "tantivy": tantivy}[side](corpus, copies, Path(folder))
        found: dict[str, Any] = {"side": side, "corpus": corpus.name, "build_s": time.perf_counter() - began}
        found["build_mb"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        found["index_bytes"] = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        search = open_index()
        kept = list(passages(corpus, copies))
        found["passages"] = len(kept)
        titles = {passage.title for passage in kept}
        for k in (2, 5):
            recalls = []
            for question in questions:
                wanted = {fact[0] for fact in question["supporting_facts"]} & titles
                got = {kept[row].title for row in search(question["question"], k)}
                recalls += [len(wanted & got) / len(wanted)] if wanted else []
            found[f"recall@{k}"] = sum(recalls) / len(recalls) if recalls else None
        some = kept[:: max(1, len(kept) // 200)]
        by_words = [passage in [kept[r] for r in search(" ".join(passage.text.split()[:12]), 5)] for passage in some]
        found["found_by_its_first_12_words@5"] = sum(by_words) / len(by_words)
        for k in (3, 100):
            rates = []
            for _ in range(REPEATS):
                began = time.perf_counter()
                for question in questions:
                    search(question["question"], k)
                rates.append(len(questions) / (time.perf_counter() - began))
            found[f"queries_per_s@{k}"] = max(rates)
    return {key: round(value, 4) if isinstance(value, float) else value for key, value in found.items()}


if __name__ == "__main__":
    side, corpus, questions, *copies = sys.argv[1:]
    given = json.loads(Path(questions).read_text(encoding="utf-8"))
    print(json.dumps(measure(side, Path(corpus), given, int(copies[0]) if copies else 1)))
