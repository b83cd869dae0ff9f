"""Memory that libraries keep in a process of a model, and the limits that loading a model sets."""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from learners_common import Build, make_config, make_policy

from benchmarks.learner.kernels import measured
from learners.algorithms.grpo import GRPOLearner
from learners.ranks.learner_group import LearnerWorker
from ragr1_actors.core.disk.folders import SharedFolderWriter
from ragr1_actors.core.disk.learner_state import TensorPart
from ragr1_actors.core.models import process_memory
from ragr1_actors.core.models.model_files import load_model
from ragr1_actors.core.models.process_memory import KERNEL_LIMITS


@pytest.mark.integration
@pytest.mark.skipif(not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN has no bfloat16 on this processor")
def test_compiled_matrix_products_do_not_stay() -> None:
    unlimited_mib, _ = measured(150, is_limited=False)
    limited_mib, _ = measured(150, is_limited=True)
    assert limited_mib < unlimited_mib / 2


@pytest.mark.engine
@pytest.mark.parametrize("loads", ["learner", "engine"])
def test_loading_a_model_limits_the_kernels_and_leaves_a_users_limit(
    monkeypatch: pytest.MonkeyPatch, build: Build, tmp_path: Path, loads: str
) -> None:
    monkeypatch.setenv(KERNEL_LIMITS[0], "7")
    monkeypatch.delenv(KERNEL_LIMITS[1], raising=False)
    if loads == "learner":
        build(GRPOLearner)
    else:
        load_model(make_policy(tmp_path / "model"), trust_remote_code=False)
    assert [os.environ[name] for name in KERNEL_LIMITS] == ["7", "64"]


@pytest.mark.engine
def test_the_copy_of_a_checkpoint_is_given_back_once_it_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copies: list[weakref.ref[Any]] = []
    alive: list[int] = []
    monkeypatch.setattr(process_memory, "trim_heap", lambda: alive.append(sum(ref() is not None for ref in copies)))
    worker = LearnerWorker(make_config(learners={"num_learners": 0}))
    worker.build("grpo", make_policy(tmp_path / "policy"))
    copied = worker.learner.get_parts

    def get_parts() -> dict[str, TensorPart]:
        parts = copied()
        copies.extend(weakref.ref(part.values) for part in parts.values())
        return parts

    monkeypatch.setattr(worker.learner, "get_parts", get_parts)
    (tmp_path / "checkpoint").mkdir()
    worker.begin_save(SharedFolderWriter(tmp_path / "checkpoint"))
    assert worker.finish_save()
    worker._writer.shutdown()
    assert copies
    assert alive == [0]
    worker.close()
