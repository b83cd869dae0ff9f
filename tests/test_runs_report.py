from __future__ import annotations

import dataclasses
import io
import json
import re
from pathlib import Path

import pytest
from processes import run_python
from rich.console import Console

from ragr1_actors.core.errors import DataError, RunDirectoryError
from ragr1_actors.runs.report import (
    EvalResult,
    RunReport,
    StageReport,
    TaskCounts,
    read_report,
    render_table,
    write_report,
)

START = EvalResult(em=0.0, f1=0.01, rounds=0.0, queries_per_round=0.0, queries=0.0, tokens=200.0, num_tasks=200)
SFT = EvalResult(em=0.55, f1=0.58, rounds=2.4, queries_per_round=1.1, queries=2.64, tokens=71.5, num_tasks=200)
RL = dataclasses.replace(SFT, em=0.925, rounds=1.8, queries_per_round=1.6)
REPORT = RunReport(
    stages=(StageReport("start", START, 0.5), StageReport("sft", SFT, 100.0), StageReport("rl", RL, 400.0)),
    wall_s=512.25,
    peak_rss_bytes=2**31,
    tasks=TaskCounts(issued=6400, trained=6399, failed=1, lost=0, doubled=0),
    ratios={"rounds_vs_single_query": 0.71},
)


def test_report_json(tmp_path: Path) -> None:
    write_report(tmp_path, REPORT)
    written = json.loads((tmp_path / "report.json").read_text())
    lists = {"alarms", "decisions", "incidents", "failed_tasks", "gaps"}
    assert set(written) == {"stages", "wall_s", "peak_rss_bytes", "tasks", "ratios"} | lists
    assert written["stages"][2]["stage"] == "rl"
    assert written["stages"][2]["eval"]["em"] == 0.925
    assert {"em", "f1", "rounds", "queries", "tokens"} <= set(written["stages"][0]["eval"])
    assert written["tasks"] == {"issued": 6400, "trained": 6399, "failed": 1, "skipped": 0, "lost": 0, "doubled": 0}
    assert read_report(tmp_path) == REPORT


def test_tasks_that_failed_are_shown_where_there_are_any(tmp_path: Path) -> None:
    def text(report: RunReport) -> str:
        file = io.StringIO()
        Console(width=100, file=file).print(render_table(report))
        return file.getvalue()

    assert "failed" not in text(REPORT)
    shaky = dataclasses.replace(RL, num_tasks=197, num_failed=3)
    report = dataclasses.replace(REPORT, stages=(*REPORT.stages[:2], StageReport("rl", shaky, 400.0)))
    write_report(tmp_path, report)
    assert read_report(tmp_path).stages[2].eval.num_failed == 3
    assert re.search(r"failed tasks, in no mean\W+0\W+0\W+3\b", text(report))


def test_report_that_is_not_there_or_broken(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match=r"holds no report\.json"):
        read_report(tmp_path)
    (tmp_path / "report.json").write_text("{")
    with pytest.raises(DataError, match="delete the file, and --resume writes it again"):
        read_report(tmp_path)
    (tmp_path / "report.json").write_text('{"stages": [], "peak_rss_bytes": 1}')
    with pytest.raises(DataError, match="wall_s"):
        read_report(tmp_path)


def test_table() -> None:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render_table(REPORT))
    console.file.close()
    text = console.export_text()
    for words in ("before SFT", "after SFT", "after RL", "200 tasks", "search rounds", "queries per round", "0.925"):
        assert words in text


PEAK = """
import subprocess, sys, time
from ragr1_actors.runs import report
report.SAMPLE_INTERVAL_S = 0.05
before = report.tree_memory_bytes()
assert before > 10 * 2**20
script = "import sys; block = bytearray(b'x' * (100 << 20)); print('up', flush=True); sys.stdin.read()"
command = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {script!r}])"]
with report.PeakMemory() as memory:
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"up\\n"
    assert report.tree_memory_bytes() > before + 100 * 2**20
    while memory.peak_bytes <= before + 100 * 2**20:
        time.sleep(0.05)
    child.communicate()
assert report.tree_memory_bytes() < memory.peak_bytes
"""


def test_peak_memory_sees_children() -> None:
    run_python(PEAK)  # whose only children are those of the script
