"""The transformers engine on groups of eight trajectories, with prompts computed once and for every trajectory.

``OMP_NUM_THREADS=1 python -m benchmarks.rollout.shared_prompts POLICY [NUM_GROUPS PROMPT_TOKENS NEW_TOKENS]`` prints
the CPU seconds of both sides, in turn. A quarter of each prompt is that of all groups, as instructions are.
"""

from __future__ import annotations

import asyncio
import random
import sys
import time
from pathlib import Path

from ragr1_actors.core.types import Sampling
from ragr1_actors.rollout.engines import transformers_engine
from ragr1_actors.rollout.engines.base import EngineArguments, PolicyTokenizer
from ragr1_actors.rollout.engines.transformers_engine import Session, TransformersEngine

GROUP_SIZE, REPEATS, VOCABULARY = 8, 3, 300


class Alone(transformers_engine._Beginnings):
    """Finds nothing in common."""

    def longest(self, session: Session) -> tuple[int, int]:
        """Return the session's own row, and no token."""
        return session.row, 0


async def clock(engine: TransformersEngine, prompts: list[list[int]], new_tokens: int) -> float:
    """CPU seconds of one group per prompt."""

    async def generate(prompt: list[int], name: str, seed: int) -> None:
        await engine.generate(prompt, Sampling(new_tokens, seed=seed), request_id=name)
        engine.release(name)

    started = time.process_time()
    attempts = [(prompt, f"{at} {one}", one) for at, prompt in enumerate(prompts) for one in range(GROUP_SIZE)]
    await asyncio.gather(*(generate(*attempt) for attempt in attempts))
    return time.process_time() - started


async def main(policy: Path, num_groups: int = 4, prompt_tokens: int = 400, new_tokens: int = 16) -> None:
    """Print a line per repeat."""
    rows, context = num_groups * GROUP_SIZE, prompt_tokens + new_tokens
    engine = TransformersEngine(policy, PolicyTokenizer(policy), EngineArguments(rows, context))
    rng, sides = random.Random(0), (transformers_engine._Beginnings, Alone)
    for _ in range(REPEATS):
        common = [rng.randrange(VOCABULARY) for _ in range(prompt_tokens // 4)]
        own = range(prompt_tokens - len(common))
        prompts = [common + [rng.randrange(VOCABULARY) for _ in own] for _ in range(num_groups)]
        found = []
        for side in sides:
            transformers_engine._Beginnings = side  # type: ignore[misc]
            found.append(await clock(engine, prompts, new_tokens))
        print(f"once {found[0]:.2f} s, for every trajectory {found[1]:.2f} s: {found[1] / found[0]:.1f}")


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), *map(int, sys.argv[2:])))
