"""``ragr1 bench gpu``: what only a GPU shows. DeepSpeed, Ray, FAISS and vLLM are not needed.

================= ======================================================================= =======
metric            ratio                                                                   goal
================= ======================================================================= =======
bf16_logprobs     mean gap of log-probs in bf16 to float32 on the CPU, in nats             <= 0.02
bf16_gradient     cosine of the whole gradient in bf16 with that in float32               >= 0.99
varlen_attention  largest gap of flash attention over rows to attention over blocks       <= 0.03
packed_recurrent  tokens/s of Qwen3.5's layers on a packed row ÷ a row for each sequence    >= 1
mfu_0.5b ...      model FLOP/s ÷ the GPU's peak, forward and backward                      >= 0.5 (1.5b, 7b)
memory_1.5b, _7b  peak bytes of the allocator ÷ those of ``learners/deepspeed/memory.py``, minus 1   <= 0.1
gap_135m ...      mean gap of the engine's log-probs to the learner's, bf16, in nats       <= 0.02
decode_135m ...   tokens/s of the transformers engine ÷ the bound of the memory's bandwidth
search            queries/s of a half-precision scan of 21M x 768 ÷ the bandwidth's bound
search_recall     best 3 of it that are the best 3 in float32                             >= 0.99
weight_copy       bytes/s of a copy of all weights, tensor by tensor ÷ of one large copy  >= 0.8
================= ======================================================================= =======

Without a GPU, and with ``--quick``, the first two, ``gap_small``, the search and the copy run on the CPU at small
sizes, and the others are left out with a line that says so. The shapes are those of ``shapes.py``.

Model FLOPs are 6 per parameter and token (in the head, per MODEL token), and 6 * num_layers * attention_size per pair
of length**2, as causal attention looks at half of them; what gradient checkpointing computes again is not counted.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from benchmarks.learner.shapes import SERVED, SHAPES, SMALL, policy_of, write_policy
from benchmarks.measurement import HIGHER, Goal, Measurement, Sample, choose, log, measure, quotient
from learners.deepspeed.memory import pass_parts
from learners.models.scoring import PolicyModel, block_attention, flash_attention
from learners.packing import MicroBatch, packed_layout
from ragr1_actors.core.models.model_shape import ModelShape
from ragr1_actors.core.types import Completion, Sampling
from ragr1_actors.rollout.engines.base import EngineArguments, PolicyTokenizer
from ragr1_actors.rollout.engines.transformers_engine import TransformersEngine
from retrieval.indexes.ranking import best_of
from retrieval.indexes.torch_index import TorchFlatIndex

# Read by DeepSpeed, which transformers imports where it is installed; it would say on stdout what it found.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

PEAK_TFLOPS = {"H100 80GB HBM3": 989.0, "H200": 989.0, "A100": 312.0}
"""By the name of the GPU: bf16, dense, SXM, from NVIDIA's data sheets."""
BYTES_PER_S = {"H100 80GB HBM3": 3.35e12, "H200": 4.8e12, "A100": 2.04e12}
ROW_TOKENS = 16_384
NUM_VECTORS, NUM_VECTORS_QUICK, DIMENSION = 21_015_324, 20_000, 768
NUM_QUERIES = 128
ENGINE_ROWS, PROMPT_TOKENS, NEW_TOKENS = 64, 256, 128
"""Trajectories that the engine continues at once, and the tokens of each."""

GOALS: dict[str, Goal] = {
    "bf16_logprobs": Goal(0.02, at_least=False),
    "bf16_gradient": Goal(0.99, at_least=True),
    "varlen_attention": Goal(0.03, at_least=False),
    "packed_recurrent": Goal(1.0, at_least=True),
    "mfu_0.5b": HIGHER,
    "mfu_1.5b": Goal(0.5, at_least=True),
    "mfu_3b": HIGHER,
    "mfu_7b": Goal(0.5, at_least=True),
    **{f"mfu_{name}": HIGHER for name in SERVED},
    "memory_1.5b": Goal(0.1, at_least=False),
    "memory_7b": Goal(0.1, at_least=False),
    **{f"gap_{name}": Goal(0.02, at_least=False) for name in ("small", *SERVED)},
    **{f"decode_{name}": HIGHER for name in SERVED},
    "search": HIGHER,
    "search_recall": Goal(0.99, at_least=True),
    "weight_copy": Goal(0.8, at_least=True),
}
METRICS = tuple(GOALS)
Samples = dict[str, list[Sample]]


