"""The configuration of a run: sections of keys, each with its type, default and meaning.

Two levels, ``section.key``, with the same names in a recipe file, on the command line and in Python
(``training/algorithm_config.py``). ``resolve.py`` makes a ``RunConfig`` of a recipe and refuses what does not fit.
"""

from __future__ import annotations

from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

DEFAULT_PROMPT = (
    "Answer the question below. Reason inside <think> and </think> whenever you learn something new. If a fact is "
    "missing, search for it: write up to {max_queries} queries, {query_format}, inside <search> and </search>; what is "
    "found will stand inside <information> and </information>. Search as often as you need. Once you know, write only "
    "the short answer inside <answer> and </answer>.\nQuestion: {question}"
)

QueryFormat = Literal["lines", "comma", "json", "single"]
"""How queries stand inside ``<search>``; ``envs/actions.py`` shows each."""
ObservationFormat = Literal["grouped", "ragr1_json", "ragr1", "searchr1"]
"""How passages stand inside ``<information>``; ``envs/observations.py`` shows each."""


class Section(BaseModel):
    """A section of the configuration: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class EnvironmentSettings(Section):
    """What the policy acts in."""

    env: str = "search"
    """``search``, or a custom ``my_module:MyEnv``."""
    tasks: str = "world"
    """Training tasks: ``world`` (made by the project) or a task file."""
    eval_tasks: str = ""
    """Held-out tasks: a task file; empty takes the world's, or holds ``evaluation.num_tasks`` of the file out."""
    world_seed: int = 0
    prompt: str = DEFAULT_PROMPT
    """The user message; ``{question}``, ``{max_queries}`` and ``{query_format}`` ("one a line") are filled in."""
    reward: str = "exact_match"
    """``exact_match``, ``token_f1`` or ``my_module:my_function``."""
    max_turns: int = Field(5, ge=1)
    """Turns the policy has, its answer included; searches are at most one less."""
    max_queries_per_turn: int = Field(3, ge=1, le=64)
    query_format: QueryFormat = "lines"
    """Of the queries of one turn: ``lines``, ``comma`` (RAG-R1-mq), ``json`` or ``single`` (RAG-R1-sq, Search-R1)."""
    observation_format: ObservationFormat = "grouped"
    """Of what is found: ``grouped`` by query, or ``ragr1_json``, ``ragr1``, ``searchr1`` for published checkpoints."""
    top_k: int = Field(3, ge=1, le=100)
    """Passages a query."""
    max_observation_tokens_per_query: int = Field(512, ge=8)
    max_observation_tokens: int = Field(1536, ge=16)


class PolicySettings(Section):
    """The model that is trained."""

    model: str = "tiny"
    """A Hugging Face folder or hub name, or ``tiny``: a small Qwen2 and its tokenizer, made in the run directory."""
    vocab_size: int = Field(2048, ge=300)
    """Of the tiny policy, as are the next three."""
    hidden_size: int = Field(128, ge=8)
    num_layers: int = Field(3, ge=1)
    num_heads: int = Field(4, ge=1)
    dtype: Literal["float32", "bfloat16"] = "float32"


class EnvRunnerSettings(Section):
    """The rollout fleet."""

    num_env_runners: int = Field(1, ge=0)
    """Actors; 0 samples in the driver."""
    num_cpus_per_env_runner: float = Field(1, ge=0)
    num_gpus_per_env_runner: float = Field(0, ge=0)
    engine: str = "transformers"
    """``transformers``, ``vllm``, or ``my_module:MyEngine``."""
    engine_options: dict[str, Any] = {}
    """Passed on to the engine by its own names: for vLLM ``{tensor_parallel_size: 2, gpu_memory_utilization: 0.8}``."""
    max_concurrent_trajectories: int = Field(128, ge=1)
    """In one runner."""
    max_context_tokens: int = Field(4096, ge=32)
    """Prompt, model turns and observations together."""
    max_new_tokens_per_turn: int = Field(500, ge=1)
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    """Below 1 the learner scores every batch anew, one forward pass more: the engine's log-probs are of the nucleus."""
    max_task_retries: int = Field(3, ge=0)
    """Times a task is issued again after a failure of the machinery."""
    weight_transport: Literal["auto", "object_store", "broadcast", "ipc"] = "object_store"
    """How new weights come from the learner: ``cluster/weights/weight_sync.py`` has the table. ``auto`` broadcasts
    where both sides have whole GPUs, and takes ``ipc`` where they share one; neither has been run on GPUs yet."""


