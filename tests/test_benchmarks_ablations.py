"""The table of the options of the policy gradients, from what runs wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.learner import ablations
from benchmarks.real.runs import FinishedRun
from ragr1_actors.core.resolve import override, read_recipe, resolve
from ragr1_actors.planning.preflight import check_classes
from ragr1_actors.runs.report import EvalResult, RunReport, StageReport, TaskCounts, write_report


def write_run(path: Path, em: float, gaps: Sequence[float], outside: float | None) -> FinishedRun:
    """A run of one iteration per gap, each followed by an evaluation."""
    path.mkdir(parents=True)
    means = EvalResult(em=em, f1=0, rounds=1, queries_per_round=2, queries=2, tokens=3, num_tasks=1)
    tasks = TaskCounts(issued=1, trained=1, failed=0, lost=0, doubled=0)
    write_report(path, RunReport((StageReport("rl", means, 1.0),), 60, 9, tasks))
    lines = [{"stage": "sft", "iteration": 1, "learner/logprob_gap_mean": 9.0}]
    for number, gap in enumerate(gaps, start=1):
        row = {"stage": "rl", "iteration": number, "time/iteration_s": 1.0, "learner/logprob_gap_mean": gap}
        lines += [row | ({} if outside is None else {"learner/sequences_outside": outside})]
        lines += [{"stage": "rl", "iteration": number, "eval/em": 0.5}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return FinishedRun(path)


def test_a_row_has_the_means_of_all_seeds(tmp_path: Path) -> None:
    plain = [write_run(tmp_path / f"a_seed{seed}", 0.9 + 0.02 * seed, [0.1, 0.2 + seed], None) for seed in (0, 1)]
    masked = [write_run(tmp_path / "b_seed0", 0.5, [0.01], 0.25)]
    lines = ablations.table({(1, "none"): plain, (4, "mask"): masked}).splitlines()
    assert lines[2:] == [
        "| 1 | `none` | 0.910 | 0.900, 0.920 | 0.4000 |  |  |",
        "| 4 | `mask` | 0.500 | 0.500 | 0.0100 |  | 0.2500 |",
    ]


def test_finished_runs_are_read_and_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "sft_seed0", 0.5, [0.01], None)
    for lag, name in ablations.VARIANTS:
        write_run(tmp_path / f"lag{lag}_{name}_seed0", 0.5, [0.01], None)
    ablations.main(tmp_path, seeds=[0])
    out = capsys.readouterr().out
    assert [out.count(f"| {lag} | `") for lag in (0, 1, 2, 4)] == [2, 6, 6, 6]


@pytest.mark.parametrize("overrides", ablations.VARIANTS.values(), ids=str)
def test_the_runs_settings_are_legal(overrides: list[str]) -> None:
    overrides = [*ablations.from_sft(Path("runs/sft_seed0")), *overrides]
    check_classes(resolve(override(read_recipe(ablations.RECIPE), overrides)))
