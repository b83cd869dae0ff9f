"""Plan of a recipe, for ``ragr1 plan``: its needs on each machine in bytes, and its seconds, before anything starts.

::

    RunConfig, Machine, corpus size ──► make_plan ──► Plan: a Need per device, memory and disk, with what fills it
                                                            times of one iteration: generation, search, learning
                                                            a remedy for what does not fit

Pure arithmetic over ``ModelShape``, ``learners.deepspeed.memory`` and ``retrieval.capacity``. A need fits if it leaves
``SPARE_SHARE`` of the memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from pathlib import Path

from envs.base import search_options
from envs.sources import TaskSources, is_source, open_source, shown_names
from learners.deepspeed.memory import (
    CUDA_CONTEXT_BYTES,
    ELEMENT_BYTES,
    Parts,
    RankMemory,
    kept_parts,
    rank_memory,
    trained_parameters,
)
from ragr1_actors.core.config import RunConfig, SamplerConfig
from ragr1_actors.core.disk.data_files import is_parquet, num_parquet_rows, text_bytes
from ragr1_actors.core.errors import ConfigError, DataError
from ragr1_actors.core.models.model_shape import ModelShape
from ragr1_actors.core.resolve import STATIC, has_reference
from ragr1_actors.core.weight_transport import PART_BYTES, choose_transport
from ragr1_actors.planning.fit import find_remedy, place_changes, reserved_gpus, search_changes
from ragr1_actors.planning.machine import GIB, Gpu, Machine
from ragr1_actors.planning.pace import EnginePace, LearnerPace, Pace, SearchPace, Times
from ragr1_actors.planning.tiny_policy import policy_maker
from retrieval.base import Passage, needs_index
from retrieval.capacity import PASSAGE_BYTES, EncoderShape, encode_s, gpu_scan_s, index_bytes, scan_s, vector_bytes
from retrieval.corpora.readers import read_passages
from retrieval.indexes.manifest import GPU_TYPES, Manifest
from retrieval.local import encoder_of, index_types_of
from retrieval.replicas.batching import MAX_BATCH

SPARE_SHARE = 0.1
"""Share of a memory that must stay free: allocators fragment, and the formulas are estimates."""
_VLLM_UTILIZATION = 0.92
"""Default of vLLM 0.32's ``gpu_memory_utilization``."""
_VLLM_OTHER_BYTES = 4 * GIB
"""CUDA context, CUDA graphs and the activations of a profiling run; an allowance, not a measurement."""
_ASLEEP_BYTES = 3 * GIB
"""Bytes of an engine that sleeps at level 2: CUDA context and graphs; an allowance, not a measurement."""
_TRANSFER_BYTES = 2 * GIB
"""Bytes of vLLM's packed weight transfer: two buckets of its default size, 1 GiB."""
_DRIVER_BYTES = 7 * GIB // 8
"""Bytes of the quickstart's driver, 0.6 GiB, and of Ray's processes, 0.25: proportional set sizes of ``smaps``."""
_ACTOR_BYTES = 3 * GIB // 8
"""Bytes of an actor with its libraries; in the quickstart a runner with engine has 0.42 GiB, a retriever 0.25."""
_VLLM_CPU_PROCESS_BYTES = 3 * GIB // 4
"""Bytes of vLLM's separate process with its libraries."""
_VLLM_CPU_CACHE_BYTES = GIB
"""Value of ``VLLM_CPU_KVCACHE_SPACE``, as ``vllm_engine`` sets it."""
_CUDA_HOST_BYTES = 2 * GIB
"""Bytes of CUDA's libraries in the host's memory; an allowance, not a measurement."""
_BYTES_PER_TOKEN = 24
"""Bytes of a trajectory's token in Arrow: id, kind, log-prob, version, and its text."""
_BYTES_PER_TEXT_TOKEN = 4
"""Bytes per token of English, in the vocabularies of BERT-like encoders."""
_STATIC_DIMENSION = 512
TOKENS_PER_QUERY = 16
START_S = 30.0
"""Seconds of an actor's start without loading: process, libraries, CUDA graphs; an allowance, not a measurement."""
_LOAD_BYTES_PER_S = 1e9
"""Bytes of weights and vectors that a disk reads per second; an allowance, not a measurement."""
_PUBLISH_BYTES_PER_S = 1e10
"""Bytes per second of a weight sync to all runners at once; an allowance, not a measurement."""
CORE_FLOPS = 5e10
"""FLOPs per second of one CPU core with AVX-512 in float32 products."""
_MFU = 0.4
"""Share of the peak that training reaches; 0.40-0.50 is published for models of this size."""
_BANDWIDTH_SHARE = 0.7
"""Share of the memory bandwidth that decoding reaches."""
TOKENS_PER_TURN = 128
"""Mean of sampled tokens per turn: between RAG-R1's published 100 and the limit of 500."""


