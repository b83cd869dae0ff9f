"""Every index type: what it finds, what it keeps of small and odd data, and what is refused in one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from processes import run_python
from retrieval_world import hard_vectors

from ragr1_actors.core.errors import ConfigError, DataError
from retrieval.indexes.faiss_build import decode_bytes, encode_bytes, sample
from retrieval.indexes.manifest import INDEX_TYPES, FileRecord, Shard, parse_options
from retrieval.indexes.ranking import ABSENT, Ranking, merge_rankings
from retrieval.indexes.vector_index import VectorIndex

COUNT, DIMENSION = 3000, 384
QUICK = {"hnsw": {"m": 8, "ef_construction": 40, "ef_search": 64}}
Floats = NDArray[np.float32]


@pytest.fixture(scope="module")
def hard() -> tuple[Floats, Floats]:
    return hard_vectors(COUNT, DIMENSION, 200)


@pytest.fixture(scope="module")
def indexes(hard: tuple[Floats, Floats]) -> dict[str, VectorIndex]:
    blocks = np.array_split(hard[0], 3)
    return {
        name: VectorIndex.build(blocks, DIMENSION, name, count=COUNT, options=QUICK.get(name)) for name in INDEX_TYPES
    }


def saved(index: VectorIndex, directory: Path) -> Shard:
    index.save(directory / "shard-0000.faiss")
    return Shard(0, index.count, FileRecord.of(directory, "shard-0000.faiss"))


def recall(found: NDArray[np.int64], hard: tuple[Floats, Floats]) -> float:
    k = found.shape[1]
    truth = np.argsort(-(hard[1] @ hard[0].T), axis=1)[:, :k]
    return float(np.mean([np.isin(a, b).mean() for a, b in zip(truth, found, strict=True)]))


@given(
    seed=st.integers(0, 10**6), count=st.integers(1, 400), k=st.integers(1, 12), size=st.integers(1, 40),
    repeats=st.booleans(),
)  # fmt: skip
def test_flat_is_exact_and_the_same_in_any_batch(seed: int, count: int, k: int, size: int, repeats: bool) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((count, 64), dtype=np.float32)
    if repeats:  # equal scores
        vectors = vectors[rng.integers(0, count, count)]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    queries = rng.standard_normal((size, 64), dtype=np.float32)
    queries /= np.linalg.norm(queries, axis=1, keepdims=True)
    index = VectorIndex.build(np.array_split(vectors, 3), 64)
    scores, rows = index.search(queries, k, 1)
    assert rows.shape == scores.shape == (size, min(k, count))
    truth = -np.sort(-(queries @ vectors.T), axis=1)[:, :k]
    assert np.allclose(scores, truth, atol=1e-5)
    for number in range(size):
        alone_scores, alone_rows = index.search(queries[number : number + 1], k, 1)
        assert np.array_equal(alone_scores[0], scores[number])
        if not repeats:
            assert np.array_equal(alone_rows[0], rows[number])


def test_flat_returns_the_first_of_many_equal_rows_in_any_batch_and_from_shards() -> None:
    vectors = np.random.default_rng(0).standard_normal((900, 32)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    equal = np.array([3, *range(120, 150), *range(700, 900)])
    vectors[equal] = vectors[3]
    queries = vectors[:16] + np.float32(0.01)
    whole = VectorIndex.build([vectors], 32)
    parts = [(start, VectorIndex.build([vectors[start : start + 300]], 32)) for start in (0, 300, 600)]
    for k in (1, 5, 40):
        in_batch = whole.search(queries, k, 1)
        assert in_batch.rows[3].tolist() == equal[:k].tolist()
        found = [(start, part.search(queries[3:4], k, 1)) for start, part in parts]
        merged = merge_rankings([Ranking(scores, rows + start) for start, (scores, rows) in found], k)
        for ranking in (whole.search(queries[3:4], k, 1), merged):
            assert np.array_equal(ranking.rows[0], in_batch.rows[3])
            assert np.array_equal(ranking.scores[0], in_batch.scores[3])


@pytest.mark.parametrize("name", INDEX_TYPES)
def test_every_type_finds_in_any_batch_and_after_loading(
    name: str, indexes: dict[str, VectorIndex], hard: tuple[Floats, Floats], tmp_path: Path
) -> None:
    vectors, queries = hard
    index = indexes[name]
    scores, rows = index.search(queries, 5, 1)
    assert index.count == COUNT
    assert (scores.dtype, rows.dtype, rows.shape) == (np.float32, np.int64, (len(queries), 5))
    products = np.take_along_axis(queries @ vectors.T, rows, axis=1)
    assert np.allclose(scores, products, atol=1e-5 if index.scanner.is_lossless else 5e-3)
    assert (np.diff(scores, axis=1) <= 0).all()
    alone = [index.search(query[None], 5, 1) for query in queries[:20]]
    assert np.array_equal(np.concatenate([found for _, found in alone]), rows[:20])
    assert np.allclose(np.concatenate([found for found, _ in alone]), scores[:20], atol=1e-6)
    loaded = VectorIndex.load(tmp_path, saved(index, tmp_path), name, DIMENSION)
    for before, after in zip((scores, rows), loaded.search(queries, 5, 1), strict=True):
        assert np.array_equal(before, after)


@pytest.mark.parametrize(
    ("name", "at_3", "at_10", "num_bytes"),
    [("flat", 1, 1, 4), ("fp16", 0.998, 0.998, 2), ("sq8", 0.97, 0.97, 1), ("pq", 0.99, 0.98, 4 / 3)],
)
def test_recall_of_scans_and_their_bytes(
    name: str, at_3: float, at_10: float, num_bytes: float,
    indexes: dict[str, VectorIndex], hard: tuple[Floats, Floats], tmp_path: Path,
) -> None:  # fmt: skip
    assert recall(indexes[name].search(hard[1], 3, 1)[1], hard) >= at_3
    assert recall(indexes[name].search(hard[1], 10, 1)[1], hard) >= at_10
    fixed = 4 * DIMENSION**2 + 100_000 if name == "pq" else 5_000  # rotation and codebook, however many vectors
    assert saved(indexes[name], tmp_path).file.num_bytes <= COUNT * DIMENSION * num_bytes + fixed


def test_more_probes_and_candidates_find_more(
    indexes: dict[str, VectorIndex], hard: tuple[Floats, Floats], tmp_path: Path
) -> None:
    for name, options in (
        ("ivf", {"num_probes": 10**6}),
        ("ivf_pq", {"num_probes": 10**6, "refine_factor": 20}),
        ("hnsw", {"ef_search": 2000}),
    ):
        (tmp_path / name).mkdir()
        shard = saved(indexes[name], tmp_path / name)
        few = recall(indexes[name].search(hard[1], 10, 1).rows, hard)
        loaded = VectorIndex.load(tmp_path / name, shard, name, DIMENSION, options=options)
        many = recall(loaded.search(hard[1], 10, 1).rows, hard)
        assert many > few, name
        assert many >= 0.97, name


def test_options_of_the_build_stay_with_the_file(hard: tuple[Floats, Floats], tmp_path: Path) -> None:
    built = VectorIndex.build([hard[0][:800]], DIMENSION, "ivf", options={"num_lists": 20, "num_probes": 20})
    shard = saved(built, tmp_path)
    few = (hard[0][:800], hard[1])
    assert recall(VectorIndex.load(tmp_path, shard, "ivf", DIMENSION).search(hard[1], 10, 1).rows, few) == 1
    one_probe = VectorIndex.load(tmp_path, shard, "ivf", DIMENSION, options={"num_probes": 1})
    assert recall(one_probe.search(hard[1], 10, 1).rows, few) < 1


@pytest.mark.parametrize("name", INDEX_TYPES)
@pytest.mark.parametrize("count", [1, 10, 300])
def test_few_vectors_build_any_type(name: str, count: int, hard: tuple[Floats, Floats], capfd: Any) -> None:
    index = VectorIndex.build([hard[0][:count]], DIMENSION, name)
    _, rows = index.search(hard[1][:5], count + 7, 1)
    assert rows.shape == (5, count)
    for row in rows.tolist():
        found = [number for number in row if number != ABSENT]
        assert len(set(found)) == len(found) >= 1
        assert row[len(found) :] == [ABSENT] * (count - len(found))
    if name not in ("ivf", "ivf_pq", "hnsw"):
        assert (np.sort(rows, axis=1) == np.arange(count)).all()
    assert capfd.readouterr().err == ""


def test_lists_that_hold_too_few_leave_absent_rows_at_the_end(hard: tuple[Floats, Floats]) -> None:
    for name, options in (("ivf", {}), ("ivf_pq", {"refine_factor": 1})):
        index = VectorIndex.build(
            [hard[0][:400]], DIMENSION, name, options={"num_lists": 40, "num_probes": 1, **options}
        )
        scores, rows = index.search(hard[1], 100, 1)
        is_absent = rows == ABSENT
        assert is_absent.any()
        assert not is_absent[:, 0].any()
        assert (np.diff(is_absent.astype(int), axis=1) >= 0).all()
        assert (scores[is_absent] == -np.inf).all()
        assert np.isfinite(scores[~is_absent]).all()


@pytest.mark.parametrize("name", INDEX_TYPES)
def test_generators_odd_dimensions_and_repeated_vectors(name: str) -> None:
    vectors, queries = hard_vectors(500, 30, 9)
    vectors = np.concatenate([vectors, vectors[:20]])
    whole = VectorIndex.build([vectors], 30, name, options=QUICK.get(name))
    streamed = VectorIndex.build(iter(np.array_split(vectors, 7)), 30, name, options=QUICK.get(name))
    first, second = (np.sort(index.search(queries, 9, 1)[0]) for index in (whole, streamed))
    assert np.allclose(first, second, atol=2e-3)  # a rotation rounds, and a graph grows, by the block
    if name not in ("ivf", "ivf_pq", "hnsw"):
        rows = whole.search(vectors[:20], 2, 1)[1]
        assert rows.tolist() == [[row, row + 500] for row in range(20)]


def test_a_dimension_that_pq_cannot_take_is_refused() -> None:
    with pytest.raises(ConfigError, match="'pq' needs an even dimension, got 33; use 'sq8'"):
        VectorIndex.build([np.ones((4, 33), np.float32)], 33, "pq")


@pytest.mark.parametrize("name", INDEX_TYPES)
def test_vectors_that_are_not_finite_and_wrong_counts_are_refused(name: str, hard: tuple[Floats, Floats]) -> None:
    vectors = hard[0][:100].copy()
    for bad in (np.nan, np.inf):
        vectors[70, 3] = bad
        with pytest.raises(DataError, match="vector 70 holds NaN or infinity"):
            VectorIndex.build(np.array_split(vectors, 4), DIMENSION, name)
    for count in (99, 101):
        with pytest.raises(DataError, match=f"expected {count}"):
            VectorIndex.build([hard[0][:50], hard[0][50:100]], DIMENSION, name, count=count)
    for count in (None, 0):
        with pytest.raises(DataError, match="got 0 vectors"):
            VectorIndex.build([], DIMENSION, name, count=count)
    with pytest.raises(DataError, match=r"shape \(3, 8\), expected \[n, 384\]"):
        VectorIndex.build([np.ones((3, 8), np.float32)], DIMENSION, name)


def test_options_are_checked_by_name_and_value() -> None:
    assert parse_options("hnsw", {"ef_search": 9})["m"] == 32
    for index_type, options, said in [
        ("hsnw", {}, "unknown index type 'hsnw'; did you mean 'hnsw'?"),
        ("cube", {}, "unknown index type 'cube'; expected one of: flat, fp16"),
        ("hnsw", {"ef_serch": 9}, "index type 'hnsw': unknown key options.ef_serch; did you mean 'ef_search'?"),
        ("flat", {"num_probes": 9}, "index type 'flat': unknown key options.num_probes"),
        ("ivf", {"num_probes": -1}, "index type 'ivf': options.num_probes: got -1; input should be greater than or"),
        ("ivf", {"num_probes": "4"}, "got '4'; input should be a valid integer"),
        ("pq", {"refine_factor": True}, "got True; expected a number"),
    ]:
        with pytest.raises(ConfigError) as caught:
            VectorIndex.build([np.ones((4, 8), np.float32)], 8, index_type, options=options)
        assert said in str(caught.value)


def test_truncated_foreign_and_other_files_are_refused(indexes: dict[str, VectorIndex], tmp_path: Path) -> None:
    shard = saved(indexes["flat"], tmp_path)
    path = tmp_path / shard.file.name
    content = path.read_bytes()
    with pytest.raises(DataError, match=r"got 3000 vectors of dimension 384, expected 3000 of 385"):
        VectorIndex.load(tmp_path, shard, "flat", 385)
    with pytest.raises(DataError, match=r"expected 2999 of 384"):
        VectorIndex.load(tmp_path, replace(shard, count=2999), "flat", DIMENSION)
    with pytest.raises(ConfigError, match=r"index type 'flat': unknown key options\.m"):
        VectorIndex.load(tmp_path, shard, "flat", DIMENSION, options={"m": 3})
    for damage, said in [
        (content[:-100], r"got \d+ bytes, expected \d+"),
        (b"x" * len(content), "got fingerprint"),
    ]:
        path.write_bytes(damage)
        with pytest.raises(DataError, match=said):
            VectorIndex.load(tmp_path, shard, "flat", DIMENSION)
    for foreign in (b"not an index at all", content[:5000]):  # with a manifest that fits
        path.write_bytes(foreign)
        with pytest.raises(DataError, match="faiss cannot read it") as caught:
            VectorIndex.load(tmp_path, replace(shard, file=FileRecord.of(tmp_path, path.name)), "flat", DIMENSION)
        assert "\n" not in str(caught.value)
    faiss.write_index(faiss.index_factory(8, "LSH"), str(path))
    with pytest.raises(DataError, match="faiss index of kind IndexLSH"):
        VectorIndex.load(tmp_path, Shard(0, 0, FileRecord.of(tmp_path, path.name)), "flat", 8)
    path.unlink()
    with pytest.raises(DataError, match=r"no .*faiss"):
        VectorIndex.load(tmp_path, shard, "flat", DIMENSION)


def test_flat_and_fp16_move_to_a_device_through_torch(
    indexes: dict[str, VectorIndex], hard: tuple[Floats, Floats], tmp_path: Path
) -> None:
    """``cpu:0`` in place of a GPU that faiss does not use: only the device differs."""
    for name in ("flat", "fp16", "pq"):
        (tmp_path / name).mkdir()
        shard = saved(indexes[name], tmp_path / name)
        moved = VectorIndex.load(tmp_path / name, shard, name, DIMENSION, device="cpu:0")
        for before, after in zip(indexes[name].search(hard[1], 5, 1), moved.search(hard[1], 5, 1), strict=True):
            assert np.allclose(before, after, atol=1e-5)
        assert moved.scanner.is_lossless == (name == "flat")
        assert np.array_equal(next(iter(moved.scanner.blocks())), next(iter(indexes[name].scanner.blocks())))


class FaissGpu:
    """faiss-gpu as far as a CPU goes: it keeps what it is asked to copy, and searches it here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.copied: list[Any] = []
        monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1)
        for name in ("StandardGpuResources", "GpuClonerOptions"):
            monkeypatch.setattr(faiss, name, SimpleNamespace, raising=False)
        monkeypatch.setattr(faiss, "index_cpu_to_gpu", self.copy, raising=False)

    def copy(self, resources: Any, number: int, index: Any, options: Any = None) -> Any:
        self.copied.append(index)
        return index


