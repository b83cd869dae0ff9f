"""Replay: a recorded query gets its recorded answer; a search for another query fails."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from recorded_run import PASSAGES, record

from ragr1_actors.core.errors import ConfigError, DataError, RetrievalError
from ragr1_actors.core.types import ToolCall
from retrieval.local import ReplayRetriever

PAGES = (
    ToolCall("open_page", {"title": "Riga"}, records=(PASSAGES[0],), version="v1"),
    ToolCall("open_page", {"title": "Rigga"}, '["Riga"]'),
    ToolCall("open_page", {"title": "Oslo"}, "At most 2 calls of one turn are answered."),
    ToolCall("open_page", {"tool": ["Rome"]}, "The arguments of open_page are wrong: ..."),
    ToolCall("add", {"title": "Rome"}, "[3]"),
)


async def test_a_recorded_query_finds_again_what_it_found(tmp_path: Path) -> None:
    await record(tmp_path / "run", ["Riga", "nowhere", "Oslo"])
    replay = pickle.loads(pickle.dumps(ReplayRetriever({"run": str(tmp_path / "run")})))
    assert await replay.search([" Oslo", "Riga", "nowhere"], 2) == [[PASSAGES[1]], [PASSAGES[0]], []]
    with pytest.raises(RetrievalError, match="never asked for 2 passages for 'Rome'"):
        await replay.search(["Rome"], 2)
    with pytest.raises(RetrievalError, match="never asked for 5"):
        await replay.search(["Riga"], 5)


async def test_a_search_that_was_refused_is_no_answer(tmp_path: Path) -> None:
    refused = ToolCall("search", {"query": "Riga", "k": 2}, "The arguments of search are wrong: ...")
    await record(tmp_path / "run", ["Riga"], (refused,))
    assert await ReplayRetriever({"run": str(tmp_path / "run")}).search(["Riga"], 2) == [[PASSAGES[0]]]


async def test_a_recorded_page_is_opened_again(tmp_path: Path) -> None:
    await record(tmp_path / "run", [], PAGES)
    replay = pickle.loads(pickle.dumps(ReplayRetriever({"run": str(tmp_path / "run")})))
    found, missing = await replay.open_pages([" Riga ", "Rigga"])
    assert (found, found.near, found.index_version) == ([PASSAGES[0]], (), "v1")
    assert (missing, missing.near) == ([], ("Riga",))
    for title in ("riga", "Oslo", "Rome"):  # never opened, refused, and called wrongly
        with pytest.raises(RetrievalError, match=f"never opened the page '{title}'"):
            await replay.open_pages([title])


def test_a_run_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no recorded searches"):
        ReplayRetriever({"run": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"expected \{run: DIR\}"):
        ReplayRetriever({"folder": str(tmp_path)})
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "iteration_00001.arrow").write_bytes(b"ARROW1 but no more")
    with pytest.raises(DataError, match="iteration_00001"):
        ReplayRetriever({"run": str(tmp_path)})
