"""vLLM for real, on a CPU: `make test-vllm`. One engine serves the module, as it takes half a minute to start."""

import asyncio
import os
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm")

from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferUpdateInfo

from ragr1_actors.core.errors import EngineDeadError, EngineError
from ragr1_actors.core.types import Completion, FinishReason, Message, Sampling
from ragr1_actors.planning.tiny_policy import make_tiny_policy
from ragr1_actors.rollout.engines.base import EngineArguments, PolicyTokenizer
from ragr1_actors.rollout.engines.vllm_engine import SHARED_MEMORY, STREAM_TOKENS, VLLMEngine, _collect
from ragr1_actors.rollout.engines.vllm_worker import NcclEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="module")]
any_model_runner = pytest.mark.skipif(
    os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1", reason="no part of the model runner; run by make test-vllm"
)
Weights = dict[str, Any]
TEXTS = [" Ana Bell was born in 1931 in Riga. <search> Ana Bell</search>", " Bo Cole: x, y\n 1950 and more words here"]
LONG = "Ana Bell was born in 1931 in Riga. " * 20
"""More tokens than a block of the prefix cache has (128 on a CPU): a stale block would show."""


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy")
    make_tiny_policy(directory, TEXTS, seed=0, vocab_size=400, hidden_size=64, num_layers=2, num_heads=2)
    return directory


@pytest.fixture(scope="module")
def tokenizer(policy_dir: Path) -> PolicyTokenizer:
    return PolicyTokenizer(policy_dir)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(policy_dir: Path, tokenizer: PolicyTokenizer) -> AsyncIterator[VLLMEngine]:
    engine = VLLMEngine(policy_dir, tokenizer, EngineArguments(max_rows=16, max_context_tokens=1024))
    await engine.check()
    yield engine
    await engine.close()


@pytest.fixture(scope="module")
def prompt(tokenizer: PolicyTokenizer) -> list[int]:
    ids = tokenizer.prompt_ids([Message("user", LONG)])
    assert len(ids) > 129
    return ids


class Reference:
    """The policy as transformers computes it, with any set of weights."""

    def __init__(self, policy_dir: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32).eval()

    def weights(self, seed: int) -> Weights:
        """A weight set that is nothing like another one."""
        generator = torch.Generator().manual_seed(seed)
        state = self.model.state_dict()
        for name, tensor in state.items():
            if tensor.dim() > 1:
                state[name] = 0.08 * torch.randn(tensor.shape, generator=generator)
        state["lm_head.weight"] = state["model.embed_tokens.weight"]  # tied
        return {name: tensor.numpy() for name, tensor in state.items()}

    def load(self, weights: Weights) -> None:
        self.model.load_state_dict({name: torch.from_numpy(weight) for name, weight in weights.items()})

    @torch.no_grad()
    def logprobs(self, prompt: list[int], token_ids: list[int], temperature: float = 1.0) -> np.ndarray:
        logits = self.model(torch.tensor([prompt + token_ids])).logits[0, len(prompt) - 1 : -1].float()
        scores = torch.log_softmax(logits / temperature, dim=-1)
        return scores[torch.arange(len(token_ids)), torch.tensor(token_ids)].numpy()


@pytest.fixture
def reference(policy_dir: Path) -> Reference:
    return Reference(policy_dir)


async def turns_under_way(engine: VLLMEngine, prompt: list[int], count: int) -> list[asyncio.Task[Completion]]:
    """Long turns, of the prompt and a number each, that have begun.

    The odd ones are streamed and have reported text; each even one was requested before the next odd one.
    How many tokens they have depends on the machine; one that sampled the end of sequence early is done.
    """
    turns, begun = [], []
    for index in range(count):
        told = asyncio.Event()
        on_text = (lambda _, told=told: told.set()) if index % 2 else None
        turn = engine.generate([*prompt, index], Sampling(600, seed=index), request_id=str(index), on_text=on_text)
        turns.append(asyncio.create_task(turn))
        if on_text:
            begun.append(asyncio.create_task(told.wait()))
    _, pending = await asyncio.wait(begun, timeout=600.0)
    assert not pending, f"{len(pending)} of {len(begun)} turns said nothing in 600 s"
    return turns


