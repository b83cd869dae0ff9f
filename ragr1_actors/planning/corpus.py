"""Passages of a run, from a corpus file or from the task sources."""

from __future__ import annotations

from collections.abc import Iterable

from envs.sources import TaskSources, is_source, open_source, shown_names
from ragr1_actors.core.config import SamplerConfig
from ragr1_actors.core.errors import ConfigError
from retrieval.base import Passage
from retrieval.corpora.readers import read_passages


def corpus_of(config: SamplerConfig) -> Iterable[Passage]:
    """Return the passages that ``retrieval.corpus`` names; ``UserError`` if there are none, or they cannot be read."""
    named, environment = config.retrieval.corpus, config.environment
    if named and not is_source(named):
        return read_passages(named)
    sources = TaskSources.open(environment.tasks, environment)
    if named:
        source = sources.by_name.get(named)
        return (source or open_source(named, environment, {})).passages()
    passages = sources.passages()
    if not passages:
        raise ConfigError(
            f"retrieval.corpus: got nothing, and {shown_names(environment.tasks)} has no passages; name a corpus file, "
            "or retrieval.index=FOLDER of an index that is built"
        )
    return passages