@dataclass(frozen=True)
class Need:
    """Bytes that one place must hold."""

    place: str
    """``learner GPU``, ``env runner GPU``, ``retriever GPU``, ``host memory``, ``/dev/shm`` or ``disk``."""
    parts: Mapping[str, int]
    """Bytes by content."""
    available: int
    remedy: str = ""
    """Nearest setting that fits, if this one does not."""

    @property
    def num_bytes(self) -> int:
        """Sum of all parts."""
        return sum(self.parts.values())

    @property
    def is_impossible(self) -> bool:
        """Whether the parts are larger than the place."""
        return self.num_bytes > self.available

    @property
    def fits(self) -> bool:
        """Whether ``SPARE_SHARE`` of what is available stays free."""
        return self.num_bytes <= (1 - SPARE_SHARE) * self.available

    @property
    def problem(self) -> str:
        """Sentence for people if it does not fit."""
        if not self.available:
            return f"{self.place}: {self.num_bytes / GIB:.1f} GiB are needed, and there is none"
        larger = f"take more {self.place}" + (" (docker run --shm-size)" if self.place == "/dev/shm" else "")
        spare = "" if self.is_impossible else f", less than {SPARE_SHARE:.0%} to spare"
        needed, available = self.num_bytes / GIB, self.available / GIB
        return f"{self.place}: {needed:.1f} GiB of {available:.1f} GiB{spare}; {self.remedy or larger}"


@dataclass(frozen=True)
class Plan:
    """Results that ``ragr1 plan`` prints."""

    num_gpus: float
    """Number of GPUs that the actors reserve, on all machines."""
    gpus_available: int
    needs: tuple[Need, ...]
    times: Times
    micro_batch_tokens: int
    """Token budget that is set, or chosen by ``micro_batch.py``."""

    @property
    def problems(self) -> list[str]:
        """Sentences about everything that does not fit."""
        found = [need.problem for need in self.needs if not need.fits]
        if self.num_gpus > self.gpus_available:
            found.insert(
                0, f"the actors reserve {self.num_gpus:g} GPUs, and there are {self.gpus_available}; start fewer"
            )
        return found + ([self.times.problem] if self.times.problem else [])


def count_passages(config: RunConfig) -> int:
    """Return the number of passages that a run searches, from its index, or estimated from its corpus file.

    Raises:
        DataError: ``retrieval.index`` holds no index.
        ConfigError: there is no corpus file, or it cannot be read.
    """
    retrieval = config.retrieval
    if not needs_index(retrieval.type):
        return 0
    if retrieval.index:
        return Manifest.read(retrieval.index).count
    if not retrieval.corpus or is_source(retrieval.corpus):
        return sum(1 for _ in corpus_of(config))
    path = Path(retrieval.corpus)
    try:
        return num_parquet_rows(path) if is_parquet(path) else ceil(text_bytes(path) / PASSAGE_BYTES)
    except DataError as error:
        raise ConfigError(
            f"retrieval.corpus: {error}; or give the number of its passages, such as --passages 21015324 for "
            "Search-R1's Wikipedia"
        ) from error


