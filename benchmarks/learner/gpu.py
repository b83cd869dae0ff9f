"""``ragr1 bench gpu``: what only a GPU shows, with torch, transformers and this project alone (no DeepSpeed, no vLLM).

================= ======================================================================= =======
metric            ratio                                                                   goal
================= ======================================================================= =======
bf16_logprobs     mean gap of log-probs in bf16 to float32 on the CPU, in nats             <= 0.02
bf16_gradient     cosine of the whole gradient in bf16 with that in float32               >= 0.99
varlen_attention  largest gap of flash attention over rows to attention over blocks       <= 0.03
mfu_0.5b ...      model FLOP/s ÷ the GPU's peak, Qwen2.5's shapes, forward and backward    >= 0.5 (1.5b, 7b)
memory_1.5b, _7b  peak bytes of the allocator ÷ those of ``learners/deepspeed/memory.py``, minus 1   <= 0.1
search            queries/s of a half-precision scan of 21M x 768 ÷ the bandwidth's bound
search_recall     best 3 of it that are the best 3 in float32                             >= 0.99
weight_copy       bytes/s of a copy of all weights, tensor by tensor ÷ of one large copy  >= 0.8
================= ======================================================================= =======

Without a GPU, and with ``--quick``, the first two, the search and the copy run on the CPU at small sizes, and the
others are left out with a line that says so. **Nothing here has been run on a GPU yet.**

Model FLOPs are 6 per parameter and token (in the head, per MODEL token), and 6 * num_layers * hidden_size per pair of
length**2, as causal attention looks at half of them; what gradient checkpointing computes again is not counted. The 7B
shape has 8 of its 28 layers, so that it fits beside its gradient on any card.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.learner import sides
from benchmarks.learner.sides import Shape
from benchmarks.measurement import Goal, Measurement, Sample, choose, log, measure, quotient
from learners.deepspeed.memory import activation_bytes, head_bytes
from learners.models.attention import block_attention, flash_attention
from learners.models.scoring import PolicyModel
from learners.packing import MicroBatch, packed_layout
from ragr1_actors.core.models.model_shape import ModelShape
from retrieval.indexes.ranking import best_of
from retrieval.indexes.torch_index import TorchFlatIndex

# Read by DeepSpeed, which transformers imports where it is installed; it would say on stdout what it found.
os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")

SHAPES = {
    "0.5b": Shape(896, 4864, 24, 14, 2, 151_936),
    "1.5b": Shape(1536, 8960, 28, 12, 2, 151_936),
    "3b": Shape(2048, 11_008, 36, 16, 2, 151_936),
    "7b": Shape(3584, 18_944, 8, 28, 4, 152_064, is_tied=False),
}
SMALL = Shape(hidden_size=128, intermediate_size=344, num_layers=4, num_heads=4, num_kv_heads=2, vocab_size=2048)
PEAK_TFLOPS = {"H100 80GB HBM3": 989.0, "H200": 989.0, "A100": 312.0}
"""By the name of the GPU: bf16, dense, SXM, from NVIDIA's data sheets."""
BYTES_PER_S = {"H100 80GB HBM3": 3.35e12, "H200": 4.8e12, "A100": 2.04e12}
ROW_TOKENS = 16_384
NUM_VECTORS, NUM_VECTORS_QUICK, DIMENSION = 21_015_324, 20_000, 768
NUM_QUERIES = 128

GOALS: dict[str, Goal | None] = {
    "bf16_logprobs": Goal(0.02, at_least=False),
    "bf16_gradient": Goal(0.99, at_least=True),
    "varlen_attention": Goal(0.03, at_least=False),
    "mfu_0.5b": None,
    "mfu_1.5b": Goal(0.5, at_least=True),
    "mfu_3b": None,
    "mfu_7b": Goal(0.5, at_least=True),
    "memory_1.5b": Goal(0.1, at_least=False),
    "memory_7b": Goal(0.1, at_least=False),
    "search": None,
    "search_recall": Goal(0.99, at_least=True),
    "weight_copy": Goal(0.8, at_least=True),
}
METRICS = tuple(GOALS)
Samples = dict[str, list[Sample]]


def describe() -> str:
    """The workload, in one line."""
    return f"gpu: {_gpu_name() or 'no GPU'}; Qwen2.5's shapes, rows of {ROW_TOKENS} tokens, random weights"


def run(only: str | None = None, repeats: int | None = None, quick: bool = False) -> Iterator[Measurement]:
    """Measure, and yield what is found.

    Raises:
        UserError: ``only`` is no metric.
    """
    wanted = choose(only, METRICS)
    on_gpu = torch.cuda.is_available() and not quick
    with tempfile.TemporaryDirectory(prefix="ragr1-bench-") as directory:
        for part in (precision, attention, speed, search, copies):
            for metric, samples in part(Path(directory), wanted, repeats or (3 if on_gpu else 1), on_gpu).items():
                if samples and metric in wanted:
                    yield measure(metric, samples, _unit(metric), GOALS[metric])


