"""Causes of an actor's death, in one line from Ray's texts of up to forty lines with advice on Ray's settings.

Ray's memory monitor ends the newest actors of a node that is almost full, not the one that filled it. An actor that may
restart fails with ``ActorUnavailableError``, which names no cause; Ray's table of processes has it.
"""

from __future__ import annotations

import re
import textwrap
import time

import ray
from ray._private.state import state  # no public function has the table of ended processes without Ray's dashboard
from ray.core.generated.common_pb2 import WorkerExitType  # type: ignore[attr-defined]  # generated
from ray.core.generated.gcs_pb2 import WorkerTableData  # type: ignore[attr-defined]
from ray.exceptions import ActorUnavailableError, OutOfMemoryError, RayActorError

MAX_LINE = 160
"""Limit of characters, so that a line with the actor's name and the reaction has at most 200."""
_MAX_NAME = 40
_RECENT_S = 60.0
"""Age in seconds above which a report is about an earlier death of the same actor."""
_NODE = re.compile(r"was ([\d.]+)GB used / ([\d.]+)GB limit")
_LARGEST = re.compile(r"COMMAND\s+\d+\t([\d.]+)\t(.+)")
_HAS_ENDED = re.compile(r"The actor (was restarted|is restarting)|its worker process has died")
_UNAVAILABLE = re.compile(r"temporarily unavailable: (?:IOError: )?(.+?)\.* The task may or may not")
PROCESSES = {
    "ray::LearnerWorker": ("learner", "learners.micro_batch_tokens"),
    "ray::EnvRunnerActor": ("env runner", "env_runners.max_concurrent_trajectories"),
    "VLLM::EngineCore": ("vLLM", "env_runners.max_concurrent_trajectories"),
    "ray::RetrieverActor": ("retriever", "retrieval.num_retrievers"),
    "ray::EncoderActor": ("encoder", "retrieval.encoders.num_encoders"),
    "ray::EmbeddingActor": ("encoder", "retrieval.encoders.num_encoders"),
    "ragr1 train": ("driver", "learners.micro_batch_tokens"),
    "ragr1_actors train": ("driver", "learners.micro_batch_tokens"),
}
"""Role in a run and the key that makes it smaller, by a part of a process's command. A driver may be the learner."""


def death_line(error: Exception) -> str:
    """Return what ended an actor or put it out of reach; empty for every other error."""
    if report := _memory_report(error):
        return memory_line(report)
    if not isinstance(error, RayActorError) or error.actor_init_failed:
        return ""
    line = (str(error).splitlines() or [""])[-1]
    if _HAS_ENDED.search(line):
        return "its process was killed or crashed"
    if isinstance(error, ActorUnavailableError) and (reason := _UNAVAILABLE.search(line)):
        line = reason[1]
    return textwrap.shorten(f"{type(error).__name__}: {line}", MAX_LINE, placeholder=" ...")


def last_line(error: Exception) -> str:
    """Return what ended an actor, else an error's class and the line of its message that names the cause.

    That is the line after the last traceback, since CUDA's advice follows it over several lines; else the last line.
    """
    if death := death_line(error):
        return death
    lines = [line for line in str(error).splitlines() if line.strip()]
    last_frame = max((at for at, line in enumerate(lines) if line.lstrip().startswith('File "')), default=None)
    behind = [] if last_frame is None else [line for line in lines[last_frame + 1 :] if not line[0].isspace()]
    chosen = (behind or lines[-1:] or [""])[0].strip()
    return f"{type(error).__name__}: {chosen}" if chosen else type(error).__name__


def memory_line(report: str) -> str:
    """Return the line for a report of Ray's memory monitor.

    ``ended by Ray's memory monitor, node 21.8 of 23.5 GB; largest: learner 14.6 GB; lower learners.micro_batch_tokens``
    """
    parts = ["ended by Ray's memory monitor"]
    if node := _NODE.search(report):
        parts[0] += f", node {float(node[1]):.1f} of {float(node[2]):.1f} GB"
    if largest := _LARGEST.search(report):
        name = next((name for name in PROCESSES if name in largest[2]), "")
        if not name:
            parts.append(f"largest: {textwrap.shorten(largest[2], _MAX_NAME, placeholder='...')} {_gb(largest[1])}")
        else:
            part, key = PROCESSES[name]
            parts += [f"largest: {part} {_gb(largest[1])}", f"lower {key}"]
    return "; ".join(parts)


def _gb(size: str) -> str:
    return f"{float(size):.1f} GB"


def _memory_report(error: Exception) -> str:
    """Return the report of Ray's memory monitor on the actor of this error, or an empty text."""
    if isinstance(error, OutOfMemoryError):
        return str(error)
    actor_id = error.actor_id if isinstance(error, RayActorError) else None
    if not actor_id or not ray.is_initialized():
        return ""
    since_ms, selected = 1000 * (time.time() - _RECENT_S), f"Selected to kill: (Actor({actor_id})"
    for data in state._connect_and_get_accessor().get_worker_table():
        worker = WorkerTableData.FromString(data)
        is_recent = worker.exit_type == WorkerExitType.NODE_OUT_OF_MEMORY and worker.end_time_ms > since_ms
        if is_recent and selected in worker.exit_detail:
            return str(worker.exit_detail)
    return ""
