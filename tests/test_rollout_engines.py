import asyncio
import json
import shutil
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import ByteTokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    PreTrainedTokenizerFast,
    Qwen2ForCausalLM,
)

from benchmarks.rollout.fleet import PacedScripts
from envs.base import EnvContext
from envs.search import SearchEnv
from ragr1_actors.core.config import EnvironmentSettings, PolicySettings
from ragr1_actors.core.errors import ConfigError, DataError, EngineError
from ragr1_actors.core.types import Completion, FinishReason, Message, Sampling, Task, TokenKind
from ragr1_actors.planning.tiny_policy import PROTOCOL_TAGS, make_tiny_policy
from ragr1_actors.rollout.engines import decoding
from ragr1_actors.rollout.engines.base import EngineArguments, PolicyTokenizer, ScriptedEngine, load_tokenizer
from ragr1_actors.rollout.engines.decoding import sample, uniform
from ragr1_actors.rollout.engines.transformers_engine import TransformersEngine, TurnText
from ragr1_actors.rollout.recorder import EnvAttempt, Recorder, run_trajectory
from retrieval.base import Passage

TEXTS = [" Ana Bell was born in 1931 in Riga. <search> Ana Bell</search>", " Bo Cole: x, y\n 1950 and more words here"]

NEARLY_ONE_SEED = 12379357
"""Its first ``uniform`` is above 1 - 2**-25, which float32 rounds to 1."""


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("policy")
    make_tiny_policy(directory, TEXTS, seed=0, vocab_size=400, hidden_size=32, num_layers=2, num_heads=2)
    return directory


@pytest.fixture(scope="module")
def tokenizer(policy_dir: Path) -> PolicyTokenizer:
    return PolicyTokenizer(policy_dir)


def make_engine(policy_dir: Path, tokenizer: PolicyTokenizer, max_rows: int = 8) -> TransformersEngine:
    return TransformersEngine(policy_dir, tokenizer, EngineArguments(max_rows, 512, version=1))


def reference_logprobs(model: torch.nn.Module, ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].float() / temperature, dim=-1)


@pytest.mark.engine
def test_the_policy_folder_is_an_ordinary_one_and_its_tokenizer_loses_nothing(policy_dir: Path) -> None:
    assert isinstance(AutoModelForCausalLM.from_pretrained(policy_dir), Qwen2ForCausalLM)
    tokenizer = AutoTokenizer.from_pretrained(policy_dir)
    assert len(tokenizer.encode("<search> Ana Bell 1931</search>", add_special_tokens=False)) == 5
    for text in ("Beyoncé 日本 🎉\t\x00", "<think> Ana\n Bell</think>", ""):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


SPECIAL = ["</s>", "<s>", "<end_of_turn>", "<\uff5cend▁of▁sentence\uff5c>", "[/INST]"]
NOT_SPECIAL = "</tool_response>"
CONTROL = [*SPECIAL, NOT_SPECIAL]


