"""2WikiMultihopQA (Ho et al., arXiv:2011.01060, Apache-2.0) as the recipe ``smollm2_2wiki`` reads it.

``python -m benchmarks.real.two_wiki FOLDER`` reads the set's own JSON from ``FOLDER`` and writes ``data/2wiki/``::

    *train*.json   questions in 2Wiki's own form    ──► train.json   at most a tenth of the answers are yes or no
    *test*.json    the same, or *dev*.json          ──► test.json    unchanged
    *corpus*.json  passages; the largest file       ──► corpus.json  unchanged

A third of the set's training answers are yes or no, a twelfth of its test answers. A policy that is trained on all of
them answers "no" to what it cannot find.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from ragr1_actors.core.errors import DataError

MAX_YES_NO = 0.1
"""Largest share of training answers that are yes or no."""


def main(source: Path, target: Path = Path("data/2wiki")) -> None:
    """Write the three files; ``DataError`` if one is missing."""
    train = json.loads(_file(source, "*train*.json").read_text())
    kept = subsample(train, random.Random(0))
    target.mkdir(parents=True, exist_ok=True)
    (target / "train.json").write_text(json.dumps(kept, ensure_ascii=False))
    (target / "test.json").write_bytes(_file(source, "*test*.json", "*dev*.json").read_bytes())
    (target / "corpus.json").write_bytes(_file(source, "*corpus*.json").read_bytes())
    print(f"{target}: {len(kept)} of {len(train)} training questions, {_counted(kept)}")


def subsample(records: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    """Return the records in their order, without those yes-or-no questions that are more than ``MAX_YES_NO``."""
    yes_no = [number for number, record in enumerate(records) if is_yes_no(record["answer"])]
    num_others = len(records) - len(yes_no)
    num_kept = min(len(yes_no), int(num_others * MAX_YES_NO / (1 - MAX_YES_NO)))
    left_out = set(yes_no) - set(rng.sample(yes_no, num_kept))
    return [record for number, record in enumerate(records) if number not in left_out]


def is_yes_no(answer: str) -> bool:
    """Whether an answer is yes or no."""
    return answer.strip().lower() in ("yes", "no")


def _counted(records: list[dict[str, Any]]) -> str:
    types = Counter(record["type"] for record in records)
    num_yes_no = sum(is_yes_no(record["answer"]) for record in records)
    return ", ".join(f"{count} {name}" for name, count in sorted(types.items())) + f"; {num_yes_no} answers yes or no"


def _file(folder: Path, *patterns: str) -> Path:
    """Return the largest file of 2Wiki that fits the first pattern that any fits."""
    for pattern in patterns:
        if found := [path for path in folder.glob(pattern) if "2wiki" in path.name.lower()]:
            return max(found, key=lambda path: path.stat().st_size)
    raise DataError(
        f"no file of 2WikiMultihopQA like {' or '.join(patterns)} in {folder}; its name must have 2wiki in it"
    )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
