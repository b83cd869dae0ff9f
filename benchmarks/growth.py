"""``ragr1 bench growth``: how seconds and bytes grow with the number of trajectories, tokens, passages and runners.

===================== ================================================================== =======
metric                exponent of                                                        goal
===================== ================================================================== =======
trajectories_s        CPU seconds in which a rank reads and packs a batch, by            <= 1.1
                      trajectories
trajectories_bytes    peak bytes of Python objects of it                                 <= 1.1
tokens_s              CPU seconds of an update, one trajectory a row, by its tokens      <= 2
tokens_bytes          peak bytes of forward and backward, by the tokens of a row         <= 1.1
corpus_s              CPU seconds of 64 exact queries, by passages                       <= 1.1
corpus_bytes          bytes of the index on disk, by passages                            <= 1
runners_s             CPU seconds of the simulated driver per group, by env runners      <= 0.5
runners_bytes         peak bytes of its Python objects, by env runners                   <= 1.1
===================== ================================================================== =======

The exponent is the slope of the straight line through the logarithms of sizes and costs, by least squares: 1 is linear.
Each size is twice the one before. The two sides are the costs at the largest and at the smallest size.
"""

from __future__ import annotations

import math
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import linear_regression

import pyarrow as pa

from benchmarks.learner import head_memory, sides
from benchmarks.learner.ratios import PAIR_COST, SHAPE
from benchmarks.learner.shapes import write_policy
from benchmarks.measurement import Goal, Measurement, Repeats, Sample, choose, log, measure
from benchmarks.retrieval import evidence
from benchmarks.retrieval.search_rates import NUM_QUERIES, TOP_K
from learners.algorithms.grpo import GRPOLearner
from ragr1_actors.core.schema import groups_to_record_batch
from ragr1_actors.core.types import TrajectoryGroup
from ragr1_actors.lab.simulation.run import Size, simulate
from ragr1_actors.lab.simulation.workload import DrawnWorkload
from ragr1_actors.planning.machine import GPUS, Machine
from ragr1_actors.planning.plan import make_pace
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from retrieval.indexes.manifest import FileRecord, Shard
from retrieval.indexes.vector_index import VectorIndex

GOALS = {
    "trajectories_s": Goal(1.1, at_least=False),
    "trajectories_bytes": Goal(1.1, at_least=False),
    "tokens_s": Goal(2.0, at_least=False),
    "tokens_bytes": Goal(1.1, at_least=False),
    "corpus_s": Goal(1.1, at_least=False),
    "corpus_bytes": Goal(1.0, at_least=False),
    "runners_s": Goal(0.5, at_least=False),
    "runners_bytes": Goal(1.1, at_least=False),
}
METRICS = tuple(GOALS)
TRAJECTORIES = (1024, 2048, 4096, 8192)
TOKENS = (1024, 2048, 4096, 8192)
ROW_TOKENS = (2048, 4096, 8192, 16384)
PASSAGES = (25_000, 50_000, 100_000, 200_000)
RUNNERS, TRACED_RUNNERS = (32, 64, 128, 256), (16, 32, 64, 128)
NUM_PASSAGES = 21_015_324
"""Corpus of the simulated runs, as in ``benchmarks.scale``."""
QUICK = 16
"""By which all sizes are divided in a quick run."""

Cost = Callable[[int], float]


def describe() -> str:
    """The workload, in one line."""
    return "growth: exponents over four sizes, each twice the one before"


