from __future__ import annotations

import json
from pathlib import Path

import pytest
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


def test_little_room_is_a_warning(tmp_path: Path) -> None:
    assert doctor._room("disk", tmp_path, 0, "runs").state == "ok"
    little = doctor._room("disk", tmp_path, 2**80, "runs are written here")
    assert little.state == "warning"
    assert little.found.endswith("runs are written here")
    assert doctor._room("disk", tmp_path / "none", 0, "runs").state == "warning"


def test_the_command_looks_over_a_machine_on_which_the_tests_run() -> None:
    lines = [json.loads(line) for line in invoke("doctor", "--no-ray", "--json").splitlines()]
    states = {line["name"]: line["state"] for line in lines}
    assert states["Python"] == states["torch"] == states["FAISS"] == states["CPU cores"] == "ok"
    assert "/dev/shm" in states
    assert "Ray" not in states
