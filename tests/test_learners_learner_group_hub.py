"""The worker builds a policy by its name on a model hub, from the hub's cache on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from learners_common import make_policy

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = """
import sys
from pathlib import Path
from learners_common import make_config, make_groups
from learners.ranks.learner_group import LearnerGroup
from ragr1_actors.core.disk.folders import SharedFolderWriter
from ragr1_actors.core.schema import groups_to_record_batch
group = LearnerGroup(make_config(learners={"num_learners": 0}))
group.build("grpo", "someone/tiny")
group.update([groups_to_record_batch(make_groups(0))])
group.save_policy(SharedFolderWriter(Path(sys.argv[1])))
group.stop()
"""


@pytest.mark.slow
def test_a_hub_name_is_trained_and_saved(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    cached = tmp_path / "hub" / "models--someone--tiny"
    shutil.copytree(make_policy(tmp_path / "policy"), cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    environment = {
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
        "DS_ACCELERATOR": "cpu",
    }
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "saved")]
    ran = subprocess.run(
        command, env=os.environ | environment, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200
    )
    assert ran.returncode == 0, ran.stderr
    saved = {path.name for path in (tmp_path / "saved").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= saved
