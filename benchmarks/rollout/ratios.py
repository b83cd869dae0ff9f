"""``ragr1 bench rollout``: what the rollout adds to its engine, what it saves against a lock-step loop, how it scales.

==================== ================================================================== =======
metric               ratio                                                              goal
==================== ================================================================== =======
engine_parity        tokens/s of the real loop ÷ the bare engine on the same turns      >= 0.97
vs_lockstep          wall ÷ lock-step loop, one blocking search per trajectory (RAG-R1) <= 0.4
vs_lockstep_batched  wall ÷ lock-step loop, one blocking search per turn (Search-R1)
vs_lockstep_paced    the same two, on an engine that keeps a GPU's time (``paced.py``)  <= 0.4
vs_batched_paced
lockstep_waiting     of that lock-step loop: trajectories' time spent waiting for others
retrieval_hidden     1 - seconds with searches and nothing to generate ÷ search seconds >= 0.98
overrun_tokens       tokens behind the stop string ÷ stopped completions                0
sync_pause           pause of a weight update ÷ warm copy of the same 100 MB            <= 3
scaling_runners      groups/s of 8 runners ÷ 8 times those of one                       >= 0.95
driver_cpu           CPU ÷ wall seconds of the driver, 256 trajectories on 8 runners    <= 1
loop_ceiling         tokens/s of one runner's loop, early search included (``ceiling``) >= 50000
loop_cost            CPU seconds of that loop ÷ of the engine alone on the same turns   <= 6
gateway_ceiling      tokens/s of one runner's gateway, 256 sessions (``gateway``)       >= 20000
gateway_parity       environment's ÷ agents' seconds, the same turns on a paced engine  >= 0.95
==================== ================================================================== =======

The workload is drawn as ``workload.py`` says. ``sides.NUM_IN_FLIGHT`` trajectories are under way and half as many run
in the engine, which has one core and the loop the other. The prefix cache is emptied before each side and has room for
all of it. All is taken over whole runs, their ends with ever fewer trajectories included. The sides follow each other
within a repeat; a first, small one of each does not count. stderr shows the load of the machine: where the engine's CPU
seconds are fewer than the seconds of the run, another process had its core. On the paced engine all trajectories run at
once, on every side, as they would on a GPU.
"""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import time
from collections.abc import Collection, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.measurement import HIGHER, LOWER, Goal, Measurement, Repeats, Sample, choose, log, measure, quotient
from benchmarks.rollout import baselines, sides, workload
from benchmarks.rollout.ceiling import loop_samples
from benchmarks.rollout.fleet import GROUP_SIZE
from benchmarks.rollout.sides import SideRun

# read by torch and vLLM when they are imported: one core for the engine, the other for the loop; room for all prefixes
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

GOALS: dict[str, Goal] = {
    "engine_parity": Goal(0.97, at_least=True),
    "vs_lockstep": Goal(0.4, at_least=False),
    "vs_lockstep_batched": LOWER,
    "vs_lockstep_paced": Goal(0.4, at_least=False),
    "vs_batched_paced": LOWER,
    "lockstep_waiting": HIGHER,
    "retrieval_hidden": Goal(0.98, at_least=True),
    "overrun_tokens": Goal(0.0, at_least=False),
    "sync_pause": Goal(3.0, at_least=False),
    "scaling_runners": Goal(0.95, at_least=True),
    "driver_cpu": Goal(1.0, at_least=False),
    "loop_ceiling": Goal(50_000.0, at_least=True),
    "loop_cost": Goal(6.0, at_least=False),
    "gateway_ceiling": Goal(20_000.0, at_least=True),
    "gateway_parity": Goal(0.95, at_least=True),
}
UNITS = {
    "engine_parity": "tokens/s",
    "vs_lockstep": "s",
    "vs_lockstep_batched": "s",
    "vs_lockstep_paced": "s",
    "vs_batched_paced": "s",
    "lockstep_waiting": "s waiting, s of all trajectories",
    "retrieval_hidden": "s idle, s searching",
    "overrun_tokens": "tokens, stopped completions",
    "sync_pause": "s",
    "scaling_runners": "groups/s",
    "driver_cpu": "CPU s, wall s",
    "loop_ceiling": "tokens, CPU s",
    "loop_cost": "CPU s",
    "gateway_ceiling": "tokens, CPU s",
    "gateway_parity": "s",
}
METRICS = tuple(GOALS)
_LOOP = {"engine_parity", "vs_lockstep", "vs_lockstep_batched", "retrieval_hidden"}
_FLEET = {"scaling_runners", "driver_cpu"}
_PACED = {"vs_lockstep_paced", "vs_batched_paced", "lockstep_waiting"}
_CEILING = {"loop_ceiling", "loop_cost"}
_GATEWAY = {"gateway_ceiling", "gateway_parity"}

