from __future__ import annotations

import errno
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from small_world import invoke

from ragr1_actors.cli import doctor


def test_a_package_is_there_missing_or_of_another_version() -> None:
    needed = [Requirement(text) for text in ("numpy>=2", "numpy<1", "no-such-package-at-all==1.0")]
    found = list(doctor.packages(needed))
    assert [finding.state for finding in found] == ["ok", "missing", "missing"]
    assert "expected <1; pip install 'numpy<1'" in found[1].found
    assert found[2].found == "not installed, expected ==1.0; pip install 'no-such-package-at-all==1.0'"


def test_what_is_needed_is_what_pyproject_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DISTRIBUTION", "no-such-package-at-all")  # as in a checkout that is not installed
    names = {need.name for need in doctor.requirements()}
    assert {"torch", "ray", "transformers", "pydantic"} <= names
    assert "ruff" not in names


def test_little_room_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_at_disk() -> doctor.Finding:
        return next(finding for finding in doctor.examine(with_ray=False) if finding.name == "disk")

    monkeypatch.setattr(doctor, "MIN_DISK_BYTES", 0)
    assert look_at_disk().state == "ok"
    monkeypatch.setattr(doctor, "MIN_DISK_BYTES", 2**80)
    little = look_at_disk()
    assert little.state == "warning"
    assert little.found.endswith("better 1125899906842624 GiB: runs are written here")

    def fail(path: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    monkeypatch.setattr(shutil, "disk_usage", fail)
    absent = look_at_disk()
    assert absent.state == "warning"
    assert absent.found.startswith(f"{Path.cwd()}: No such file or directory; ")


NVIDIA_SMI = """#!/bin/sh
if [ "$1" = -L ]; then echo "GPU 0: NVIDIA A100-SXM4-80GB"; else
echo "| NVIDIA-SMI 550.54    Driver Version: 550.54    CUDA Version: 12.4    |"; fi
"""


@pytest.mark.parametrize(
    ("built", "state", "found"),
    [
        ("13.0", "missing", "torch is built for CUDA 13.0, the driver has 12.4, which is too old; update the NVIDIA"),
        ("12.8", "ok", "torch is built for CUDA 12.8, the driver has 12.4"),
        ("11.8", "ok", "torch is built for CUDA 11.8"),
        (None, "warning", "torch is built for CPUs"),
    ],
)
def test_the_driver_is_compared_with_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: str | None, state: str, found: str
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(NVIDIA_SMI)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(torch.version, "cuda", built)
    findings = {finding.name: finding for finding in doctor.examine(with_ray=False)}
    assert (findings["GPUs"].state, findings["GPUs"].found[0]) == ("ok", "1")
    assert findings["CUDA"].state == state
    assert found in findings["CUDA"].found


def test_the_disk_is_compared_with_what_a_recipe_writes() -> None:
    def disk_of(recipe: str) -> doctor.Finding:
        return next(finding for finding in doctor.examine(with_ray=False, recipe=recipe) if finding.name == "disk")

    assert "quickstart writes 3 checkpoints 0.0" in disk_of("quickstart").found
    written = re.search(r"ragr1_mq_7b writes 3 checkpoints ([\d.]+) GiB", disk_of("ragr1_mq_7b").found)
    assert written is not None
    assert float(written[1]) > 3 * 190e9 / 2**30, "policy and critic, three times"


def test_the_command_looks_over_a_machine_on_which_the_tests_run() -> None:
    lines = [json.loads(line) for line in invoke("doctor", "--no-ray", "--json").splitlines()]
    states = {line["name"]: line["state"] for line in lines}
    assert states["Python"] == states["torch"] == states["FAISS"] == states["CPU cores"] == "ok"
    assert "/dev/shm" in states
    assert "Ray" not in states
