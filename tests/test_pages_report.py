"""The page about a run: its figures, its words, that text of a run is only text, and how a browser draws it."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import webbrowser
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import async_playwright
from typer.testing import CliRunner

from ragr1_actors.cli import main as cli
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import DataError
from ragr1_actors.core.types import FailedTask, Failure
from ragr1_actors.pages.report import facts, page
from ragr1_actors.pages.report.page import Chart, draw, draw_evaluations, draw_fleet, mark_alarms, render, write_page
from ragr1_actors.runs.report import EvalResult, RunReport, StageReport, TaskCounts, write_report
from ragr1_actors.runs.run_directory import (
    STARTS_FILE,
    Start,
    append_start,
    create_run_directory,
    read_starts,
    this_start,
)
from ragr1_actors.runs.scores import wilson
from ragr1_actors.runs.telemetry.events import Alarm, Incident, ScalingDecision
from ragr1_actors.runs.telemetry.metrics import MetricsLogger, find_bottleneck, load_of_rows

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"
CONFIG = RunConfig.model_validate(
    {"environment": {"prompt": "{question}" + HOSTILE}, "env_runners": {"num_env_runners": 4}}
)
TIMES = {"time/iteration_s": 10.0, "time/sample_s": 8.0, "time/learn_s": 1.5, "time/publish_s": 0.5}
FLEET = {"env_runners/target": 4.0, "env_runners/running": 4.0, "env_runners/starting": 0.0, "env_runners/load": 60.0}
EVALUATION = {
    "eval/em": 0.9,
    "eval/f1": 0.92,
    "eval/rounds": 1.5,
    "eval/queries": 2.0,
    "eval/tokens": 60.0,
    "eval/num_tasks": 100.0,
}
RESULT = EvalResult(em=0.9, f1=0.92, rounds=1.5, queries_per_round=1.3, queries=2.0, tokens=60.0, num_tasks=100)
REPORT = RunReport(
    stages=(StageReport("rl", RESULT, 400.0),),
    wall_s=512.0,
    peak_rss_bytes=2**31,
    tasks=TaskCounts(issued=96, trained=95, failed=1, lost=0, doubled=0),
    ratios={"recall@10": 0.8, "recall@3": 0.61},
    failed_tasks=(FailedTask(f"nq/7{HOSTILE}", 0, Failure.DATA, 4, f"KeyError: {HOSTILE}"),),
    alarms=(Alarm("entropy", "learner/entropy", 2, 0.41, 0.27, 0.107, "warn"),),
)


def row(iteration: int, stage: str = "rl", **metrics: float) -> dict[str, Any]:
    return {"stage": stage, "iteration": iteration, **metrics}


def make_run(run_dir: Path, num_iterations: int = 4) -> None:
    """Write the files of a run with an evaluation, a decision, an incident and hostile text wherever text is."""
    create_run_directory(CONFIG, run_dir)
    append_start(run_dir, Start(1.79e9, f"node-7{HOSTILE}", "Linux", 16, "3.11.7", {"torch": "2.13.0"}))
    logger = MetricsLogger(run_dir)
    logger.log("eval_start", 0, {**EVALUATION, "eval/em": 0.1})
    for iteration in range(1, num_iterations + 1):
        values = {"rollout/reward": iteration / 10, "learner/entropy": 1 / iteration, **TIMES, **FLEET}
        values |= {"tasks/issued": 24.0 * iteration, "tasks/trained": 24.0 * iteration - 1}
        values |= {"tasks/lost": 0.0, "tasks/doubled": 0.0, "env_runners/num_restarts": float(iteration == 4)}
        made = [ScalingDecision(1.79e9, "runners", 2, 4, f"the learner waits {HOSTILE}")] if iteration == 3 else []
        failed = [Incident(1.79e9, f"env runner 1 died ({HOSTILE})")] if iteration == 4 else []
        logger.log("rl", iteration, values, made, failed)
    logger.log("eval_rl", num_iterations, EVALUATION)
    logger.close()


def names(figure: page.Figure | None) -> list[str]:
    assert figure is not None
    return [trace["name"] for trace in figure["data"]]


def test_a_chart_has_the_curves_with_two_finite_points() -> None:
    chart = Chart("Reward", "share", {"a": "rollout/a", "b": "rollout/b", "c": "rollout/c"})
    rows = [
        row(1, **{"rollout/a": 0.1, "rollout/b": 1.0}),
        row(2, **{"rollout/a": math.nan}),
        row(3, **{"rollout/a": 0.5}),
    ]
    figure = draw(chart, [*rows, row(1, "sft", **{"rollout/c": 1.0}), row(2, "sft", **{"rollout/c": 1.0})])
    assert names(figure) == ["a"]
    assert figure is not None
    assert figure["data"][0]["x"] == [1, 2, 3]
    assert figure["data"][0]["y"] == [0.1, None, 0.5]  # JSON has no NaN
    assert draw(chart, rows[:1]) is None
    assert draw(replace(chart, stage="sft"), rows) is None


def test_a_long_run_is_thinned_evenly() -> None:
    rows = [row(number, **{"rollout/reward": 1.0, "rollout/em": 1.0}) for number in range(5000)]
    figure = draw(page.LEARNING[0], rows)
    assert figure is not None
    xs = figure["data"][0]["x"]
    assert len(xs) <= page.MAX_POINTS
    assert (xs[0], xs[1] - xs[0], xs[-1]) == (0, 3, 4998)


def test_evaluations_have_intervals_and_lie_at_the_version_that_they_name() -> None:
    rows = [
        row(0, "eval_start", **{**EVALUATION, "eval/em": 0.0}),
        row(0, "eval_sft", **{**EVALUATION, "eval/em": 0.5}),
        row(6, **EVALUATION, **{"eval/policy_version": 5.0}),
        row(7, **TIMES),
    ]
    figure = draw_evaluations(rows)
    assert names(figure) == ["exact match", "F1", "exact match before SFT"]
    assert figure is not None
    curve = figure["data"][0]
    assert (curve["x"], curve["y"]) == ([0, 5], [0.5, 0.9])
    found = wilson(0.9, 100)
    assert curve["error_y"]["array"][1] == found.high - 0.9
    assert curve["error_y"]["arrayminus"][1] == 0.9 - found.low
    assert names(draw_evaluations([rows[0], rows[2]])) == ["exact match", "F1"]  # without SFT they are one curve
    assert draw_evaluations(rows[3:]) is None


def test_wilsons_interval() -> None:
    found = wilson(0.9, 100)
    assert (round(found.low, 4), round(found.high, 4)) == (0.8256, 0.9448)
    assert (wilson(0.0, 10).low, wilson(1.0, 10).high) == pytest.approx((0.0, 1.0))
    assert round(wilson(0.0, 10).high, 3) == 0.278


def test_fleets_have_marks_where_the_autoscaler_decided() -> None:
    decided = {"time_s": 1.0, "fleet": "runners", "before": 4, "after": 6, "reason": "a < b"}
    other = {**decided, "fleet": "retrievers"}
    rows = [row(1, **FLEET), {**row(2, **FLEET), "scaling/decisions": [decided, other]}]
    figure = draw_fleet(page.FLEETS["runners"], "runners", rows)
    assert names(figure) == ["wanted", "running", "starting", "decision"]
    assert figure is not None
    mark = figure["data"][-1]
    assert (mark["x"], mark["y"], mark["text"]) == ([2], [6], ["4 -&gt; 6: a &lt; b"])  # plotly takes HTML in a label
    assert draw_fleet(page.FLEETS["encoders"], "encoders", rows) is None


def test_alarms_are_lines() -> None:
    figure = {"data": [], "layout": {"height": 300}}
    assert mark_alarms(figure, [])["layout"] == {"height": 300}
    (line,) = mark_alarms(figure, [(7, "entropy")])["layout"]["shapes"]
    assert (line["x0"], line["x1"], line["label"]["text"]) == (7, 7, "entropy")


def test_the_verdict_is_that_of_the_newest_iterations() -> None:
    busy: Mapping[str, float] = {**FLEET, **TIMES, "time/sample_s": 0.0}
    rows = [row(number, **busy) for number in range(30)] + [row(30 + n, **FLEET, **TIMES) for n in range(facts.NEWEST)]
    load = load_of_rows(CONFIG, rows[30:])
    assert load is not None
    assert (load.learner_wait, load.num_runners) == (0.8, 4)
    assert load.runner_load == 60 / CONFIG.env_runners.max_concurrent_trajectories
    found, shown = find_bottleneck(load), facts.headline(CONFIG, rows)
    assert shown[0] == f"{found.limit.capitalize()}-bound"
    assert found.advice[1:] in shown[1]
    assert facts.headline(CONFIG, rows[:30])[0] == "Learner-bound"
    assert facts.headline(CONFIG, [row(0, "eval_start", **EVALUATION)])[0] == "No iteration yet"
    alone = RunConfig.model_validate({"env_runners": {"num_env_runners": 0}})
    assert facts.headline(alone, rows)[0] == "One process"


def test_evaluations_between_iterations_are_no_iterations(tmp_path: Path) -> None:
    books = {"tasks/issued": 24.0, "tasks/trained": 24.0, "tasks/lost": 0.0, "tasks/doubled": 0.0}
    tokens_per_s = {"env_runners/sampled_tokens": 3200.0, "learner/tokens": 753.0}
    books |= {name: value * TIMES["time/iteration_s"] for name, value in tokens_per_s.items()}
    rows = [
        one
        for number in range(1, facts.NEWEST + 3)
        for one in (row(number, **TIMES, **FLEET, **books), row(number, **EVALUATION, **{"eval/policy_version": 1.0}))
    ]
    shown = {tile.label: tile for tile in facts.tiles(CONFIG, rows, None)}
    assert shown["iterations of RL"].value == str(facts.NEWEST + 2)
    assert shown["tasks trained"].value == "24"
    assert shown["trajectories trained"].note == "tokens/s: 3,200 sampled, 753 in the loss"
    assert f"Iterations in the mean: {facts.NEWEST}." in facts.headline(CONFIG, rows)[1]
    assert f"{facts.NEWEST + 2} iterations of RL so far" in render("run", CONFIG, rows, None)


def test_counters_add_up_over_the_processes_of_a_run() -> None:
    assert facts.total_of_counter([0, 2, 2, 0, 1]) == 3
    assert facts.total_of_counter([2, 1]) == 3
    rows = [row(n, **TIMES, **{"env_runners/num_hangs": float(n), "loop/learner_restarts": 0.0}) for n in (1, 2)]
    assert facts.failures(rows) == [("env runners that hung", 2)]


def test_failures_of_encoders_and_trajectories_and_actors_that_do_not_answer() -> None:
    lost = {"retrieval/retriever_lost": [0.0, 2.0, 0.0, 1.0], "retrieval/encoder_hangs": [0.0, 0.0, 1.0, 1.0]}
    failed = {"env_runners/num_env_error": [0.0, 3.0, 3.0, 3.0], "retrieval/encoder_lost": [0.0] * 4}
    rows = [row(n, **TIMES, **{name: values[n] for name, values in (lost | failed).items()}) for n in range(4)]
    assert facts.failures(rows) == [
        ("trajectories that failed in the environment", 3),
        ("encoders that hung", 1),
        ("retrievers that did not answer, most at a time", 2),
    ]
    assert "Nothing failed." not in render("run", CONFIG, rows, None)


def test_ratios_have_goals_where_the_project_has_one() -> None:
    rows = [row(1, **TIMES, **{"learner/padding_waste": 0.02, "retrieval/cache_hit_rate": 0.5})]
    found = {one.name: one for one in facts.ratios(CONFIG, rows)}
    assert found["learner waits for samples"].value == "80.00%"
    assert found["learner waits for samples"].is_met is None  # in turns it must wait
    assert found["padding in computed tokens"].is_met is False
    assert found["searches from the cache"].goal == ""
    behind = RunConfig.model_validate({"training": {"max_policy_lag": 1}})
    assert {one.name: one.is_met for one in facts.ratios(behind, rows)}["learner waits for samples"] is False


def test_search_time_that_no_trajectory_waited_for_is_hidden() -> None:
    times = {"time/retrieval_s": 2.0, "time/retrieval_waited_s": 0.5, "time/generation_s": 8.0}
    (found,) = (one for one in facts.ratios(CONFIG, [row(1, **TIMES, **times)]) if "hidden" in one.name)
    assert found == facts.Ratio("search time hidden from its trajectory", "75.00%", "", None)
    without = facts.ratios(CONFIG, [row(1, **TIMES, **dict.fromkeys(times, 0.0))])
    assert not any("hidden" in one.name for one in without)


def test_text_of_a_run_is_only_text_and_nothing_is_fetched(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    out = tmp_path / "page.html"
    write_page(out, f"run {HOSTILE}", CONFIG, tmp_path / "run", REPORT)
    page = out.read_text("utf-8")
    head, code = page.split("<script>", 1)  # from here on plotly, and the page's own script
    assert "<img" not in head
    assert HOSTILE not in page
    assert not re.search(r"<(script|link|iframe)[^>]*\b(src|href)=", page)
    assert "@import" not in head
    assert "url(" not in head
    for words in ("0.900", "0.826 to 0.945", "Rollout-bound", "nq/7", "data, in quarantine", "env runner 1 died"):
        assert words in head
    for words in ("runners 2 -&gt; 4", "learner/entropy is 0.41", "node-7", "torch 2.13.0", "recall@3 0.610"):
        assert words in head
    assert head.index("recall@3 ") < head.index("recall@10 ")
    for words in ("env_runners.num_env_runners", "env runners restarted", "finished"):
        assert words in head
    figures = re.findall(r'<script type="application/json">(.*?)</script>', head, re.DOTALL)
    assert len(figures) >= 5
    assert all(json.loads(figure)["data"] for figure in figures)
    assert "Plotly" in code


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    os.mkfifo(tmp_path / "pipe")
    result = CliRunner().invoke(cli.app, ["report", str(tmp_path / "run"), "--html", "--out", str(tmp_path / "pipe")])
    assert isinstance(result.exception, DataError)
    assert str(result.exception).endswith("pipe is no regular file; choose another --out")
    assert (tmp_path / "pipe").is_fifo()


def test_a_counter_that_is_no_number_is_left_out() -> None:
    assert facts.total_of_counter([1.0, float("nan"), 3.0]) == 3


def test_a_run_that_has_not_ended(tmp_path: Path) -> None:
    run_dir = tmp_path / "my 'run'"
    make_run(run_dir)
    result = CliRunner().invoke(cli.app, ["report", str(run_dir), "--html"])
    assert result.exit_code == 0, result.output
    assert "in a browser" in result.output
    page = (run_dir / "report.html").read_text("utf-8")
    assert "not finished: 4 iterations of RL so far" in page
    write_report(run_dir, REPORT)
    assert (
        CliRunner().invoke(cli.app, ["report", str(run_dir), "--html", "--out", str(tmp_path / "a.html")]).exit_code
        == 0
    )
    assert '<p class="soft">finished' in (tmp_path / "a.html").read_text("utf-8")
    empty = render("new", CONFIG, [], None)
    assert "nothing measured yet" in empty
    assert "No evaluation yet" in empty


@pytest.mark.parametrize("has_browser", [True, False])
def test_the_page_opens_in_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_browser: bool) -> None:
    make_run(tmp_path / "my run")
    asked: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: (asked.append(url), has_browser)[1])
    result = CliRunner().invoke(cli.app, ["report", str(tmp_path / "my run"), "--open"])
    path = tmp_path / "my run" / "report.html"
    assert asked == [f"file://{tmp_path}/my%20run/report.html"]
    assert path.is_file()
    assert result.output == f"{path}\n" if has_browser else f"open {path} in a browser\n"


@pytest.mark.parametrize("options", [["--out", "a.html"], ["--html", "--json"], ["--open", "--json"]])
def test_options_that_exclude_each_other(tmp_path: Path, options: list[str]) -> None:
    with pytest.raises(Exception, match="give --html alone or with --out"):
        CliRunner().invoke(cli.app, ["report", str(tmp_path), *options], catch_exceptions=False)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    out = tmp_path / "none" / "a.html"
    with pytest.raises(Exception, match="choose another --out"):
        CliRunner().invoke(
            cli.app, ["report", str(tmp_path / "run"), "--html", "--out", str(out)], catch_exceptions=False
        )


def test_starts(tmp_path: Path) -> None:
    assert read_starts(tmp_path) == ()
    found = this_start()
    assert {"torch", "ray", "ragr1-actors"} <= set(found.versions)
    append_start(tmp_path, found)
    append_start(tmp_path, replace(found, host="other"))
    with (tmp_path / STARTS_FILE).open("a") as file:
        file.write('{"time_s": 1')  # a crash
    assert [one.host for one in read_starts(tmp_path)] == [found.host, "other"]
    (tmp_path / STARTS_FILE).write_text("{}\n")
    with pytest.raises(DataError, match=r"starts\.jsonl, line \d+ is damaged: .*; delete the file"):
        read_starts(tmp_path)


@pytest.mark.integration
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_a_browser_draws_it_offline(tmp_path: Path, scheme: str) -> None:
    make_run(tmp_path / "run")
    out = tmp_path / "page.html"
    write_page(out, HOSTILE, CONFIG, tmp_path / "run", REPORT)
    async with async_playwright() as playwright:
        # Chromium's own sandbox does not start as root, as in a container
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page(color_scheme=scheme)  # type: ignore[arg-type]
        page.set_default_timeout(120_000)
        problems: list[str] = []
        requested: list[str] = []
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: requested.append(request.url))
        await page.goto(out.as_uri())
        await page.wait_for_function("document.querySelectorAll('.plot .main-svg').length > 0")
        figures = await page.locator("figure").count()
        await page.wait_for_function(f"document.querySelectorAll('.plot.js-plotly-plot').length == {figures}")
        assert await page.title() == HOSTILE
        assert requested == [out.as_uri()]
        assert problems == []
        back = await page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert back == {"light": "rgb(255, 255, 255)", "dark": "rgb(20, 23, 27)"}[scheme]
        await browser.close()
