"""Writer of the page: it puts facts and charts of a run's files into a template that escapes its text.

::

    metrics.jsonl, starts.jsonl, report.json, config.yaml ──► facts, charts ──► report.html.jinja ──► one file
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.disk.files import write_file
from ragr1_actors.pages.report import facts
from ragr1_actors.pages.report.facts import Row
from ragr1_actors.runs.report import RunReport
from ragr1_actors.runs.run_directory import Start, read_starts
from ragr1_actors.runs.scores import wilson
from ragr1_actors.runs.telemetry.events import FleetName
from ragr1_actors.runs.telemetry.metrics import DECISIONS, METRICS_FILE, read_metrics

Figure = dict[str, Any]

COLOURS = ("#3b7dd8", "#d9822b", "#2f9e6e", "#b452b4", "#8a8f98")
"""Colours that are readable on white and on black, and differ for any colour vision."""
SHARE = "share"
_plain = partial(escape, quote=False)
"""Function that escapes what plotly would take as HTML in a label."""
MAX_POINTS = 2000
"""Limit of the points of a curve: a longer run is thinned, as no screen has more columns."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over the iterations of RL, or over the steps of SFT."""

    title: str
    unit: str
    """Title of the vertical axis; ``share`` is shown in per cent."""
    curves: Mapping[str, str]
    """Metrics by their names in the legend."""
    stage: str = "rl"
    is_log: bool = False


LEARNING = (
    Chart("Training reward", "mean per trajectory", {"reward": "rollout/reward", "exact match": "rollout/em"}),
    Chart("Groups to learn from", SHARE, {"rewards differ within the group": "rollout/groups_with_variance"}),
    Chart("Entropy", "nats per token", {"entropy": "learner/entropy"}),
    Chart("Gradient norm", "before clipping", {"gradient norm": "learner/grad_norm"}, is_log=True),
    Chart("Clipped tokens", SHARE, {"clipped": "learner/clip_fraction"}),
    Chart("Loss of SFT", "nats per token", {"loss": "learner/loss"}, stage="sft"),
)
SEARCH = (
    Chart(
        "Searches per question",
        "per trajectory",
        {
            "queries": "rollout/queries",
            "rounds": "rollout/rounds",
            "queries per round": "rollout/queries_per_round",
        },
    ),
    Chart(
        "How trajectories end",
        SHARE,
        {
            "answered": "rollout/stop_answered",
            "no turns left": "rollout/stop_max_turns",
            "context full": "rollout/stop_context_full",
            "malformed": "rollout/malformed",
        },
    ),
    Chart(
        "Length",
        "tokens per trajectory",
        {
            "sampled": "rollout/tokens",
            "observations": "rollout/observation_tokens",
            "whole context": "rollout/context_tokens",
        },
    ),
    Chart(
        "Wasted queries",
        "per trajectory",
        {
            "asked before": "rollout/repeated_queries",
            "twice in a turn": "rollout/duplicate_queries",
            "over the limit": "rollout/queries_over_limit",
        },
    ),
)
THROUGHPUT = (
    Chart(
        "Seconds of an iteration",
        "s",
        {
            "whole": "time/iteration_s",
            "waits for samples": "time/sample_s",
            "learns": "time/learn_s",
            "publishes weights": "time/publish_s",
            "writes": "time/write_s",
        },
    ),
    Chart(
        "Seconds of a trajectory",
        "s",
        {"generates": "time/generation_s", "waits for searches": "time/retrieval_waited_s"},
    ),
    Chart("Searches from the cache", SHARE, {"hit rate": "retrieval/cache_hit_rate"}),
    Chart("Policy lag", "versions", {"mean of the batch": "loop/policy_lag"}),
)
AGREEMENT = (
    Chart("Ratios outside 0.9 to 1.1", SHARE, {"tokens": "learner/ratio_outliers"}),
    Chart("Gap of log-probs", "nats per token", {"mean": "learner/logprob_gap_mean", "max": "learner/logprob_gap_max"}),
)
_SIZES = ("wanted", "running", "starting")
_FLEETS: tuple[tuple[FleetName, str, str], ...] = (
    ("runners", "Env runners", "env_runners/{}"),
    ("retrievers", "Retrievers", "retrieval/retriever_{}"),
    ("encoders", "Encoders", "retrieval/encoder_{}"),
)
FLEETS: Mapping[FleetName, Chart] = {
    fleet: Chart(title, "replicas", {shown: metric.format(shown.replace("wanted", "target")) for shown in _SIZES})
    for fleet, title, metric in _FLEETS
}
LOADS = (
    Chart("Load of the runners", "trajectories", {"in flight per runner": "env_runners/load"}),
    Chart("Load of the retrievers", SHARE, {"of their time": "retrieval/retriever_busy"}),
)