def _unit(metric: str) -> str:
    units = {"bf16_logprobs": "nats", "search": "queries/s", "weight_copy": "bytes/s"}
    return units.get(metric) or {"mfu": "TFLOP/s", "memory": "bytes"}.get(metric.partition("_")[0], "")


def _gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def _known(table: dict[str, float]) -> float | None:
    return next((value for name, value in table.items() if name in _gpu_name()), None)


def _device(on_gpu: bool) -> torch.device:
    return torch.device("cuda" if on_gpu else "cpu")


def make_row(vocab_size: int, lengths: list[int], seed: int = 0) -> MicroBatch:
    """A packed row of which 30 % are MODEL tokens, the last ones of every sequence."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum([0, *lengths[:-1]])
    token_ids = torch.from_numpy(rng.integers(0, vocab_size, sum(lengths)))
    parts = [np.arange(s + int(0.7 * n), s + n) for s, n in zip(starts, lengths, strict=True)]
    targets = torch.from_numpy(np.concatenate(parts))
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
    policy_dir = sides.make_policy(directory / "small", SMALL)
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
    model = PolicyModel(
        sides.make_policy(directory / name, shape, torch.bfloat16), torch.bfloat16, 1.0, gradient_checkpointing=True
    ).to("cuda")
    lengths = [2048] * (ROW_TOKENS // 2048)
    row = make_row(shape.vocab_size, lengths).to(torch.device("cuda"))
    sizes = sizes_of(shape)
    flops = model_flops(sizes, lengths, len(row.target_ids))

    def step() -> None:
        model(row).logprobs.mean().backward()
        torch.cuda.synchronize()

    step()  # makes the gradients
    torch.cuda.reset_peak_memory_stats()
    seconds = [_timed(step) for _ in range(repeats)]
    expected = 4 * sizes.num_parameters  # weights and gradients in bf16
    expected += activation_bytes(sizes, ROW_TOKENS, 2, checkpointing=True, takes_rows=True)
    expected += head_bytes(sizes, len(row.target_ids), 2)
    reached = torch.cuda.max_memory_allocated()
    return {
        f"mfu_{name}": [quotient(flops / second / 1e12, peak) for second in seconds],
        f"memory_{name}": [Sample(abs(reached / expected - 1), reached, expected)],
    }


def sizes_of(shape: Shape) -> ModelShape:
    return ModelShape(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.hidden_size // shape.num_heads,
        vocab_size=shape.vocab_size,
        is_tied=shape.is_tied,
        has_qkv_bias=True,
    )


def model_flops(shape: ModelShape, lengths: list[int], num_targets: int) -> float:
    """Floating-point operations of forward and backward over a packed row."""
    linear = shape.num_layers * shape.layer_parameters * sum(lengths) + shape.embedding_parameters * num_targets
    return 6.0 * (linear + shape.num_layers * shape.hidden_size * sum(length**2 for length in lengths))


def _timed(step: Callable[[], object]) -> float:
    started = time.perf_counter()
    step()
    return time.perf_counter() - started


def search(directory: Path, wanted: set[str], repeats: int, on_gpu: bool) -> Samples:
    """Exact search in half precision over generated vectors of length 1, Search-R1's number of them on a GPU."""
    if not wanted & {"search", "search_recall"}:
        return {}
    device, count = str(_device(on_gpu)), NUM_VECTORS if on_gpu else NUM_VECTORS_QUICK

    def blocks() -> Iterator[np.ndarray]:
        rng = np.random.default_rng(0)
        for start in range(0, count, 2**17):
            block = rng.standard_normal((min(2**17, count - start), DIMENSION), dtype=np.float32)
            yield block / np.linalg.norm(block, axis=1, keepdims=True)

    queries = np.random.default_rng(1).standard_normal((NUM_QUERIES, DIMENSION), dtype=np.float32)
    index = TorchFlatIndex(blocks(), count, DIMENSION, device=device, dtype=torch.float16 if on_gpu else None)
    few = queries[:8]
    exact_scores, exact_rows = np.zeros((len(few), 0), np.float32), np.zeros((len(few), 0), np.int64)
    start = 0
    for block in blocks():  # the same search in float32 on the CPU
        rows = np.broadcast_to(np.arange(start, start + len(block)), (len(few), len(block)))
        scores, rows = np.hstack([exact_scores, few @ block.T]), np.hstack([exact_rows, rows])
        best = np.argpartition(-scores, 2, axis=1)[:, :3]
        exact_scores, exact_rows = np.take_along_axis(scores, best, 1), np.take_along_axis(rows, best, 1)
        start += len(block)
    ranking = index.find(few, 3)
    found = best_of(ranking.scores, ranking.rows, 3).rows
    recall = float(
        np.mean([len(set(a) & set(b)) / 3 for a, b in zip(found.tolist(), exact_rows.tolist(), strict=True)])
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
    shape = sizes_of(SHAPES["1.5b"] if on_gpu else SMALL)
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