def make_plan(config: RunConfig, machine: Machine, num_passages: int) -> Plan:
    """Compute the needs of RL on each machine; ``num_passages`` counts the passages of its index.

    Raises:
        ConfigError: the sizes of the policy or of the encoder are not known.
    """
    run = _Run(config, machine, num_passages)
    times = run.times()
    return Plan(
        num_gpus=reserved_gpus(config),
        gpus_available=machine.num_gpus * machine.num_machines,
        needs=tuple(replace(need, remedy=_need_remedy(need, run)) for need in run.needs()),
        times=replace(times, remedy=_search_remedy(times, run)),
        micro_batch_tokens=config.learners.row_tokens,
    )


def learner_fits(config: RunConfig, machine: Machine, num_passages: int) -> bool:
    """Return whether the parts fit into the memory in which the learner computes; raises as ``make_plan``."""
    place = "learner GPU" if config.learners.num_gpus_per_learner else "host memory"
    return all(need.fits for need in _Run(config, machine, num_passages).needs() if need.place.startswith(place))


def make_pace(config: RunConfig, machine: Machine, num_passages: int) -> Pace:
    """Compute the seconds of the parts of a run on ``machine``, for any sizes of its fleets.

    Raises:
        ConfigError: the machine has no GPU, or the sizes of the policy or of the encoder are not known.
    """
    if machine.gpu is None:
        raise ConfigError("got a machine without GPUs, and CPUs are not estimated; name a GPU, or a run to measure")
    return _Run(config, machine, num_passages).pace(machine.gpu)


