"""Metrics out: what Ray's agent exports of a run, and the dashboard that shows it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from processes import run_python
from prometheus_client.parser import text_string_to_metric_families
from small_world import make_files, make_recipe

from benchmarks.scale.clusters import free_port
from cluster.metrics import RECORDED

ROOT = Path(__file__).resolve().parent.parent
DASHBOARD = ROOT / "cluster" / "deploy" / "grafana" / "ragr1.json"
_NAME = re.compile(r"ray_ragr1_\w+")

RUN = """
import json, sys, threading, time, urllib.request
from pathlib import Path
import ray
from rich.console import Console
from ragr1_actors.core.resolve import read_yaml_file, resolve
from ragr1_actors.runs.storage.store import find_store
from ragr1_actors.runs.run_directory import create_run_directory
from ragr1_actors.runs.run_directory import ScaleOrder, write_order
from ragr1_actors.training.training_run import TrainingRun

recipe, run_dir, port, temp_dir, wanted = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5:]
ray.init(
    address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, _temp_dir=temp_dir,
    object_store_memory=200_000_000, _metrics_export_port=port, _system_config={"metrics_report_interval_ms": 1000},
)
found, is_over = {}, threading.Event()

def scrape():
    while not is_over.wait(1.0):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:  # the agent is busy, or not up yet
            continue
        found.update((line.rpartition(" ")[0], line) for line in lines if line.startswith("ray_ragr1_"))

scraper = threading.Thread(target=scrape)
scraper.start()

config = resolve(read_yaml_file(Path(recipe), ""))
create_run_directory(config, run_dir)
write_order(find_store(run_dir), ScaleOrder(order_id="a second retriever", sizes={"retrievers": 2}))
with (run_dir / "console.txt").open("w") as printed:
    TrainingRun(config, run_dir, Console(file=printed, width=200)).execute()
deadline = time.monotonic() + 300
while not all(any(line.startswith(name) for line in list(found)) for name in wanted) and time.monotonic() < deadline:
    time.sleep(0.5)