def describe() -> str:
    """The workload, in one line."""
    return f"gpu: {_gpu_name() or 'no GPU'}; shapes of Qwen2.5, Qwen3 and SmolLM2, rows of {ROW_TOKENS} tokens"


def run(only: str | None = None, repeats: int | None = None, quick: bool = False) -> Iterator[Measurement]:
    """Measure, and yield what is found.

    Raises:
        UserError: ``only`` is no metric.
    """
    wanted = choose(only, METRICS)
    on_gpu = torch.cuda.is_available() and not quick
    with tempfile.TemporaryDirectory(prefix="ragr1-bench-") as directory:
        for part in (precision, attention, recurrent, speed, engines, search, copies):
            for metric, samples in part(Path(directory), wanted, repeats or (3 if on_gpu else 1), on_gpu).items():
                if samples and metric in wanted:
                    yield measure(metric, samples, _unit(metric), GOALS[metric])


def _unit(metric: str) -> str:
    units = {"bf16_logprobs": "nats", "packed_recurrent": "tokens/s", "search": "queries/s", "weight_copy": "bytes/s"}
    kinds = {"mfu": "TFLOP/s", "memory": "bytes", "gap": "nats", "decode": "tokens/s"}
    return units.get(metric) or kinds.get(metric.partition("_")[0], "")


def _gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def _known(table: dict[str, float]) -> float | None:
    return next((value for name, value in table.items() if name in _gpu_name()), None)


def _device(on_gpu: bool) -> torch.device:
    return torch.device("cuda" if on_gpu else "cpu")


def make_row(vocab_size: int, lengths: list[int], seed: int = 0) -> MicroBatch:
    """A packed row of random tokens of which 30 % are MODEL tokens, the last ones of every sequence."""
    rng = np.random.default_rng(seed)
    sequences: list[list[int]] = [rng.integers(0, vocab_size, length).tolist() for length in lengths]
    cuts = [int(0.7 * length) for length in lengths]
    return make_scored_row(
        [one[:cut] for one, cut in zip(sequences, cuts, strict=True)],
        [one[cut:] for one, cut in zip(sequences, cuts, strict=True)],
    )


def make_scored_row(prompts: Sequence[list[int]], completions: Sequence[list[int]]) -> MicroBatch:
    """A packed row of prompts, each with the MODEL tokens that follow it."""
    sequences = [prompt + tokens for prompt, tokens in zip(prompts, completions, strict=True)]
    lengths = [len(one) for one in sequences]
    token_ids = torch.tensor([token for one in sequences for token in one])
    ends = np.cumsum(lengths)
    targets = torch.from_numpy(
        np.concatenate([np.arange(end - len(tokens), end) for end, tokens in zip(ends, completions, strict=True)])
    )
    return MicroBatch(
        token_ids=token_ids,
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        predict_positions=targets - 1,
        target_ids=token_ids[targets],
        column_index=torch.arange(len(targets)),
        layout=packed_layout(lengths),
        weight=1.0,
    )


def precision(directory: Path, wanted: set[str], repeats: int, on_gpu: bool) -> Samples:
    """One model in float32 on the CPU, and in bf16 on the device."""
    if not wanted & {"bf16_logprobs", "bf16_gradient"}:
        return {}
    policy_dir = write_policy(directory / "small", SMALL)
    row = make_row(SMALL.vocab_size, [300, 200, 100, 50])
    found = []
    for dtype, device in ((torch.float32, torch.device("cpu")), (torch.bfloat16, _device(on_gpu))):
        model = PolicyModel(policy_dir, dtype, 1.0).to(device)
        logprobs = model(row.to(device)).logprobs
        logprobs.mean().backward()
        gradient = torch.cat([p.grad.flatten().float().cpu() for p in model.parameters() if p.grad is not None])
        found.append((logprobs.detach().cpu(), gradient))
    (exact, exact_gradient), (rounded, rounded_gradient) = found
    gap = float((rounded - exact).abs().mean())
    cosine = float(torch.nn.functional.cosine_similarity(exact_gradient.double(), rounded_gradient.double(), dim=0))
    return {"bf16_logprobs": [Sample(gap, gap, 0.0)], "bf16_gradient": [Sample(cosine, cosine, 1.0)]}


