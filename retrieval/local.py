"""Retrievers that answer in this process, without Ray: ``LocalRetriever`` searches an index directory,
``ReplayRetriever`` answers from the searches that a run recorded, without an index, an encoder or a server."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ragr1_actors.core.config import RetrievalSettings
from ragr1_actors.core.disk.folders import Folder
from ragr1_actors.core.errors import ConfigError, DataError, RetrievalError
from ragr1_actors.core.resolve import STATIC, load_object, path_of
from ragr1_actors.core.schema import TRAJECTORIES, read_trajectories
from ragr1_actors.core.types import ToolCall
from retrieval.base import OPEN_PAGE, RETRIEVERS, SEARCH, SHARED_KEYS, Hits, Page, Passage, Retriever, needs_index
from retrieval.corpora.corpus import Corpus, Titles
from retrieval.corpora.text import normalise
from retrieval.indexes.manifest import ENCODER_FOLDER, FLAT, FOREIGN, HYBRID, TITLES_FILE, Manifest, parse_options
from retrieval.indexes.ranking import Rank, Ranking, fused, to_hits

if TYPE_CHECKING:
    from retrieval.encoders.reranker import Reranker
    from retrieval.indexes.vector_index import DenseRanker


def open_retriever(index_dir: str | Path | None, settings: RetrievalSettings) -> Retriever:
    """Return the retriever of a recipe's ``retrieval`` section that searches in this process, without a fleet.

    ``index_dir`` is None if ``settings.type`` needs no index; the class that it names is made with its options.

    Raises:
        UserError: the index or an option cannot be used.
    """
    if index_dir is None:
        shared = {key: getattr(settings.requests, key) for key in SHARED_KEYS.get(settings.type, ())}
        made: Retriever = load_object(settings.type, RETRIEVERS)(shared | dict(settings.options))
        return made
    num_threads = max(1, math.ceil(settings.num_cpus_per_retriever))
    return LocalRetriever(index_dir, num_threads, reranker=settings.reranker, options=settings.options)


def retriever_class(retrieval_type: str) -> type:
    """Return the class whose methods show what retrievers of a type can do; retrievers of a fleet can do the same."""
    found: type = LocalRetriever if needs_index(retrieval_type) else load_object(retrieval_type, RETRIEVERS)
    return found


def inner_retriever(options: Mapping[str, Any]) -> Retriever:
    """Return the retriever inside a custom one; options are keys of ``retrieval``: ``{"type": "bm25", "index": DIR}``.

    Raises:
        UserError: the index or an option cannot be used.
    """
    settings = RetrievalSettings.read(options, "retrieval.options.inner")
    return open_retriever(named_index(settings) if needs_index(settings.type) else None, settings)


def named_index(settings: RetrievalSettings) -> Path:
    """Return the index that ``retrieval.index`` names; ``DataError`` if it is not an index or has another encoder.

    An empty ``retrieval.encoder`` accepts the index's encoder.
    """
    manifest = Manifest.read(settings.index)
    if manifest.is_dense and settings.encoder and not _is_encoder_of(manifest, settings.encoder):
        raise DataError(
            f"{settings.index} was built with encoder {manifest.encoder!r}, but retrieval.encoder is "
            f"{settings.encoder!r}; leave retrieval.encoder empty or name the same, or build another index"
        )
    return Path(settings.index)


def encoder_of(settings: RetrievalSettings) -> str:
    """Return the encoder of a dense index: from the settings, from the index on this machine, or ``static``."""
    if settings.encoder or not settings.index or not Path(settings.index).is_dir():
        return settings.encoder or STATIC
    encoder = Manifest.read(settings.index).encoder
    return STATIC if encoder == ENCODER_FOLDER else encoder


def index_types_of(settings: RetrievalSettings) -> tuple[str, str]:
    """Return the type of what is searched, and the type of its vectors, which differ if it is ``hybrid``.

    The types are those of the index on this machine, unless it was adopted; else of the setting, with ``flat`` vectors.
    """
    found, vectors = settings.type, FLAT
    if needs_index(found) and settings.index and Path(settings.index).is_dir():
        manifest = Manifest.read(settings.index)
        if manifest.index_type != FOREIGN:
            found, vectors = manifest.index_type, manifest.vector_type
    return found, vectors if found == HYBRID else found


def _is_encoder_of(manifest: Manifest, name: str) -> bool:
    """Return whether an index was built with an encoder; a folder may be given by any path or link to it."""
    if manifest.encoder == ENCODER_FOLDER:
        return name in (STATIC, ENCODER_FOLDER)
    path = path_of(name, STATIC)
    return path is not None and (name == manifest.encoder or path.resolve().name == Path(manifest.encoder).name)


class LocalRetriever:
    """Searches one index directory in the process that asks.

    The memory maps are shared by all processes of a node, so a second retriever takes little more than its encoder. It
    pickles as its arguments: the receiving process opens the index itself.
    """

    def __init__(
        self,
        index_dir: str | Path,
        num_threads: int = 1,
        *,
        device: str = "cpu",
        reranker: str = "",
        options: Mapping[str, Any] | None = None,
        shards: Sequence[int] | None = None,
        load_encoder: bool = True,
        encoder_dir: str = "",
        shards_dir: str = "",
    ) -> None:
        """Open an index: vectors, inverted index or both, as its manifest says.

        Args:
            index_dir: directory made by ``build_index``.
            num_threads: threads of the search among vectors. One thread scores words, so only more replicas use more
                cores for that. The host process sets torch's threads.
            device: ``cpu`` or ``cuda``, for encoder, vectors and reranker.
            reranker: a cross-encoder, folder or hub name, that sorts the passages again; empty: none.
            options: options of the index type, and of ``RETRIEVER_OPTIONS``; see ``INDEX_TYPES``.
            shards: numbers of the shards to search; the default is all.
            load_encoder: whether to load the encoder; without it, queries need vectors.
            encoder_dir: path on this node of an encoder outside the index; the default is its path at the build.
            shards_dir: folder of the shard files; the default is ``index_dir``.

        Raises:
            DataError: the directory holds no index, or parts that do not belong together.
            ConfigError: an option is unknown, or shards are given for an index that is not dense.
        """
        self._arguments: dict[str, Any] = {
            "num_threads": num_threads,
            "device": device,
            "options": dict(options or {}),
            "shards": None if shards is None else tuple(shards),
            "load_encoder": load_encoder,
            "encoder_dir": encoder_dir,
            "shards_dir": shards_dir,
        }
        self._directory = Path(index_dir)
        self._reranker_name = reranker
        self.manifest = manifest = Manifest.read(self._directory)
        self._options = parse_options(manifest.vector_type or manifest.index_type, options or {})
        if shards is not None and manifest.has_bm25:
            raise ConfigError(
                f"{index_dir}: an index of type {manifest.index_type!r} cannot be searched by shards; search it whole"
            )
        for file in (manifest.corpus, *manifest.files):  # the shards are checked when they are opened
            file.check(self._directory)
        self.corpus = self._open_corpus()
        self.dense: DenseRanker | None = None
        """Ranker of the vectors; None for an index without vectors."""
        self._rank = self._open_rank()
        self._reranker: Reranker | None = None
        if reranker:
            from retrieval.encoders.reranker import Reranker  # imports torch

            self._reranker = Reranker.load(reranker, device=device)

    def _open_corpus(self) -> Corpus:
        corpus = Corpus.open(self._directory)
        if len(corpus) != self.manifest.count:
            raise DataError(
                f"{self._directory}: got {len(corpus)} passages, but the index was built over {self.manifest.count}; "
                "build the index again"
            )
        return corpus

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the arguments of the constructor."""
        return partial(LocalRetriever, reranker=self._reranker_name, **self._arguments), (self._directory,)

    @property
    def version(self) -> str:
        """Name of the evidence: ``Manifest.version``, followed by the name of the reranker."""
        version = self.manifest.version
        return f"{version}+{Path(self._reranker_name).name}" if self._reranker_name else version

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Call ``search_batch``. It blocks the event loop, so that a run in one process has one order."""
        return self.search_batch(queries, k)

    async def open_pages(self, titles: list[str]) -> list[Page]:
        """Call ``open_batch``, as ``search`` does."""
        return self.open_batch(titles)

    def open_batch(self, titles: list[str]) -> list[Page]:
        """Return the page of each title; see ``PageRetriever``."""
        return [self._titles.page(title, self.version) for title in titles]

    @cached_property
    def _titles(self) -> Titles:
        return Titles.open(self.corpus, self._directory / TITLES_FILE)

    def search_batch(
        self, queries: list[str], k: int, vectors: NDArray[np.float32] | None = None
    ) -> list[list[Passage]]:
        """Return up to ``k`` passages for each query, best first, as ``Hits``: ``[len(queries)][<= min(k, corpus)]``.

        A query without a word that encoder or inverted index know finds nothing. Arguments and errors are as in
        ``rank``; a reranker that returns NaN or infinity also raises ``RetrievalError``.
        """
        if self._reranker is None:
            return self.search_rows(queries, k, vectors)[1]
        depth = max(k, self._options["rerank_candidates"]) if k > 0 else k  # ``search_rows`` refuses such a ``k``
        found = self.search_rows(queries, depth, vectors)[1]
        return [Hits(passages, index_version=self.version) for passages in self._reranker.rerank(queries, found, k)]

    def search_rows(
        self, queries: list[str], k: int, vectors: NDArray[np.float32] | None = None
    ) -> tuple[Ranking, list[list[Passage]]]:
        """Return the result of ``rank``, and the passages of its rows that are not absent as ``Hits``."""
        ranking = self.rank(queries, k, vectors)
        return ranking, list(to_hits(ranking, self.corpus.fields, self.version))

    def rank(self, queries: list[str], k: int, vectors: NDArray[np.float32] | None = None) -> Ranking:
        """Return the best ``k`` rows of each query, before any reranking, numbered as in the whole corpus.

        ``vectors``: float32 ``[len(queries), dimension]``, the queries encoded elsewhere.

        Raises:
            ValueError: ``k`` is less than 1, or there is neither a vector nor an encoder.
            RetrievalError: a vector holds NaN or infinity.
        """
        if k < 1:
            raise ValueError(f"got k={k}, expected at least 1")
        return self._rank(queries, k, vectors)

    def _open_rank(self) -> Rank:
        ranks: list[Rank] = []
        if self.manifest.is_dense:
            from retrieval.indexes.vector_index import DenseRanker  # imports faiss; a client of a fleet needs neither

            self.dense = DenseRanker(self._directory, self.manifest, **self._arguments)
            ranks.append(self.dense.rank)
        if self.manifest.has_bm25:
            from retrieval.indexes.bm25 import BM25Ranker

            ranks.append(BM25Ranker(self._directory, self.manifest).rank)
            if self.dense is not None:
                return partial(fused, ranks, self._options["fusion_depth"])
        if not ranks:
            raise DataError(f"{self._directory}: its manifest names no vectors and no words; build the index again")
        return ranks[0]


class ReplayRetriever:
    """Answers the queries of a recorded run, and opens its pages. It pickles as its arguments."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Read the records of a run; the options are ``{"run": DIR}``, a run directory, or a ``Folder`` of its records.

        Raises:
            ConfigError: the option ``run`` is missing, or there is another option.
            DataError: the run has no recorded searches, or a file of it cannot be read.
        """
        if set(options) != {"run"}:
            raise ConfigError(
                f"retrieval.options: got {sorted(options)} with type replay, expected {{run: DIR}}, a run directory"
            )
        self._options = dict(options)
        run = options["run"]
        directory = run.fetch() if isinstance(run, Folder) else Path(run) / TRAJECTORIES
        self._found = {_key(call.tool, call.arguments): call for call in _retrieved(directory)}
        if not self._found:
            raise DataError(
                f"no recorded searches in {directory}; give a run with checkpointing.keep_trajectories in which at "
                "least one trajectory searched"
            )

    def __reduce__(self) -> tuple[type[ReplayRetriever], tuple[Any, ...]]:
        """Pickle as the arguments of the constructor."""
        return ReplayRetriever, (self._options,)

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return what each query found in the recorded run; ``RetrievalError`` if the run never asked for so many."""
        answers: list[list[Passage]] = []
        for query in queries:
            found = self._found.get(_key(SEARCH, {"query": query, "k": k}))
            if found is None:
                raise RetrievalError(
                    f"the recorded run never asked for {k} passages for {query!r}; replay a run with this query and "
                    "top_k"
                )
            answers.append(Hits(found.records, is_cached=found.is_cached, index_version=found.version))
        return answers

    async def open_pages(self, titles: list[str]) -> list[Page]:
        """Return each page as it was in the recorded run; ``RetrievalError`` if the run never opened it."""
        answers: list[Page] = []
        for title in titles:
            found = self._found.get(_key(OPEN_PAGE, {"title": title}))
            if found is None:
                raise RetrievalError(f"the recorded run never opened the page {title!r}; replay a run that did")
            near = json.loads(found.result or "[]")
            answers.append(Page(found.records, near=near, is_cached=found.is_cached, index_version=found.version))
        return answers


def _retrieved(directory: Path) -> Iterator[ToolCall]:
    """Yield the calls that a retriever answered; the environment itself answers calls that are wrong or too many."""
    for path in sorted(directory.glob("*.arrow")):
        trajectories = (trajectory for group in read_trajectories(path) for trajectory in group.trajectories)
        for call in (call for trajectory in trajectories for call in trajectory.calls):
            is_search = call.tool == SEARCH and call.was_made
            if is_search or (call.tool == OPEN_PAGE and (call.records or call.result.startswith("["))):
                yield call


def _key(tool: str, arguments: Mapping[str, Any]) -> str:
    """Return a call as canonical JSON, in which the order of keys and white space do not matter."""
    clean = {name: normalise(value) if isinstance(value, str) else value for name, value in arguments.items()}
    return json.dumps([tool, clean], sort_keys=True)
