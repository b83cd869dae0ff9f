import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from ragr1_actors.engines.sampler import sample, uniform
from ragr1_actors.engines.transformers_engine import TransformersEngine
from ragr1_actors.errors import ConfigError, EngineError
from ragr1_actors.tiny_policy import make_tiny_policy
from ragr1_actors.tokenizer import PolicyTokenizer
from ragr1_actors.types import Completion, FinishReason, Message, Sampling

TEXTS = [" Ana Bell was born in 1931 in Riga. <search> Ana Bell</search>", " Bo Cole: x, y\n 1950 and more words here"]


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy")
    make_tiny_policy(directory, TEXTS, seed=0, vocab_size=400, hidden_size=32, num_layers=2, num_heads=2)
    return directory


@pytest.fixture(scope="module")
def tokenizer(policy_dir: Path) -> PolicyTokenizer:
    return PolicyTokenizer(policy_dir)


def make_engine(policy_dir: Path, tokenizer: PolicyTokenizer, max_rows: int = 8) -> TransformersEngine:
    return TransformersEngine(policy_dir, tokenizer, max_rows=max_rows, version=1)


def reference_logprobs(model: torch.nn.Module, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].float() / temperature, dim=-1)


def test_the_policy_folder_is_an_ordinary_one_and_its_tokenizer_loses_nothing(policy_dir: Path) -> None:
    assert isinstance(AutoModelForCausalLM.from_pretrained(policy_dir), Qwen2ForCausalLM)
    tokenizer = AutoTokenizer.from_pretrained(policy_dir)
    assert len(tokenizer.encode("<search> Ana Bell 1931</search>", add_special_tokens=False)) == 5
    for text in ("Beyoncé 日本 🎉\t\x00", "<think> Ana\n Bell</think>", ""):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


async def converse(
    engine: TransformersEngine, tokenizer: PolicyTokenizer, index: int, temperature: float
) -> list[tuple[list[int], Completion]]:
    ids = tokenizer.prompt_ids([Message("user", f"Where was Ana Bell {'x' * index}?")])
    turns = []
    for turn in range(3):
        sampling = Sampling(5 + index % 7, temperature, stop=("</search>",), seed=100 * index + turn)
        completion = await engine.generate(ids, sampling, request_id=str(index))
        turns.append((list(ids), completion))
        ids = ids + completion.token_ids + tokenizer.encode(" Riga. Ana" * (index % 3))
        await asyncio.sleep(0.001 * (index % 4))
    engine.release(str(index))
    return turns


@pytest.mark.parametrize(("max_rows", "temperature"), [(64, 1.0), (3, 0.7)])
async def test_logprobs_are_the_models_own_in_any_batch_and_with_any_cache(
    policy_dir: Path, tokenizer: PolicyTokenizer, max_rows: int, temperature: float
) -> None:
    engine = make_engine(policy_dir, tokenizer, max_rows)
    conversations = await asyncio.gather(*(converse(engine, tokenizer, i, temperature) for i in range(20)))
    model = AutoModelForCausalLM.from_pretrained(policy_dir).eval()
    for turns in conversations:
        for prompt, completion in turns:
            logprobs = reference_logprobs(model, prompt + completion.token_ids, temperature)
            expected = [logprobs[len(prompt) + i - 1, token].item() for i, token in enumerate(completion.token_ids)]
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)
            assert completion.policy_versions == [1] * len(completion.token_ids)
            assert completion.text == tokenizer.decode(completion.token_ids)


async def test_the_same_seed_gives_the_same_tokens_whatever_runs_beside_it(
    policy_dir: Path, tokenizer: PolicyTokenizer
) -> None:
    engine = make_engine(policy_dir, tokenizer, 32)
    together = await asyncio.gather(*(converse(engine, tokenizer, i, 1.0) for i in range(12)))
    alone = await converse(make_engine(policy_dir, tokenizer, 1), tokenizer, 7, 1.0)
    assert [c.token_ids for _, c in alone] == [c.token_ids for _, c in together[7]]
    assert len({tuple(turns[0][1].token_ids) for turns in together}) > 1