NUM_TRAJECTORIES, NUM_TRAJECTORIES_QUICK = 96, 72
NUM_COMPLETIONS = 64
NUM_SYNCS = 5
"""Updates of a repeat; each has its own ratio."""
GROUPS_PER_RUNNER, GROUPS_PER_RUNNER_QUICK = 64, 24
NUM_CEILING_GROUPS, NUM_CEILING_GROUPS_QUICK = 192, 64

Samples = dict[str, list[Sample]]


def describe() -> str:
    """The workload, in one line."""
    return f"rollout: {workload.DESCRIPTION}"


def run(only: str | None = None, repeats: int | None = None, quick: bool = False) -> Iterator[Measurement]:
    """Measure, and yield what is found.

    Raises:
        UserError: ``only`` is no metric, or vLLM is not there.
    """
    wanted, times = choose(only, METRICS), Repeats(repeats or (1 if quick else None))
    with tempfile.TemporaryDirectory(prefix="ragr1-bench-") as directory:
        policy_dir = Path(directory)
        workload.make_policy(policy_dir)
        if by_vllm := wanted - _FLEET - _PACED - _CEILING - _GATEWAY:
            yield from _measured(_run_engine(policy_dir, by_vllm, times, quick))
        if wanted & _PACED:
            num = NUM_TRAJECTORIES_QUICK if quick else NUM_TRAJECTORIES
            yield from _measured({k: v for k, v in run_paced(policy_dir, num, times).items() if k in wanted})
        if wanted & _CEILING:
            num = NUM_CEILING_GROUPS_QUICK if quick else NUM_CEILING_GROUPS
            loop_samples(policy_dir, GROUP_SIZE)  # does not count
            found = [loop_samples(policy_dir, num) for _ in times]
            yield from _measured({metric: [sample[metric] for sample in found] for metric in wanted & _CEILING})
        if wanted & _GATEWAY:
            yield from _measured({k: v for k, v in _run_gateway(policy_dir, times, quick).items() if k in wanted})
        if wanted & _FLEET:
            yield from _measured({k: v for k, v in _run_fleet(policy_dir, times, quick).items() if k in wanted})


def _measured(samples: Samples) -> Iterator[Measurement]:
    for metric, found in samples.items():
        yield measure(metric, found, UNITS[metric], GOALS[metric])


def _run_engine(policy_dir: Path, wanted: Collection[str], repeats: Repeats, quick: bool) -> Samples:
    """All that needs vLLM, on one engine and one event loop."""
    with asyncio.Runner() as runner, _engine(runner, policy_dir) as (engine, tokenizer):
        bench = EngineBench(engine, tokenizer, policy_dir, wanted)
        if _LOOP & set(wanted):
            num = NUM_TRAJECTORIES_QUICK if quick else NUM_TRAJECTORIES
            runner.run(bench.warm_up())
            for _ in repeats:
                runner.run(bench.repeat_loop(num))
        if "overrun_tokens" in wanted:
            runner.run(bench.repeat_overrun(repeats))
        if "sync_pause" in wanted:
            runner.run(bench.repeat_sync(repeats))
    return bench.samples