@pytest.fixture(scope="module")
def tokenizer_with_control_tokens(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    folder = Path(shutil.copytree(policy_dir, tmp_path_factory.mktemp("control") / "policy"))
    added = AutoTokenizer.from_pretrained(folder)
    added.add_tokens([*SPECIAL, "\n\n"], special_tokens=True)
    added.add_tokens([NOT_SPECIAL, " Zorro"])
    added.save_pretrained(folder)
    return PolicyTokenizer(folder)


@pytest.mark.engine
def test_no_text_of_the_environment_becomes_a_control_token(
    tokenizer: PolicyTokenizer, tokenizer_with_control_tokens: PolicyTokenizer
) -> None:
    plain, tokenizer = tokenizer, tokenizer_with_control_tokens
    for text in (*CONTROL, " Ana</s> Bell <end_of_turn>\n<|im_end|>", "".join(CONTROL)):
        ids = tokenizer.encode(text)
        assert ids == plain.encode(text)
        assert tokenizer.decode(ids) == text
    for text in TEXTS:
        assert tokenizer.encode(text) == plain.encode(text)
    for text in ("\n\n", " Zorro"):  # white space and plain words are text
        assert len(tokenizer.encode(text)) == 1
    assert tokenizer.eos_token_ids & set(tokenizer.prompt_ids([Message("user", "Where?")])), "the template's own"


@pytest.mark.parametrize("mode", ["rag", "search"])
@pytest.mark.engine
async def test_a_template_meets_no_control_token_of_a_question_or_a_document(
    mode: str, tokenizer_with_control_tokens: PolicyTokenizer
) -> None:
    tokenizer = tokenizer_with_control_tokens
    names = "".join([*CONTROL, "<|im_end|>", "</think>"])

    async def play(text: str) -> list[int]:
        class Finds:
            async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
                return [[Passage("p", text, text)] for _ in queries]

        settings = EnvironmentSettings(prompt="[/INST] {question} {passages}", options={"mode": mode})  # its own counts
        context = EnvContext(Finds(), tokenizer.encode, tokenizer.defuse)
        engine = ScriptedEngine({"one": ["<search> Ana</search>", "<answer> Riga</answer>"]}, tokenizer.encode)
        recorder = Recorder("one", engine.generate, tokenizer, Sampling(500), 4000, 0)
        trajectory = await run_trajectory(
            EnvAttempt(SearchEnv(settings, context), recorder), Task("t/0", text, ("Riga",))
        )
        assert not trajectory.error
        return [int(i) for i in trajectory.token_ids[trajectory.kinds != TokenKind.MODEL]]

    def of_templates(ids: list[int]) -> list[str]:
        texts = ["<|im_end|>" if i in tokenizer.eos_token_ids else tokenizer.decode([i]) for i in ids]
        return [text for text in texts if text in {*CONTROL, "<|im_start|>", "<|im_end|>", "</think>"}]

    ids = await play(f" Zorro {names}")
    assert of_templates(ids) == of_templates(await play(" Zorro ")) != []
    assert tokenizer.decode(ids).count("[/INST]") == 1
    assert tokenizer.decode(ids).count("(/tool_response)") >= 3  # of the question, the title and the text


def change(folder: Path, name: str, edit: Callable[[Any], None]) -> None:
    content = json.loads((folder / name).read_text())
    edit(content)
    (folder / name).write_text(json.dumps(content))


@pytest.mark.engine
def test_tags_that_are_special_tokens_are_read_and_written_as_others(policy_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(policy_dir, tmp_path / "policy"))
    plain = PolicyTokenizer(folder)

    def mark(tokens: list[dict[str, Any]]) -> None:
        for token in tokens:
            token["special"] = token["special"] or token["content"] in PROTOCOL_TAGS

    change(folder, "tokenizer.json", lambda content: mark(content["added_tokens"]))
    change(folder, "tokenizer_config.json", lambda c: mark(list(c.get("added_tokens_decoder", {}).values())))
    special = AutoTokenizer.from_pretrained(folder)
    turn = "<think> Ana</think><search> Ana Bell</search>"
    observation = "\n<information>\n(1) Ana <|im_end|> Bell\n</information>\n"
    assert special.decode(special.encode(turn, add_special_tokens=False), skip_special_tokens=True) == " Ana Ana Bell"
    tokenizer = PolicyTokenizer(folder)
    for text in (turn, observation, "</search>" + observation):
        ids = tokenizer.encode(text)
        assert ids == plain.encode(text)
        assert tokenizer.decode(ids) == plain.decode(ids) == text
    assert tokenizer.eos_token_ids.isdisjoint(tokenizer.encode(observation))
    assert tokenizer.tokens_containing({">"}) >= {tokenizer.encode("</search>")[0]}


@pytest.mark.engine
def test_a_turn_ends_with_what_the_chat_template_puts_behind_it(policy_dir: Path, tmp_path: Path) -> None:
    """Base models are published with another end of sequence."""
    folder = Path(shutil.copytree(policy_dir, tmp_path / "policy"))
    change(folder, "tokenizer_config.json", lambda content: content.update(eos_token="<|endoftext|>"))
    change(folder, "generation_config.json", lambda content: content.pop("eos_token_id"))
    ids = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"])
    tokenizer = PolicyTokenizer(folder)
    assert tokenizer.eos_token_ids == set(ids)
    assert tokenizer.decode([ids[0], *tokenizer.encode(" Ana"), ids[1]]) == " Ana"
    template = folder / "chat_template.jinja"
    for text in (
        "{% for m in messages %}{{ m.content }}\n{% endfor %}",  # a newline ends no turn
        "{{ raise_exception('roles') }}",
        "<|im_start|>{{ messages[0].content }}",  # without the assistant's turn
    ):
        template.write_text(text)
        assert PolicyTokenizer(folder).eos_token_ids == {ids[0]}


@pytest.mark.engine
async def test_a_template_may_begin_the_turn_with_a_thought(policy_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(policy_dir, tmp_path / "policy"))
    template = folder / "chat_template.jinja"
    template.write_text(
        template.read_text() + "{{ '<think>\\n' if enable_thinking is not defined else '<think>\\n\\n</think>\\n\\n' }}"
    )
    tokenizer = load_tokenizer(folder, PolicySettings())
    prompt = tokenizer.prompt_ids([Message("user", "Write <think>")])
    assert tokenizer.turn_start(prompt) == "<think>\n"
    scripts = {"x": ["<think> a</think><answer> Riga</answer>"]}
    demonstrated = ScriptedEngine(scripts, tokenizer.encode, turn_start=tokenizer.turn_start)
    completion = await demonstrated.generate(prompt, Sampling(64), request_id="x")
    whole = tokenizer.decode([*prompt, *completion.token_ids])
    assert whole.endswith("<think>\n a</think><answer> Riga</answer>")
    off = load_tokenizer(folder, PolicySettings(template_options={"enable_thinking": False}))
    prompt = off.prompt_ids([Message("user", "Write <think>")])
    assert off.decode(prompt).endswith("<think>\n\n</think>\n\n")
    assert off.turn_start(prompt) == ""
    with pytest.raises(ConfigError, match=r"policy\.template_options: got return_dict, tokenize, which transformers"):
        load_tokenizer(folder, PolicySettings(template_options={"tokenize": False, "return_dict": 1, "date": "today"}))


@pytest.mark.engine
def test_bare_contents_begin_with_the_tokenizers_start_once(policy_dir: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(policy_dir, tmp_path / "policy"))
    (folder / "chat_template.jinja").unlink()
    bare = PolicyTokenizer(folder).prompt_ids([Message("user", "Where?")])
    start, end = AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(["<|im_start|>", "<|endoftext|>"])
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = TemplateProcessing(
        single="<|im_start|> $A <|endoftext|>", special_tokens=[("<|im_start|>", start), ("<|endoftext|>", end)]
    )
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>").save_pretrained(folder)
    tokenizer = PolicyTokenizer(folder)
    assert tokenizer.prompt_ids([Message("user", "Where?")]) == [start, *bare]
    assert tokenizer.encode("Where?\n") == bare


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
        await asyncio.sleep(0.001 * (index % 4))  # as searches do, which take different times
    engine.release(str(index))
    return turns


@pytest.fixture(scope="module")
def grouped_dir(policy_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of ``policy_dir``, and a model of six heads over two of keys and values."""
    folder = tmp_path_factory.mktemp("grouped") / "policy"
    shutil.copytree(policy_dir, folder)
    config = AutoConfig.from_pretrained(policy_dir)
    config.update({"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8})
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("policy", "max_rows", "temperature"),
    [("policy_dir", 64, 1.0), ("policy_dir", 3, 0.7), ("grouped_dir", 64, 1.0), ("grouped_dir", 3, 0.7)],
)
@pytest.mark.engine
async def test_logprobs_are_the_models_own_in_any_batch_and_with_any_cache(
    request: pytest.FixtureRequest, tokenizer: PolicyTokenizer, policy: str, max_rows: int, temperature: float
) -> None:
    folder: Path = request.getfixturevalue(policy)
    engine = make_engine(folder, tokenizer, max_rows)
    conversations = await asyncio.gather(*(converse(engine, tokenizer, i, temperature) for i in range(20)))
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    for turns in conversations:
        for prompt, completion in turns:
            logprobs = reference_logprobs(model, prompt + completion.token_ids, temperature)
            expected = [logprobs[len(prompt) + i - 1, token].item() for i, token in enumerate(completion.token_ids)]
            assert completion.logprobs == pytest.approx(expected, abs=1e-4)
            assert completion.policy_versions == [1] * len(completion.token_ids)
            assert completion.text == tokenizer.decode(completion.token_ids)


@pytest.mark.engine
async def test_the_same_seed_gives_the_same_tokens_whatever_runs_beside_it(
    policy_dir: Path, tokenizer: PolicyTokenizer
) -> None:
    engine = make_engine(policy_dir, tokenizer, 32)
    together = await asyncio.gather(*(converse(engine, tokenizer, i, 1.0) for i in range(12)))
    alone = await converse(make_engine(policy_dir, tokenizer, 1), tokenizer, 7, 1.0)
    assert [c.token_ids for _, c in alone] == [c.token_ids for _, c in together[7]]
    assert len({tuple(turns[0][1].token_ids) for turns in together}) > 1


@pytest.mark.engine
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


class Spoken:
    """A tokenizer whose policy says the same in every turn, if ``sample`` is replaced by ``next_token``."""

    def __init__(self, token_ids: list[int], num_rows: int) -> None:
        self._said = iter([i for token_id in token_ids for i in [token_id] * num_rows])

    def next_token(self, logits: torch.Tensor, *_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([next(self._said) for _ in logits]), torch.zeros(len(logits))


@pytest.mark.parametrize(
    ("said", "stop"),
    [
        ("Riga. \n\nBo Cole", "\n\n"),
        ("Ana  Bell", "a "),
        ("Ana\tBell", "\t"),
        ("où est Riga? où", "où"),
        ("日本 Riga", "本"),
        ("Riga 🎉 Bo", "🎉"),
        ("x1y2z3" * 5 + "</search> x", "x1y2z3" * 5 + "</search>"),
        ("Ana Bell</search> Bo", "</search>"),
    ],
)
@pytest.mark.engine
async def test_any_stop_string_ends_generation(
    policy_dir: Path, tokenizer: PolicyTokenizer, said: str, stop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    token_ids = tokenizer.encode(said)
    ends = next(n for n in range(1, len(token_ids) + 1) if stop in tokenizer.decode(token_ids[:n]))
    monkeypatch.setattr(
        "ragr1_actors.rollout.engines.transformers_engine.sample", Spoken(token_ids, num_rows=1).next_token
    )
    sampling = Sampling(len(token_ids), stop=("</answer>", stop))
    completion = await make_engine(policy_dir, tokenizer).generate([5, 6], sampling, request_id="a")
    assert (completion.token_ids, completion.finish_reason) == (token_ids[:ends], FinishReason.STOP)


@pytest.mark.engine
async def test_new_weights_with_more_requests_than_rows_fail_none_of_them(
    policy_dir: Path, tokenizer: PolicyTokenizer
) -> None:
    engine = make_engine(policy_dir, tokenizer, max_rows=2)
    weights = {name: value.numpy() for name, value in engine.model.state_dict().items()}
    heard: list[str] = []
    turns = [  # the two with a row have more to compute again than the one that waits for a row
        asyncio.create_task(engine.generate([7] * 50, Sampling(30, seed=i), request_id=str(i), on_text=heard.append))
        for i in range(3)
    ]
    while len(heard) < 4 and not any(turn.done() for turn in turns):
        await asyncio.sleep(0)
    await engine.update_weights(weights, 2)
    for completion in await asyncio.gather(*turns):
        assert completion.token_ids


@pytest.mark.engine
async def test_an_end_of_sequence_that_was_sampled_is_a_token_of_the_turn(policy_dir: Path) -> None:
    tokenizer = PolicyTokenizer(policy_dir)
    prompt, sampling = tokenizer.encode(" Ana Bell"), Sampling(20, 1.0, seed=5)
    free = await make_engine(policy_dir, tokenizer).generate(prompt, sampling, request_id="a")
    end = free.token_ids[3]
    tokenizer.eos_token_ids = frozenset({end})
    ended = await make_engine(policy_dir, tokenizer).generate(prompt, sampling, request_id="a")
    length = free.token_ids.index(end) + 1
    assert (ended.token_ids, ended.finish_reason) == (free.token_ids[:length], FinishReason.STOP)
    assert ended.logprobs == pytest.approx(free.logprobs[:length], abs=1e-6)
    assert ended.policy_versions == [1] * length


@pytest.mark.engine
async def test_length_ends_generation_too(policy_dir: Path, tokenizer: PolicyTokenizer) -> None:
    engine = make_engine(policy_dir, tokenizer)
    completion = await engine.generate(tokenizer.encode(" Ana"), Sampling(3, 0.0), request_id="a")
    assert (completion.finish_reason, len(completion.token_ids)) == (FinishReason.LENGTH, 3)


@pytest.mark.engine
async def test_new_weights_in_the_middle_of_a_turn_recompute_the_cache(
    policy_dir: Path, tokenizer: PolicyTokenizer
) -> None:
    engine = make_engine(policy_dir, tokenizer)
    prompt = tokenizer.encode(" Ana Bell was born in 1931 in Riga.")
    seen: list[str] = []
    turn = engine.generate(prompt, Sampling(40, 1.0, seed=3), request_id="a", on_text=seen.append)
    running = asyncio.create_task(turn)
    while len(seen) < 4:
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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.engine
async def test_the_text_so_far_grows_to_what_the_turn_decodes_to(
    policy_dir: Path, tokenizer: PolicyTokenizer, seed: int
) -> None:
    seen: list[str] = []
    completion = await make_engine(policy_dir, tokenizer).generate(
        tokenizer.encode(" Ana"), Sampling(60, 1.0, seed=seed), request_id="a", on_text=seen.append
    )
    assert len(seen) > 10
    assert len(set(seen)) == len(seen)
    assert all(later.startswith(earlier) for earlier, later in pairwise(seen))
    assert completion.text.startswith(seen[-1])
    assert completion.text[len(seen[-1]) :].strip("\ufffd") == ""  # but for the beginning of a character at the end


@pytest.mark.engine
async def test_a_callback_that_raises_fails_only_its_own_request(policy_dir: Path, tokenizer: PolicyTokenizer) -> None:
    def fail(text: str) -> None:
        raise KeyError("oops")

    engine = make_engine(policy_dir, tokenizer)
    prompt = tokenizer.encode(" Ana Bell")
    runs = [
        engine.generate(prompt, Sampling(20, 1.0, seed=index), request_id=str(index), on_text=on_text)
        for index, on_text in enumerate((None, fail, None))
    ]
    first, failed, last = await asyncio.gather(*runs, return_exceptions=True)
    assert isinstance(failed, KeyError)
    assert isinstance(first, Completion)
    assert isinstance(last, Completion)
    again = await engine.generate(prompt, Sampling(20, 1.0, seed=0), request_id="1")
    assert again.token_ids == first.token_ids


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.text("é日🎉a ", max_size=30))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.engine
def test_a_character_of_several_tokens_appears_when_it_is_whole(tokenizer: PolicyTokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text)
    turn = TurnText(tokenizer.decode)
    whole = tokenizer.decode(token_ids)
    for end in range(1, len(token_ids) + 1):
        before = turn.text
        assert turn.grow(token_ids[:end]) == (turn.text != before)
        assert whole.startswith(turn.text)
    assert turn.text == whole or whole.endswith("\ufffd")


def test_bytes_that_are_no_characters_are_decoded_seldom() -> None:
    num_decoded = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(ids)
        return bytes(ids).decode(errors="replace")

    turn = TurnText(decode)
    token_ids: list[int] = []
    for token in (*b"ab", *[0xE6] * 5000, *"é日.".encode()):
        token_ids.append(token)
        turn.grow(token_ids)
    assert turn.text == "ab"  # a hint: what follows so much of nothing may come late
    token_ids += b"x" * 700
    for end in range(len(token_ids) - 699, len(token_ids) + 1):
        turn.grow(token_ids[:end])
    assert turn.text == bytes(token_ids).decode(errors="replace")
    assert num_decoded < 400_000


async def test_a_script_is_played_at_its_pace() -> None:
    script = "<think> é日🎉</think><search> Ana Bell</search>"
    tokenizer = ByteTokenizer()
    engine = PacedScripts({"a": [script, script], "b": [script]}, tokenizer.encode, token_latency_s=0.001)
    seen: list[str] = []
    started = time.perf_counter()
    completion = await engine.generate([], Sampling(200), request_id="a", on_text=seen.append)
    assert time.perf_counter() - started > 0.001 * len(completion.token_ids)
    assert len(seen) == len(completion.token_ids) == len(script.encode())
    assert seen[-1] == completion.text == script
    assert all(later.startswith(earlier) for earlier, later in pairwise(seen))
    cut = await engine.generate([], Sampling(20), request_id="a", on_text=seen.append)
    assert (cut.finish_reason, len(cut.token_ids)) == (FinishReason.LENGTH, 20)
    assert cut.text == seen[-1]
    assert script.startswith(cut.text)
    at_once = ScriptedEngine({"b": [script]}, tokenizer.encode)
    seen.clear()
    await at_once.generate([], Sampling(200), request_id="b", on_text=seen.append)
    assert seen == [script]


@pytest.mark.engine
async def test_an_update_that_lacks_a_parameter_is_refused(policy_dir: Path, tokenizer: PolicyTokenizer) -> None:
    with pytest.raises(EngineError, match="lacks"):
        await make_engine(policy_dir, tokenizer).update_weights({"model.norm.weight": np.ones(32)}, version=2)


@pytest.mark.engine
def test_a_folder_without_a_model_is_one_sentence(tmp_path: Path, tokenizer: PolicyTokenizer) -> None:
    with pytest.raises(DataError, match="cannot load a model"):
        TransformersEngine(tmp_path, tokenizer, EngineArguments(1, 512))
    with pytest.raises(ConfigError, match="cannot load a tokenizer"):
        PolicyTokenizer(tmp_path)
    ByT5Tokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: ByT5Tokenizer is written in Python, expected"):
        PolicyTokenizer(tmp_path)


@pytest.mark.engine
async def test_a_draw_just_below_one_takes_a_token_of_the_nucleus(policy_dir: Path, tokenizer: PolicyTokenizer) -> None:
    draw = uniform(np.array([NEARLY_ONE_SEED], dtype=np.uint64), np.zeros(1, dtype=np.uint64))
    assert draw < 1 and draw.astype(np.float32) == 1
    sampling = Sampling(1, top_p=0.02, seed=NEARLY_ONE_SEED)
    completion = await make_engine(policy_dir, tokenizer).generate([5, 6], sampling, request_id="a")
    assert np.isfinite(completion.logprobs).all()


def test_the_sampler_reaches_every_token_of_a_large_vocabulary() -> None:
    """As many tokens as Qwen2.5 has, most of them less probable than float32 can tell from 0 beside 1."""
    logits = torch.zeros((1, 151_936))
    logits[0, 0] = np.log(1e8)
    probabilities = torch.log_softmax(logits[0], dim=-1).exp().double()
    cumulative = probabilities.cumsum(dim=-1)
    expected = torch.arange(1, 151_936, 5003)
    draws = (cumulative - probabilities / 2)[expected] / cumulative[-1]
    rows = len(draws)
    tokens, _ = sample(logits.expand(rows, -1), torch.ones(rows), torch.ones(rows), draws)
    assert tokens.tolist() == expected.tolist()


def test_the_sampler_draws_from_the_distribution() -> None:
    n = 20_000
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]]).expand(n, 4)
    draws = torch.from_numpy(uniform(np.arange(n, dtype=np.uint64), np.zeros(n, dtype=np.uint64)))
    for temperature, top_p in ((1.0, 1.0), (0.5, 1.0), (1.0, 0.8), (1.0, 1e-300)):
        tokens, logprobs = sample(logits, torch.full((n,), temperature), torch.full((n,), top_p), draws)
        probabilities = torch.softmax(logits[0] / temperature, dim=-1)
        if top_p < 1:
            probabilities = torch.where(torch.arange(4) < (2 if top_p > 0.1 else 1), probabilities, 0.0)
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


@pytest.mark.engine
async def test_the_cache_has_room_for_the_most_rows_at_most_and_goes_with_the_last_trajectory(
    policy_dir: Path, tokenizer: PolicyTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[torch.device] = []
    monkeypatch.setattr(decoding, "release_cache", given_back.append)
    layers, heads, head_dim = 2, 2, 16
    bytes_per_column = layers * 2 * heads * head_dim * 4
    engine = TransformersEngine(policy_dir, tokenizer, EngineArguments(5, 100))
    prompts = [tokenizer.encode(" Ana" * 40)] * 5
    for number, prompt in enumerate(prompts):  # never more than 5
        await engine.generate(prompt, Sampling(50, seed=number), request_id=str(number))
    assert engine.cache_bytes == 5 * (100 + 1) * bytes_per_column  # and the scratch column
    for number in range(5):
        assert engine.cache_bytes and not given_back
        engine.release(str(number))
    assert engine.cache_bytes == 0
    assert given_back == [torch.device("cpu")]
    found = await engine.generate(prompts[0], Sampling(50, seed=0), request_id="0")
    assert found.token_ids
