"""ReplayRetriever: answers from the searches that a run recorded, without an index, an encoder or a server.

Every trajectory keeps the passages that its queries found (``RetrievalRecord``); the files in the run's
``trajectories`` folder therefore suffice to answer its searches again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from ragr1_actors.core.errors import ConfigError, DataError, RetrievalError, one_line
from ragr1_actors.core.types import RetrievalRecord
from retrieval.base import Hits, Passage
from retrieval.fleet.batching import normalise


class ReplayRetriever:
    """Answers the queries of a recorded run. Pickles as its arguments."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        """Read the records of a run; the options are ``{"run": DIR}``, a run directory.

        Raises:
            ConfigError: the option ``run`` is missing, or there is another one.
            DataError: the run has no recorded searches, or a file of it cannot be read.
        """
        if set(options) != {"run"}:
            raise ConfigError(
                f"retrieval.options: got {sorted(options)} with type replay, expected {{run: DIR}}, a run directory"
            )
        self._options = dict(options)
        directory = Path(options["run"]) / "trajectories"
        self._found: dict[tuple[str, int], Hits] = {}
        for record in _records(directory):
            passages = map(Passage, record.passage_ids, record.titles, record.texts, record.scores)
            self._found[normalise(record.query), record.k] = Hits(
                passages, is_cached=record.is_cached, index_version=record.index_version
            )
        if not self._found:
            raise DataError(
                f"no recorded searches in {directory}; give a run with checkpointing.keep_trajectories in which at "
                "least one trajectory searched"
            )

    def __reduce__(self) -> tuple[type[ReplayRetriever], tuple[Any, ...]]:
        """Pickle as the arguments of the constructor."""
        return ReplayRetriever, (self._options,)

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return the passages that each query found in the recorded run: ``[len(queries)][<= k]``.

        Raises:
            RetrievalError: the run never searched for a query, or with another ``k``.
        """
        return [self._answer(query, k) for query in queries]

    def _answer(self, query: str, k: int) -> Hits:
        found = self._found.get((normalise(query), k))
        if found is None:
            raise RetrievalError(
                f"the recorded run never asked for {k} passages for {query!r}; replay a run with this query and top_k"
            )
        return Hits(found, is_cached=found.is_cached, index_version=found.index_version)


def _records(directory: Path) -> Iterator[RetrievalRecord]:
    for path in sorted(directory.glob("*.arrow")):
        try:
            with pa.memory_map(str(path)) as source:
                reader = pa.ipc.open_file(source)
                for index in range(reader.num_record_batches):
                    for turns in reader.get_batch(index).column("turns").to_pylist():
                        for turn in turns:
                            for fields in turn["retrievals"]:
                                lists = {n: tuple(fields[n]) for n in ("passage_ids", "scores", "titles", "texts")}
                                yield RetrievalRecord(**(fields | lists))
        except (pa.ArrowInvalid, KeyError, TypeError, OSError) as error:
            cause = one_line(error)
            raise DataError(f"{path}: no trajectories of this version of the project ({cause})") from error