def _run_gateway(policy_dir: Path, repeats: Repeats, quick: bool) -> Samples:
    from benchmarks.rollout.gateway import gateway_ceiling, gateway_parity

    num_groups = NUM_CEILING_GROUPS_QUICK if quick else NUM_CEILING_GROUPS
    num_trajectories = NUM_TRAJECTORIES_QUICK if quick else NUM_TRAJECTORIES
    gateway_ceiling(policy_dir, GROUP_SIZE)  # does not count
    return {
        "gateway_ceiling": [gateway_ceiling(policy_dir, num_groups) for _ in repeats],
        "gateway_parity": [gateway_parity(policy_dir, num_trajectories) for _ in repeats],
    }


def _run_fleet(policy_dir: Path, repeats: Repeats, quick: bool) -> Samples:
    from benchmarks.rollout.fleet import NUM_RUNNERS, SLOTS, Fleets

    samples: Samples = {"scaling_runners": [], "driver_cpu": []}
    fleets = Fleets(policy_dir)
    try:
        fleets.measure(SLOTS + 1)  # warm
        for _ in repeats:
            before = _cpu_s()[1]
            scaling, cpu = fleets.measure(GROUPS_PER_RUNNER_QUICK if quick else GROUPS_PER_RUNNER)
            log(
                f"{NUM_RUNNERS} runners {scaling.ours:.2f} groups/s, one {scaling.theirs / NUM_RUNNERS:.2f}; "
                f"CPU: driver {cpu.ratio:.3f} of a core, actors {_cpu_s()[1] - before:.1f} s"
            )
            samples["scaling_runners"].append(scaling)
            samples["driver_cpu"].append(cpu)
    finally:
        fleets.close()
    return samples


class EngineBench:
    """The metrics of one engine."""

    def __init__(self, engine: Any, tokenizer: Any, policy_dir: Path, wanted: Collection[str]) -> None:
        self._engine, self._llm, self._tokenizer = engine, engine.llm, tokenizer
        self._policy_dir = policy_dir
        self._wanted = wanted
        self._config = sides.make_config()
        self.samples: Samples = {metric: [] for metric in METRICS if metric in wanted}

    async def warm_up(self) -> None:
        """Run every side once, small."""
        await self._sides(8, keep=False)

    async def repeat_loop(self, num_trajectories: int) -> None:
        """One repeat: our side, then each of the others."""
        await self._sides(num_trajectories, keep=True)

    async def _sides(self, num_trajectories: int, *, keep: bool) -> None:
        names = [f"bench/{index}" for index in range(num_trajectories)]
        ours = await _clocked(
            self._llm, "loop", sides.run_loop(self._config, str(self._policy_dir), self._engine, names)
        )
        found = {"retrieval_hidden": ours.hidden}
        if "engine_parity" in self._wanted:
            raw = await _clocked(self._llm, "bare engine", baselines.replay(self._llm.generate, ours.turns))
            found["engine_parity"] = quotient(ours.tokens_per_s, raw.tokens_per_s)
        for metric in sorted({"vs_lockstep", "vs_lockstep_batched"} & set(self._wanted)):
            batched = metric == "vs_lockstep_batched"
            side = baselines.lockstep(self._llm.generate, self._tokenizer, ours.turns, batched_search=batched)
            theirs = await _clocked(self._llm, metric, side)
            found[metric] = quotient(ours.wall_s, theirs.wall_s)
        if keep:
            for metric in found.keys() & self.samples.keys():
                self.samples[metric].append(found[metric])

    async def repeat_overrun(self, repeats: Repeats) -> None:
        """Turns that end at stop strings, by a policy that is fond of the tags."""
        from benchmarks.rollout.probes import fond_of_tags, overrun, read_weights

        await self._engine.update_weights(fond_of_tags(read_weights(self._policy_dir), self._tokenizer), 1)
        for repeat in repeats:
            found = await overrun(self._engine, self._tokenizer, NUM_COMPLETIONS, repeat * NUM_COMPLETIONS)
            self.samples["overrun_tokens"].append(found)

    async def repeat_sync(self, repeats: Repeats) -> None:
        """Updates of an engine that has nothing to do, after one that does not count."""
        from benchmarks.rollout.probes import read_weights, sync_pause

        weights = read_weights(self._policy_dir)
        await sync_pause(self._engine, weights, 2)
        for repeat in repeats:
            first = 3 + repeat * NUM_SYNCS
            found = [await sync_pause(self._engine, weights, version) for version in range(first, first + NUM_SYNCS)]
            self.samples["sync_pause"] += found


