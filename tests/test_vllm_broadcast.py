"""vLLM takes part in broadcasts over gloo, and in pairs over shared memory, on a CPU: `make test-vllm`.

Both ways: into the twin of the model, as a CPU engine does, and in place, as on a GPU. What sleeps is the scheduler: on
a CPU, vLLM gives no memory back.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

pytest.importorskip("vllm")

from test_vllm_engine import LONG, TEXTS, Reference, Weights, turns_under_way

from cluster.weights.weight_group import WeightGroup, listen
from cluster.weights.weight_pair import PairListener, WeightPair
from cluster.weights.weight_stream import Invitation, WeightSpec, WeightStream
from ragr1_actors.core.errors import TransferError
from ragr1_actors.core.types import Completion, Message, Sampling
from ragr1_actors.rollout.engines.base import ColocatedEngine, EngineSettings, ReceivingEngine
from ragr1_actors.rollout.engines.vllm_engine import VLLMEngine
from ragr1_actors.rollout.tokenizer import PolicyTokenizer
from ragr1_actors.training.tiny_policy import make_tiny_policy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]
in_both_ways = pytest.mark.parametrize("in_place", [False, True])


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy")
    make_tiny_policy(directory, TEXTS, seed=0, vocab_size=400, hidden_size=64, num_layers=2, num_heads=2)
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(policy_dir: Path) -> AsyncIterator[VLLMEngine]:
    settings = EngineSettings(max_rows=16, max_context_tokens=1024, sleeps=True)
    engine = VLLMEngine(policy_dir, PolicyTokenizer(policy_dir), settings)
    await engine.check()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def _awake_again(engine: VLLMEngine) -> AsyncIterator[None]:
    """The engine of the module, whose sleep a test that failed does not leave to the next."""
    yield
    await engine.wake_up("kv_cache")


@pytest.fixture(scope="module")
def prompt(policy_dir: Path) -> list[int]:
    return PolicyTokenizer(policy_dir).prompt_ids([Message("user", LONG)])


@pytest.fixture
def reference(policy_dir: Path) -> Reference:
    return Reference(policy_dir)


def sendable(weights: Weights) -> list[tuple[str, torch.Tensor]]:
    return [(name, torch.from_numpy(weight)) for name, weight in weights.items() if name != "lm_head.weight"]


async def join(engine: VLLMEngine, weights: Weights) -> WeightGroup:
    """Return the sender of a group that the engine has joined."""
    assert isinstance(engine, ReceivingEngine)
    store = listen("127.0.0.1")
    layout = tuple(WeightSpec(name, tuple(value.shape), "float32") for name, value in sendable(weights))
    invitation = Invitation("127.0.0.1", store.port, 1 + engine.num_weight_ranks, layout, True, "gloo", 20_000)
    joining = asyncio.to_thread(WeightGroup, invitation, 0, torch.device("cpu"), store)
    sender, _ = await asyncio.gather(joining, engine.join_weight_group(invitation, 1))
    return sender


async def join_pair(engine: VLLMEngine, weights: Weights) -> WeightPair:
    """Return the sender of a pair whose receiver is the engine's worker, in a process of its own."""
    assert isinstance(engine, ColocatedEngine)
    layout = tuple(WeightSpec(name, tuple(value.shape), "float32") for name, value in sendable(weights))
    listener = PairListener(Invitation("", 0, 2, layout, True, "ipc", 20_000), torch.device("cpu"))
    joining = asyncio.to_thread(WeightPair.sender, listener)
    sender, _ = await asyncio.gather(joining, engine.join_weight_group(listener.invitation, 1))
    return sender


async def broadcast(engine: VLLMEngine, sender: WeightStream, weights: Weights, version: int) -> None:
    await asyncio.gather(asyncio.to_thread(sender.send, sendable(weights)), engine.receive_weights(version))


async def lose(engine: VLLMEngine, sender: WeightStream, weights: Weights) -> None:
    """Begin a broadcast of which only a part arrives."""

    def some() -> Any:
        yield from sendable(weights)[:9]
        sender.close()

    receiving = asyncio.create_task(engine.receive_weights(99))
    with pytest.raises(TransferError, match="got no parameter"):
        await asyncio.to_thread(sender.send, some())
    with pytest.raises(TransferError, match="a bucket of weights"):
        await receiving


def gaps(reference: Reference, weights: Weights, prompt: list[int], completion: Completion, version: int) -> Any:
    """Log-probs of the reference less the engine's, of the tokens of one version."""
    reference.load(weights)
    found = reference.logprobs(prompt, completion.token_ids) - np.array(completion.logprobs)
    return np.abs(found[np.array(completion.policy_versions) == version])


