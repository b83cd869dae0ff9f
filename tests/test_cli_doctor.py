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
from typer.testing import CliRunner

from ragr1_actors.cli import doctor
from ragr1_actors.cli.main import app


def test_a_package_is_there_missing_or_of_another_version() -> None:
    needed = [Requirement(text) for text in ("numpy>=2", "numpy<1", "no-such-package-at-all==1.0")]
    found = list(doctor.packages(needed))
    assert [finding.state for finding in found] == ["ok", "missing", "missing"]
    assert "expected <1; pip install 'numpy<1'" in found[1].found
    assert found[2].found == "not installed, expected ==1.0; pip install 'no-such-package-at-all==1.0'"


def test_a_build_counts_where_it_is_asked_for() -> None:
    torch_version = torch.__version__  # such as 2.13.0+cpu
    public = torch_version.partition("+")[0]
    needed = [Requirement(text) for text in (f"torch=={public}", f"torch=={public}+none; python_version>'3'")]
    found = list(doctor.packages(needed))
    assert [finding.state for finding in found] == ["ok", "missing"]
    assert found[1].found.endswith(f"pip install 'torch=={public}+none'")


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
if [ -n "$1" ]; then echo "0, NVIDIA A100-SXM4-80GB, 81920, $USED_MIB"; else
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
    monkeypatch.setenv("USED_MIB", "512")
    monkeypatch.setattr(torch.version, "cuda", built)
    findings = {finding.name: finding for finding in doctor.examine(with_ray=False)}
    assert (findings["GPUs"].state, findings["GPUs"].found[:9]) == ("warning", "1; no vLL")
    assert (findings["GPU 0"].state, findings["GPU 0"].found) == ("ok", "NVIDIA A100-SXM4-80GB, 80 GiB")
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


@pytest.mark.parametrize(("used_mib", "state"), [("8193", "warning"), ("8192", "ok"), ("[N/A]", "ok")])
def test_memory_of_a_gpu_that_another_program_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, used_mib: str, state: str
) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(NVIDIA_SMI)
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("USED_MIB", used_mib)
    (found,) = (finding for finding in doctor.examine(with_ray=False) if finding.name == "GPU 0")
    assert found.state == state
    assert ("nvidia-smi lists the processes to end" in found.found) == (state == "warning")


@pytest.mark.parametrize(
    ("environment", "state", "found"),
    [
        ({}, "ok", "made by each local session"),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "s3cret"}, "ok", "set by RAY_AUTH_TOKEN"),
        ({"RAY_AUTH_MODE": "disabled"}, "warning", "unset it"),
        ({"RAY_ADDRESS": "10.0.0.1:6379"}, "warning", "none for the cluster at RAY_ADDRESS=10.0.0.1:6379"),
        ({"RAY_AUTH_TOKEN_PATH": "/no/file"}, "missing", "write the token there"),
    ],
)
def test_the_token_of_ray(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, environment: dict[str, str], state: str, found: str
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    (token,) = (finding for finding in doctor.examine(with_ray=False) if finding.name == "Ray token")
    assert token.state == state
    assert found in token.found
    assert "s3cret" not in token.found


def test_a_token_that_an_earlier_version_left_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".ray" / "auth_token"
    file.parent.mkdir()
    file.write_text("s3cret")
    (token,) = (finding for finding in doctor.examine(with_ray=False) if finding.name == "Ray token")
    assert token.state == "warning" and "s3cret" not in token.found
    assert token.found.startswith(f"{file}: ray start --head asks for it") and "delete it if" in token.found
    assert file.read_text() == "s3cret"
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    (token,) = (finding for finding in doctor.examine(with_ray=False) if finding.name == "Ray token")
    assert token.state == "ok"


def test_what_is_needed_for_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = [str(need.specifier) for need in doctor.requirements("gpu") if need.name == "vllm"]
    monkeypatch.setattr(doctor, "DISTRIBUTION", "no-such-package-at-all")
    in_checkout = [str(need.specifier) for need in doctor.requirements("gpu") if need.name == "vllm"]
    assert installed == in_checkout != []
    assert "torch" not in {need.name for need in doctor.requirements("gpu")}


def test_what_is_fine_is_hidden_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    printed = invoke("doctor", "--no-ray")
    assert "warning  Ray token: RAY_AUTH_MODE=disabled" in printed
    assert "Python" not in printed
    assert re.search(r"ok  \d+ of \d+ checks: fine; --verbose lists them\n$", printed)
    whole = invoke("doctor", "--no-ray", "--verbose").splitlines()
    assert whole[0].split()[:2] == ["ok", "Python:"]
    assert len(whole) == int(printed.rpartition(" checks")[0].split()[-1])


def test_the_exit_status_says_that_something_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/no/file")
    result = CliRunner().invoke(app, ["doctor", "--no-ray"])
    assert result.exit_code == 1
    assert "missing  Ray token" in result.output
