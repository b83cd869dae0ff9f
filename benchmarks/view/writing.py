"""What it costs to write metrics, TensorBoard and trajectories: updates of one batch, with and without.

A short run of the quickstart gives the batch and the seconds of an iteration. Then a learner in this process, with a
thread per core, learns from that batch again and again; in every second block of updates all is written that a run
writes. Two whole runs would differ by several per cent: they sample different trajectories once a rounding differs.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.measurement import Repeats, Sample, log
from learners.ranks.learner_group import LearnerGroup
from ragr1_actors.core.disk.files import SFT_POLICY
from ragr1_actors.core.errors import UserError
from ragr1_actors.core.schema import groups_to_record_batch, read_trajectories
from ragr1_actors.rollout.groups import FinishedGroup, GroupRequest, summarize
from ragr1_actors.runs.run_directory import keep_trajectories, open_run_directory
from ragr1_actors.runs.telemetry.metrics import MetricsLogger, is_iteration, read_metrics
from ragr1_actors.training.batches import rollout_samples, take_histograms

RUN = ["training.num_iterations=13", "evaluation.num_tasks=1"]
RUN_QUICK = ["sft.num_steps=1", "sft.num_demonstrations=8", "training.num_iterations=3", "evaluation.num_tasks=1"]
RUN_QUICK += ["training.train_batch_size=4"]
WARM_UP = 2
"""First iterations, and updates, that are not counted: caches fill and files are made."""
NUM_BLOCKS, NUM_BLOCKS_QUICK = 20, 2
"""With and without in turns."""
BLOCK = 5
"""Updates. A block ends when its last file is whole, so that no thread works on in the next one."""


def cost(folder: Path, repeats: Repeats, *, quick: bool) -> list[Sample]:
    """Return the seconds of an iteration of the quickstart, and without writing; the ratio is the share that it adds.

    Raises:
        UserError: the run failed.
    """
    run_dir = folder / "run"
    command = [sys.executable, "-m", "ragr1_actors", "train", "quickstart", *(RUN_QUICK if quick else RUN)]
    done = subprocess.run([*command, "--run-dir", str(run_dir)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise UserError(f"the run failed: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    rows = [row for row in read_metrics(run_dir) if is_iteration(row)]
    iteration_s = mean(row["time/iteration_s"] for row in rows[WARM_UP:])
    found = []
    with closing(Replay(run_dir, folder / "written", rows[-1])) as replay:
        for _ in repeats:
            writing_s = replay.writing_s(NUM_BLOCKS_QUICK if quick else NUM_BLOCKS)
            log(f"{writing_s * 1e3:.1f} ms of writing in {iteration_s:.2f} s of an iteration")
            found.append(Sample(writing_s / (iteration_s - writing_s), iteration_s, iteration_s - writing_s))
    return found


class Replay:
    """Learns from the last batch of a run, in this process."""

    def __init__(self, run_dir: Path, out: Path, row: Mapping[str, Any]) -> None:
        """Write into ``out`` what the run ``run_dir`` wrote for an iteration; ``row`` has its metrics."""
        config = open_run_directory(run_dir)
        learners = config.learners.model_copy(update={"num_learners": 0})
        self._learners = LearnerGroup(config.model_copy(update={"learners": learners}), lambda rank: {})
        self._learners.build(config.training.algorithm, run_dir / SFT_POLICY)
        last = max((run_dir / "trajectories").glob("iteration_*.arrow"))
        groups = read_trajectories(last)
        self._batches = [groups_to_record_batch([group]) for group in groups]
        requests = [GroupRequest(g.task.task_id, g.task, len(g.trajectories), 1.0) for g in groups]
        self._finished = [
            FinishedGroup(request, summarize(group), batch)
            for request, group, batch in zip(requests, groups, self._batches, strict=True)
        ]
        self._metrics = {name: value for name, value in row.items() if isinstance(value, float)}
        self._out, self._number = out, 0
        self._logger = MetricsLogger(out, settings=config.changes())
        self._keeper = ThreadPoolExecutor(1, "keep trajectories")
        for _ in range(WARM_UP):
            self._block_s(writes=True)

    def writing_s(self, num_blocks: int) -> float:
        """Return the seconds that writing adds to an update, the mean over ``num_blocks`` of each kind."""
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(num_blocks):
            for writes in (True, False) if number % 2 == 0 else (False, True):
                seconds[writes].append(self._block_s(writes=writes))
        return mean(seconds[True]) - mean(seconds[False])

    def _block_s(self, *, writes: bool) -> float:
        started = time.perf_counter()
        keeping = None
        for _ in range(BLOCK):
            metrics, histograms = take_histograms(self._learners.update(list(self._batches)))
            if not writes:
                continue
            if keeping is not None:
                keeping.result()
            self._number += 1
            learned, *_ = self._learners.foreach_learner(lambda learner: learner.learned)
            name = f"iteration_{self._number:05d}"
            keeping = self._keeper.submit(keep_trajectories, self._out, name, self._batches, learned)
            samples = rollout_samples(self._finished)
            self._logger.log("rl", self._number, self._metrics | metrics, (), (), samples, histograms)
        if keeping is not None:
            keeping.result()
        return (time.perf_counter() - started) / BLOCK

    def close(self) -> None:
        """End the learner and close the files."""
        self._keeper.shutdown()
        self._logger.close()
        self._learners.stop()