@pytest.mark.parametrize("name", ["flat", "fp16"])
def test_vectors_reach_a_gpu_in_blocks_also_with_faiss_gpu(
    indexes: dict[str, VectorIndex], hard: tuple[Floats, Floats], tmp_path: Path, name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """``index_cpu_to_gpu`` would copy all of a float32 array to the device, beside the halves made of it."""
    gpu = FaissGpu(monkeypatch)
    moved = VectorIndex.load(tmp_path, saved(indexes[name], tmp_path), name, DIMENSION, device="cpu:0")
    assert np.array_equal(moved.search(hard[1], 5, 1).rows, indexes[name].search(hard[1], 5, 1).rows)
    assert gpu.copied == []


def test_lists_reach_a_gpu_in_half_precision(
    indexes: dict[str, VectorIndex], hard: tuple[Floats, Floats], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu, shard = FaissGpu(monkeypatch), saved(indexes["ivf"], tmp_path)
    for options in ({}, {"num_probes": 3}):
        on_cpu = VectorIndex.load(tmp_path, shard, "ivf", DIMENSION, options=options).search(hard[1], 5, 1)
        moved = VectorIndex.load(tmp_path, shard, "ivf", DIMENSION, device="cuda:0", options=options)
        copied = gpu.copied.pop()
        assert (copied.code_size, copied.ntotal) == (2 * DIMENSION, len(hard[0]))
        found = moved.search(hard[1], 5, 1)
        assert np.mean(found.rows == on_cpu.rows) > 0.99
        assert np.allclose(found.scores, on_cpu.scores, atol=2e-3)
        copied.reset()  # what a GPU cannot take is searched by the CPU
        assert (moved.search(hard[1], 5, 1).rows == ABSENT).all()
        assert (moved.search(hard[1], 2049, 1).rows[:, :5] == on_cpu.rows).all()


def test_vectors_of_lossless_types_come_back(indexes: dict[str, VectorIndex], hard: tuple[Floats, Floats]) -> None:
    assert {name for name, index in indexes.items() if index.scanner.is_lossless} == {"flat", "ivf", "hnsw"}
    for name in ("flat", "ivf", "hnsw"):
        assert np.array_equal(np.concatenate(list(indexes[name].scanner.blocks())), hard[0])


@pytest.mark.integration
@pytest.mark.parametrize("name", ["flat", "sq8"])
def test_queries_that_cannot_be_written_to_are_searched_without_a_warning(
    name: str, indexes: dict[str, VectorIndex], hard: tuple[Floats, Floats]
) -> None:
    queries = np.frombuffer(hard[1][:8].tobytes(), np.float32).reshape(8, DIMENSION)  # as they come in a message
    assert not queries.flags.writeable
    found, expected = indexes[name].search(queries, 3, 1), indexes[name].search(hard[1][:8], 3, 1)
    assert np.array_equal(found.rows, expected.rows)


def test_a_search_leaves_torch_its_threads(tmp_path: Path) -> None:
    # in a process that imports torch before faiss, as the driver does, both have the same OpenMP
    assert run_python(THREADS, tmp_path).split() == ["2", "2"]


THREADS = """
import torch
import numpy as np
from retrieval.indexes.vector_index import VectorIndex

torch.set_num_threads(2)
vectors = np.eye(64, dtype=np.float32)
for name in ("flat", "hnsw"):
    VectorIndex.build([vectors], 64, name, count=64).search(vectors[:2], 3, num_threads=1)
    print(torch.get_num_threads())
"""


@pytest.mark.integration
def test_a_mapped_index_takes_no_private_memory(tmp_path: Path) -> None:
    """In a separate process: 30 MB of vectors are searched in each type, and stay in the page cache."""
    script = """
import ctypes, re, sys
from pathlib import Path
ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD: the heap keeps no buffer that was read and freed
import numpy as np
from retrieval.indexes.vector_index import VectorIndex
from retrieval.indexes.manifest import FileRecord, Shard
def private():
    return int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) // 1024
def load(name):
    index = VectorIndex.load(folder, Shard(0, 60_000, FileRecord.of(folder, name)), name, 128)
    index.search(np.ones((8, 128), np.float32), 3, 1)
    return index
folder = Path(sys.argv[1])
for name in sys.argv[2:]:
    load(name)
for name in sys.argv[2:]:
    before = private()
    index = load(name)
    print(private() - before)
"""
    vectors = np.random.default_rng(0).standard_normal((60_000, 128), dtype=np.float32)
    most_mb = {"flat": 2, "sq8": 2, "pq": 8, "ivf": 4}
    for name in most_mb:
        options = {"num_lists": 16} if name == "ivf" else {}
        VectorIndex.build([vectors], 128, name, count=60_000, options=options).save(tmp_path / name)
    taken = dict(zip(most_mb, map(int, run_python(script, tmp_path, *most_mb).split()), strict=True))
    assert all(taken[name] <= most for name, most in most_mb.items()), taken


def test_byte_codes_keep_a_vector_to_half_a_step() -> None:
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((50, 24), dtype=np.float32) * rng.uniform(0, 3, (50, 1)).astype(np.float32)
    vectors[7] = 0
    codes = encode_bytes(vectors)
    assert (codes.dtype, codes.shape) == (np.uint8, (50, 28))
    steps = np.abs(vectors).max(axis=1, keepdims=True) / 127
    assert (np.abs(decode_bytes(codes) - vectors) <= steps * 0.5001).all()


def test_a_sample_is_drawn_evenly_and_bounded() -> None:
    blocks = [np.arange(start, start + 50, dtype=np.float32)[:, None] for start in range(0, 1000, 50)]
    drawn = sample(blocks, 1, 1000, 300)[:, 0]
    assert len(set(drawn.tolist())) == 300
    assert (np.diff(drawn) > 0).all()
    assert 420 < drawn.mean() < 580
    assert np.array_equal(drawn, sample(blocks, 1, 1000, 300)[:, 0])
    assert len(sample(blocks, 1, 1000, 5000)) == 1000