@in_both_ways
async def test_engine_and_learner_agree_after_broadcasts_in_the_middle_of_turns(
    engine: VLLMEngine, reference: Reference, prompt: list[int], in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_receives_in_place", in_place)
    sets = {version: reference.weights(seed=version) for version in (10, 11, 12)}
    sender = await join(engine, sets[10])
    await broadcast(engine, sender, sets[10], 10)
    for version in (11, 12):
        turns = await turns_under_way(engine, prompt, 4)
        await broadcast(engine, sender, sets[version], version)
        num_mixed, widest_wrong = 0, 0.0
        for index, completion in enumerate(await asyncio.gather(*turns)):
            assert set(completion.policy_versions) <= {version - 1, version}
            num_mixed += len(set(completion.policy_versions)) == 2
            for one in (version - 1, version):
                assert gaps(reference, sets[one], [*prompt, index], completion, one).max(initial=0) < 1e-4
            wrong = gaps(reference, sets[10 if version == 12 else 12], [*prompt, index], completion, version)
            widest_wrong = max(widest_wrong, wrong.max(initial=0))
        assert widest_wrong > 0.1  # an agreement on certainties would show nothing
        assert num_mixed, "the broadcast came before or after every turn"
    sender.close()


@in_both_ways
async def test_half_a_broadcast_is_made_good_by_an_update(
    engine: VLLMEngine, reference: Reference, prompt: list[int], in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_receives_in_place", in_place)
    before, torn, after = (reference.weights(seed=seed) for seed in (20, 21, 22))
    await engine.update_weights(before, 20)
    sender = await join(engine, before)
    await lose(engine, sender, torn)
    turn = asyncio.create_task(engine.generate(prompt, Sampling(40, seed=1), request_id="a"))
    done, _ = await asyncio.wait([turn], timeout=3.0 if in_place else 120.0)
    assert bool(done) is not in_place  # half of each policy is none
    await engine.update_weights(after, 22)
    completion = await turn
    version, weights = (22, after) if in_place else (20, before)
    assert set(completion.policy_versions) == {version}
    assert gaps(reference, weights, prompt, completion, version).max() < 1e-4
    for version, weights in ((23, before), (24, after)):
        sender = await join(engine, weights)
        await broadcast(engine, sender, weights, version)
        completion = await engine.generate(prompt, Sampling(40, seed=2), request_id="b")
        assert set(completion.policy_versions) == {version}
        assert gaps(reference, weights, prompt, completion, version).max() < 1e-4
        sender.close()


@in_both_ways
async def test_an_engine_that_slept_goes_on_with_the_weights_of_its_learner(
    engine: VLLMEngine, reference: Reference, prompt: list[int], in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_receives_in_place", in_place)
    sets = {version: reference.weights(seed=version) for version in (30, 31, 32)}
    sender = await join_pair(engine, sets[30])
    await broadcast(engine, sender, sets[30], 30)
    for version in (31, 32):
        turns = await turns_under_way(engine, prompt, 4)
        await engine.sleep()
        late = asyncio.create_task(engine.generate(prompt, Sampling(20, seed=9), request_id="late"))
        await asyncio.sleep(1.0)  # the learner learns
        ended_before = {turn for turn in turns if turn.done()}
        assert len(ended_before) < len(turns), "the engine slept after every turn"
        await engine.wake_up("weights")
        await broadcast(engine, sender, sets[version], version)
        done, _ = await asyncio.wait([*turns, late], timeout=2.0)
        assert done == ended_before, "the cache has no room yet"
        await engine.wake_up("kv_cache")
        await engine.wake_up("kv_cache")  # of one that is awake already
        for index, completion in enumerate(await asyncio.gather(*turns)):
            versions = {version - 1} if turns[index] in ended_before else {version - 1, version}
            assert set(completion.policy_versions) == versions
            for one in (version - 1, version):
                assert gaps(reference, sets[one], [*prompt, index], completion, one).max(initial=0) < 1e-4
        completion = await late
        assert set(completion.policy_versions) == {version}
        assert gaps(reference, sets[version], prompt, completion, version).max() < 1e-4
    sender.close()


@in_both_ways
async def test_an_engine_that_sleeps_and_gets_half_of_it_is_given_all_before_it_wakes(
    engine: VLLMEngine, reference: Reference, prompt: list[int], in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_receives_in_place", in_place)
    before, torn, after = (reference.weights(seed=seed) for seed in (40, 41, 42))
    await engine.update_weights(before, 40)
    sender = await join_pair(engine, before)
    await engine.sleep()
    await engine.wake_up("weights")
    await lose(engine, sender, torn)
    turn = asyncio.create_task(engine.generate(prompt, Sampling(40, seed=1), request_id="a"))
    await engine.update_weights(after, 42)
    done, _ = await asyncio.wait([turn], timeout=2.0)
    assert not done
    await engine.wake_up("kv_cache")
    completion = await turn
    assert set(completion.policy_versions) == {42}
    assert gaps(reference, after, prompt, completion, 42).max() < 1e-4


async def test_an_engine_in_no_group_says_so(engine: VLLMEngine, reference: Reference) -> None:
    sender = await join(engine, reference.weights(seed=1))
    sender.close()
    store = listen("127.0.0.1")
    nobody = Invitation("127.0.0.1", store.port, 3, sender.invitation.layout, True, timeout_s=2.0)
    with pytest.raises(TransferError, match="no weight group"):
        await engine.join_weight_group(nobody, 1)
    with pytest.raises(TransferError, match="in no weight group"):
        await engine.receive_weights(1)