async def test_engine_and_learner_agree_on_every_token_under_two_weight_sets(
    engine: VLLMEngine, reference: Reference, prompt: list[int]
) -> None:
    for version in (1, 2):
        weights = reference.weights(seed=version)
        reference.load(weights)
        await engine.generate(prompt, Sampling(4, seed=0), request_id="fills the prefix cache with the weights before")
        await engine.update_weights(weights, version)
        for temperature in (1.0, 0.7):
            sampling = Sampling(60, temperature, seed=version)
            completion = await engine.generate(prompt, sampling, request_id="t")
            assert len(completion.token_ids) > 5
            assert set(completion.policy_versions) == {version}
            gap = reference.logprobs(prompt, completion.token_ids, temperature) - np.array(completion.logprobs)
            assert np.abs(gap).max() < 1e-4
            assert np.std(completion.logprobs) > 0.1  # an agreement on certainties would show nothing


async def test_an_update_in_the_middle_of_a_turn_loses_nothing_and_mixes_nothing(
    engine: VLLMEngine, reference: Reference, prompt: list[int]
) -> None:
    before, after = reference.weights(seed=10), reference.weights(seed=11)
    await engine.update_weights(before, 10)
    turns = await turns_under_way(engine, prompt, 6)
    await engine.update_weights(after, 11)
    num_mixed = 0
    for index, completion in enumerate(await asyncio.gather(*turns)):
        versions = np.array(completion.policy_versions)
        assert set(versions) <= {10, 11}
        assert (np.diff(versions) >= 0).all()
        num_mixed += len(set(versions)) == 2
        for version, weights in ((10, before), (11, after)):
            reference.load(weights)
            gap = reference.logprobs([*prompt, index], completion.token_ids) - np.array(completion.logprobs)
            assert np.abs(gap[versions == version]).max(initial=0) < 1e-4
    assert num_mixed, "the update came before or after every turn"
    assert not list(SHARED_MEMORY.glob(f"ragr1-{os.getpid()}-*"))


async def test_a_turn_ends_with_its_stop_string(
    engine: VLLMEngine, tokenizer: PolicyTokenizer, reference: Reference
) -> None:
    await engine.update_weights(reference.weights(seed=20), 20)
    ids = tokenizer.prompt_ids([Message("user", "Where?")])
    tag = " Riga"
    for seed in range(40):
        completion = await engine.generate(ids, Sampling(200, stop=(tag,), seed=seed), request_id="s")
        assert completion.text == tokenizer.decode(completion.token_ids)
        if tag in completion.text:
            assert completion.finish_reason is FinishReason.STOP
            assert tag not in tokenizer.decode(completion.token_ids[:-1])
            break
    else:
        pytest.fail("the stop string was never sampled")
    short = await engine.generate(ids, Sampling(3, seed=1, stop=("nothing of the kind",)), request_id="s")
    assert (len(short.token_ids), short.finish_reason) == (3, FinishReason.LENGTH)


async def test_the_same_seed_samples_the_same_tokens_whatever_else_runs(engine: VLLMEngine, prompt: list[int]) -> None:
    alone = await engine.generate(prompt, Sampling(30, seed=5), request_id="a")
    crowd = await asyncio.gather(
        *(engine.generate(prompt, Sampling(30, seed=seed), request_id=str(seed)) for seed in range(3, 8))
    )
    assert crowd[2].token_ids == alone.token_ids
    assert len({tuple(one.token_ids) for one in crowd}) == 5


async def test_the_text_is_reported_as_it_grows(engine: VLLMEngine, prompt: list[int]) -> None:
    heard: list[str] = []
    told = await engine.generate(prompt, Sampling(60, seed=5), request_id="a", on_text=heard.append)
    silent = await engine.generate(prompt, Sampling(60, seed=5), request_id="a")
    assert told == silent
    num_tokens = len(told.token_ids)
    assert 1 < len(heard) <= 2 + num_tokens / STREAM_TOKENS, f"{num_tokens} tokens were sampled"
    assert all(later.startswith(earlier) for earlier, later in pairwise(heard))
    # the beginning of a character is not reported
    assert told.text.startswith(heard[-1]) and not told.text[len(heard[-1]) :].strip("\ufffd")


