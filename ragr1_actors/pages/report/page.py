"""Writer of the page: it puts facts and charts of a run's files into a template that escapes its text.

::

    metrics.jsonl, starts.jsonl, report.json, config.yaml ──► facts, charts ──► report.html.jinja ──► one file
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.disk.files import write_file
from ragr1_actors.pages.report import charts, facts
from ragr1_actors.pages.report.charts import Chart, Figure, Row, draw
from ragr1_actors.runs.report import RunReport
from ragr1_actors.runs.starts import Start, read_starts
from ragr1_actors.runs.telemetry.metrics import METRICS_FILE, read_metrics

_ASSETS = Path(__file__).parent / "assets"


def write_page(
    out: Path, name: str, config: RunConfig, run_dir: Path, report: RunReport | None, *, is_finished: bool = True
) -> None:
    """Write the page about the run ``name``, whose files are in ``run_dir``, to ``out``, whole or not at all.

    ``report`` is None for a run that has not ended, and ``is_finished`` False for the report of one that ended early.

    Raises:
        DataError: a file of the run is damaged.
    """
    rows = read_metrics(run_dir) if (run_dir / METRICS_FILE).is_file() else []
    page = render(name, config, rows, report, read_starts(run_dir), is_finished=is_finished)
    write_file(out, lambda writing: writing.write_text(page, encoding="utf-8"))


def render(
    name: str,
    config: RunConfig,
    rows: Sequence[Row],
    report: RunReport | None,
    starts: Sequence[Start] = (),
    *,
    is_finished: bool = True,
) -> str:
    """Return the page."""
    loader = PackageLoader("ragr1_actors.pages.report", "assets")
    environment = Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    assets = {asset: (_ASSETS / asset).read_text("utf-8") for asset in ("report.css", "report.js", _PLOTLY)}
    return environment.get_template("report.html.jinja").render(
        name=name,
        state=_state(rows, is_finished=is_finished and report is not None),
        made=time.strftime("%F %T %Z"),
        headline=facts.headline(config, rows),
        tiles=facts.tiles(config, rows, report),
        sections=_sections(rows, report),
        evaluations=facts.evaluations(rows),
        ratios=facts.ratios(config, rows),
        recall=_by_length(report.ratios) if report else [],
        failures=facts.failures(rows),
        failed_tasks=facts.failed_tasks(report) if report else [],
        alarms=[(alarm.name, str(alarm), alarm.action) for alarm in report.alarms] if report else [],
        decisions=facts.decisions(rows),
        incidents=facts.incidents(rows),
        gaps=[(gap.stage, str(gap.first), str(gap.last)) for gap in report.gaps] if report else [],
        changes=config.changes(),
        starts=[_start(one) for one in starts],
        css=assets["report.css"],
        script=assets["report.js"],
        plotly=assets[_PLOTLY],
    )


_PLOTLY = "plotly-basic.min.js"


def _by_length(named: Mapping[str, float]) -> list[tuple[str, float]]:
    """Sort so that ``recall@2`` is before ``recall@10``."""
    return sorted(named.items(), key=lambda item: (len(item[0]), item))


def _state(rows: Sequence[Row], *, is_finished: bool) -> str:
    if is_finished:
        return "finished"
    return f"not finished: {len(facts.rl_rows(rows)):,} iterations of RL so far" if rows else "nothing measured yet"


def _sections(rows: Sequence[Row], report: RunReport | None) -> dict[str, list[tuple[str, Figure]]]:
    """Return the titles and figures of each section; charts without data are left out."""
    alarms = [(alarm.iteration, alarm.name) for alarm in report.alarms] if report else []
    learning = [(title, charts.mark_alarms(figure, alarms)) for title, figure in _drawn(charts.LEARNING, rows)]
    sizes = [(chart.title, charts.draw_fleet(chart, fleet, rows)) for fleet, chart in charts.FLEETS.items()]
    evaluation = charts.draw_evaluations(rows)
    return {
        "evaluation": [("Held-out tasks, greedy", evaluation)] if evaluation else [],
        "search": _drawn(charts.SEARCH, rows),
        "learning": learning,
        "throughput": _drawn(charts.THROUGHPUT, rows),
        "agreement": _drawn(charts.AGREEMENT, rows),
        "fleets": [(title, figure) for title, figure in sizes if figure] + _drawn(charts.LOADS, rows),
    }


def _drawn(wanted: Sequence[Chart], rows: Sequence[Row]) -> list[tuple[str, Figure]]:
    return [(chart.title, figure) for chart in wanted if (figure := draw(chart, rows))]


def _start(one: Start) -> dict[str, Any]:
    return {
        "when": time.strftime("%F %T", time.localtime(one.time_s)),
        "where": f"{one.host}, {one.system}, {one.num_cpus} CPUs, Python {one.python}",
        "versions": ", ".join(f"{name} {version}" for name, version in one.versions.items()),
    }