def draw(chart: Chart, rows: Sequence[Row]) -> Figure | None:
    """Return the figure of a chart; None if no curve has two finite points."""
    found = [row for row in rows if row["stage"] == chart.stage]
    traces = []
    for (name, metric), colour in zip(chart.curves.items(), COLOURS, strict=False):
        points = _thinned([(row["iteration"], row[metric]) for row in found if metric in row])
        if sum(y is not None for _, y in points) >= 2:
            traces.append(_line(name, points, colour))
    if not traces:
        return None
    layout = _layout("step of SFT" if chart.stage == "sft" else "iteration", chart.unit, len(traces) > 1)
    if chart.is_log:
        layout["yaxis"]["type"] = "log"
    return {"data": traces, "layout": layout}


def draw_evaluations(rows: Sequence[Row]) -> Figure | None:
    """Return held-out EM with its 95 % Wilson interval, and F1, over the iterations; None without an evaluation.

    The evaluation before SFT is a separate mark at iteration 0, like the one after SFT.
    """
    found = [row for row in rows if "eval/em" in row and math.isfinite(row["eval/em"]) and row.get("eval/num_tasks")]
    if not found:
        return None
    has_sft = any(row["stage"] == "eval_sft" for row in found)
    before = [row for row in found if has_sft and row["stage"] == "eval_start"]
    after = [row for row in found if row not in before]
    traces = [_exact_match("exact match", after, COLOURS[0])]
    traces.append(_line("F1", [(_evaluated_at(row), row.get("eval/f1")) for row in after], COLOURS[1], "lines+markers"))
    if before:
        start = _exact_match("exact match before SFT", before, COLOURS[4])
        traces.append(start | {"mode": "markers"})
    layout = _layout("iteration", SHARE, has_legend=True)
    layout["yaxis"]["range"] = [0, 1.02]
    return {"data": traces, "layout": layout}


def draw_fleet(chart: Chart, fleet: FleetName, rows: Sequence[Row]) -> Figure | None:
    """Return the size of a fleet over the iterations, with the autoscaler's decisions as marks; None without one."""
    figure = draw(chart, rows)
    if figure is None:
        return None
    for trace in figure["data"]:
        trace["line"]["shape"] = "hv"
    decisions = [(row["iteration"], made) for row in rows for made in row.get(DECISIONS, ()) if made["fleet"] == fleet]
    if decisions:
        figure["data"].append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "decision",
                "x": [iteration for iteration, _ in decisions],
                "y": [made["after"] for _, made in decisions],
                "text": [_plain(f"{made['before']} -> {made['after']}: {made['reason']}") for _, made in decisions],
                "hovertemplate": "%{text}<extra></extra>",
                "marker": {"color": COLOURS[3], "size": 9, "symbol": "diamond"},
            }
        )
    figure["layout"]["yaxis"]["rangemode"] = "tozero"
    return figure


def mark_alarms(figure: Figure, alarms: Iterable[tuple[int, str]]) -> Figure:
    """Return a figure over iterations with a vertical line at each alarm, given as iteration and name."""
    lines = [
        {
            "type": "line",
            "x0": iteration,
            "x1": iteration,
            "y0": 0,
            "y1": 1,
            "yref": "paper",
            "line": {"color": "#cc4b37", "width": 1, "dash": "dot"},
            "label": {
                "text": _plain(name),
                "textposition": "end",
                "font": {"size": 10, "color": "#cc4b37"},
            },
        }
        for iteration, name in alarms
    ]
    return {**figure, "layout": {**figure["layout"], "shapes": lines}} if lines else figure


def _evaluated_at(row: Row) -> int:
    return int(row.get("eval/policy_version", row["iteration"]))


