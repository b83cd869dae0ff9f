from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from small_world import deterministic
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PluginEventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
from tensorboard.util.tensor_util import make_ndarray

from ragr1_actors.core.errors import DataError, RunDirectoryError
from ragr1_actors.core.types import Record, StopReason, Task, ToolCall, Trajectory, Turn
from ragr1_actors.runs.telemetry.metrics import MetricsLogger, as_markdown, mean_over, read_metrics
from ragr1_actors.runs.telemetry.trackers import LAYOUT


def scalars(run_dir: Path, name: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_one_line_per_iteration_and_the_same_in_tensorboard(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path / "run")
    logger.log("rl", 0, {"rollout/reward": 0.25, "learner/loss": -1})
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert lines == ['{"iteration": 0, "learner/loss": -1.0, "rollout/reward": 0.25, "stage": "rl"}']
    logger.close()
    logger.close()
    assert scalars(tmp_path / "run", "rollout/reward") == [(0, 0.25)]


def test_resume_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path)
    for iteration in range(3):
        logger.log("sft", iteration, {"learner/loss": 9.0})
    for iteration in range(4):
        logger.log("rl", iteration, {"rollout/reward": float(iteration)})
    logger.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "rollo')  # the crash
    logger = MetricsLogger(tmp_path)
    logger.log("rl", 2, {"rollout/reward": 20.0})
    logger.close()
    rows = read_metrics(tmp_path)
    assert [(row["stage"], row["iteration"]) for row in rows] == [
        *(("sft", iteration) for iteration in range(3)),
        *(("rl", iteration) for iteration in range(3)),
    ]
    assert [row["rollout/reward"] for row in rows[3:]] == [0.0, 1.0, 20.0]
    assert scalars(tmp_path, "rollout/reward") == [(0, 0.0), (1, 1.0), (2, 20.0)]
    assert scalars(tmp_path, "sft/learner/loss") == [(0, 9.0), (1, 9.0), (2, 9.0)]


def test_evaluation_is_one_curve_over_iterations_and_over_tokens(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path)
    logger.log("eval_start", 0, {"eval/em": 0.0})
    logger.log("sft", 700, {"learner/loss": 1.0, "learner/tokens": 9.0})
    logger.log("eval_sft", 0, {"eval/em": 0.25})
    logger.log("rl", 1, {"rollout/reward": 1.0, "learner/tokens": 100.0})
    logger.log("rl", 1, {"eval/em": 0.5})
    logger.log("rl", 2, {"rollout/reward": 2.0, "learner/tokens": 100.0})
    logger.log("eval_rl", 2, {"eval/em": 0.75})
    logger.close()
    assert scalars(tmp_path, "eval/em") == [(0, 0.0), (0, 0.25), (1, 0.5), (2, 0.75)]
    assert scalars(tmp_path, "by_tokens/eval/em") == [(0, 0.0), (0, 0.25), (100, 0.5), (200, 0.75)]
    for _ in range(2):  # resumed twice from iteration 1
        logger = MetricsLogger(tmp_path)
        logger.log("rl", 2, {"rollout/reward": 8.0, "learner/tokens": 50.0})
        logger.log("eval_rl", 2, {"eval/em": 0.5})
        logger.close()
    assert scalars(tmp_path, "eval/em") == [(0, 0.0), (0, 0.25), (1, 0.5), (2, 0.5)]
    assert scalars(tmp_path, "by_tokens/eval/em") == [(0, 0.0), (0, 0.25), (100, 0.5), (150, 0.5)]
    assert scalars(tmp_path, "rollout/reward") == [(1, 1.0), (2, 8.0)]
    assert scalars(tmp_path, "sft/learner/loss") == [(700, 1.0)]


def test_an_evaluation_beside_training_is_at_the_tokens_of_its_iteration(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path)
    for iteration in range(1, 7):
        logger.log("rl", iteration, {"learner/tokens": 100.0})
    logger.log("rl", 5, {"eval/em": 0.5})  # it ended beside iteration 6
    logger.close()
    assert scalars(tmp_path, "by_tokens/eval/em") == [(500, 0.5)]
    logger = MetricsLogger(tmp_path)  # continues from the checkpoint of iteration 5
    logger.log("rl", 6, {"learner/tokens": 100.0})
    logger.close()
    assert scalars(tmp_path, "by_tokens/eval/em") == [(500, 0.5)]


def test_roll_back_forgets_the_iterations_it_repeats(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path)
    for iteration in range(1, 4):
        logger.log("rl", iteration, {"rollout/reward": 1.0, "learner/tokens": 10.0})
    logger.rewind("rl")
    logger.log("rl", 2, {"rollout/reward": 5.0, "learner/tokens": 10.0})
    logger.close()
    assert scalars(tmp_path, "rollout/reward") == [(1, 1.0), (2, 5.0)]
    assert scalars(tmp_path, "by_tokens/rollout/reward") == [(10, 1.0), (20, 5.0)]