def attention(directory: Path, wanted: set[str], repeats: int, on_gpu: bool) -> Samples:
    """Flash attention over the boundaries of a row, and SDPA over blocks, in bf16."""
    if "varlen_attention" not in wanted:
        return {}
    if not on_gpu:
        log("varlen_attention skipped: flash attention over variable lengths needs a GPU")
        return {}
    layout = packed_layout([2000, 1500, 900, 400, 5, 1]).to(_device(True))
    generator = torch.Generator("cuda").manual_seed(0)
    tokens = int(layout.boundaries[-1])
    query, key, value = (
        torch.randn(tokens, heads, 128, generator=generator, device="cuda", dtype=torch.bfloat16)
        for heads in (12, 2, 2)
    )
    rows, blocks = flash_attention(query, key, value, layout), block_attention(query, key, value, layout)
    gap = float((rows - blocks).abs().max())
    return {"varlen_attention": [Sample(gap, gap, 0.0)]}


def recurrent(directory: Path, wanted: set[str], repeats: int, on_gpu: bool) -> Samples:
    """Recurrent layers with the kernels that take the ends of sequences, forward and backward."""
    if "packed_recurrent" not in wanted:
        return {}
    lacking = [name for name in ("fla", "causal_conv1d") if find_spec(name) is None]
    if not on_gpu or lacking:
        log(f"packed_recurrent skipped: it needs a GPU and the packages fla and causal_conv1d; missing: {lacking}")
        return {}
    policy_dir = write_recurrent(directory / "recurrent")
    return {"packed_recurrent": time_packing(policy_dir, [512, 384, 256, 128] * 8, _device(True), repeats)}


def write_recurrent(folder: Path) -> Path:
    """Four layers of Qwen3.5, three of them recurrent, with random weights."""
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    layers = ["linear_attention"] * 3 + ["full_attention"]
    config = Qwen3_5TextConfig(vocab_size=SMALL.vocab_size, hidden_size=1024, num_hidden_layers=4, layer_types=layers)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def time_packing(policy_dir: Path, lengths: list[int], device: torch.device, repeats: int) -> list[Sample]:
    """Tokens per second of a row of all sequences, and of a row for each, in turns."""
    model = PolicyModel(policy_dir, torch.bfloat16, 1.0).to(device)
    packed = [make_row(SMALL.vocab_size, lengths).to(device)]
    alone = [make_row(SMALL.vocab_size, [length]).to(device) for length in lengths]

    def rate(rows: list[MicroBatch]) -> float:
        def step() -> None:
            for row in rows:
                model(row).logprobs.mean().backward()
            _wait(device.type == "cuda")

        return sum(lengths) / _timed(step)

    rate(packed), rate(alone)  # kernels are compiled
    return [quotient(rate(packed), rate(alone)) for _ in range(repeats)]


def speed(directory: Path, wanted: set[str], repeats: int, on_gpu: bool) -> Samples:
    """Forward and backward of real shapes: model FLOP/s, and the peak of the allocator."""
    chosen = [name for name in SHAPES if wanted & {f"mfu_{name}", f"memory_{name}"}]
    peak = _known(PEAK_TFLOPS)
    if chosen and (not on_gpu or peak is None):
        log(f"mfu and memory skipped: found {_gpu_name() or 'no GPU'}, expected one of {', '.join(PEAK_TFLOPS)}")
        return {}
    found: Samples = {}
    for name in chosen:
        assert peak is not None
        found |= _speed_of(name, directory, repeats, peak)
        torch.cuda.empty_cache()  # the next model needs the room
    return found