def run_paced(policy_dir: Path, num_trajectories: int, repeats: Repeats) -> Samples:
    """The loops on a ``PacedEngine``, after a small run of each that does not count."""
    from benchmarks.rollout.paced import PacedEngine
    from ragr1_actors.rollout.engines.base import PolicyTokenizer

    tokenizer = PolicyTokenizer(policy_dir)
    samples: Samples = {metric: [] for metric in METRICS if metric in _PACED}

    async def repeat(num: int) -> dict[str, Sample]:
        engine = PacedEngine(tokenizer)
        names = [f"bench/{index}" for index in range(num)]
        ours = await _clocked(
            engine, "paced loop", sides.run_loop(sides.make_config(num), str(policy_dir), engine, names)
        )
        walls = []
        for batched in (False, True):
            side = baselines.lockstep(
                *(engine.generate_bare, tokenizer, ours.turns),
                batched_search=batched,
                params=lambda turn: turn.num_tokens,
            )
            walls.append(await _clocked(engine, f"paced lock-step, {'batched' if batched else 'RAG-R1'}", side))
        one_by_one, by_turn = walls
        return {
            "vs_lockstep_paced": quotient(ours.wall_s, one_by_one.wall_s),
            "vs_batched_paced": quotient(ours.wall_s, by_turn.wall_s),
            "lockstep_waiting": one_by_one.waiting,
        }

    asyncio.run(repeat(8))
    for _ in repeats:
        for metric, sample in asyncio.run(repeat(num_trajectories)).items():
            samples[metric].append(sample)
    return samples


async def _clocked(llm: Any, name: str, side: Coroutine[Any, Any, SideRun]) -> SideRun:
    """Run one side over an empty prefix cache, and say what it took of the machine."""
    await llm.reset_prefix_cache()
    before = _cpu_s()
    found = await side
    loop_cpu_s, engine_cpu_s = (after - was for after, was in zip(_cpu_s(), before, strict=True))
    log(
        f"{name}: {found.wall_s:.1f} s, {found.tokens_per_s:.0f} tokens/s, "
        f"searches {found.search_s:.1f} s, "
        f"CPU {loop_cpu_s:.1f} s here and {engine_cpu_s:.1f} s in the engine"
    )
    return found


@contextmanager
def _engine(runner: asyncio.Runner, policy_dir: Path) -> Iterator[tuple[Any, Any]]:
    """The product's own vLLM engine, made as an ``EnvRunner`` makes it, and its tokenizer."""
    from ragr1_actors.core.resolve import load_object
    from ragr1_actors.rollout.engines.base import ENGINES, EngineArguments, PolicyTokenizer

    tokenizer = PolicyTokenizer(policy_dir)
    engine_class = load_object("vllm", ENGINES)

    async def start() -> Any:  # AsyncLLM belongs to the loop it is made in
        engine = engine_class(policy_dir, tokenizer, EngineArguments.of(sides.make_config(), 0))
        await engine.check()
        return engine

    engine = runner.run(start())
    try:
        yield engine, tokenizer
    finally:
        runner.run(engine.close())
        del engine
        gc.collect()  # now: vLLM's objects warn when the interpreter takes them apart at its end


def _cpu_s() -> tuple[float, float]:
    """CPU seconds of this process and of its children, the engine's."""
    import psutil

    times = [process.cpu_times() for process in psutil.Process().children(recursive=True)]
    return time.process_time(), sum(found.user + found.system for found in times)