RETRIEVAL_TYPES = ("flat", "fp16", "sq8", "pq", "ivf", "ivf_pq", "hnsw", "bm25", "hybrid", "replay", "http", "web")
"""What ``retrieval.type`` may name beside ``my_module:MyRetriever``."""


class RetrievalSettings(Section):
    """The retrieval fleet."""

    corpus: str = "world"
    """``world``, or a corpus file to index into the run directory."""
    index: str = ""
    """An index directory made by ``ragr1 index build``; empty builds one from ``corpus``."""
    type: str = "flat"
    """Index type to build (``flat``, ``pq``, ``hnsw``, ``bm25``, ``hybrid`` ...); or what is searched in place of an
    index: ``http`` (a ``/retrieve`` server), ``web`` (a search API), ``replay`` (a recorded run), or
    ``my_module:MyRetriever``."""
    options: dict[str, Any] = {}
    """Of the type, by its own names: for ``hnsw`` ``{ef_search: 256}``, for ``http`` ``{url: "http://10.0.0.2:8000"}``,
    for ``replay`` ``{run: runs/mine}``."""
    encoder: str = "static"
    """``static`` (seeded random token vectors, no download) or a sentence-transformers folder or hub name."""
    reranker: str = ""
    """A cross-encoder, folder or hub name, that orders anew what was found; empty is none."""
    num_retrievers: int = Field(1, ge=0)
    """Replicas of the index; 0 searches in the process that asks."""
    num_shards: int = Field(1, ge=1)
    """Actors of one replica, each with its share of the vectors."""
    num_cpus_per_retriever: float = Field(1, ge=0)
    """Of one actor."""
    num_gpus_per_retriever: float = Field(0, ge=0)
    num_encoders: int = Field(0, ge=0)
    """Actors that only encode queries; 0 lets each retriever encode its own."""
    num_cpus_per_encoder: float = Field(1, ge=0)
    num_gpus_per_encoder: float = Field(0, ge=0)
    cache_size: int = Field(16384, ge=0)
    """Queries of which each searching process remembers the answer; 0 is no cache."""
    timeout_s: float = Field(30, gt=0)
    """Of one attempt at one replica."""
    max_retries: int = Field(2, ge=0)
    """On other replicas, before the search counts as failed."""


class SFTSettings(Section):
    """Stage 1: supervised fine-tuning on demonstrations."""

    num_steps: int = Field(0, ge=0)
    """Optimizer steps; 0 skips the stage."""
    num_demonstrations: int = Field(4000, ge=1)
    batch_size: int = Field(64, ge=1)
    """Trajectories a step."""
    lr: float = Field(1e-5, gt=0)
    lr_schedule: Literal["constant", "cosine"] = "constant"
    """After the warm-up; ``cosine`` falls to 0 at the last step. So in ``training``."""
    warmup_steps: int = Field(0, ge=0)