@dataclass(frozen=True)
class _Run:
    """Configuration on a machine."""

    config: RunConfig
    machine: Machine
    num_passages: int

    # -- Resources ------------------------------------------------------------------------------------------------

    @cached_property
    def shape(self) -> ModelShape:
        maker = policy_maker(self.config.policy)
        return ModelShape.of(self.config.policy.model) if maker is None else maker.shape

    @cached_property
    def encoder(self) -> EncoderShape | None:
        name = encoder_of(self.config.retrieval) if self.has_vectors else STATIC
        return EncoderShape.of(name) if name != STATIC else None

    @cached_property
    def has_critic(self) -> bool:
        return self.config.training.algorithm == "ppo"

    @cached_property
    def learner(self) -> RankMemory:
        return rank_memory(
            self.shape, self.config, has_critic=self.has_critic, on_gpu=self.config.learners.num_gpus_per_learner > 0
        )

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.config.policy.dtype]

    @property
    def weight_bytes(self) -> int:
        return self.element_bytes * self.shape.num_parameters

    @property
    def gpus_per_engine(self) -> int:
        return _count_option(self.config, "tensor_parallel_size") * _count_option(self.config, "pipeline_parallel_size")

    @property
    def num_runners(self) -> int:
        return max(1, self.config.env_runners.num_env_runners)

    @property
    def num_ranks(self) -> int:
        return max(1, self.config.learners.num_learners)

    @property
    def searches_on_gpu(self) -> bool:
        return self.config.retrieval.num_gpus_per_retriever > 0

    @property
    def scans_on_gpu(self) -> bool:
        """Whether the vectors are on the retrievers' GPUs; vectors of other types stay on their CPUs."""
        return self.searches_on_gpu and self.vector_type in GPU_TYPES

    @property
    def has_vectors(self) -> bool:
        return needs_index(self.vector_type) and self.vector_type != "bm25"

    @cached_property
    def index_types(self) -> tuple[str, str]:
        return index_types_of(self.config.retrieval)

    @property
    def vector_type(self) -> str:
        return self.index_types[1]

    @property
    def dimension(self) -> int:
        return self.encoder.dimension if self.encoder is not None else _STATIC_DIMENSION

    @property
    def shares_gpus(self) -> bool:
        """Whether a runner and a learner rank take turns on each GPU."""
        return choose_transport(self.config) == "ipc"

    # -- Needs ----------------------------------------------------------------------------------------------------

    def needs(self) -> Iterator[Need]:
        """Yield every device and memory of one machine."""
        if self.config.learners.num_gpus_per_learner:
            phase = self.learner.peak_phase
            parts = {**self.learner.resting, **self.learner.phases[phase]}
            if self.shares_gpus:
                parts["engine asleep"] = _ASLEEP_BYTES
            yield Need(f"learner GPU, {phase}", parts, self._of_a_gpu(self.config.learners.num_gpus_per_learner))
        if self.config.env_runners.num_gpus_per_env_runner:
            yield self._engine_need()
        if self.searches_on_gpu:
            available = self._of_a_gpu(self.config.retrieval.num_gpus_per_retriever)
            yield Need("retriever GPU", self._retriever_parts(), available)
        yield Need("host memory", self._host_parts(), self.machine.host_bytes)
        yield Need("/dev/shm", self._shm_parts(), self.machine.shm_bytes)
        yield Need("disk", self._disk_parts(), self.machine.disk_bytes)

    def _of_a_gpu(self, share: float) -> int:
        """Return the bytes of a GPU that an actor may use; a runner and a rank that take turns have all of it."""
        gpu_bytes = self.machine.gpu.num_bytes if self.machine.gpu is not None else 0
        return int((1.0 if self.shares_gpus else min(1.0, share)) * gpu_bytes)

    def _engine_need(self) -> Need:
        """Return the need of an engine with a cache for at least one longest trajectory."""
        runners = self.config.env_runners
        share = runners.engine_options.get("gpu_memory_utilization", _VLLM_UTILIZATION)
        if not isinstance(share, float | int) or not 0 < share <= 1:
            raise ConfigError(
                f"env_runners.engine_options: got gpu_memory_utilization {share!r}, expected a share above 0, at most 1"
            )
        cache = self.shape.kv_bytes_per_token(self.element_bytes) * runners.max_context_tokens // self.gpus_per_engine
        parts = {
            "weights": self.weight_bytes // self.gpus_per_engine,
            "CUDA context, graphs and activations": _VLLM_OTHER_BYTES,
            "cache of one longest trajectory": cache,
            "buffers of a weight transfer": _TRANSFER_BYTES if choose_transport(self.config) == "broadcast" else 0,
        }
        if self.shares_gpus:
            parts["learner, its states on the host"] = CUDA_CONTEXT_BYTES
            parts["reference weights"] = self.learner.resting.get("reference weights", 0)
        taken, available = int(share * self._of_a_gpu(1.0)), self._of_a_gpu(runners.num_gpus_per_env_runner)
        if taken > available and runners.engine == "vllm":  # it takes that share of the whole GPU at its start
            parts["rest of gpu_memory_utilization"] = max(0, taken - sum(parts.values()))
        return Need("env runner GPU", parts, min(taken, available))

    def _retriever_parts(self) -> Parts:
        retrieval = self.config.retrieval
        vectors = vector_bytes(self.vector_type, self.num_passages, self.dimension, retrieval.options, on_gpu=True)
        parts = {"vectors": vectors // retrieval.num_shards, "CUDA context": CUDA_CONTEXT_BYTES}
        if self.encoder is not None:
            parts["encoder"] = 4 * self.encoder.num_parameters
        return parts

    def _host_parts(self) -> Parts:
        retrieval, machines = self.config.retrieval, self.machine.num_machines
        num_retrievers = max(1, retrieval.num_retrievers) * retrieval.num_shards
        num_actors = self.num_runners + self.num_ranks + num_retrievers + retrieval.encoders.num_encoders
        ranks = ceil(self.num_ranks / machines)
        parts = {
            "driver and Ray": _DRIVER_BYTES,
            "processes": ceil(num_actors / machines)
            * (_ACTOR_BYTES + (_CUDA_HOST_BYTES if reserved_gpus(self.config) else 0)),
            "states that rest": ranks * self._resting_bytes(),
            "copy of a checkpoint": self.weight_bytes + self._state_bytes() * ranks // self.num_ranks,
            "object store": self._shm_parts()["object store"],
        }
        if not self.config.learners.num_gpus_per_learner:
            parts["learners"] = ranks * self.learner.peak_bytes
        if not self.config.env_runners.num_gpus_per_env_runner:
            parts["engines"] = ceil(self.num_runners / machines) * self._engine_bytes()
        if self.has_vectors and not self.scans_on_gpu:
            parts["vectors"] = vector_bytes(
                self.vector_type, self.num_passages, self.dimension, retrieval.options, on_gpu=False
            )
        return parts

    def _engine_bytes(self) -> int:
        """Return the bytes of an engine on CPUs, besides its runner's process."""
        runners = self.config.env_runners
        if runners.engine != "vllm":  # a cache for each trajectory; half of the longest is their mean
            rows = min(runners.max_concurrent_trajectories, ceil(self._num_trajectories() / self.num_runners))
            cache = rows * runners.max_context_tokens * self.shape.kv_bytes_per_token(self.element_bytes)
            return self.weight_bytes + cache // 2
        return _VLLM_CPU_PROCESS_BYTES + 2 * self.weight_bytes + _VLLM_CPU_CACHE_BYTES  # a second copy to load into

    def _shm_parts(self) -> Parts:
        """Return the parts of ``/dev/shm``: the object store with two batches, and the weight files for engines.

        Such a file holds a part of the weights, or one parameter that is larger: the embedding.
        """
        batch = self._num_trajectories() * self.config.env_runners.max_context_tokens * _BYTES_PER_TOKEN
        parts = {"object store": 2 * batch}
        if choose_transport(self.config) == "object_store":
            parts["object store"] += self.weight_bytes
            embedding = self.element_bytes * self.shape.vocab_size * self.shape.hidden_size
            runners = ceil(self.num_runners / self.machine.num_machines)
            is_vllm = self.config.env_runners.engine == "vllm"
            parts["weights for vLLM"] = runners * max(PART_BYTES, embedding) if is_vllm else 0
        return parts

    def _resting_bytes(self) -> int:
        """Return the bytes that a rank moves to the host's memory; while an engine samples on its GPU, everything."""
        trained = {name: size for name, size in self.learner.resting.items() if not name.startswith("reference")}
        return sum(self.learner.host.values()) + (sum(kept_parts(trained).values()) if self.shares_gpus else 0)

    def _state_bytes(self) -> int:
        """Return the bytes of weights and moments of everything trained, in fp32; each rank copies its part."""
        return 12 * sum(trained_parameters(self.shape, self.config, has_critic=self.has_critic).values())

    def _disk_parts(self) -> Parts:
        checkpointing, retrieval = self.config.checkpointing, self.config.retrieval
        kept = checkpointing.num_to_keep + bool(checkpointing.best_metric) + 1  # one is being written
        parts = {f"{kept} checkpoints": kept * (self.weight_bytes + self._state_bytes())}
        if checkpointing.keep_trajectories:
            tokens = self._num_trajectories() * self.config.env_runners.max_context_tokens // 2
            parts["trajectories"] = self.config.training.num_iterations * tokens * _BYTES_PER_TOKEN
        if needs_index(retrieval.type):
            parts["index"] = index_bytes(*self.index_types, self.num_passages, self.dimension, retrieval.options)
        return parts

    # -- Seconds --------------------------------------------------------------------------------------------------

    def _num_trajectories(self) -> int:
        return self.config.training.train_batch_size * self.config.training.group_size

    def times(self) -> Times:
        """Estimate an iteration; without GPUs, generation and learning are not estimated."""
        environment = self.config.environment
        turns = (environment.max_turns + 1) / 2
        num_retrievers = max(1, self.config.retrieval.num_retrievers)
        queries = search_options(environment).max_queries_per_turn
        sampled_at_once = self.num_runners * self.config.env_runners.max_concurrent_trajectories
        most_at_once = queries * min(self._num_trajectories(), sampled_at_once)
        in_flight = min(MAX_BATCH, ceil(most_at_once / num_retrievers))
        num_searched = queries * self._num_trajectories() * (turns - 1)
        search_s = num_searched / in_flight * self._batch_s(in_flight) / num_retrievers
        gpu = self.machine.gpu
        samples, learns = self.config.env_runners.num_gpus_per_env_runner, self.config.learners.num_gpus_per_learner
        return Times(
            generation_s=self._generation_s(gpu, turns) if gpu is not None and samples else 0.0,
            search_s=search_s,
            batch_search_s=self._batch_s(in_flight),
            learning_s=self._learning_s(gpu) if gpu is not None and learns else 0.0,
            timeout_s=self.config.retrieval.requests.timeout_s,
            index_s=self._index_s(gpu) if gpu is not None else 0.0,
        )

    def _index_s(self, gpu: Gpu) -> float:
        """Return passages * tokens each * FLOPs per token / (efficiency * peak * GPUs); 0 if nothing is encoded."""
        if self.encoder is None or self.config.retrieval.index:
            return 0.0
        flops = gpu.flops * self.machine.num_gpus * self.machine.num_machines
        return encode_s(self.encoder, self.num_passages, PASSAGE_BYTES // _BYTES_PER_TEXT_TOKEN, flops)

    def _batch_s(self, num_queries: int) -> float:
        """Return the seconds of one batch at one replica: encoding, then the scan of its shards in parallel."""
        retrieval, gpu = self.config.retrieval, self.machine.gpu
        if not needs_index(retrieval.type):
            return 0.0
        per_shard = ceil(self.num_passages / retrieval.num_shards)
        cores = max(1.0, retrieval.num_cpus_per_retriever)
        flops = cores * CORE_FLOPS
        if self.searches_on_gpu and gpu is not None:
            flops = gpu.flops * min(1.0, retrieval.num_gpus_per_retriever)
        if self.scans_on_gpu and gpu is not None:
            scan = gpu_scan_s(per_shard, self.dimension, num_queries, gpu.bytes_per_s, flops)
        else:
            scan = scan_s(*self.index_types, per_shard, self.dimension, num_queries, retrieval.options, cores)
        if retrieval.encoders.num_encoders:
            on_gpu = retrieval.encoders.num_gpus > 0 and gpu is not None
            flops = gpu.flops if on_gpu and gpu is not None else max(1.0, retrieval.encoders.num_cpus) * CORE_FLOPS
        encoding = encode_s(self.encoder, num_queries, TOKENS_PER_QUERY, flops) if self.encoder is not None else 0.0
        return encoding + scan

    def pace(self, gpu: Gpu) -> Pace:
        """Estimate the pace of the parts of a run."""
        retrieval, index = self.config.retrieval, 0
        if self.has_vectors:
            index = vector_bytes(
                self.vector_type, self.num_passages, self.dimension, retrieval.options, on_gpu=self.scans_on_gpu
            )
        loading = index // retrieval.num_shards / _LOAD_BYTES_PER_S
        return Pace(
            self._engine_pace(gpu),
            SearchPace(self._batch_s, start_s=START_S + loading),
            LearnerPace(self._learning_s(gpu) / self._num_trajectories(), self.weight_bytes / _PUBLISH_BYTES_PER_S),
        )

    def _engine_pace(self, gpu: Gpu) -> EnginePace:
        """Estimate decoding, which is bound by reading weights and cache once per step (all rows sample one token)."""
        context, bandwidth = self.config.env_runners.max_context_tokens / 2, gpu.bytes_per_s * _BANDWIDTH_SHARE
        return EnginePace(
            base_s=self.weight_bytes / (bandwidth * self.gpus_per_engine),
            row_s=context * self.shape.kv_bytes_per_token(self.element_bytes) / (bandwidth * self.gpus_per_engine),
            prefill_s=self.shape.forward_flops_per_token / (gpu.flops * _MFU * self.gpus_per_engine),
            start_s=START_S + self.weight_bytes / _LOAD_BYTES_PER_S,
        )

    def _generation_s(self, gpu: Gpu, turns: float) -> float:
        """Return the seconds of decoding, and of reading prompts and observations once."""
        runners, pace = self.config.env_runners, self._engine_pace(gpu)
        num_sampled = turns * TOKENS_PER_TURN
        rows = min(runners.max_concurrent_trajectories, ceil(self._num_trajectories() / self.num_runners))
        num_read = max(0.0, runners.max_context_tokens / 2 - num_sampled)
        each_s = num_sampled * pace.step_s(rows) / rows + num_read * pace.prefill_s
        return self._num_trajectories() / self.num_runners * each_s

    def _learning_s(self, gpu: Gpu) -> float:
        """Return the seconds of three forward passes per step and model, and of scoring.

        Gradient checkpointing makes another forward pass; the selective one makes no product again. A correction of
        several steps scores the batch first, as ``top_p`` does, and DPO and IPO score each minibatch before its step.
        """
        training, top_p = self.config.training, self.config.env_runners.top_p
        corrects = training.options.get("tis_clip") or training.options.get("sequence_correction")
        scores_first = top_p < 1 or (corrects and training.num_epochs * training.num_minibatches > 1)
        first = training.num_epochs if training.algorithm in ("dpo", "ipo") else int(bool(scores_first))
        tokens = self._num_trajectories() * self.config.env_runners.max_context_tokens / 2
        passes = training.num_epochs * (4 if self.config.learners.gradient_checkpointing is True else 3)
        scoring = has_reference(self.config) + first + self.has_critic
        total = passes * (1 + self.has_critic) + scoring
        return tokens * total * self.shape.forward_flops_per_token / (self.num_ranks * gpu.flops * _MFU)


def _count_option(config: RunConfig, name: str) -> int:
    found = config.env_runners.engine_options.get(name, 1)
    if not isinstance(found, int) or found < 1:
        raise ConfigError(f"env_runners.engine_options: got {name} {found!r}, expected a whole number, at least 1")
    return found


def _need_remedy(need: Need, run: _Run) -> str:
    """Return the nearest setting with which the need fits."""
    place = need.place.split(",")[0]

    def fits(config: RunConfig) -> bool:
        return all(other.fits for other in replace(run, config=config).needs() if other.place.startswith(place))

    return "" if need.fits else find_remedy(run.config, place_changes(place, run.config), fits)


def _search_remedy(times: Times, run: _Run) -> str:
    """Return the nearest setting with which searches are fast enough."""
    if not times.problem:
        return ""
    changes = search_changes(run.config, num_cpus=run.machine.num_cpus)
    return find_remedy(run.config, changes, lambda config: not replace(run, config=config).times().problem)


def corpus_of(config: SamplerConfig) -> Iterable[Passage]:
    """Return the passages that ``retrieval.corpus`` names; ``UserError`` if there are none, or they cannot be read."""
    named, environment = config.retrieval.corpus, config.environment
    if named and not is_source(named):
        return read_passages(named)
    sources = TaskSources.open(environment.tasks, environment)
    if named:
        source = sources.by_name.get(named)
        return (source or open_source(named, environment, {})).passages()
    passages = sources.passages()
    if not passages:
        raise ConfigError(
            f"retrieval.corpus: got nothing, and {shown_names(environment.tasks)} has no passages; name a corpus file, "
            "or retrieval.index=FOLDER of an index that is built"
        )
    return passages
