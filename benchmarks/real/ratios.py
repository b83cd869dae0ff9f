"""``ragr1 bench real``: what a pretrained language model learns, a run per seed. Finished runs are kept.

==================  ==================================================================================  ==============
metric              ratio                                                                               goal
==================  ==================================================================================  ==============
``real_world_em``   SmolLM2-135M-Instruct in the generated world: exact match after RL, 300 held out    >= .90
``real_world_gain`` the same less exact match after SFT                                                 >= .20
``real_world_min``  minutes from the start of ``ragr1 train`` to its report ÷ 40                        <= 1
``real_world_gb``   peak memory of all processes ÷ 10 GB                                                <= 1
``real_em_gain``    2WikiMultihopQA: exact match after RL less after SFT, 164 held out                  >= .10
``real_rounds``     search rounds with several queries per turn ÷ with one, after RL                    <= .75
==================  ==================================================================================  ==============

Every ratio is the mean over the seeds 0, 1, ...; ``ours`` and ``theirs`` are the two sides that it is made of. A run
takes half an hour to an hour on two cores. Before it: ``python -m benchmarks.real.models``, and for the last two
``python -m benchmarks.real.two_wiki FOLDER``. The runs are in ``runs/real/``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.measurement import Goal, Measurement, Sample, choose, measure
from benchmarks.real.runs import ROOT, FinishedRun, train

WORLD, TWO_WIKI = "smollm2_world", "smollm2_2wiki"
ONE_QUERY = (
    "environment.options.query_format=single",
    "environment.options.max_queries_per_turn=1",
    "sft.demonstrations=data/2wiki/demonstrations_single.json",
)
MAX_MINUTES, MAX_BYTES = 40.0, 10e9
GOALS = {
    "real_world_em": Goal(0.90, at_least=True),
    "real_world_gain": Goal(0.20, at_least=True),
    "real_world_min": Goal(1.0, at_least=False),
    "real_world_gb": Goal(1.0, at_least=False),
    "real_em_gain": Goal(0.10, at_least=True),
    "real_rounds": Goal(0.75, at_least=False),
}
METRICS = tuple(GOALS)
UNITS = {"real_world_min": "min", "real_world_gb": "bytes", "real_rounds": "rounds"}
QUICK = (
    "sft.num_steps=2",
    "sft.batch_size=2",
    "sft.num_demonstrations=8",
    "training.num_iterations=1",
    "training.train_batch_size=2",
    "training.group_size=2",
    "training.num_minibatches=1",
    "evaluation.num_tasks=4",
)


def describe() -> str:
    """The workload, in one line."""
    return "real: SmolLM2-135M-Instruct in the generated world and on 2WikiMultihopQA, a run per seed"


def bf16_overrides() -> tuple[str, ...]:
    """bfloat16 where the CPU multiplies it in hardware: at most half of float32's time, many times it elsewhere."""
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    return ("policy.dtype=bfloat16",) if {"amx_bf16", "avx512_bf16"} & set(flags.split()) else ()


def run(only: str | None = None, repeats: int | None = None, quick: bool = False) -> Iterator[Measurement]:
    """Train and yield what is found; ``repeats`` is the number of seeds.

    Raises:
        UserError: ``only`` is no metric, or a run failed.
    """
    wanted = choose(only, METRICS)
    seeds = range(repeats or (1 if quick else 3))
    common = (*bf16_overrides(), *(QUICK if quick else ()))
    with tempfile.TemporaryDirectory(prefix="ragr1-real-") as directory:
        root = Path(directory) if quick else ROOT
        found: dict[str, list[Sample]] = {}
        if any(name.startswith("real_world") for name in wanted):
            found |= world([train(WORLD, WORLD, common, seed, root) for seed in seeds])
        if wanted & {"real_em_gain", "real_rounds"}:
            several = [train(TWO_WIKI, TWO_WIKI, common, seed, root) for seed in seeds]
            found |= {"real_em_gain": [gain(one) for one in several]}
            if "real_rounds" in wanted:
                overrides = (*common, *ONE_QUERY)
                single = [train(TWO_WIKI, f"{TWO_WIKI}_single", overrides, seed, root) for seed in seeds]
                found |= {"real_rounds": [rounds(*pair) for pair in zip(several, single, strict=True)]}
        for name in METRICS:
            if name in wanted:
                yield mean_of(name, found[name])


def world(runs: Sequence[FinishedRun]) -> dict[str, list[Sample]]:
    """The samples of the metrics of the generated world, one per run."""
    minutes = [one.report.wall_s / 60 for one in runs]
    num_bytes = [float(one.report.peak_rss_bytes) for one in runs]
    gains = [gain(one) for one in runs]
    return {
        "real_world_em": [Sample(one.ours, one.ours, one.theirs) for one in gains],
        "real_world_gain": gains,
        "real_world_min": [Sample(one / MAX_MINUTES, one, MAX_MINUTES) for one in minutes],
        "real_world_gb": [Sample(one / MAX_BYTES, one, MAX_BYTES) for one in num_bytes],
    }


def gain(run: FinishedRun) -> Sample:
    """Exact match after RL and after SFT; the ratio is their difference."""
    after_rl, after_sft = run.evaluated("rl", "em"), run.evaluated("sft", "em")
    return Sample(after_rl - after_sft, after_rl, after_sft)


def rounds(several: FinishedRun, single: FinishedRun) -> Sample:
    """Search rounds per question with several queries per turn and with one."""
    ours, theirs = several.evaluated("rl", "rounds"), single.evaluated("rl", "rounds")
    return Sample(ours / theirs if theirs else float(ours == 0), ours, theirs)


def mean_of(metric: str, samples: Sequence[Sample]) -> Measurement:
    """As ``measure``, with means over the seeds: a median of three would hide the worst."""
    goal = GOALS[metric]
    ratio = fmean(sample.ratio for sample in samples)
    ours, theirs = fmean(sample.ours for sample in samples), fmean(sample.theirs for sample in samples)
    found = measure(metric, samples, UNITS.get(metric, "em"), goal)
    return replace(found, ratio=ratio, met=goal.is_met(ratio), ours=ours, theirs=theirs)