def test_layout_names_metrics_of_the_documentation(tmp_path: Path) -> None:
    MetricsLogger(tmp_path).close()
    logger = MetricsLogger(tmp_path)
    logger.log("rl", 1, {"rollout/reward": 1.0})
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (*_, found) = events.Tensors("custom_scalars__config__")
    layout = Layout.FromString(found.tensor_proto.string_val[0])
    assert [category.title for category in layout.category] == list(LAYOUT)
    tags = {tag.strip("^$") for part in layout.category for chart in part.chart for tag in chart.multiline.tag}
    documented = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()
    absent = {tag for tag in tags if f"`{tag.removeprefix('sft/').removeprefix('by_tokens/')}`" not in documented}
    assert not absent


def test_values_that_are_not_finite_stay_json(tmp_path: Path) -> None:
    logger = MetricsLogger(tmp_path)
    logger.log("rl", 0, {"learner/loss": math.nan, "learner/norm": math.inf})
    logger.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["learner/norm"] == "inf"
    row = read_metrics(tmp_path)[0]
    assert math.isnan(row["learner/loss"])
    assert row["learner/norm"] == math.inf


def test_files_that_are_not_there_or_broken(tmp_path: Path) -> None:
    with pytest.raises(RunDirectoryError, match="holds no"):
        read_metrics(tmp_path / "absent")
    (tmp_path / "metrics.jsonl").write_text("{broken\n{}\n")
    with pytest.raises(DataError, match="line 1"):
        read_metrics(tmp_path)


def test_helpers() -> None:
    assert mean_over([{"a": 1.0}, {"a": 2.0, "b": 5.0}]) == {"a": 1.5, "b": 5.0}
    assert mean_over([]) == {}
    timed = {"time/iteration_s": 1.0, "env_runners/load": 3.0, "retrieval/waiting": 4.0}
    assert deterministic({**timed, "rollout/reward": 2.0}) == {"rollout/reward": 2.0}


def test_histograms_examples_and_settings_survive_a_resume_once(tmp_path: Path) -> None:
    settings = {"training.lr": 0.001, "retrieval.options": {"nprobe": 8}}
    for first in (1, 3):  # the second process repeats iteration 3
        logger = MetricsLogger(tmp_path, settings=settings)
        for iteration in range(first, 5):
            samples = {"turns": [1.0, 2.0, 2.0, float(iteration)], "calls_per_turn": []}
            histograms = {"ratio": [(0.9, 1.1, 6.0 + iteration), (1.1, 2.0, 0.0)]}
            logger.log("rl", iteration, {"rollout/reward": 0.5}, samples=samples, histograms=histograms)
            logger.log_examples("rl", iteration, {"wrong": f"example of {iteration}"})
        logger.close()
    events = PluginEventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()  # as the server of TensorBoard reads: the older class forgets scalars only
    histograms = events.Tensors("distribution/turns")
    assert [event.step for event in histograms] == [1, 2, 3, 4]
    buckets = make_ndarray(histograms[-1].tensor_proto)  # [num_buckets, (left, right, count)]
    assert (buckets[:, 2].sum(), buckets[0, 0], buckets[-1, 1]) == (4, 1, 4)
    counted = events.Tensors("distribution/ratio")
    assert [make_ndarray(event.tensor_proto)[0, 2] for event in counted] == [7, 8, 9, 10]
    assert make_ndarray(counted[-1].tensor_proto).tolist() == [[0.9, 1.1, 10], [1.1, 2, 0]]
    assert "distribution/calls_per_turn" not in events.Tags()["tensors"]
    texts = [event.tensor_proto.string_val[0] for event in events.Tensors("examples/wrong")]
    assert texts == [f"example of {iteration}".encode() for iteration in (1, 2, 3, 4)]
    found = HParamsPluginData.FromString(
        events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    ).session_start_info
    assert found.hparams["training.lr"].number_value == 0.001
    assert found.hparams["retrieval.options"].string_value == "{'nprobe': 8}"


def test_an_example_is_markdown_in_which_all_text_is_code() -> None:
    record = Record("p1", "Riga", "a ``` fence\n# no heading", 0.5)
    found = ToolCall("search", {"query": "who `made` it", "k": 1}, records=(record,))
    turns = (Turn("<search>x</search>", 7, "search", (found,)), Turn("<answer>Riga</answer>", 3, "answer"))
    task, tokens = Task("t", "who?", ("Riga", "Rīga")), np.zeros(2, np.int32)
    arrays = (tokens, tokens.astype(np.uint8), tokens.astype(np.float32), tokens)
    trajectory = Trajectory("t", task, *arrays, turns, StopReason.ANSWERED, 1.0, "Riga")
    text = as_markdown(trajectory)
    assert "````text\n0.500  Riga: a ``` fence\n# no heading\n````" in text
    assert "**turn 1, 7 tokens** \n```text\n<search>x</search>\n```" in text
    assert "Riga | Rīga" in text
    assert "**answer, reward 1, answered** \n```text\nRiga\n```" in text