def _speed_of(name: str, directory: Path, repeats: int, peak: float) -> Samples:
    shape = SHAPES[name]
    model = PolicyModel(policy_of(name, directory), torch.bfloat16, 1.0, gradient_checkpointing=True).to("cuda")
    lengths = [2048] * (ROW_TOKENS // 2048)
    row = make_row(shape.vocab_size, lengths).to(torch.device("cuda"))
    flops = model_flops(shape, lengths, len(row.target_ids))

    def step() -> None:
        model(row).logprobs.mean().backward()
        torch.cuda.synchronize()

    step()  # makes the gradients
    torch.cuda.reset_peak_memory_stats()
    seconds = [_timed(step) for _ in range(repeats)]
    expected = 4 * shape.num_parameters  # weights and gradients in bf16
    expected += sum(pass_parts(shape, ROW_TOKENS, len(row.target_ids), 2, checkpointing=True, takes_rows=True).values())
    reached = torch.cuda.max_memory_allocated()
    return {
        f"mfu_{name}": [quotient(flops / second / 1e12, peak) for second in seconds],
        f"memory_{name}": [Sample(abs(reached / expected - 1), reached, expected)],
    }


def model_flops(shape: ModelShape, lengths: list[int], num_targets: int) -> float:
    """Floating-point operations of forward and backward over a packed row."""
    linear = shape.num_layers * shape.layer_parameters * sum(lengths) + shape.embedding_parameters * num_targets
    return 6.0 * (linear + shape.num_layers * shape.attention_size * sum(length**2 for length in lengths))


def _timed(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def engines(directory: Path, wanted: set[str], repeats: int, on_gpu: bool) -> Samples:
    """What the transformers engine samples, and the learner's log-probs of it."""
    chosen = [name for name in SERVED if wanted & {f"gap_{name}", f"decode_{name}"}]
    found: Samples = {}
    if "gap_small" in wanted:
        policy_dir = write_policy(directory / "small", SMALL)
        served = asyncio.run(serve(policy_dir, SMALL.vocab_size, _device(on_gpu), 1))
        found["gap_small"] = [_gap(policy_dir, served, _device(on_gpu))]
    if chosen and not on_gpu:
        log(f"the engine over {', '.join(chosen)} skipped: it needs a GPU")
        return found
    for name in chosen:
        policy_dir, shape = policy_of(name, directory), SHAPES[name]
        served = asyncio.run(serve(policy_dir, shape.vocab_size, _device(True), repeats))
        torch.cuda.empty_cache()
        found[f"gap_{name}"] = [_gap(policy_dir, served, _device(True))]
        cache_bytes = 2 * 2 * shape.num_layers * shape.kv_size * (PROMPT_TOKENS + NEW_TOKENS / 2) * ENGINE_ROWS
        steps_per_s = (_known(BYTES_PER_S) or 2e12) / (2 * shape.num_parameters + cache_bytes)
        found[f"decode_{name}"] = [quotient(rate, ENGINE_ROWS * steps_per_s) for rate in served.tokens_per_s]
        torch.cuda.empty_cache()
    return found


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine sampled, and how fast."""

    prompts: list[list[int]]
    completions: list[Completion]
    tokens_per_s: list[float]


async def serve(policy_dir: Path, vocab_size: int, device: torch.device, repeats: int) -> Served:
    """Continue random prompts in bf16, ``repeats`` times after a first one; the last completions are kept."""
    rng = np.random.default_rng(0)
    prompts: list[list[int]] = rng.integers(0, vocab_size, (ENGINE_ROWS, PROMPT_TOKENS)).tolist()
    settings = EngineArguments(ENGINE_ROWS, PROMPT_TOKENS + NEW_TOKENS, "bfloat16", str(device))
    engine = TransformersEngine(policy_dir, PolicyTokenizer(policy_dir), settings)
    rates, completions = [], []
    for number in range(repeats + 1):
        started = time.perf_counter()
        calls = (
            engine.generate(prompt, Sampling(NEW_TOKENS, seed=at), request_id=f"{number}/{at}")
            for at, prompt in enumerate(prompts)
        )
        completions = list(await asyncio.gather(*calls))
        rates.append(sum(len(one.token_ids) for one in completions) / (time.perf_counter() - started))
        for at in range(ENGINE_ROWS):
            engine.release(f"{number}/{at}")
    await engine.close()
    return Served(prompts, completions, rates[1:])


def _gap(policy_dir: Path, served: Served, device: torch.device) -> Sample:
    """The mean distance of the engine's log-probs to those of the learner, which scores a row per eight sequences."""
    model = PolicyModel(policy_dir, torch.bfloat16, 1.0).to(device)
    gaps = []
    with torch.no_grad():
        for start in range(0, ENGINE_ROWS, 8):
            completions = served.completions[start : start + 8]
            row = make_scored_row(served.prompts[start : start + 8], [one.token_ids for one in completions])
            sampled = torch.tensor([value for one in completions for value in one.logprobs])
            gaps.append((model(row.to(device)).logprobs.cpu() - sampled).abs())
    gap = float(torch.cat(gaps).mean())
    return Sample(gap, gap, 0.0)


def search(directory: Path, wanted: set[str], repeats: int, on_gpu: bool) -> Samples:
    """Exact search in half precision over generated vectors of length 1, Search-R1's number of them on a GPU."""
    if not wanted & {"search", "search_recall"}:
        return {}
    device, count = _device(on_gpu), NUM_VECTORS if on_gpu else NUM_VECTORS_QUICK
    queries = np.random.default_rng(1).standard_normal((NUM_QUERIES, DIMENSION), dtype=np.float32)
    few = torch.from_numpy(queries[:8]).to(device)
    exact: list[list[tuple[float, int]]] = [[] for _ in few]  # the same search in float32

    def blocks() -> Iterator[np.ndarray]:
        generator = torch.Generator(device).manual_seed(0)
        for start in range(0, count, 2**17):
            block = torch.randn(min(2**17, count - start), DIMENSION, device=device, generator=generator)
            block /= block.norm(dim=1, keepdim=True)
            scores, rows = (few @ block.T).topk(3)
            for kept, *best in zip(exact, scores.tolist(), (rows + start).tolist(), strict=True):
                kept[:] = sorted([*kept, *zip(*best, strict=True)], reverse=True)[:3]
            yield block.cpu().numpy()

    index = TorchFlatIndex(blocks(), count, DIMENSION, device=str(device), dtype=torch.float16 if on_gpu else None)
    ranking = index.find(queries[:8], 3)
    found = best_of(ranking.scores, ranking.rows, 3).rows
    recall = float(
        np.mean([len(set(a) & {row for _, row in b}) / 3 for a, b in zip(found.tolist(), exact, strict=True)])
    )
    seconds = [_timed(lambda: index.find(queries, 3)) for _ in range(repeats + 1)][1:]
    num_bytes = count * DIMENSION * (2 if on_gpu else 4)
    bound = NUM_QUERIES * (_known(BYTES_PER_S) or 2e10) / num_bytes
    return {
        "search": [quotient(NUM_QUERIES / second, bound) for second in seconds],
        "search_recall": [Sample(recall, recall, 1.0)],
    }


def copies(directory: Path, wanted: set[str], repeats: int, on_gpu: bool) -> Samples:
    """A copy of a policy's weights, one tensor after the other, against one copy of as many bytes."""
    if "weight_copy" not in wanted:
        return {}
    shape = SHAPES["1.5b"] if on_gpu else SMALL
    c, i, a, k = shape.hidden_size, shape.intermediate_size, shape.attention_size, shape.kv_size
    layer = [c * a, c * k, c * k, a * c, c * i, c * i, i * c, a, k, k, c, c]
    sizes = [shape.embedding_parameters, *(layer * shape.num_layers), c]
    tensors = [torch.empty(size, dtype=torch.bfloat16, device=_device(on_gpu)) for size in sizes]
    whole = torch.empty(sum(sizes), dtype=torch.bfloat16, device=_device(on_gpu))

    def each() -> None:
        for tensor, target in zip(tensors, whole.split(sizes), strict=True):
            target.copy_(tensor)
        _wait(on_gpu)

    def at_once() -> None:
        whole.copy_(other)
        _wait(on_gpu)

    other = torch.empty_like(whole)
    each()
    at_once()
    rates = [[2.0 * len(whole) / _timed(step) for step in (each, at_once)] for _ in range(repeats)]
    return {"weight_copy": [quotient(ours, theirs) for ours, theirs in rates]}


def _wait(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()
