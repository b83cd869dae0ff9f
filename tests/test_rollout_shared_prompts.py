"""What prompts have in common is computed once by the transformers engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ragr1_actors.core.errors import EngineError
from ragr1_actors.core.types import Sampling
from ragr1_actors.planning.tiny_policy import make_tiny_policy
from ragr1_actors.rollout.engines.base import EngineArguments, PolicyTokenizer
from ragr1_actors.rollout.engines.transformers_engine import TransformersEngine

PROMPTS = [[10 + group, *range(50, 90)] for group in range(3)]
GROUP_SIZE = 8


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    make_tiny_policy(folder, ["Ana Bell, Riga"], seed=0, vocab_size=400, hidden_size=32, num_layers=2, num_heads=2)
    return folder


class Counted:
    """An engine, and the number of tokens that it has computed."""

    def __init__(self, policy_dir: Path, max_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = TransformersEngine(policy_dir, PolicyTokenizer(policy_dir), EngineArguments(max_rows, 512))
        self.num_computed = 0
        cache = self.engine._cache
        select = cache.select

        def count(rows: slice | torch.Tensor, positions: torch.Tensor, length: int) -> None:
            self.num_computed += int((positions < cache.scratch).sum())
            select(rows, positions, length)

        monkeypatch.setattr(cache, "select", count)

    async def ask(self, name: str, prompt: list[int], num_tokens: int = 1) -> float:
        """Return the log-prob of the most likely first token."""
        found = await self.engine.generate(prompt, Sampling(num_tokens, 0.0), request_id=name)
        return found.logprobs[0]


@pytest.mark.parametrize("max_rows", [3 * GROUP_SIZE + 2, 5])
@pytest.mark.engine
async def test_what_prompts_have_in_common_is_computed_once(
    policy_dir: Path, monkeypatch: pytest.MonkeyPatch, max_rows: int
) -> None:
    counted = Counted(policy_dir, max_rows, monkeypatch)
    found = await asyncio.gather(
        *(counted.ask(f"{group} {one}", prompt) for group, prompt in enumerate(PROMPTS) for one in range(GROUP_SIZE))
    )
    has_room = max_rows > 3 * GROUP_SIZE
    # with few rows, the one that is taken from an idle trajectory may be the only one with the prompt
    most = sum(len(prompt) + GROUP_SIZE - 1 for prompt in PROMPTS) if has_room else GROUP_SIZE * len(PROMPTS[0]) * 3 / 2
    assert counted.num_computed <= most
    longer = [[*PROMPTS[1][:30], other, 8, 9] for other in (7, 200)]
    for number, prompt in enumerate(longer):
        counted.num_computed = 0
        found.append(await counted.ask(f"longer {number}", prompt))
        assert counted.num_computed == 3 or not has_room
    model = AutoModelForCausalLM.from_pretrained(policy_dir).eval()
    with torch.no_grad():
        logprobs = [model(torch.tensor([ids])).logits[0, -1].log_softmax(-1).max() for ids in (*PROMPTS, *longer)]
    expected = np.repeat(np.array(logprobs), [GROUP_SIZE] * 3 + [1] * 2)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert len(set(np.round(expected, 4))) == 5


@pytest.mark.engine
async def test_what_turns_have_in_common_is_computed_once(policy_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(policy_dir, GROUP_SIZE, monkeypatch)
    names = [f"{one}" for one in range(GROUP_SIZE)]
    await asyncio.gather(*(counted.ask(name, PROMPTS[0]) for name in names))
    counted.num_computed = 0
    document = [*PROMPTS[0], 9, *range(100, 160)]  # of the same search of all but one, who has searched for nothing
    found = await asyncio.gather(
        *(counted.ask(name, document) for name in names[1:]), counted.ask("0", [*PROMPTS[0], 8])
    )
    assert counted.num_computed == (1 + 60) + 6 * 1 + 1
    assert np.ptp(found[:-1]) < 1e-4
    counted.num_computed = 0
    assert abs(await counted.ask("0", document) - found[0]) < 1e-4
    assert counted.num_computed == 1


@pytest.mark.engine
async def test_those_that_wait_for_a_prompt_begin_in_the_next_pass(
    policy_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(policy_dir, 32, monkeypatch)
    running = [asyncio.create_task(counted.ask(f"running {one}", [10 + one] * 5, 40)) for one in range(12)]
    while not counted.num_computed:
        await asyncio.sleep(0)
    await asyncio.gather(*(counted.ask(f"new {one}", PROMPTS[0]) for one in range(3)))
    assert not any(task.done() for task in running)
    await asyncio.gather(*running)


@pytest.mark.engine
async def test_nothing_is_taken_from_a_pass_that_failed_between_two_layers(
    policy_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted(policy_dir, 4, monkeypatch)
    alone = await counted.ask("alone", [7, *PROMPTS[1][1:]])
    model = counted.engine.model.get_decoder()

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    hook = model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(EngineError, match="out of memory"):  # its trajectory is not released yet
        await counted.ask("failed", PROMPTS[0])
    hook.remove()
    after = await counted.ask("after", PROMPTS[0])
    fresh = await Counted(policy_dir, 4, monkeypatch).ask("fresh", PROMPTS[0])
    assert after == pytest.approx(fresh, abs=1e-5)
    assert await counted.ask("alone", [7, *PROMPTS[1][1:]]) == pytest.approx(alone, abs=1e-5)
