"""Updates of weights and adapters in a real vLLM, part by part, as learner ranks send them: `make test-vllm`.

Twice: into the second model of a CPU engine, and in place, as on a GPU. Only the scheduler sleeps: on a CPU, vLLM frees
no memory.
"""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.numpy import save_file
from safetensors.torch import save

pytest.importorskip("vllm")

from test_vllm_engine import LONG, TEXTS, Reference, Weights, turns_under_way
from vllm.distributed.weight_transfer import VLLMWeightSyncClient

from learners.deepspeed.deepspeed_engine import WholeTensor
from ragr1_actors.core.errors import EngineError, TransferError
from ragr1_actors.core.types import Completion, Message, Sampling
from ragr1_actors.core.weight_transport import BASE_KEY, AdapterBase
from ragr1_actors.planning.tiny_policy import make_tiny_policy
from ragr1_actors.rollout.engines import vllm_engine
from ragr1_actors.rollout.engines.base import ColocatedEngine, EngineArguments, PolicyTokenizer
from ragr1_actors.rollout.engines.vllm_engine import VLLMEngine
from ragr1_actors.rollout.runners.weight_sync import Delivery, send

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="module")]
SCALING = 2.0
PART_BYTES = 10_000
TARGETS = ("q_proj.weight", "v_proj.weight", "up_proj.weight", "down_proj.weight")
"""vLLM joins queries with keys and values; here one part has an adapter and another has none."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The policies that two stages begin with; the second has other weights where there are adapters."""
    folders = [tmp_path_factory.mktemp("policy"), tmp_path_factory.mktemp("policy_sft")]
    make_tiny_policy(folders[0], TEXTS, seed=0, vocab_size=400, hidden_size=64, num_layers=2, num_heads=2)
    reference = Reference(folders[0])
    reference.load(merge(reference, adapters(reference, seed=99)))
    reference.model.save_pretrained(folders[1])
    return folders


@pytest.fixture(scope="module", params=["twin", "in place"])
def in_place(request: pytest.FixtureRequest) -> bool:
    return request.param == "in place"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(bases: list[Path], in_place: bool) -> AsyncIterator[VLLMEngine]:
    options = {"weight_transfer_config": {"backend": "ragr1_nccl"}} if in_place else {}
    settings = EngineArguments(max_rows=16, max_context_tokens=1024, sleeps=True, options=options)
    engine = VLLMEngine(bases[0], PolicyTokenizer(bases[0]), settings)
    assert isinstance(engine, ColocatedEngine)
    await engine.check()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def _awake_again(engine: VLLMEngine) -> AsyncIterator[None]:
    """Wake the engine of the module: a test that failed may leave it asleep."""
    yield
    await engine.wake_up("kv_cache")


@pytest.fixture(scope="module")
def prompt(bases: list[Path]) -> list[int]:
    return PolicyTokenizer(bases[0]).prompt_ids([Message("user", LONG)])


@pytest.fixture
def reference(bases: list[Path]) -> Reference:
    return Reference(bases[0])