class TrainingSettings(Section):
    """Stage 2: reinforcement learning. Names are RLlib's where RLlib has one."""

    algorithm: str = "grpo"
    """``ppo``, ``grpo``, ``dr_grpo``, ``dapo``, ``rloo``, ``reinforce_pp``, ``gspo``, ``cispo``, ``dpo``, ``ipo``, or a
    custom ``my_module:MyLearner``."""
    num_iterations: int = Field(100, ge=0)
    train_batch_size: int = Field(512, ge=1)
    """Tasks an iteration."""
    group_size: int = Field(5, ge=1, le=4096)
    """Trajectories a task."""
    num_epochs: int = Field(1, ge=1)
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps an epoch."""
    max_policy_lag: int = Field(0, ge=0)
    """Versions a trajectory may be behind the policy it trains; 0 is synchronous."""
    lr: float = Field(1e-6, gt=0)
    lr_schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    clip_low: float | None = Field(None, ge=0)
    """How far the ratio may fall below 1; null is the algorithm's own, 0.2 for most. So ``clip_high``, above 1."""
    clip_high: float | None = Field(None, ge=0)
    tis_clip: float = Field(0.0, ge=0)
    """Truncated importance sampling: a token's loss is weighted by how much more likely the learner makes it than the
    engine that sampled it did, but by this at most; 2 is usual, 0 is off. An update of several steps takes a forward
    pass more."""
    kl_coeff: float = Field(0.0, ge=0)
    """Of the divergence from the policy at the start of the stage; ``options`` say which estimate of it goes where."""
    entropy_coeff: float = 0.0
    options: dict[str, Any] = {}
    """Of the algorithm, by its own names: for ``ppo`` ``{vf_clip: 0.5}``; see ``learners/algorithms/options.py``."""


class LearnerSettings(Section):
    """The learner group."""

    num_learners: int = Field(1, ge=0)
    """DeepSpeed ranks, each an actor; 0 learns in the driver."""
    num_cpus_per_learner: float = Field(1, ge=0)
    num_gpus_per_learner: float = Field(0, ge=0)
    zero_stage: Literal[0, 1, 2, 3] = 1
    micro_batch_tokens: int = Field(16384, ge=32)
    """Token budget of one forward and backward pass."""
    gradient_checkpointing: bool = False
    max_restarts: int = Field(2, ge=0)
    """Times in a run that the group is started anew after a rank failed, without losing a batch; 0 ends the run."""
    offload: list[Literal["optimizer", "params", "reference", "critic"]] = []
    """What lives in the host's memory: ``optimizer`` (its states and its step; ``zero_stage`` 1 to 3) and ``params``
    (``zero_stage`` 3) always, ``reference`` and ``critic`` between their uses."""
    lora: dict[str, Any] = {}
    """Train adapters only (arXiv:2106.09685): ``{rank: 16, alpha: 32, target_modules: [q_proj, v_proj]}``; ``{}``
    trains every weight. ``lora_settings.py`` has the keys."""


class EvaluationSettings(Section):
    """Greedy evaluation on held-out tasks."""

    interval: int = Field(0, ge=0)
    """Iterations between evaluations; 0 evaluates at the ends of the stages only."""
    num_tasks: int = Field(200, ge=1)


class CheckpointingSettings(Section):
    """What is kept of a run."""

    interval: int = Field(10, ge=1)
    """Iterations between checkpoints; one is always written at the end."""
    num_to_keep: int = Field(2, ge=1)
    best_metric: Literal["", "em", "f1"] = ""
    """The checkpoint with the highest one on the held-out tasks is kept too, as ``checkpoints/best``; empty: none."""
    keep_trajectories: bool = True
    """Write demonstrations, and each iteration's and evaluation's trajectories, to ``trajectories/*.arrow``."""


class DebuggingSettings(Section):
    """Seeds and threads."""

    seed: int = Field(0, ge=0, lt=2**32)
    num_threads: int = Field(0, ge=0)
    """Torch threads a process; 0 takes the actor's CPUs."""


class SamplerConfig(BaseModel):
    """The sections that sampling reads: all that ``ragr1 evaluate``, ``ask`` and ``select`` need of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    environment: EnvironmentSettings = EnvironmentSettings()
    policy: PolicySettings = PolicySettings()
    env_runners: EnvRunnerSettings = EnvRunnerSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    debugging: DebuggingSettings = DebuggingSettings()


class RunConfig(SamplerConfig):
    """The resolved configuration of a run: every key has a value. Stored as ``config.yaml``."""

    sft: SFTSettings = SFTSettings()
    training: TrainingSettings = TrainingSettings()
    learners: LearnerSettings = LearnerSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpointing: CheckpointingSettings = CheckpointingSettings()

    def to_yaml(self) -> str:
        """Every section and key with its value."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True)
