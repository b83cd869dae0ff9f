import io

import pytest
from rich.console import Console

from ragr1_actors.cli.claims import compare, render_comparison
from ragr1_actors.runs.report import EvalResult, RunReport, StageReport


def report(em: float, rounds: float) -> RunReport:
    result = EvalResult(em, em, rounds, 1.0, rounds, 20.0, 200)
    return RunReport((StageReport("sft", report_of(0.5), 1.0), StageReport("rl", result, 1.0)), 2.0, 1)


def report_of(em: float) -> EvalResult:
    return EvalResult(em, em, 1.0, 1.0, 1.0, 20.0, 200)


@pytest.mark.parametrize(
    ("multi", "single", "holds"),
    [((0.95, 1.6), (0.94, 2.0), True), ((0.93, 1.6), (0.94, 2.0), False), ((0.95, 1.8), (0.94, 2.0), False)],
)
def test_the_claim_is_judged_on_both_figures_of_the_last_stage(
    multi: tuple[float, float], single: tuple[float, float], holds: bool
) -> None:
    comparison = compare(report(*multi), report(*single))
    assert comparison.holds is holds
    console = Console(record=True, width=120, file=io.StringIO())
    console.print(render_comparison(comparison))
    text = console.export_text()
    assert f"{multi[0]:.3f}" in text
    assert f"{1 - multi[1] / single[1]:.0%}" in text
