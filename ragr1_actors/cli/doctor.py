"""Looks this machine over: is what the project needs there, and how much room is there for it?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

from ragr1_actors.core.errors import RagR1Error

DISTRIBUTION = "ragr1-actors"
FAISS = ("faiss-cpu", "faiss-gpu", "faiss-gpu-cu12")
"""Any one of them."""
MIN_SHM_BYTES = 2 * 1024**3
MIN_DISK_BYTES = 5 * 1024**3

State = Literal["ok", "warning", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: ``Finding("torch", "ok", "2.13.0, expected ==2.13.0")``."""

    name: str
    state: State
    """``missing``: something required is not there, or not as it must be."""
    found: str


def examine(with_ray: bool = True) -> Iterator[Finding]:
    """Yield the findings as they come; starting Ray takes seconds and is the last."""
    yield _python()
    yield from packages(requirements())
    yield _faiss()
    yield Finding("CPU cores", "ok", str(os.cpu_count() or 1))
    yield _gpus()
    yield _room("/dev/shm", Path("/dev/shm"), MIN_SHM_BYTES, "Ray keeps trajectories there, or else on disk, slowly")
    yield _room("disk", Path.cwd(), MIN_DISK_BYTES, "runs are written here: checkpoints, trajectories, indexes")
    if with_ray:
        yield _ray()


def requirements() -> list[Requirement]:
    """Return what the project needs: of the installed package, or of the checkout that is not installed."""
    try:
        texts = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        project = Path(__file__).resolve().parents[2] / "pyproject.toml"
        texts = (
            tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"] if project.exists() else []
        )
    found = [Requirement(text) for text in texts]
    return [need for need in found if need.marker is None or need.marker.evaluate({"extra": ""})]


def packages(needed: list[Requirement]) -> Iterator[Finding]:
    """Compare what is installed with what is needed; nothing is imported."""
    for need in needed:
        version = _version(need.name)
        if version is None:
            yield Finding(need.name, "missing", f"not installed, expected {need.specifier}; pip install '{need}'")
        elif need.specifier.contains(version.partition("+")[0], prereleases=True):
            yield Finding(need.name, "ok", f"{version}, expected {need.specifier}")
        else:
            yield Finding(need.name, "missing", f"{version}, expected {need.specifier}; pip install '{need}'")


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("Python", "ok" if sys.version_info >= (3, 11) else "missing", f"{version}, expected >=3.11")


def _faiss() -> Finding:
    for name in FAISS:
        version = _version(name)
        if version is not None:
            return Finding("FAISS", "ok", f"{name} {version}")
    return Finding("FAISS", "missing", "not installed; pip install -e '.[cpu]', or '.[gpu]' on a machine with GPUs")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _gpus() -> Finding:
    command = shutil.which("nvidia-smi")
    if command is None:
        return Finding("GPUs", "ok", "0 (no nvidia-smi); the quickstart needs none")
    try:
        done = subprocess.run([command, "-L"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("GPUs", "warning", f"nvidia-smi does not answer: {error}")
    if done.returncode:
        return Finding("GPUs", "warning", f"nvidia-smi failed: {' '.join((done.stderr or done.stdout).split())[:120]}")
    vllm = _version("vllm")
    engine = f"vLLM {vllm}" if vllm else "no vLLM: pip install -e '.[gpu]' for env_runners.engine=vllm"
    return Finding("GPUs", "ok", f"{len(done.stdout.splitlines())}, {engine}")


def _room(name: str, path: Path, least_bytes: int, what_for: str) -> Finding:
    try:
        free = shutil.disk_usage(path).free
    except OSError as error:
        return Finding(name, "warning", f"{path}: {error.strerror}; {what_for}")
    found = f"{free / 2**30:.1f} GiB free"
    if free < least_bytes:
        return Finding(name, "warning", f"{found}, better {least_bytes / 2**30:.0f} GiB: {what_for}")
    return Finding(name, "ok", found)


def _ray() -> Finding:
    try:
        import ray

        from cluster.session import Session

        with Session():
            resources = ray.cluster_resources()
    except ImportError as error:
        return Finding("Ray", "missing", f"cannot be imported: {error}")
    except (RagR1Error, OSError, RuntimeError, ValueError, TimeoutError) as error:
        return Finding("Ray", "missing", f"does not start: {' '.join(str(error).split())[:200]}")
    return Finding("Ray", "ok", f"starts, with {resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs")
