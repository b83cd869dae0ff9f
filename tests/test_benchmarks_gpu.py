"""The GPU benchmark at the size of a CPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.learner import gpu, shapes
from ragr1_actors.core.errors import UserError
from ragr1_actors.core.models.model_shape import ModelShape

SHAPE = shapes.make_shape(32, 64, 2, 4, 2, vocab_size=64, has_qkv_bias=True)


def test_model_flops_by_hand() -> None:
    linear = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
    expected = 6 * (linear * 60 + 64 * 32 * 18 + 2 * 32 * (20**2 + 40**2))
    assert gpu.model_flops(SHAPE, [20, 40], 18) == pytest.approx(expected, rel=0.03)  # biases and norms


def test_a_row_predicts_the_end_of_every_sequence() -> None:
    row = gpu.make_row(50, [10, 20])
    assert row.target_ids.tolist() == row.token_ids[[7, 8, 9, *range(24, 30)]].tolist()
    assert row.predict_positions.tolist() == [6, 7, 8, *range(23, 29)]
    assert row.position_ids.tolist() == [*range(10), *range(20)]


@pytest.mark.engine
def test_what_a_cpu_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SMALL", replace(SHAPE, vocab_size=128))
    monkeypatch.setattr(gpu, "NUM_VECTORS_QUICK", 2000)
    found = {measurement.metric: measurement for measurement in gpu.run(quick=True)}
    assert set(found) == {"bf16_logprobs", "bf16_gradient", "gap_small", "search", "search_recall", "weight_copy"}
    assert 0 < found["bf16_logprobs"].ratio < 0.02
    assert 0.99 < found["bf16_gradient"].ratio < 1
    assert 0 < found["gap_small"].ratio < 0.02
    assert found["search_recall"].ratio == 1


@pytest.mark.engine
def test_an_engine_that_sampled_other_tokens_has_a_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "SMALL", replace(SHAPE, vocab_size=128))
    right = gpu.make_scored_row
    monkeypatch.setattr(gpu, "make_scored_row", lambda prompts, tokens: right(prompts, [one[::-1] for one in tokens]))
    (measurement,) = gpu.run(only="gap_small", quick=True)
    assert measurement.ratio > 0.02
    assert not measurement.met


@pytest.mark.engine
@pytest.mark.parametrize(("name", "family"), [("135m", "llama"), ("1.5b", "qwen2"), ("0.6b", "qwen3")])
def test_a_written_policy_has_the_shape(tmp_path: Path, name: str, family: str) -> None:
    shape = replace(shapes.SHAPES[name], num_layers=1, vocab_size=512)
    folder = shapes.write_policy(tmp_path, shape, torch.bfloat16)
    assert json.loads((folder / "config.json").read_text())["model_type"] == family
    assert ModelShape.of(str(folder)) == shape


def test_a_wrong_scan_has_no_recall(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "NUM_VECTORS_QUICK", 2000)
    right = gpu.TorchFlatIndex.find
    monkeypatch.setattr(gpu.TorchFlatIndex, "find", lambda index, queries, k: right(index, -queries, k))
    (measurement,) = gpu.run(only="search_recall", quick=True)
    assert measurement.ratio == 0
    assert not measurement.met


def test_every_metric_has_a_goal_or_says_that_it_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert all(
        metric in (gpu.__doc__ or "") for metric in ("bf16_gradient", "mfu_0.5b", "search_recall", "weight_copy")
    )
    with pytest.raises(UserError, match="got --only no_such, expected one of bf16_logprobs, "):
        next(gpu.run(only="no_such"))
    if not torch.cuda.is_available():
        assert list(gpu.run(only="mfu_7b")) == []
        assert "mfu and memory skipped: found no GPU, expected one of H100" in capsys.readouterr().err
