"""The seven sets of the Search-R1 and RAG-R1 papers by name: their files, sizes and published figures.

The files are FlashRAG's, which both papers used. ``load_sets("musique", Path("sets"))`` reads
``sets/musique/dev.jsonl``; without a folder the file comes from the hub, or from its cache on this machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

from envs.tasks.files import LoadedTasks, read_files
from envs.tasks.paths import NamedTasks, TaskFile, as_list, shown, task_files
from ragr1_actors.core.errors import DataError, one_line
from ragr1_actors.core.resolve import path_of

HUB_NAME = "RUC-NLPIR/FlashRAG_datasets"
_ENDINGS = (".jsonl", ".json", ".parquet", ".tsv", ".csv")


@dataclass(frozen=True, slots=True)
class PublishedSet:
    """One evaluation set."""

    folder: str
    """Folder among FlashRAG's data sets, such as ``2wikimultihopqa``."""
    split: str
    num_tasks: int
    """Questions in the split, as both papers count them."""


SETS: dict[str, PublishedSet] = {
    "nq": PublishedSet("nq", "test", 3610),
    "triviaqa": PublishedSet("triviaqa", "test", 11_313),
    "popqa": PublishedSet("popqa", "test", 14_267),
    "hotpotqa": PublishedSet("hotpotqa", "dev", 7405),
    "2wiki": PublishedSet("2wikimultihopqa", "dev", 12_576),
    "musique": PublishedSet("musique", "dev", 2417),
    "bamboogle": PublishedSet("bamboogle", "test", 125),
}
"""Evaluation sets by the name that ``ragr1 evaluate --tasks`` takes."""


_RAG_R1 = "Qwen2.5-7B-Instruct, KILT Wikipedia of 2019, bge-large, top 3, T=0.7, EM of RAG-R1"
_SEARCH_R1 = "Wikipedia of 2018, e5-base, top 3, T=1, EM of Search-R1"

PUBLISHED: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("direct answer", _RAG_R1, (0.132, 0.360, 0.148, 0.183, 0.236, 0.031, 0.080)),
    ("standard RAG", _RAG_R1, (0.328, 0.476, 0.353, 0.284, 0.253, 0.048, 0.152)),
    ("Search-R1", _RAG_R1, (0.387, 0.531, 0.422, 0.377, 0.351, 0.135, 0.376)),
    ("RAG-R1, one query", _RAG_R1, (0.429, 0.599, 0.477, 0.474, 0.481, 0.181, 0.432)),
    ("RAG-R1, several queries", _RAG_R1, (0.423, 0.608, 0.479, 0.495, 0.556, 0.192, 0.432)),
    ("Search-R1, PPO", f"Qwen2.5-7B, {_SEARCH_R1}", (0.480, 0.638, 0.457, 0.433, 0.382, 0.196, 0.432)),
    ("Search-R1, PPO", f"Qwen2.5-7B-Instruct, {_SEARCH_R1}", (0.393, 0.610, 0.397, 0.370, 0.414, 0.146, 0.368)),
    ("Search-R1, GRPO", f"Qwen2.5-7B-Instruct, {_SEARCH_R1}", (0.429, 0.623, 0.427, 0.386, 0.346, 0.162, 0.400)),
)
"""Method, settings and exact match, ``[7]`` in the order of ``SETS``, as papers report them."""


def published_em(name: str) -> list[tuple[str, str, float]]:
    """Return method, settings and exact match of every policy published on the set ``name``; empty if unknown."""
    if name not in SETS:
        return []
    position = list(SETS).index(name)
    return [(method, settings, em[position]) for method, settings, em in PUBLISHED]


def load_sets(named: NamedTasks, folder: Path | None = None) -> LoadedTasks:
    """Read sets of ``SETS`` by their names, and task files by their paths, whole; a file called ``nq`` is ``./nq``.

    The sets come first.

    ``folder`` holds FlashRAG's folders, or files such as ``musique.jsonl``; None is the hub.

    Raises:
        DataError: the folder has no such set, the hub cannot be reached, or a file cannot be used.
    """
    names = dict.fromkeys(str(one) for one in as_list(named) if path_of(one, *SETS) is None)
    paths = [one for one in as_list(named) if path_of(one, *SETS) is not None]
    files = [TaskFile(_from_hub(name) if folder is None else _from_folder(name, folder), name) for name in names]
    files += task_files(paths) if paths else []
    return read_files(files, shown(named), whole=True)


def _from_folder(name: str, folder: Path) -> Path:
    published = SETS[name]
    stems = (f"{published.folder}/{published.split}", published.folder, name)
    candidates = [folder / f"{stem}{ending}" for stem in stems for ending in _ENDINGS]
    found = next((path for path in candidates if path.is_file()), None)
    if found is None:
        raise DataError(
            f"{folder} has no set {name}; expected {published.folder}/{published.split}.jsonl or {name}.jsonl in it"
        )
    return found


def _from_hub(name: str) -> Path:
    published = SETS[name]
    try:
        return Path(hf_hub_download(HUB_NAME, f"{published.folder}/{published.split}.jsonl", repo_type="dataset"))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise DataError(
            f"the set {name} cannot be loaded from the hub ({one_line(error)}); fetch {HUB_NAME} and name its folder "
            "with --data"
        ) from error
