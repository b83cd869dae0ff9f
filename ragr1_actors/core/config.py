"""The configuration of a run: sections of keys, each with its type, default and meaning.

Two levels, ``section.key``, with the same names in a recipe file, on the command line and in Python
(``training/algorithm_config.py``). ``resolve.py`` makes a ``RunConfig`` from a recipe and refuses wrong values.

Every key says what it means, its unit, and where its default comes from. "Search-R1" is its published GRPO run on
7B (recipe ``search_r1_grpo_7b``), "RAG-R1" its published PPO run with several queries (recipe ``ragr1_mq_7b``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from ragr1_actors.core.errors import ConfigError, first_problem, nearest

DEFAULT_PROMPT = (
    "Answer the question below. Reason inside <think> and </think> whenever you learn something new. If a fact is "
    "missing, search for it: write up to {max_queries} queries, {query_format}, inside <search> and </search>; what is "
    "found will stand inside <information> and </information>. Search as often as you need. Once you know, write only "
    "the short answer inside <answer> and </answer>.\nQuestion: {question}"
)
LINEAR_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""The linear layers of a decoder layer of Qwen2, Llama and Mistral."""
RETRIEVAL_TYPES = ("flat", "fp16", "sq8", "pq", "ivf", "ivf_pq", "hnsw", "bm25", "hybrid", "replay", "http", "web")
"""Known values of ``retrieval.type``; any other is ``my_module:MyRetriever``."""

QueryFormat = Literal["lines", "comma", "json", "single"]
"""How a turn writes its queries inside ``<search>``; ``envs/actions.py`` shows each format."""
ObservationFormat = Literal["grouped", "ragr1_json", "ragr1", "searchr1"]
"""How passages are written inside ``<information>``; ``envs/observations.py`` shows each format."""
LRSchedule = Literal["constant", "cosine"]
GuardAction = Literal["ignore", "warn", "stop", "roll_back"]
AlarmName = Literal[
    "entropy",
    "good_logprob",
    "grad_norm",
    "logprob_gap",
    "format",
    "searches",
    "repeat_queries",
    "observation_share",
]
"""The alarms of the collapse guard; ``training/guard.py`` has their metrics and limits."""

_LABEL = r"[A-Za-z0-9](?:[\w.-]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = re.compile(rf"(?:[A-Za-z0-9.-]{{1,253}}/)?{_LABEL}", re.ASCII)
_LABEL_VALUE = re.compile(rf"!?(?:{_LABEL}|in\({_LABEL}(?:, ?{_LABEL})*\))", re.ASCII)


def _check_labels(label_selector: dict[str, str]) -> dict[str, str]:
    """Refuse what Ray's ``label_selector`` does not take."""
    for key, value in label_selector.items():
        if not _LABEL_KEY.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
            raise ValueError(f"{key}: {value} is no label and value such as role: runner, '!runner' or 'in(a, b)'")
    return label_selector


def _check_task_paths(value: Any) -> Any:
    """Refuse all but a text and a list of texts, in the words of one error: a union has one for each of its types."""
    if isinstance(value, str) or (isinstance(value, list) and value and all(isinstance(one, str) for one in value)):
        return value
    raise ValueError("expected the path of a task file, or a list of paths")


TaskPaths = Annotated[str | list[str], BeforeValidator(_check_task_paths)]
LabelSelector = Annotated[dict[str, str], AfterValidator(_check_labels)]