def _exact_match(name: str, rows: Sequence[Row], colour: str) -> dict[str, Any]:
    found = [wilson(row["eval/em"], int(row["eval/num_tasks"])) for row in rows]
    trace = _line(name, [(_evaluated_at(row), row["eval/em"]) for row in rows], colour, "lines+markers")
    return trace | {
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [one.high - one.mean for one in found],
            "arrayminus": [one.mean - one.low for one in found],
            "thickness": 1.2,
        }
    }


def _line(name: str, points: Sequence[tuple[int, float | None]], colour: str, mode: str = "lines") -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": mode,
        "name": name,
        "x": [x for x, _ in points],
        "y": [y for _, y in points],
        "line": {"color": colour, "width": 2},
    }


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float | None]]:
    """Return at most ``MAX_POINTS`` of the points, evenly spread; a value that is not finite becomes a gap."""
    step = math.ceil(len(points) / MAX_POINTS) or 1
    return [(x, y if math.isfinite(y) else None) for x, y in points[::step]]


def _layout(x_title: str, unit: str, has_legend: bool) -> dict[str, Any]:
    y_axis: dict[str, Any] = {"title": {"text": unit}, "automargin": True}
    if unit == SHARE:
        y_axis |= {"tickformat": ".0%", "rangemode": "tozero"}
    return {
        "xaxis": {"title": {"text": x_title}, "automargin": True},
        "yaxis": y_axis,
        "showlegend": has_legend,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "margin": {"l": 56, "r": 14, "t": 34, "b": 44},
        "height": 300,
        "hovermode": "x unified",
    }


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
    return environment.get_template("report.html.jinja").render(
        name=name,
        state=_state(rows, is_finished=is_finished and report is not None),
        made=time.strftime("%F %T %Z"),
        headline=facts.headline(config, rows),
        tiles=facts.tiles(config, rows, report),
        sections=_sections(rows, report),
        evaluations=facts.evaluations(rows),
        ratios=facts.ratios(config, rows),
        # recall@2 before recall@10
        recall=sorted(report.ratios.items(), key=lambda item: (len(item[0]), item)) if report else [],
        failures=facts.failures(rows),
        failed_tasks=facts.failed_tasks(report) if report else [],
        alarms=[(alarm.name, str(alarm), alarm.action) for alarm in report.alarms] if report else [],
        decisions=facts.decisions(rows),
        incidents=facts.incidents(rows),
        gaps=[(gap.stage, str(gap.first), str(gap.last)) for gap in report.gaps] if report else [],
        changes=config.changes(),
        starts=[_start(one) for one in starts],
        css=(_ASSETS / "report.css").read_text("utf-8"),
        script=(_ASSETS / "report.js").read_text("utf-8"),
        plotly=(_ASSETS / "plotly-basic.min.js").read_text("utf-8"),
    )


def _state(rows: Sequence[Row], *, is_finished: bool) -> str:
    if is_finished:
        return "finished"
    return f"not finished: {len(facts.rl_rows(rows)):,} iterations of RL so far" if rows else "nothing measured yet"


def _sections(rows: Sequence[Row], report: RunReport | None) -> dict[str, list[tuple[str, Figure]]]:
    """Return the titles and figures of each section; charts without data are left out."""
    alarms = [(alarm.iteration, alarm.name) for alarm in report.alarms] if report else []
    learning = [(title, mark_alarms(figure, alarms)) for title, figure in _drawn(LEARNING, rows)]
    sizes = [(chart.title, draw_fleet(chart, fleet, rows)) for fleet, chart in FLEETS.items()]
    evaluation = draw_evaluations(rows)
    return {
        "evaluation": [("Held-out tasks, greedy", evaluation)] if evaluation else [],
        "search": _drawn(SEARCH, rows),
        "learning": learning,
        "throughput": _drawn(THROUGHPUT, rows),
        "agreement": _drawn(AGREEMENT, rows),
        "fleets": [(title, figure) for title, figure in sizes if figure] + _drawn(LOADS, rows),
    }


def _drawn(wanted: Sequence[Chart], rows: Sequence[Row]) -> list[tuple[str, Figure]]:
    return [(chart.title, figure) for chart in wanted if (figure := draw(chart, rows))]


def _start(one: Start) -> dict[str, Any]:
    return {
        "when": time.strftime("%F %T", time.localtime(one.time_s)),
        "where": f"{one.host}, {one.system}, {one.num_cpus} CPUs, Python {one.python}",
        "versions": ", ".join(f"{name} {version}" for name, version in one.versions.items()),
    }
