"""vLLM's workers merge adapters into the policy that a stage began with, on a CPU: `make test-vllm`."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch

pytest.importorskip("vllm")

from test_vllm_broadcast import gaps, in_both_ways
from test_vllm_engine import LONG, TEXTS, Reference, Weights

from cluster.weights.weight_group import WeightGroup, listen
from cluster.weights.weight_stream import Invitation, WeightSpec
from ragr1_actors.core.errors import TransferError
from ragr1_actors.core.types import Message, Sampling
from ragr1_actors.core.weight_transport import BASE_KEY, AdapterBase
from ragr1_actors.rollout.engines.base import EngineSettings
from ragr1_actors.rollout.engines.vllm_engine import VLLMEngine
from ragr1_actors.rollout.tokenizer import PolicyTokenizer
from ragr1_actors.training.tiny_policy import make_tiny_policy

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="module")]
SCALING = 2.0
TARGETS = ("q_proj.weight", "v_proj.weight", "up_proj.weight", "down_proj.weight")
"""Of what vLLM joins, queries with keys and values, one part has an adapter and another has none."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The policies that two stages begin with; the second has other weights where there are adapters."""
    folders = [tmp_path_factory.mktemp("policy"), tmp_path_factory.mktemp("policy_sft")]
    make_tiny_policy(folders[0], TEXTS, seed=0, vocab_size=400, hidden_size=64, num_layers=2, num_heads=2)
    reference = Reference(folders[0])
    merged = merge(reference, adapters(reference, seed=99))
    reference.load(merged)
    reference.model.save_pretrained(folders[1])
    return folders


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(bases: list[Path]) -> AsyncIterator[VLLMEngine]:
    engine = VLLMEngine(bases[0], PolicyTokenizer(bases[0]), EngineSettings(max_rows=16, max_context_tokens=1024))
    await engine.check()
    yield engine
    await engine.close()


@pytest.fixture(scope="module")
def prompt(bases: list[Path]) -> list[int]:
    return PolicyTokenizer(bases[0]).prompt_ids([Message("user", LONG)])


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


async def assert_samples_with(
    engine: VLLMEngine, prompt: list[int], weights: Weights, version: int, base: Path
) -> None:
    completion = await engine.generate(prompt, Sampling(40, seed=version), request_id=str(version))
    assert set(completion.policy_versions) == {version}
    assert gaps(Reference(base), weights, prompt, completion, version).max() < 1e-4


async def test_adapters_by_the_object_store(engine: VLLMEngine, bases: list[Path], prompt: list[int]) -> None:
    for version, folder in ((1, bases[0]), (2, bases[0]), (3, bases[1])):
        found = adapters(Reference(folder), version)
        await engine.update_weights({**found, BASE_KEY: np.asarray(base_of(folder))}, version)
        await assert_samples_with(engine, prompt, merge(Reference(folder), found), version, folder)
    with pytest.raises(TransferError, match=r"cannot read the weights of .*nowhere, .* put --run-dir"):
        await engine.update_weights({**found, BASE_KEY: np.asarray(base_of(folder / "nowhere"))}, 4)
    await assert_samples_with(engine, prompt, merge(Reference(bases[1]), found), 3, bases[1])


@in_both_ways
async def test_adapters_by_broadcast(
    engine: VLLMEngine, bases: list[Path], prompt: list[int], in_place: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_receives_in_place", in_place)
    for folder in bases:
        found = adapters(Reference(folder), 10)
        store = listen("127.0.0.1")
        layout = tuple(WeightSpec(name, tuple(value.shape), "float32") for name, value in found.items())
        invitation = Invitation("127.0.0.1", store.port, 2, layout, True, "gloo", 5_000, base=base_of(folder))
        joining = asyncio.to_thread(WeightGroup, invitation, 0, torch.device("cpu"), store)
        sender, _ = await asyncio.gather(joining, engine.join_weight_group(invitation, 1))
        for version in (11, 12):
            found = adapters(Reference(folder), version)
            sending = asyncio.to_thread(sender.send, [(name, torch.from_numpy(value)) for name, value in found.items()])
            await asyncio.gather(sending, engine.receive_weights(version))
            await assert_samples_with(engine, prompt, merge(Reference(folder), found), version, folder)
        sender.close()