class Section(BaseModel):
    """A group of keys: frozen, without unknown keys, and without NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def check_keys(cls, options: Mapping[str, Any], key: str) -> None:
        """Refuse a name in ``options`` that is no key, with a ``ConfigError`` that has the most similar known one."""
        known = list(cls.model_fields)
        for name in options:
            if name not in known:
                instead = nearest(str(name), known) if known else f"; it has no keys: leave {key} empty"
                raise ConfigError(f"unknown key {key}.{name}{instead}")

    @classmethod
    def read(cls, options: Mapping[str, Any], key: str) -> Self:
        """Check a mapping under ``key``, such as ``retrieval.options``; ``ConfigError`` on a wrong name or value."""
        cls.check_keys(options, key)
        try:
            return cls.model_validate(dict(options))
        except ValidationError as error:
            name, found, problem = first_problem(error)
            raise ConfigError(f"{key}.{name}: got {found!r}; {problem}") from error


class EnvironmentSettings(Section):
    """The environment that the policy acts in, and its tasks."""

    env: str = "search"
    """Environment: ``search``; the baselines ``direct`` (no search) and ``rag`` (one, with the question); or a class
    ``my_module:MyEnv``."""
    tasks: TaskPaths = "world"
    """Training tasks: ``world`` (generated from ``world_seed``); or a task file, a folder of such files, a pattern such
    as ``data/train-*.parquet``, or a list of these."""
    eval_tasks: TaskPaths = ""
    """Held-out tasks: files named as in ``tasks``. Empty takes the generated world's own held-out tasks, or else holds
    ``evaluation.num_tasks`` of the ``tasks`` out of training, a fifth of them at most."""
    world_seed: int = 0
    """Seed of the generated world; the same seed gives the same passages and tasks on every machine."""
    prompt: str = DEFAULT_PROMPT
    """The user message, with the fields ``{question}``, ``{max_queries}`` and ``{query_format}`` ("one a line")."""
    reward: str = "exact_match"
    """Reward of an answer: ``exact_match`` (RAG-R1), ``token_f1``, or a function ``my_module:my_function``."""
    max_turns: int = Field(5, ge=1)
    """Turns per trajectory, the answer included; the policy can search in all turns but the last. Default: Search-R1
    and RAG-R1, four searches and an answer."""
    max_queries_per_turn: int = Field(3, ge=1, le=64)
    """Queries per turn that are executed; further ones are dropped and counted. Default: RAG-R1."""
    query_format: QueryFormat = "lines"
    """How a turn writes its queries: ``lines``, ``comma`` (RAG-R1-mq), ``json``, or ``single`` (RAG-R1-sq, Search-R1).
    The default is this project's: no character of a query has a second meaning."""
    observation_format: ObservationFormat = "grouped"
    """How passages are shown: ``grouped`` by query (this project's), or ``ragr1_json``, ``ragr1``, ``searchr1`` for
    published checkpoints."""
    top_k: int = Field(3, ge=1, le=100)
    """Passages per query. Default: Search-R1 and RAG-R1."""
    max_observation_tokens_per_query: int = Field(512, ge=8)
    """Token budget for the passages of one query; longer ones are cut. Default: about Search-R1's 500."""
    max_observation_tokens: int = Field(1536, ge=16)
    """Token budget of one observation. Default: three queries of 512 tokens."""


class PolicySettings(Section):
    """The model that is trained."""

    model: str = "tiny"
    """A Hugging Face folder or hub name; a run directory, for its newest policy; or ``tiny``: a small Qwen2 with random
    weights and its tokenizer, made in the run directory."""
    tiny: dict[str, Any] = {}
    """Sizes of the ``tiny`` policy: ``{hidden_size: 256}``; ``{}`` (default) suits two CPU cores."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights in learners and engines; ``bfloat16`` on GPUs, ``float32`` (default) on CPUs."""
    template_options: dict[str, Any] = {}
    """Options of the policy's chat template, by its own names: ``{enable_thinking: false}``."""
    trust_remote_code: bool = False
    """Whether Python code in the policy's folder or repository (``auto_map``) is run, in every learner and engine; by
    default such a policy is refused. Code of encoders and rerankers is never run."""