is_over.set()
scraper.join()
print("\\n".join(found.values()))
"""


def exported_name(metric: str) -> str:
    """Return the name of a driver's metric in Prometheus: ``ray_ragr1_env_runners_load`` for ``env_runners/load``."""
    return f"ray_ragr1_{metric.replace('/', '_')}"


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return found


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def known_names() -> set[str]:
    """Return what a run exports: what actors record, and the metrics of the driver that docs/metrics.md lists."""
    documented = re.findall(r"`(\w+/\w+)`", (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8"))
    names = {exported_name(metric) for metric in documented}
    for name, recorded in RECORDED.items():
        endings = ("_bucket", "_sum", "_count") if recorded.boundaries else ("_total",)
        names |= {f"ray_ragr1_{name}{ending}" for ending in endings}
    return names


def test_the_dashboard_has_grafanas_form() -> None:
    found = dashboard()
    assert {"uid", "title", "schemaVersion", "templating", "panels", "time"} <= set(found)
    assert {variable["name"] for variable in found["templating"]["list"]} == {"datasource", "run"}
    ids = [panel["id"] for panel in found["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in found["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24, panel["title"]
        taken |= cells
    for panel in panels():
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert panel["type"] == "timeseries" and panel["fieldConfig"]["defaults"]["unit"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Ray leaves its template open
def test_the_dashboard_uses_only_keys_that_rays_own_dashboards_use() -> None:
    """Ray provisions Grafana with a folder of dashboards, which reads this one beside its own."""
    from ray.dashboard.modules.metrics.grafana_dashboard_factory import (
        generate_data_grafana_dashboard,
        generate_default_grafana_dashboard,
        generate_train_grafana_dashboard,
    )

    makers = (generate_data_grafana_dashboard, generate_default_grafana_dashboard, generate_train_grafana_dashboard)
    known = [json.loads(make()[0]) for make in makers]
    assert set(dashboard()) <= set().union(*known)
    all_panels = [inner for each in known for panel in each["panels"] for inner in (panel, *panel.get("panels", []))]
    assert set().union(*dashboard()["panels"]) <= set().union(*all_panels)
    targets = [target for panel in all_panels for target in panel.get("targets", [])]
    assert {key for panel in panels() for target in panel["targets"] for key in target} <= set().union(*targets)


def test_every_expression_names_metrics_that_exist() -> None:
    known = known_names()
    for panel in panels():
        for target in panel["targets"]:
            names = _NAME.findall(target["expr"])
            assert names and set(names) <= known, target["expr"]
            assert target["expr"].count("(") == target["expr"].count(")")


def test_the_page_about_monitoring_names_metrics_that_exist() -> None:
    names = set(_NAME.findall((ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")))
    assert {f"ray_ragr1_{name}" for name in RECORDED} <= {re.sub("_(bucket|sum|count|total)$", "", n) for n in names}
    assert names <= known_names() | {f"ray_ragr1_{name}" for name in RECORDED}


@pytest.mark.ray
@pytest.mark.engine
@pytest.mark.slow
def test_rays_agent_exports_a_run(tmp_path: Path, ray_temp_dir: str) -> None:
    """One iteration with an actor of each sort; the agent of the node is asked over loopback, as Prometheus does."""
    recipe = make_recipe(tmp_path / "recipe.yaml", make_files(tmp_path), num_iterations=1)
    config = json.loads(recipe.read_text())
    config["retrieval"] |= {"encoders": {"num_encoders": 1, "num_cpus": 0}}
    config["environment"]["eval_tasks"] = str(tmp_path / "eval_tasks.json")
    recipe.write_text(json.dumps(config))
    unsure = ("ray_ragr1_failed_attempts", "ray_ragr1_cached_queries")  # a counter appears with its first event
    wanted = [f"ray_ragr1_{name}" for name in RECORDED]
    wanted += [name for panel in panels() for target in panel["targets"] for name in _NAME.findall(target["expr"])]
    wanted = sorted({name for name in wanted if not name.startswith(unsure)})
    text = run_python(RUN, recipe, tmp_path / "run", free_port(), ray_temp_dir, *wanted)
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    values: dict[str, float] = {}
    for sample in samples:
        values[sample.name] = values.get(sample.name, 0.0) + sample.value
    assert [name for name in wanted if not any(found.startswith(name) for found in values)] == []
    printed = (tmp_path / "run" / "console.txt").read_text()
    table = [re.split("  +", line.strip()) for line in printed.splitlines()[:5]]
    assert table[0] == ["actors", "number", "each", "nodes"]
    assert {row[0] for row in table[1:]} == {"learner ranks", "env runners", "retrievers", "encoders"}
    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-2])
    assert line["stage"] == "rl"
    exported = {s.name: s.value for s in samples if s.labels.get("run") == "run"}
    for metric in ("time/iteration_s", "env_runners/load", "learner/tokens", "retrieval/retriever_batch"):
        assert exported[exported_name(metric)] == pytest.approx(line[metric]), metric
    # what an actor recorded in the second before it was ended is not exported
    assert values["ray_ragr1_tokens_total"] > values["ray_ragr1_trajectories_total"] > 0
    assert 0 < values["ray_ragr1_group_seconds_sum"] < 600
    fleets = {s.labels["fleet"]: s.value for s in samples if s.name == "ray_ragr1_batch_queries_sum"}
    assert set(fleets) == {"retriever", "encoder"} and min(fleets.values()) > 0
    [decision] = [s for s in samples if s.name == "ray_ragr1_scaling_decisions_total"]
    assert (decision.labels["fleet"], decision.labels["direction"], decision.value) == ("retrievers", "up", 1)
    assert values["ray_ragr1_queries_total"] >= values.get("ray_ragr1_cached_queries_total", 0.0)