def adapters(reference: Reference, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    found: Weights = {}
    for name, weight in reference.model.state_dict().items():
        if name.endswith(TARGETS):
            rows, columns = weight.shape
            layer = name.removesuffix(".weight")
            found[f"{layer}.lora_A.weight"] = (0.3 * torch.randn(4, columns, generator=generator)).numpy()
            found[f"{layer}.lora_B.weight"] = (0.3 * torch.randn(rows, 4, generator=generator)).numpy()
    return found


def merge(reference: Reference, found: Weights) -> Weights:
    weights = {name: weight.clone().numpy() for name, weight in reference.model.state_dict().items()}
    for name in weights:
        layer = name.removesuffix(".weight")
        if name.endswith(TARGETS):
            weights[name] += SCALING * found[f"{layer}.lora_B.weight"] @ found[f"{layer}.lora_A.weight"]
    return weights


def base_of(folder: Path) -> str:
    return AdapterBase(folder=str(folder), scaling=SCALING).model_dump_json()


async def send_parts(engine: VLLMEngine, weights: Weights, num_parts: int | None = None, base: str = "") -> None:
    """Start an update and send parts of five weights each, all or the first ``num_parts``."""
    sendable = [(name, torch.from_numpy(weight)) for name, weight in weights.items() if name != "lm_head.weight"]
    parts = [sendable[first : first + 5] for first in range(0, len(sendable), 5)]
    await engine.start_weight_update()
    for part in parts[:num_parts]:
        await engine.receive_weights({"base": base}, np.frombuffer(save(dict(part)), np.uint8))


async def update(engine: VLLMEngine, weights: Weights, version: int, base: str = "") -> None:
    await send_parts(engine, weights, base=base)
    await engine.finish_weight_update(version)


def gaps(reference: Reference, weights: Weights, prompt: list[int], completion: Completion, version: int) -> Any:
    """Log-probs of the reference less the engine's, of the tokens of one version."""
    reference.load(weights)
    found = reference.logprobs(prompt, completion.token_ids) - np.array(completion.logprobs)
    return np.abs(found[np.array(completion.policy_versions) == version])


async def test_engine_and_learner_agree_after_updates_in_the_middle_of_turns(
    engine: VLLMEngine, reference: Reference, prompt: list[int]
) -> None:
    sets = {version: reference.weights(seed=version) for version in (10, 11, 12)}
    await update(engine, sets[10], 10)
    for version in (11, 12):
        turns = await turns_under_way(engine, prompt, 4)
        await update(engine, sets[version], version)
        num_mixed, widest_wrong = 0, 0.0
        for index, completion in enumerate(await asyncio.gather(*turns)):
            assert set(completion.policy_versions) <= {version - 1, version}
            num_mixed += len(set(completion.policy_versions)) == 2
            for one in (version - 1, version):
                assert gaps(reference, sets[one], [*prompt, index], completion, one).max(initial=0) < 1e-4
            wrong = gaps(reference, sets[10 if version == 12 else 12], [*prompt, index], completion, version)
            widest_wrong = max(widest_wrong, wrong.max(initial=0))
        assert widest_wrong > 0.1  # an agreement on certainties would show nothing
        assert num_mixed, "the update came before or after every turn"


async def test_half_an_update_is_made_good_by_a_whole_one(
    engine: VLLMEngine, reference: Reference, prompt: list[int], in_place: bool
) -> None:
    before, torn, after = (reference.weights(seed=seed) for seed in (20, 21, 22))
    await engine.update_weights(before, 20)
    await send_parts(engine, torn, 2)
    turn = asyncio.create_task(engine.generate(prompt, Sampling(40, seed=1), request_id="a"))
    done, _ = await asyncio.wait([turn], timeout=3.0 if in_place else 120.0)
    assert bool(done) is not in_place  # half of each policy is none
    await engine.update_weights(after, 22)
    completion = await turn
    version, weights = (22, after) if in_place else (20, before)
    assert set(completion.policy_versions) == {version}
    assert gaps(reference, weights, prompt, completion, version).max() < 1e-4
    for version, weights in ((23, before), (24, after)):
        await update(engine, weights, version)
        completion = await engine.generate(prompt, Sampling(40, seed=2), request_id="b")
        assert set(completion.policy_versions) == {version}
        assert gaps(reference, weights, prompt, completion, version).max() < 1e-4


async def test_an_engine_that_slept_goes_on_with_the_weights_of_its_learner(
    engine: VLLMEngine, reference: Reference, prompt: list[int]
) -> None:
    sets = {version: reference.weights(seed=version) for version in (30, 31)}
    await update(engine, sets[30], 30)
    turns = await turns_under_way(engine, prompt, 4)
    await engine.sleep()
    late = asyncio.create_task(engine.generate(prompt, Sampling(20, seed=9), request_id="late"))
    # the learner learns meanwhile; no state shows that an engine that sleeps generates nothing
    ended_before, _ = await asyncio.wait(turns, timeout=5.0)
    assert len(ended_before) < len(turns), "the engine slept after every turn"
    await engine.wake_up("weights")
    await update(engine, sets[31], 31)
    done, _ = await asyncio.wait([*turns, late], timeout=2.0)
    assert done == ended_before, "the cache has no room yet"
    await engine.wake_up("kv_cache")
    await engine.wake_up("kv_cache")  # of one that is awake already
    for index, completion in enumerate(await asyncio.gather(*turns)):
        versions = {30} if turns[index] in ended_before else {30, 31}
        assert set(completion.policy_versions) == versions
        for one in (30, 31):
            assert gaps(reference, sets[one], [*prompt, index], completion, one).max(initial=0) < 1e-4
    completion = await late
    assert set(completion.policy_versions) == {31}
    assert gaps(reference, sets[31], prompt, completion, 31).max() < 1e-4


async def test_an_engine_that_sleeps_and_gets_half_an_update_gets_a_whole_one_before_it_wakes(
    engine: VLLMEngine, reference: Reference, prompt: list[int]
) -> None:
    before, torn, after = (reference.weights(seed=seed) for seed in (40, 41, 42))
    await engine.update_weights(before, 40)
    await engine.sleep()
    await engine.wake_up("weights")
    await send_parts(engine, torn, 2)
    turn = asyncio.create_task(engine.generate(prompt, Sampling(40, seed=1), request_id="a"))
    await engine.update_weights(after, 42)
    done, _ = await asyncio.wait([turn], timeout=2.0)
    assert not done
    await engine.wake_up("kv_cache")
    completion = await turn
    assert set(completion.policy_versions) == {42}
    assert gaps(reference, after, prompt, completion, 42).max() < 1e-4


async def test_adapters_are_merged_into_the_policy_that_a_stage_began_with(
    engine: VLLMEngine, bases: list[Path], prompt: list[int], in_place: bool
) -> None:
    for version, folder in ((50, bases[0]), (51, bases[0]), (52, bases[1]), (53, bases[1])):
        found = adapters(Reference(folder), version)
        if version % 2:
            await update(engine, found, version, base_of(folder))
        else:
            await engine.update_weights({**found, BASE_KEY: np.asarray(base_of(folder))}, version)
        completion = await engine.generate(prompt, Sampling(40, seed=version), request_id=str(version))
        assert set(completion.policy_versions) == {version}
        weights = merge(Reference(folder), found)
        assert gaps(Reference(folder), weights, prompt, completion, version).max() < 1e-4
    with pytest.raises(EngineError, match=r"cannot read the weights of .*nowhere, .* put --run-dir"):
        await engine.update_weights({**found, BASE_KEY: np.asarray(base_of(folder / "nowhere"))}, 54)
    await engine.update_weights(weights, 55)


async def test_no_runner_holds_the_weights_whole_beside_its_engine(
    engine: VLLMEngine, reference: Reference, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They lie in shared memory a part at a time; bfloat16 comes as its bits."""
    monkeypatch.setattr(vllm_engine, "PART_BYTES", PART_BYTES)
    in_bits = {name: torch.from_numpy(weight).bfloat16() for name, weight in reference.weights(seed=56).items()}
    files: list[int] = []

    def save(part: Weights, path: Path) -> None:
        files.append(sum(weight.nbytes for weight in part.values()))
        save_file(part, path)

    monkeypatch.setattr(vllm_engine, "save_file", save)
    await engine.update_weights({name: weight.view(torch.uint16).numpy() for name, weight in in_bits.items()}, 56)
    largest = max(weight.nbytes for weight in in_bits.values())
    assert len(files) > 2 and max(files) <= max(PART_BYTES, largest) < sum(files) / 2
    completion = await engine.generate(prompt, Sampling(40, seed=1), request_id="a")
    rounded = {name: weight.float().numpy() for name, weight in in_bits.items()}
    assert gaps(reference, rounded, prompt, completion, 56).max() < 1e-4


async def test_an_update_that_lacks_a_parameter_is_refused(
    engine: VLLMEngine, reference: Reference, prompt: list[int]
) -> None:
    weights = reference.weights(seed=60)
    await engine.update_weights(weights, 60)
    lacking = {name: weight for name, weight in weights.items() if name != "model.norm.weight"}
    with pytest.raises(TransferError, match=r"weight update lacks 1 parameters, model\.norm\.weight among them"):
        await engine.update_weights(lacking, 61)
    await engine.update_weights(weights, 62)
    completion = await engine.generate(prompt, Sampling(40, seed=1), request_id="a")
    assert set(completion.policy_versions) == {62}
    assert gaps(reference, weights, prompt, completion, 62).max() < 1e-4


class OneOfTwo:
    """Learner rank 1, which only helps to gather."""

    rank = 1
    dtype = torch.float32
    adapter_base = ""

    def __init__(self) -> None:
        self.num_gathered = 0

    def published_tensors(self) -> Any:
        for name, shape in {"a": (2,), "b": (3, 4)}.items():
            yield WholeTensor(name, shape, partial(self.gather, shape))

    def gather(self, shape: tuple[int, ...]) -> torch.Tensor:
        self.num_gathered += 1
        return torch.zeros(shape)


async def test_a_rank_that_does_not_send_gathers_every_parameter_in_vllms_transfer() -> None:
    learner, delivery = OneOfTwo(), Delivery("nccl", version=1)
    assert isinstance(delivery, VLLMWeightSyncClient)
    for num_gathered in (2, 4):
        assert send(delivery, learner) == {}
        assert learner.num_gathered == num_gathered
