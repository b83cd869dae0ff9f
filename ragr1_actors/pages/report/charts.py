"""Charts of the page, as figures of plotly.js: pure functions of the lines of ``metrics.jsonl``.

A figure is ``{"data": [trace, ...], "layout": {...}}`` after https://plotly.com/javascript/reference. ``report.js``
adds the colours of text and grid, which follow the reader's light or dark theme.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ragr1_actors.runs.scaling import FleetName
from ragr1_actors.runs.scores import wilson
from ragr1_actors.runs.telemetry.metrics import DECISIONS

Row = Mapping[str, Any]
"""A line of ``metrics.jsonl``."""
Figure = dict[str, Any]

COLOURS = ("#3b7dd8", "#d9822b", "#2f9e6e", "#b452b4", "#8a8f98")
"""Colours that are readable on white and on black, and differ for any colour vision."""
SHARE = "share"
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
FLEETS: Mapping[FleetName, Chart] = {
    "runners": Chart(
        "Env runners",
        "replicas",
        {"wanted": "env_runners/target", "running": "env_runners/running", "starting": "env_runners/starting"},
    ),
    "retrievers": Chart(
        "Retrievers",
        "replicas",
        {
            "wanted": "retrieval/retriever_target",
            "running": "retrieval/retriever_running",
            "starting": "retrieval/retriever_starting",
        },
    ),
    "encoders": Chart(
        "Encoders",
        "replicas",
        {
            "wanted": "retrieval/encoder_target",
            "running": "retrieval/encoder_running",
            "starting": "retrieval/encoder_starting",
        },
    ),
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
            "label": {"text": _plain(name), "textposition": "end", "font": {"size": 10, "color": "#cc4b37"}},
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


def _plain(text: str) -> str:
    """Escape what plotly would take as HTML in a label."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
