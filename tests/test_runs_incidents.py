"""What failed and was mended: from a warning to a line of the console, the metrics and the report."""

from __future__ import annotations

import logging
from pathlib import Path

from small_world import deterministic

from ragr1_actors.runs.report import EvalResult, RunReport, StageReport, TaskCounts, read_report, write_report
from ragr1_actors.runs.telemetry.events import IncidentLog
from ragr1_actors.runs.telemetry.metrics import MetricsLogger, read_events, read_metrics


def test_a_warning_is_printed_kept_and_in_the_report(tmp_path: Path) -> None:
    said: list[str] = []
    logger = MetricsLogger(tmp_path)
    with IncidentLog(said.append) as incidents:
        logging.getLogger("learners.ranks.learner_group").warning("rank %d died", 1)
        logging.getLogger("learners.ranks.learner_group").info("a note")
        logging.getLogger("transformers").warning("of another library")
        logger.log("rl", 1, {"rollout/em": 0.5}, incidents=incidents.take())
        logger.log("rl", 2, {"rollout/em": 0.5}, incidents=incidents.take())
    logging.getLogger("learners.ranks.learner_group").warning("after the run")
    logger.close()
    assert said == ["rank 1 died"]
    (found,) = read_events(tmp_path)[1]
    assert found.what == "rank 1 died"
    assert deterministic(read_metrics(tmp_path)[0]) == {"stage": "rl", "iteration": 1, "rollout/em": 0.5}
    stage = StageReport("rl", EvalResult(0.5, 0.5, 1.0, 1.0, 1.0, 9.0, num_tasks=1), 1.0)
    write_report(tmp_path, RunReport((stage,), 1.0, 1, TaskCounts(1, 1, 0, 0, 0), incidents=(found,)))
    assert read_report(tmp_path).incidents == (found,)