async def test_generation_ends_with_the_token_that_completes_the_stop_string(
    policy_dir: Path, tokenizer: PolicyTokenizer
) -> None:
    engine = make_engine(policy_dir, tokenizer)
    prompt = tokenizer.encode(" Ana Bell")
    free = await engine.generate(prompt, Sampling(60, 1.0, seed=5), request_id="a")
    text = tokenizer.decode(free.token_ids[:4])
    stopped = await engine.generate(prompt, Sampling(60, 1.0, stop=(text[-1],), seed=5), request_id="b")
    assert stopped.finish_reason is FinishReason.STOP
    assert text[-1] in tokenizer.decode(stopped.token_ids[-1:])
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert not any(text[-1] in tokenizer.decode([t]) for t in stopped.token_ids[:-1])


async def test_length_ends_generation_too(policy_dir: Path, tokenizer: PolicyTokenizer) -> None:
    engine = make_engine(policy_dir, tokenizer)
    completion = await engine.generate(tokenizer.encode(" Ana"), Sampling(3, 0.0), request_id="a")
    assert (completion.finish_reason, len(completion.token_ids)) == (FinishReason.LENGTH, 3)


async def test_new_weights_in_the_middle_of_a_turn_recompute_the_cache(
    policy_dir: Path, tokenizer: PolicyTokenizer
) -> None:
    engine = make_engine(policy_dir, tokenizer)
    prompt = tokenizer.encode(" Ana Bell was born in 1931 in Riga.")
    running = asyncio.create_task(engine.generate(prompt, Sampling(40, 1.0, seed=3), request_id="a"))
    for _ in range(8):
        await asyncio.sleep(0)
    model = AutoModelForCausalLM.from_pretrained(policy_dir).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    await engine.update_weights({name: value.numpy() for name, value in model.state_dict().items()}, version=2)
    completion = await running
    versions = completion.policy_versions
    assert versions == sorted(versions)
    assert set(versions) == {1, 2}
    logprobs = reference_logprobs(model, prompt + completion.token_ids)
    for index, (token, version) in enumerate(zip(completion.token_ids, versions, strict=True)):
        if version == 2:
            assert completion.logprobs[index] == pytest.approx(
                logprobs[len(prompt) + index - 1, token].item(), abs=1e-4
            )


async def test_an_update_that_lacks_a_parameter_is_refused(policy_dir: Path, tokenizer: PolicyTokenizer) -> None:
    with pytest.raises(EngineError, match="lacks"):
        await make_engine(policy_dir, tokenizer).update_weights({"model.norm.weight": np.ones(32)}, version=2)


def test_a_folder_without_a_model_is_one_sentence(tmp_path: Path, tokenizer: PolicyTokenizer) -> None:
    with pytest.raises(EngineError, match="cannot load a model"):
        TransformersEngine(tmp_path, tokenizer, max_rows=1)
    with pytest.raises(ConfigError, match="cannot load a tokenizer"):
        PolicyTokenizer(tmp_path)


def test_the_sampler_draws_from_the_distribution() -> None:
    n = 20_000
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(n, 4)
    draws = torch.from_numpy(uniform(np.arange(n, dtype=np.uint64), np.zeros(n, dtype=np.uint64)).astype(np.float32))
    for temperature, top_p in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.8)):
        tokens, logprobs = sample(logits, torch.full((n,), temperature), torch.full((n,), top_p), draws)
        probabilities = torch.softmax(logits[0] / temperature, dim=-1)
        if top_p < 1:
            probabilities = torch.where(torch.arange(4) < 2, probabilities, 0.0)
            probabilities /= probabilities.sum()
        frequencies = torch.bincount(tokens, minlength=4) / n
        assert torch.allclose(frequencies, probabilities, atol=0.012)
        assert torch.allclose(logprobs, probabilities[tokens].log(), atol=1e-5)
    greedy, _ = sample(logits, torch.zeros(n), torch.ones(n), draws)
    assert set(greedy.tolist()) == {0}


def test_uniforms_are_uniform_and_repeat() -> None:
    steps = np.arange(10_000, dtype=np.uint64)
    values = uniform(np.full(10_000, 2**63 + 11, dtype=np.uint64), steps)
    assert 0 <= values.min() < 0.01 < 0.99 < values.max() < 1
    assert abs(values.mean() - 0.5) < 0.02
    np.testing.assert_array_equal(values, uniform(np.full(10_000, 2**63 + 11, dtype=np.uint64), steps))
