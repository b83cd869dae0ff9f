"""RAG-R1's claim at toy scale: several queries a turn cost fewer search rounds and no accuracy.

In RAG-R1 (Tan et al. 2025, table 3) the multi-query policy made 2.15 retrieval rounds a question against 2.53 of the
single-query one, 15 % fewer.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from ragr1_actors.runs.report import RunReport

FEWER_ROUNDS_GOAL = 0.15


@dataclass(frozen=True, slots=True)
class Comparison:
    """Multi-query against single-query, after RL."""

    em_multi: float
    em_single: float
    rounds_multi: float
    rounds_single: float
    num_tasks: int

    @property
    def fewer_rounds(self) -> float:
        """Share of search rounds saved."""
        return 1 - self.rounds_multi / self.rounds_single if self.rounds_single else 0.0

    @property
    def holds(self) -> bool:
        """EM not lower, and at least 15 % fewer rounds."""
        return self.em_multi >= self.em_single and self.fewer_rounds >= FEWER_ROUNDS_GOAL


def compare(multi: RunReport, single: RunReport) -> Comparison:
    """Compare the last stages of two runs."""
    a, b = multi.stages[-1].eval, single.stages[-1].eval
    return Comparison(a.em, b.em, a.rounds, b.rounds, min(a.num_tasks, b.num_tasks))


def render_comparison(comparison: Comparison) -> Table:
    """Return the table that ``make claims`` ends with."""
    table = Table(title=f"Multi-query against single-query, after RL ({comparison.num_tasks} held-out tasks)")
    for heading in ("", "multi-query", "single-query", "claim", "holds"):
        table.add_column(heading, justify="right" if heading else "left")
    c = comparison
    table.add_row("EM", f"{c.em_multi:.3f}", f"{c.em_single:.3f}", "not lower", _yes(c.em_multi >= c.em_single))
    table.add_row(
        "search rounds",
        f"{c.rounds_multi:.2f}",
        f"{c.rounds_single:.2f}",
        f"{FEWER_ROUNDS_GOAL:.0%} fewer",
        f"{_yes(c.fewer_rounds >= FEWER_ROUNDS_GOAL)} ({c.fewer_rounds:.0%})",
    )
    return table


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"