async def test_the_token_that_ends_a_turn_has_no_part_in_the_reported_text(tokenizer: PolicyTokenizer) -> None:
    async def stream() -> AsyncIterator[Any]:
        for text in ("Ri", "ga<|im_end|>"):  # as vLLM writes it
            yield SimpleNamespace(outputs=[SimpleNamespace(text=text)])

    heard: list[str] = []
    await _collect(stream(), heard.append, tokenizer.end_texts)
    assert heard == ["Ri", "Riga"]


async def test_a_request_that_cannot_be_run_fails_alone(engine: VLLMEngine) -> None:
    with pytest.raises(EngineError, match=r"refused a turn of 'too long'.*1024"):
        await engine.generate([5] * 1025, Sampling(1), request_id="too long")
    assert (await engine.generate([5] * 1023, Sampling(8), request_id="full")).token_ids
    await engine.check()


@any_model_runner
@pytest.mark.parametrize(
    ("options", "reason"),
    [({"no_such_option": 1}, "no_such_option"), ({"tensor_parallel_size": 3}, "3")],
)
async def test_an_engine_that_cannot_start_says_why(
    policy_dir: Path, tokenizer: PolicyTokenizer, options: dict[str, Any], reason: str
) -> None:
    with pytest.raises(EngineError, match=f"vLLM did not start on .*{reason}"):
        VLLMEngine(policy_dir, tokenizer, EngineArguments(4, 512, options=options))


@any_model_runner
async def test_a_folder_without_a_model_is_named(tmp_path: Path, tokenizer: PolicyTokenizer) -> None:
    with pytest.raises(EngineError, match=f"vLLM did not start on {tmp_path}"):
        VLLMEngine(tmp_path, tokenizer, EngineArguments(4, 512))


class OpenGroup:
    """In place of a communicator of NCCL, which there is none of on a CPU."""

    disabled = False

    def destroy(self) -> None:
        self.disabled = True


@any_model_runner
@pytest.mark.parametrize("engine_class", [NCCLWeightTransferEngine, NcclEngine])
async def test_a_broadcast_that_fails_closes_its_group_at_once(
    engine_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's engine does not."""

    def fail(**_: Any) -> None:
        raise RuntimeError("a shape that the model does not have")

    monkeypatch.setattr("vllm.distributed.weight_transfer.nccl_engine.packed_nccl_broadcast_consumer", fail)
    engine = engine_class.__new__(engine_class)
    engine.model, engine.device, engine.packed = torch.nn.Linear(1, 1), torch.device("cpu"), True
    engine.model.load_weights = None
    engine.packed_buffer_size_bytes = engine.packed_num_buffers = 1
    group = engine.model_update_group = OpenGroup()
    with pytest.raises(RuntimeError, match="a shape that"):
        engine.receive_weights(NCCLWeightTransferUpdateInfo([], [], []))
    is_closed = engine_class is NcclEngine
    assert (group.disabled, engine.model_update_group is None) == (is_closed, is_closed)


@any_model_runner
async def test_a_dead_engine_says_so(policy_dir: Path, tokenizer: PolicyTokenizer, prompt: list[int]) -> None:
    engine = VLLMEngine(policy_dir, tokenizer, EngineArguments(4, 1024))
    await engine.check()
    turns = await turns_under_way(engine, prompt, 4)
    (process,) = engine_processes()
    process.kill()
    results = await asyncio.gather(*turns, return_exceptions=True)
    assert any(isinstance(result, EngineDeadError) for result in results)
    assert not any(isinstance(result, Exception) and not isinstance(result, EngineDeadError) for result in results)
    with pytest.raises(EngineDeadError):
        await engine.check()
    with pytest.raises(EngineDeadError):
        await engine.update_weights({"x": np.zeros(1, np.float32)}, 1)
    await engine.close()


@any_model_runner
async def test_an_engine_that_dies_while_it_starts_says_so(policy_dir: Path, tokenizer: PolicyTokenizer) -> None:
    engine = VLLMEngine(policy_dir, tokenizer, EngineArguments(4, 1024))
    (process,) = engine_processes()
    process.kill()
    with pytest.raises(EngineDeadError):
        await engine.check()
    await engine.close()


def engine_processes() -> list[psutil.Process]:
    """EngineCore processes below this one, the newest."""
    cores = [
        p for p in psutil.Process().children() if "EngineCore" in " ".join(p.cmdline()) or "EngineCore" in p.name()
    ]
    return sorted(cores, key=psutil.Process.create_time)[-1:]