def run(only: str | None = None, repeats: int | None = None, quick: bool = False) -> Iterator[Measurement]:
    """Measure, and yield what is found.

    Raises:
        UserError: ``only`` is no metric.
    """
    wanted, times = choose(only, METRICS), Repeats(repeats or (1 if quick else None))
    with tempfile.TemporaryDirectory(prefix="ragr1-growth-") as directory:
        costs = Costs(Path(directory))
        of_metric: dict[str, tuple[Sequence[int], Cost]] = {
            "trajectories_s": (TRAJECTORIES, costs.reading_s),
            "trajectories_bytes": (TRAJECTORIES, costs.reading_bytes),
            "tokens_s": (TOKENS, costs.update_s),
            "tokens_bytes": (ROW_TOKENS, costs.row_bytes),
            "corpus_s": (PASSAGES, costs.search_s),
            "corpus_bytes": (PASSAGES, costs.index_bytes),
            "runners_s": (RUNNERS, costs.driver_s),
            "runners_bytes": (TRACED_RUNNERS, costs.driver_bytes),
        }
        for metric, (sizes, cost) in of_metric.items():
            if metric in wanted:
                used = [size // QUICK for size in sizes] if quick else sizes
                unit = metric.rpartition("_")[2]
                yield measure(metric, [exponent(used, cost) for _ in times], unit, GOALS[metric])


def exponent(sizes: Sequence[int], cost: Cost) -> Sample:
    """Return the slope of the logarithms, with the costs of the largest and of the smallest size as its sides."""
    cost(sizes[0])  # does not count: what is imported and compiled at the first use
    costs = [cost(size) for size in sizes]
    log(", ".join(f"{size:,}: {found:.4g}" for size, found in zip(sizes, costs, strict=True)))
    slope = linear_regression([math.log(size) for size in sizes], [math.log(found) for found in costs]).slope
    return Sample(slope, costs[-1], costs[0])


class Costs:
    """What each size costs."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._policy_dir = write_policy(directory / "policy", SHAPE)
        self._indexes: dict[int, Path] = {}

    def reading_s(self, num_trajectories: int) -> float:
        """CPU seconds of a rank from the record batch to the packed rows."""
        batch, groups = self._batch(num_trajectories)
        started = time.process_time()
        sides.read_batch(batch, decode_texts=False)
        sides.packed_rows(sides.members(groups), 2, 4096, PAIR_COST)
        return time.process_time() - started

    def reading_bytes(self, num_trajectories: int) -> float:
        """Peak bytes of Python objects while the batch is read."""
        return sides.read_batch(self._batch(num_trajectories)[0], decode_texts=False, heap=True)[1]

    def _batch(self, num_trajectories: int) -> tuple[pa.RecordBatch, list[TrajectoryGroup]]:
        groups = sides.draw_groups(sides.draw_lengths(num_trajectories, 50, 500, 0), 1000, 0)
        return groups_to_record_batch(groups), groups

    def update_s(self, num_tokens: int) -> float:
        """CPU seconds of an update with a group whose trajectories have a row each; the second one counts."""
        config = sides.make_config(num_tokens)
        learner = sides.build_learner(GRPOLearner, self._policy_dir, config)
        groups = sides.draw_groups([num_tokens] * sides.GROUP_SIZE, SHAPE.vocab_size, 0)
        sides.clock(learner, groups)
        started = time.process_time()
        sides.clock(learner, groups)
        return time.process_time() - started

    def row_bytes(self, num_tokens: int) -> float:
        """Bytes above the weights, in a new process."""
        return head_memory.measure_side("ours", self._policy_dir, num_tokens)

    def search_s(self, num_passages: int) -> float:
        """CPU seconds of a batch of queries, the least of five."""
        path = self._index(num_passages)
        shard = Shard(0, num_passages, FileRecord.of(path.parent, path.name))
        index = VectorIndex.load(path.parent, shard, "flat", evidence.DIMENSION)
        queries, seconds = evidence.vectors(NUM_QUERIES, seed=99), []
        for _ in range(5):
            started = time.process_time()
            index.search(queries, TOP_K, 1)
            seconds.append(time.process_time() - started)
        return min(seconds)

    def index_bytes(self, num_passages: int) -> float:
        """Bytes of the file of vectors."""
        return self._index(num_passages).stat().st_size

    def _index(self, num_passages: int) -> Path:
        if num_passages not in self._indexes:
            folder = self._directory / str(num_passages)
            folder.mkdir()
            path = folder / "shard-0000.faiss"
            vectors = evidence.vectors(num_passages, seed=0)
            VectorIndex.build([vectors], evidence.DIMENSION, "flat", count=num_passages, options={}).save(path)
            self._indexes[num_passages] = path
        return self._indexes[num_passages]

    def driver_s(self, num_runners: int) -> float:
        """CPU seconds per group of the decisions of the driver, in a simulation."""
        started = time.process_time()
        num_groups = _simulate(num_runners)
        return (time.process_time() - started) / num_groups

    def driver_bytes(self, num_runners: int) -> float:
        """Peak bytes of Python objects of a simulation."""
        tracemalloc.start()
        _simulate(num_runners)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak


def _simulate(num_runners: int) -> int:
    """Simulate two iterations that give each env runner the same work, and return the number of groups."""
    training = {"max_policy_lag": 1, "train_batch_size": 2 * num_runners}
    config = AlgorithmConfig.from_recipe("search_r1_grpo_7b").training(**training).freeze()
    pace = make_pace(config, Machine(GPUS["h200-141gb"], 8, 96, 0, 0, 0), NUM_PASSAGES)
    found = simulate(config, pace, DrawnWorkload(config), Size(num_runners, max(1, num_runners // 8)), 2)
    return found.tasks["issued"]