class TinySettings(Section):
    """The keys of ``policy.tiny``."""

    vocab_size: int = Field(2048, ge=300)
    """Tokens in the vocabulary."""
    hidden_size: int = Field(128, ge=8)
    """Width; an even multiple of ``num_heads``."""
    num_layers: int = Field(3, ge=1)
    """Decoder layers."""
    num_heads: int = Field(4, ge=1, validate_default=True)
    """Attention heads."""

    @field_validator("num_heads")
    @classmethod
    def _divides_width(cls, num_heads: int, info: ValidationInfo) -> int:
        width = info.data.get("hidden_size", 2 * num_heads)  # missing where it was refused itself
        if width % (2 * num_heads):
            even = max(4, (width // num_heads + 1) // 2 * 2)
            problem = f"hidden_size is {width}, expected an even multiple of the heads, such as {even * num_heads}"
            raise ValueError(f"{problem}: rotary positions turn pairs of numbers")
        return num_heads


def read_tiny(settings: PolicySettings) -> TinySettings:
    """Return ``policy.tiny`` with all keys; ``ConfigError`` on a wrong key or value."""
    return TinySettings.read(settings.tiny, "policy.tiny")


class EnvRunnerSettings(Section):
    """The env runners: actors that sample trajectories."""

    num_env_runners: int = Field(1, ge=0)
    """Env runner actors; 0 samples in the driver. Name and meaning of 0: RLlib."""
    num_cpus_per_env_runner: float = Field(1, ge=0)
    """CPUs that Ray reserves per env runner. Default: RLlib."""
    num_gpus_per_env_runner: float = Field(0, ge=0)
    """GPUs that Ray reserves per env runner, on one node: as many as vLLM's ``tensor_parallel_size`` times its
    ``pipeline_parallel_size``; a fraction shares a GPU. Default: RLlib."""
    label_selector: LabelSelector = {}
    """Nodes that env runners may run on, by Ray's node labels: ``{ragr1: runner}``, ``{gpu: "in(a100, h100)"}``; ``!``
    before a value negates it. ``{}`` (default): any node."""
    engine: str = "transformers"
    """Inference engine: ``transformers`` (any CPU), ``vllm``, or a class ``my_module:MyEngine``."""
    engine_options: dict[str, Any] = {}
    """Options of the engine, by its names: for vLLM ``{tensor_parallel_size: 2, gpu_memory_utilization: 0.8}``."""
    max_concurrent_trajectories: int = Field(128, ge=1)
    """Trajectories that one env runner advances at the same time."""
    max_context_tokens: int = Field(4096, ge=32)
    """Tokens per trajectory at most: prompt, model turns and observations together. Default: Search-R1."""
    max_new_tokens_per_turn: int = Field(500, ge=1)
    """Tokens that the policy may sample per turn. Default: Search-R1 and RAG-R1."""
    temperature: float = Field(1.0, ge=0.001)
    """Sampling temperature in training; evaluation is greedy, unless ``ragr1 evaluate`` is given this key. Default:
    Search-R1 and RAG-R1."""
    top_p: float = Field(1.0, ge=0.001, le=1)
    """Nucleus sampling; 1 (default) is off. Below 1 the engine's log-probs are those of the nucleus, so the learner
    computes the log-probs of every batch again: one more forward pass."""
    weight_transport: Literal["auto", "object_store", "broadcast", "ipc"] = "auto"
    """How new weights travel from the learners to the env runners: through Ray's ``object_store`` (works everywhere),
    by ``broadcast`` from learner rank 0 (both sides have whole GPUs), or by ``ipc`` (both sides share each GPU).
    ``auto`` (default) picks the fastest way that fits. ``broadcast`` and ``ipc`` have not been run on GPUs yet."""
    in_flight: Literal["continue", "finish"] = "continue"
    """What trajectories in flight do when new weights come, with a ``training.max_policy_lag``: ``continue`` (default)
    with them, each token with its policy version; or ``finish`` with the old ones while the learner waits."""
    autoscaling: dict[str, Any] = {}
    """Let the number of env runners follow the load: ``{min_replicas: 1, max_replicas: 8}``, the keys of
    ``RunnerAutoscaling``; ``{}`` (default) keeps ``num_env_runners``, which is the number at the start otherwise."""


class RetrievalSettings(Section):
    """The index and the retrievers that search it."""

    corpus: str = "world"
    """``world`` (the generated passages), or the path of a corpus file; it is indexed into the run directory."""
    index: str = ""
    """An index directory made by ``ragr1 index build``; empty builds an index from ``corpus``."""
    type: str = "flat"
    """Type of the index to build: ``flat`` (exact; default), ``fp16``, ``sq8``, ``pq``, ``ivf``, ``ivf_pq``, ``hnsw``,
    ``bm25`` or ``hybrid``. Or what is searched instead of an index: ``http`` (a ``/retrieve`` server), ``web`` (a
    search API), ``replay`` (a recorded run), or a class ``my_module:MyRetriever``."""
    options: dict[str, Any] = {}
    """Options of the type, by its own names: for ``hnsw`` ``{ef_search: 256}``, for ``http`` ``{url:
    "http://10.0.0.2:8000"}``, for ``replay`` ``{run: runs/mine}``."""
    encoder: str = ""
    """``static`` (seeded random token vectors; no download), or a sentence-transformers folder or hub name. Empty
    (default): the encoder that ``index`` was built with, and ``static`` for an index that is built."""
    reranker: str = ""
    """A cross-encoder, folder or hub name, that ranks the passages found again; empty (default) is none."""
    num_retrievers: int = Field(1, ge=0)
    """Retriever replicas, each with the whole index; 0 searches in the process that asks."""
    num_shards: int = Field(1, ge=1)
    """Actors per replica, each with its share of the vectors."""
    num_cpus_per_retriever: float = Field(1, ge=0)
    """CPUs that Ray reserves per retriever actor."""
    num_gpus_per_retriever: float = Field(0, ge=0)
    """GPUs that Ray reserves per retriever actor."""
    num_encoders: int = Field(0, ge=0)
    """Actors that only encode queries; 0 (default) lets each retriever encode the queries it gets."""
    num_cpus_per_encoder: float = Field(1, ge=0)
    """CPUs that Ray reserves per encoder actor."""
    num_gpus_per_encoder: float = Field(0, ge=0)
    """GPUs that Ray reserves per encoder actor."""
    label_selector: LabelSelector = {}
    """Nodes that retriever and encoder actors may run on, as ``env_runners.label_selector``."""
    autoscaling: dict[str, Any] = {}
    """Let the number of retriever replicas follow the load: the keys of ``RetrieverAutoscaling``; ``{}`` (default)
    keeps ``num_retrievers``, which is the number at the start otherwise."""
    encoder_autoscaling: dict[str, Any] = {}
    """As ``autoscaling``, for the encoder actors and ``num_encoders``."""
    cache_size: int = Field(16384, ge=0)
    """Queries whose results each searching process keeps; 0 is no cache."""
    timeout_s: float = Field(30, gt=0)
    """Seconds that one attempt at one replica may take."""
    max_retries: int = Field(2, ge=0)
    """Attempts on other replicas after the first, before the search counts as failed."""


class SFTSettings(Section):
    """SFT, the first stage: supervised fine-tuning on demonstrations."""

    num_steps: int = Field(0, ge=0)
    """Optimizer steps; 0 (default) skips the stage."""
    demonstrations: str = "correct"
    """``correct``: scripted demonstrations, those that end with a right answer (default); ``mixture``: all scripted
    ones, wrong habits included; or a file of a teacher's, of which those that end right are kept, as in RAG-R1."""
    num_demonstrations: int = Field(4000, ge=1)
    """Demonstrations that are played once before the first step, of a file at most all; the steps draw from them."""
    batch_size: int = Field(64, ge=1)
    """Trajectories per optimizer step."""
    lr: float = Field(1e-5, gt=0)
    """Learning rate after the warm-up: a usual value for full fine-tuning of 7B models; RAG-R1 publishes none."""
    lr_schedule: LRSchedule = "constant"
    """Learning rate after the warm-up: ``constant``, or ``cosine`` down to 0 at the last step."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from 0."""


class TrainingSettings(Section):
    """RL, the second stage: reinforcement learning. Names are RLlib's where RLlib has the key."""

    algorithm: str = "grpo"
    """``ppo``, ``grpo``, ``dr_grpo``, ``dapo``, ``rloo``, ``reinforce_pp``, ``gspo``, ``cispo``, ``dpo``, ``ipo``, or a
    class ``my_module:MyLearner``."""
    num_iterations: int = Field(100, ge=0)
    """Iterations of the stage; each samples and trains one batch."""
    train_batch_size: int = Field(512, ge=1)
    """Tasks per iteration. Default: Search-R1 and RAG-R1."""
    group_size: int = Field(5, ge=1, le=4096)
    """Trajectories per task; 1 only with ``ppo`` and ``reinforce_pp``. Default: Search-R1's GRPO."""
    num_epochs: int = Field(1, ge=1)
    """Passes over a batch. Default: Search-R1 and RAG-R1."""
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps per epoch. Default: strictly on-policy; Search-R1 takes 10 with GRPO, RAG-R1 4 with PPO."""
    max_policy_lag: int = Field(0, ge=0)
    """Policy versions that a trajectory may be behind the policy that trains on it; 0 (default) is synchronous."""
    lr: float = Field(1e-6, gt=0)
    """Learning rate after the warm-up. Default: Search-R1 and RAG-R1."""
    lr_schedule: LRSchedule = "constant"
    """As ``sft.lr_schedule``. Default: Search-R1 and RAG-R1."""
    warmup_steps: int = Field(0, ge=0)
    """As ``sft.warmup_steps``."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay per step, times the learning rate; Search-R1 and RAG-R1 take 0.01."""
    grad_clip: float = Field(1.0, gt=0)
    """Norm to which the gradient is clipped, in SFT too. Default: Search-R1 and RAG-R1."""
    clip_low: float | None = Field(None, ge=0)
    """How far the probability ratio may fall below 1; null takes the algorithm's own value, 0.2 for most."""
    clip_high: float | None = Field(None, ge=0)
    """How far the probability ratio may rise above 1; null takes the algorithm's own value, 0.2 for most."""
    tis_clip: float = Field(0.0, ge=0)
    """Truncated importance sampling: each token's loss is weighted by its probability under the learner divided by that
    under the engine that sampled it, truncated at this value. 2 is usual; 0 (default) is off. An update of several
    steps needs one more forward pass."""
    kl_coeff: float = Field(0.0, ge=0)
    """Weight of the KL divergence from the policy at the start of the stage; ``options`` choose the estimator and
    where it enters. 0 (default) needs no reference; Search-R1 and RAG-R1 take 0.001."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus, per token; Search-R1 and RAG-R1 take 0.001."""
    options: dict[str, Any] = {}
    """Options of the algorithm, by its names: for ``ppo`` ``{vf_clip: 0.5}``; see ``learners/options.py``."""
    guard: dict[str, Any] = {}
    """What happens when training collapses: ``{action: roll_back}``, the keys of ``GuardSettings``; ``{}`` (default)
    warns."""


class GuardSettings(Section):
    """The keys of ``training.guard``: alarms that compare the metrics of an iteration with those of the run before."""

    action: GuardAction = "warn"
    """What every alarm does: ``warn`` (default), ``stop`` the run after a checkpoint, ``roll_back`` to a checkpoint
    from before with a smaller learning rate, or ``ignore``: the guard is off."""
    actions: dict[AlarmName, GuardAction] = {}
    """What single alarms do instead: ``{entropy: roll_back, searches: ignore}``."""
    limits: dict[AlarmName, tuple[float | None, float | None]] = {}
    """Lower and upper limit of single alarms, in the unit of the alarm; null is none: ``{grad_norm: [null, 10]}``."""
    patience: int = Field(2, ge=1)
    """Iterations in a row for which a metric must be outside its limits."""
    baseline_iterations: int = Field(10, ge=2)
    """Iterations whose median is the baseline: the newest ones inside the limits. With half as many it begins."""
    lr_factor: float = Field(0.5, gt=0, le=1)
    """What each roll-back multiplies the learning rate by."""
    max_roll_backs: int = Field(2, ge=1)
    """Roll-backs per run; the next one is a stop."""


def read_guard(settings: TrainingSettings) -> GuardSettings:
    """Return ``training.guard`` with all keys; ``ConfigError`` on a wrong key or value."""
    return GuardSettings.read(settings.guard, "training.guard")


MICRO_BATCH_TOKENS = 16384
"""Where ``learners.micro_batch_tokens`` is not set and nothing chose it."""


class LearnerSettings(Section):
    """The learner group: the DeepSpeed ranks that compute gradients."""

    num_learners: int = Field(1, ge=0)
    """Learner ranks, each an actor; 0 learns in the driver. Name and meaning of 0: RLlib."""
    num_cpus_per_learner: float = Field(1, ge=0)
    """CPUs that Ray reserves per learner rank; at 0 a single rank takes those its node has left. Default: RLlib."""
    num_gpus_per_learner: float = Field(0, ge=0, le=1)
    """GPUs that Ray reserves per learner rank; at most 1. Default: RLlib."""
    placement: Literal["pack", "spread"] = "pack"
    """``pack`` (default) puts the ranks on as few nodes as possible, on one if it has room, so that gradients travel
    within a machine; ``spread`` puts them on as many as possible. Names: Ray's placement strategies."""
    label_selector: LabelSelector = {}
    """Nodes that learner ranks may run on, as ``env_runners.label_selector``."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed's ZeRO stage: 0 replicates everything; 1 shards the optimizer, 2 also gradients, 3 also weights."""
    micro_batch_tokens: int | None = Field(None, ge=32)
    """Token budget of one forward and backward pass per rank. Default: the largest of 16384, 8192, ... 1024 with which
    the learner fits this machine by `ragr1 plan`, and 16384 where a cluster runs it."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass instead of keeping them: less memory, about a third more time."""
    offload: list[Literal["optimizer", "params", "reference", "critic"]] = []
    """Parts kept in the host's memory: ``optimizer`` (states and step; ``zero_stage`` 1 to 3) and ``params``
    (``zero_stage`` 3) always, ``reference`` and ``critic`` between their uses."""
    lora: dict[str, Any] = {}
    """Train low-rank adapters only (arXiv:2106.09685): ``{rank: 16, alpha: 32, target_modules: [q_proj, v_proj]}``, the
    keys of ``LoraSettings``; ``{}`` (default) trains every weight."""

    @property
    def row_tokens(self) -> int:
        """``micro_batch_tokens``, whether it is set or not."""
        return self.micro_batch_tokens or MICRO_BATCH_TOKENS


class LoraSettings(Section):
    """The keys of ``learners.lora``: a weight W is used as W + alpha / rank * B A (Hu et al., arXiv:2106.09685)."""

    rank: int = Field(16, ge=1)
    """Rows of A and columns of B."""
    alpha: int = Field(32, ge=1)
    """Scaling of the adapters, divided by ``rank``. Default: twice the rank, as is usual."""
    target_modules: list[str] = Field(LINEAR_LAYERS, min_length=1)
    """Last part of the names of the linear layers that get an adapter. Default: all of a decoder layer."""

    @field_validator("target_modules")
    @classmethod
    def _leave_the_vocabulary_alone(cls, names: list[str]) -> list[str]:
        for name in names:
            if name in ("lm_head", "embed_tokens") or "." in name or not name:
                raise ValueError(f"{name!r} is none of a decoder layer's linear layers, such as 'q_proj'")
        return names


def read_lora(options: dict[str, Any]) -> LoraSettings | None:
    """Return the settings in ``learners.lora``, None if it is empty; ``ConfigError`` on a wrong key or value."""
    return LoraSettings.read(options, "learners.lora") if options else None


class AutoscalingSettings(Section):
    """How a fleet follows its load. Names and meaning are those of Ray Serve's ``autoscaling_config`` where it has the
    key; its ``initial_replicas`` is the fleet's own size in the recipe, such as ``num_env_runners``."""

    min_replicas: int = Field(1, ge=1)
    """Fewest replicas. Default: Serve."""
    max_replicas: int = Field(ge=1)
    """Most replicas."""
    target_ongoing_requests: float | None = Field(None, gt=0)
    """Requests, running and waiting, that occupy one replica: trajectories of an env runner, queries of a retriever or
    encoder. null takes ``env_runners.max_concurrent_trajectories``, and 512 queries, which are one batch."""
    look_back_period_s: float = Field(30.0, gt=0)
    """Seconds over which the signals are averaged; for env runners at least one iteration. Default: Serve."""
    upscale_delay_s: float = Field(30.0, ge=0)
    """Seconds for which more replicas must be wanted before they are started. Default: Serve."""
    downscale_delay_s: float = Field(600.0, ge=0)
    """Seconds for which fewer replicas must be wanted before some are ended. Default: Serve."""
    upscaling_factor: float = Field(1.0, gt=0)
    """Share of the replicas that are missing which one decision starts. Default: Serve."""
    downscaling_factor: float = Field(1.0, gt=0)
    """Share of the replicas that are too many which one decision ends. Default: Serve."""
    cooldown_s: float = Field(60.0, ge=0)
    """Seconds after a decision in which none in the other direction is made."""
    tolerance: float = Field(0.1, ge=0, lt=1)
    """Hysteresis: a fleet keeps its size while the wanted size differs by up to this share. Default: Kubernetes'
    Horizontal Pod Autoscaler."""

    @field_validator("max_replicas")
    @classmethod
    def _allow_the_minimum(cls, maximum: int, info: ValidationInfo) -> int:
        if maximum < (minimum := info.data.get("min_replicas", 1)):
            raise ValueError(f"expected at least min_replicas, which is {minimum}")
        return maximum


class RunnerAutoscaling(AutoscalingSettings):
    """The keys of ``env_runners.autoscaling``."""

    target_starvation: float | None = Field(None, gt=0, lt=1)
    """Share of its time that the learner may wait for samples; more runners are started above it. null takes 0.05 if
    ``training.max_policy_lag`` lets runners and learner work at the same time, else 0.5: equal times."""


class RetrieverAutoscaling(AutoscalingSettings):
    """The keys of ``retrieval.autoscaling`` and ``retrieval.encoder_autoscaling``."""

    target_utilization: float = Field(0.9, gt=0, le=1)
    """Share of their time that the replicas should work."""
    target_queue_time_s: float = Field(10.0, gt=0)
    """Seconds within which the fleet should answer the queries that wait."""


def read_runner_autoscaling(settings: EnvRunnerSettings) -> RunnerAutoscaling | None:
    """Return ``env_runners.autoscaling``, None if it is empty; ``ConfigError`` on a wrong key or value."""
    return RunnerAutoscaling.read(settings.autoscaling, "env_runners.autoscaling") if settings.autoscaling else None


def read_retriever_autoscaling(settings: RetrievalSettings) -> RetrieverAutoscaling | None:
    """Return ``retrieval.autoscaling``, None if it is empty; ``ConfigError`` on a wrong key or value."""
    return RetrieverAutoscaling.read(settings.autoscaling, "retrieval.autoscaling") if settings.autoscaling else None


def read_encoder_autoscaling(settings: RetrievalSettings) -> RetrieverAutoscaling | None:
    """Return ``retrieval.encoder_autoscaling``, None if it is empty; ``ConfigError`` on a wrong key or value."""
    found = settings.encoder_autoscaling
    return RetrieverAutoscaling.read(found, "retrieval.encoder_autoscaling") if found else None


class EvaluationSettings(Section):
    """Greedy evaluation on held-out tasks."""

    interval: int = Field(0, ge=0)
    """Iterations between evaluations, which run beside the sampling of the next batch; 0 (default) evaluates at the
    ends of the stages only."""
    num_tasks: int = Field(200, ge=1)
    """Held-out tasks, one trajectory each."""


class CheckpointingSettings(Section):
    """What a run keeps on disk."""

    interval: int = Field(10, ge=1)
    """Iterations between checkpoints; the end of each stage writes one too."""
    interval_minutes: float = Field(0, ge=0)
    """Minutes after which the next iteration, or step of SFT, writes one too; 0 (default) counts iterations only."""
    num_to_keep: int = Field(2, ge=1)
    """Newest checkpoints that are kept."""
    best_metric: Literal["", "em", "f1"] = ""
    """The checkpoint with the highest value on the held-out tasks is kept too, as ``checkpoints/best``; empty: none."""
    keep_trajectories: bool = True
    """Write the trajectories of demonstrations, iterations and evaluations to ``trajectories/*.arrow``."""


class DebuggingSettings(Section):
    """Seed, threads, trackers and faults."""

    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of everything random in a run but the generated world."""
    num_threads: int = Field(0, ge=0)
    """Threads per env runner, engine included, and per learner rank; 0 (default): the CPUs that Ray reserves for it."""
    trackers: list[Literal["wandb", "mlflow"]] = []
    """Where the metrics go besides the run directory: Weights & Biases, MLflow or both."""
    fault_tolerance: dict[str, Any] = {}
    """What is done about parts that fail, hang or fall behind: ``{hang_timeout_s: 60}``, the keys of
    ``FaultToleranceSettings``. Name: RLlib's section."""


class FaultToleranceSettings(Section):
    """The keys of ``debugging.fault_tolerance``."""

    max_task_retries: int = Field(3, ge=0)
    """Times that a task is issued again after its environment or reward raised, before it is put in quarantine;
    evaluation counts failures of engine and retrieval, too."""
    failed_trajectories: Literal["refill", "shrink"] = "refill"
    """What becomes of a group in which trajectories failed: ``refill`` (default) samples it again as a whole, and
    trains on the others only after the last try; ``shrink`` trains on the others at once, if at least two are left."""
    max_learner_restarts: int = Field(2, ge=0)
    """Times per run that the learner group is restarted after a rank failed, without losing a batch; 0 ends the run at
    the first failure."""
    hang_timeout_s: float = Field(20, gt=0)
    """An env runner, retriever, encoder or learner rank that has not answered for this long hangs: it is ended and
    starts again. So does a learner rank whose update has made no progress for twice as long, and for three times its
    longest step so far."""
    hedge_factor: float = Field(4, ge=0)
    """A group that takes this many times the median time is sampled by an idle env runner, too, and the first to finish
    counts; 0 never does it."""
    storage_retry_s: float = Field(120, ge=0)
    """Seconds for which a failed call to the storage of a run directory at a URI is repeated before the run ends."""
    stale_groups: Literal["wait", "drop"] = "wait"
    """What happens to groups that would exceed ``training.max_policy_lag``: the learner waits for them before its next
    batch (``wait``, default: no sample is lost), or they are dropped and their tasks sampled again (``drop``)."""


def read_fault_tolerance(settings: DebuggingSettings) -> FaultToleranceSettings:
    """Return ``debugging.fault_tolerance``; ``ConfigError`` on a wrong key or value."""
    return FaultToleranceSettings.read(settings.fault_tolerance, "debugging.fault_tolerance")


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
        """Return every section and key with its value, as YAML."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True)

    def changes(self) -> dict[str, Any]:
        """Return the keys that differ from the defaults, such as ``{"training.lr": 0.0005}``."""
        changed = self.model_dump(exclude_defaults=True)
        return {f"{section}.{key}": value for section, keys in changed.items() for key, value in keys.items()}
