"""The configuration of a run: sections of keys, each with its type, default and meaning.

Two levels, ``section.key``, with the same names in a recipe file, on the command line and in Python
(``training/algorithm_config.py``). A key may be a group of keys itself: ``training.guard.action``. ``resolve.py`` makes
a ``RunConfig`` from a recipe and refuses wrong values.

Every key states its meaning, its unit and the source of its default. "Search-R1" is its published GRPO run on 7B
(recipe ``search_r1_grpo_7b``), "RAG-R1" its published PPO run with several queries (recipe ``ragr1_mq_7b``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from ragr1_actors.core.section import Checkpointing, LabelSelector, Section
from ragr1_actors.core.service_settings import AgentSettings, McpServer, named_function

DEFAULT_PROMPT = (
    "Answer the question below. Reason inside <think> and </think> whenever you learn something new. If a fact is "
    "missing, search for it: write up to {max_queries} queries, {query_format}, inside <search> and </search>; what is "
    "found will stand inside <information> and </information>. Search as often as you need. Once you know, write only "
    "the short answer inside <answer> and </answer>.\nQuestion: {question}"
)
LINEAR_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""Linear layers of a decoder layer of Qwen2, Llama and Mistral."""
DEFAULT_KEY_ENV = "OPENAI_API_KEY"
RETRIEVAL_TYPES = (
    "flat",
    "fp16",
    "sq8",
    "pq",
    "ivf",
    "ivf_pq",
    "hnsw",
    "bm25",
    "hybrid",
    "replay",
    "http",
    "web",
    "images",
    "none",
)
"""Known values of ``retrieval.type``; any other is ``my_module:MyRetriever``."""

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


class SourceSettings(Section):
    """Source of tasks, one of several."""

    source: str | list[str]
    """Name of the source: ``world``, the path of task files, a list of paths, or a class ``my_module:MySource``."""
    weight: float | None = Field(None, gt=0)
    """Share of the training tasks, relative to the other sources; without weights, all tasks are taken."""
    options: dict[str, Any] = {}
    """Options of the source, by its own names: for ``world`` ``{seed: 1}``."""


def _check_task_names(value: Any, info: ValidationInfo) -> Any:
    """Refuse everything but a text, a source and a list of these, with one error: a union would have one per type."""
    if isinstance(value, str):
        return value
    listed = value if isinstance(value, list) else [value]
    if listed and all(isinstance(one, str | dict | SourceSettings) for one in listed):
        key = f"environment.{info.field_name}"
        return [SourceSettings.read(one, key) if isinstance(one, dict) else one for one in listed]
    raise ValueError("expected the path of a task file, a source {source: ..., weight: ...}, or a list of these")


TaskNames = Annotated[str | list[str | SourceSettings], BeforeValidator(_check_task_names)]


class EndpointSettings(Section):
    """Model at an endpoint with OpenAI's API, and the requests to it; the options of the engine ``endpoint``."""

    url: str
    """Address of the API, such as ``http://10.0.0.2:8000/v1``; ``/v1`` is added to an address without a path."""
    model: str = Field(min_length=1)
    """Name of the model, as the endpoint lists it."""
    key_env: str = DEFAULT_KEY_ENV
    """Name of the environment variable with the API key. The default variable may be missing: no key is sent then."""
    timeout_s: float = Field(300, gt=0)
    """Limit of one attempt, in seconds."""
    max_retries: int = Field(5, ge=0)
    """Attempts after the first one, for a request that another attempt may help: status 408, 425, 429 and 5xx, no
    connection, no answer in time."""
    body: dict[str, Any] = Field({})
    """Fields of every request that replace the usual ones; null leaves a field out, such as ``stop``."""


class ModelSettings(EndpointSettings):
    """Language model that rewards, environments and retrievers ask: at an endpoint, or in each env runner."""

    url: str = ""
    """Address of the endpoint; empty with ``engine``."""
    engine: str = ""
    """Engine that runs the folder ``model``: ``transformers``, ``vllm``, ``my_module:MyEngine``; empty with ``url``."""
    max_in_flight: int = Field(16, ge=1)
    """Limit of the questions that each env runner asks at the same time."""
    max_context_tokens: int = Field(4096, ge=16)
    """Limit of question and answer together, in tokens; used with ``engine``."""


class EnvironmentSettings(Section):
    """Environment in which the policy acts, and its tasks."""

    env: str = "search"
    """Environment: ``search`` (queries in tags), ``tools`` (tool calls), or a class ``my_module:MyEnv``."""
    tools: list[str] = ["search"]
    """Tools of the environment ``tools``: ``search``, ``open_page``, ``read_section``, ``crop``, ``zoom``, functions
    and classes: ``[search, my_tools:add]``."""
    agent: Annotated[AgentSettings | None, BeforeValidator(named_function)] = None
    """Agent that acts in the environment's place, and asks the policy at the gateway of its env runner:
    ``my_agent:solve``, or ``{command: [python, agent.py, "{question}"], deadline_s: 60}``. null (default): none."""
    mcp: dict[str, McpServer] = {}
    """MCP servers by name, whose tools ``env: tools`` also has: ``{weather: {url: "http://10.0.0.2/mcp"}}``."""
    options: dict[str, Any] = {}
    """Options of the environment, by its option names: for ``search`` ``{top_k: 3, query_format: json}``."""
    tasks: TaskNames = "world"
    """Training tasks: ``world`` (generated); a task file, a folder of such files, a pattern such as
    ``data/train-*.parquet``, or a list of these; a class ``my_module:MySource``; or several sources:
    ``[{source: world, weight: 1, options: {seed: 1}}, {source: nq.json, weight: 2}]``."""
    eval_tasks: TaskNames = ""
    """Held-out tasks, named as in ``tasks``. Empty takes the held-out tasks of the sources of ``tasks``, or else holds
    ``evaluation.num_tasks`` of the ``tasks`` out of training, at most a fifth."""
    curriculum: str = "shuffle"
    """Order of the training tasks: ``shuffle`` (new in each epoch), ``difficulty`` (easy ones first, by the pass rates
    of `ragr1 select`), ``adaptive`` (tasks with a pass rate near half first), or ``my_module:MyCurriculum``."""
    curriculum_options: dict[str, Any] = {}
    """Options of the curriculum, by its option names: for ``difficulty`` ``{field: pass_rate}``."""
    prompt: str = DEFAULT_PROMPT
    """User message, with the fields ``{question}``, ``{max_queries}`` and ``{query_format}`` ("one a line"). The
    default is for ``env: search``; ``env: tools`` has another."""
    reward: str = "exact_match"
    """Reward of a trajectory: ``exact_match`` (RAG-R1) or ``token_f1`` of its answer, ``none``, or a function or class
    ``my_module:my_reward``."""
    reward_options: dict[str, Any] = {}
    """Options of the reward, by its option names."""
    models: dict[str, ModelSettings] = {}
    """Language models that reward, environment and a custom retriever ask, by name:
    ``{judge: {url: "http://10.0.0.2:8000/v1", model: qwen}}``."""
    max_turns: int = Field(5, ge=1)
    """Turns per trajectory, the answer included; the policy can search in all turns but the last. Default: Search-R1
    and RAG-R1, four searches and an answer."""


class PolicySettings(Section):
    """Model that is trained."""

    model: str = "tiny"
    """Hugging Face folder or hub name; a run directory, for its newest policy; or ``tiny``: a small Qwen2 with random
    weights and its tokenizer, made in the run directory; ``tiny_vision`` is one that reads images."""
    options: dict[str, Any] = {}
    """Options of a policy that is made, by its option names: for ``tiny`` ``{hidden_size: 128, num_layers: 3}``,
    for ``tiny_vision`` also ``{max_image_tokens: 64}``."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights in learners and engines; ``bfloat16`` on GPUs, ``float32`` (default) on CPUs."""
    chat_format: str = "auto"
    """Format of messages and tool calls: ``tags`` (plain text is added to a turn), or the chat template with the calls
    of ``hermes``, ``qwen3_coder``, ``llama3_json``, ``pythonic``, ``mistral`` or ``my_module:MyFormat``. ``auto`` is
    ``tags`` for ``env: search``; for ``env: tools`` and agents it is the template's form, or the tool calls of an
    endpoint."""
    template_options: dict[str, Any] = {}
    """Options of the policy's chat template, by its option names: ``{enable_thinking: false}``."""
    trust_remote_code: bool = False
    """Whether Python code in the policy's folder or repository (``auto_map``) is run, in every learner and engine; by
    default such a policy is refused. Code of encoders and rerankers is never run."""


class AutoscalingSettings(Section):
    """Size of a fleet by its load. Names and meaning are from Ray Serve's ``autoscaling_config``, if it has the key;
    its ``initial_replicas`` is the fleet's size in the recipe, such as ``num_env_runners``."""

    min_replicas: int = Field(1, ge=1)
    """Smallest number of replicas. Default: Serve."""
    max_replicas: int = Field(ge=1)
    """Largest number of replicas."""
    target_ongoing_requests: float | None = Field(None, gt=0)
    """Requests, running and waiting, that fill one replica: trajectories of an env runner, queries of a retriever or
    encoder. null takes ``env_runners.max_concurrent_trajectories``, and 512 queries, which are one batch."""
    look_back_period_s: float = Field(30.0, gt=0)
    """Seconds over which the signals are averaged; for env runners at least one iteration. Default: Serve."""
    upscale_delay_s: float = Field(30.0, ge=0)
    """Seconds for which more replicas must be wanted before they are started. Default: Serve."""
    downscale_delay_s: float = Field(600.0, ge=0)
    """Seconds for which fewer replicas must be wanted before some are ended. Default: Serve."""
    upscaling_factor: float = Field(1.0, gt=0)
    """Share of the missing replicas that one decision starts. Default: Serve."""
    downscaling_factor: float = Field(1.0, gt=0)
    """Share of the surplus replicas that one decision ends. Default: Serve."""
    cooldown_s: float = Field(60.0, ge=0)
    """Seconds after a decision in which no decision in the other direction is made."""
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
    """Size of the fleet of env runners by its load."""

    target_starvation: float | None = Field(None, gt=0, lt=1)
    """Share of its time that the learner may wait for samples; more runners are started above it. null takes 0.05 if
    ``training.max_policy_lag`` lets runners and learner work at the same time, else 0.5: equal times."""


class RetrieverAutoscaling(AutoscalingSettings):
    """Size of the fleet of retrievers, or encoders, by its load."""

    target_utilization: float = Field(0.9, gt=0, le=1)
    """Share of their time that the replicas should work."""
    target_queue_time_s: float = Field(10.0, gt=0)
    """Seconds within which the fleet should answer the waiting queries."""


class EnvRunnerSettings(Section):
    """Env runners: actors that sample trajectories."""

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
    """Options of the engine, by name: for vLLM ``{tensor_parallel_size: 2, gpu_memory_utilization: 0.8}``."""
    max_concurrent_trajectories: int = Field(128, ge=1)
    """Number of trajectories that one env runner samples at the same time."""
    max_context_tokens: int = Field(4096, ge=32)
    """Limit of tokens per trajectory: prompt, model turns and observations together. Default: Search-R1."""
    max_new_tokens_per_turn: int = Field(500, ge=1)
    """Limit of tokens that the policy samples per turn. Default: Search-R1 and RAG-R1."""
    temperature: float = Field(1.0, ge=0.001)
    """Sampling temperature in training; evaluation is greedy, unless ``ragr1 evaluate`` is given this key. Default:
    Search-R1 and RAG-R1."""
    top_p: float = Field(1.0, ge=0.001, le=1)
    """Nucleus sampling; 1 (default) turns it off. Below 1 the engine's log-probs are within the nucleus, so the learner
    computes the log-probs of every batch again: one more forward pass."""
    weight_transport: Literal["auto", "object_store", "broadcast", "ipc"] = "auto"
    """Transport of new weights from the learners to the env runners: through Ray's ``object_store`` (works everywhere),
    by ``broadcast`` from learner rank 0 (both sides have whole GPUs), or by ``ipc`` (both sides share each GPU).
    ``auto`` (default) picks the fastest way that fits. ``broadcast`` and ``ipc`` have not been run on GPUs yet."""
    in_flight: Literal["continue", "finish"] = "continue"
    """Effect of new weights on trajectories in flight, with a ``training.max_policy_lag``: they ``continue`` with them
    (default), each token with its policy version, or ``finish`` with the old ones while the learner waits."""
    strategy: str = "independent"
    """Strategy that chooses the attempts of a group: ``independent``, or a class ``my_module:MyStrategy``."""
    strategy_options: dict[str, Any] = {}
    """Options of the strategy, by its option names."""
    autoscaling: RunnerAutoscaling | None = None
    """Autoscaling of the env runners: ``{min_replicas: 1, max_replicas: 8}``. null (default) keeps ``num_env_runners``,
    which otherwise is only the number at the start."""


class EncoderActors(Section):
    """Actors that only encode queries."""

    num_encoders: int = Field(0, ge=0)
    """Number of these actors; 0 (default) lets each retriever encode the queries it gets."""
    num_cpus: float = Field(1, ge=0)
    """CPUs that Ray reserves per encoder actor."""
    num_gpus: float = Field(0, ge=0)
    """GPUs that Ray reserves per encoder actor."""
    autoscaling: RetrieverAutoscaling | None = None
    """Autoscaling of ``num_encoders``, like ``retrieval.autoscaling``."""


class SearchRequests(Section):
    """Timeout, retries and cache of searches."""

    timeout_s: float = Field(30, gt=0)
    """Seconds that one attempt at one replica may take."""
    max_retries: int = Field(2, ge=0)
    """Attempts on other replicas after the first, before the search counts as failed."""
    cache_size: int = Field(16384, ge=0)
    """Number of queries whose results each searching process keeps; 0 turns the cache off."""


class RetrievalSettings(Section):
    """Index, and the retrievers that search it."""

    corpus: str = ""
    """Path of a corpus file, or a source with passages, such as ``world``; it is indexed into the run directory. Empty
    (default): the passages of the sources in ``environment.tasks``."""
    index: str = ""
    """Index directory made by ``ragr1 index build``; empty builds an index from ``corpus``."""
    type: str = "flat"
    """Type of the index to build: ``flat`` (exact; default), ``fp16``, ``sq8``, ``pq``, ``ivf``, ``ivf_pq``, ``hnsw``,
    ``bm25`` or ``hybrid``. Or a retriever without an index: ``http`` (a ``/retrieve`` server), ``web`` (a search API),
    ``replay`` (a recorded run), ``images`` (a folder), ``none``, or a class ``my_module:MyRetriever``."""
    options: dict[str, Any] = {}
    """Options of the type, by its option names: for ``hnsw`` ``{ef_search: 256}``, for ``http`` ``{url:
    "http://10.0.0.2:8000"}``, for ``replay`` ``{run: runs/mine}``."""
    encoder: str = ""
    """``static`` (seeded random token vectors; no download), or a sentence-transformers folder or hub name. Empty
    (default): the encoder of ``index``, or ``static`` for an index that is built."""
    reranker: str = ""
    """Cross-encoder, folder or hub name, that ranks the passages found again; empty (default): none."""
    num_retrievers: int = Field(1, ge=0)
    """Retriever replicas, each with the whole index; 0 searches in the process that asks."""
    num_shards: int = Field(1, ge=1)
    """Actors per replica, each with its share of the vectors."""
    num_cpus_per_retriever: float = Field(1, ge=0)
    """CPUs that Ray reserves per retriever actor."""
    num_gpus_per_retriever: float = Field(0, ge=0)
    """GPUs that Ray reserves per retriever actor."""
    encoders: EncoderActors = EncoderActors()
    """Actors that only encode queries: ``{num_encoders: 2, num_cpus: 2}``."""
    label_selector: LabelSelector = {}
    """Nodes that retriever and encoder actors may run on, like ``env_runners.label_selector``."""
    autoscaling: RetrieverAutoscaling | None = None
    """Autoscaling of the retriever replicas: ``{max_replicas: 8}``. null (default) keeps ``num_retrievers``, which
    otherwise is only the number at the start."""
    requests: SearchRequests = SearchRequests()
    """Timeout, retries and cache of searches: ``{timeout_s: 60}``."""


class SFTSettings(Section):
    """SFT, the first stage: supervised fine-tuning on demonstrations."""

    num_steps: int = Field(0, ge=0)
    """Optimizer steps; 0 (default) skips the stage."""
    demonstrations: str = "correct"
    """Demonstrations: ``correct`` (default), scripted ones with a right answer; ``mixture``, all scripted ones, wrong
    habits included; or a file of a teacher's, of which those with a right answer are kept, as in RAG-R1."""
    num_demonstrations: int = Field(4000, ge=1)
    """Number of demonstrations that are played once before the first step; the steps draw from them."""
    batch_size: int = Field(64, ge=1)
    """Trajectories per optimizer step."""
    lr: float = Field(1e-5, gt=0)
    """Learning rate after the warm-up: a usual value for full fine-tuning of 7B models; RAG-R1 publishes none."""
    lr_schedule: LRSchedule = "constant"
    """Learning rate after the warm-up: ``constant``, or ``cosine`` down to 0 at the last step."""
    warmup_steps: int = Field(0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from 0."""


class GuardSettings(Section):
    """Alarms that compare the metrics of an iteration with earlier ones of the run."""

    action: GuardAction = "warn"
    """Action of every alarm: ``warn`` (default), ``stop`` the run after a checkpoint, ``roll_back`` to an earlier
    checkpoint with a smaller learning rate, or ``ignore``: the guard is off."""
    actions: dict[AlarmName, GuardAction] = {}
    """Actions of single alarms that replace ``action``: ``{entropy: roll_back, searches: ignore}``."""
    limits: dict[AlarmName, tuple[float | None, float | None]] = {}
    """Lower and upper limit of single alarms, in the unit of the alarm; null sets none: ``{grad_norm: [null, 10]}``."""
    patience: int = Field(2, ge=1)
    """Iterations in a row for which a metric must be outside its limits."""
    baseline_iterations: int = Field(10, ge=2)
    """Number of iterations whose median is the baseline: the newest inside the limits, at least half as many."""
    lr_factor: float = Field(0.5, gt=0, le=1)
    """Factor of the learning rate at each roll-back."""
    max_roll_backs: int = Field(2, ge=1)
    """Limit of roll-backs per run; the next one stops it."""

    @field_validator("limits")
    @classmethod
    def _order_limits(
        cls, limits: dict[AlarmName, tuple[float | None, float | None]]
    ) -> dict[AlarmName, tuple[float | None, float | None]]:
        if wrong := [name for name, (low, high) in limits.items() if None not in (low, high) and low >= high]:  # type: ignore[operator]
            raise ValueError(f"expected the lower limit of {wrong[0]} first, and below the upper one")
        return limits


class TrainingSettings(Section):
    """RL, the second stage: reinforcement learning. Names are RLlib's if RLlib has the key."""

    algorithm: str = "grpo"
    """Algorithm: ``ppo``, ``grpo``, ``dr_grpo``, ``dapo``, ``rloo``, ``reinforce_pp``, ``gspo``, ``cispo``, ``dpo``,
    ``ipo``, or a class ``my_module:MyLearner``."""
    num_iterations: int = Field(100, ge=0)
    """Iterations of the stage; each samples and trains one batch."""
    train_batch_size: int = Field(512, ge=1)
    """Tasks per iteration. Default: Search-R1 and RAG-R1."""
    group_size: int = Field(5, ge=1, le=4096)
    """Trajectories per task; 1 is legal only with ``ppo`` and ``reinforce_pp``. Default: Search-R1's GRPO."""
    num_epochs: int = Field(1, ge=1)
    """Passes over a batch. Default: Search-R1 and RAG-R1."""
    num_minibatches: int = Field(1, ge=1)
    """Optimizer steps per epoch. Default: strictly on-policy; Search-R1 takes 10 with GRPO, RAG-R1 4 with PPO."""
    max_policy_lag: int = Field(0, ge=0)
    """Policy versions that a trajectory may be behind the policy that trains on it; 0 (default) is synchronous."""
    lr: float = Field(1e-6, gt=0)
    """Learning rate after the warm-up. Default: Search-R1 and RAG-R1."""
    lr_schedule: LRSchedule = "constant"
    """Schedule of the learning rate, like ``sft.lr_schedule``. Default: Search-R1 and RAG-R1."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of the warm-up, like ``sft.warmup_steps``."""
    weight_decay: float = Field(0.0, ge=0)
    """AdamW's weight decay per step, times the learning rate; Search-R1 and RAG-R1 take 0.01."""
    grad_clip: float = Field(1.0, gt=0)
    """Norm to which the gradient is clipped, in SFT too. Default: Search-R1 and RAG-R1."""
    kl_coeff: float = Field(0.0, ge=0)
    """Weight of the KL divergence from the policy at the start of the stage; ``options`` choose the estimator and the
    term for it. 0 (default) needs no reference, but for ``dpo`` and ``ipo``; Search-R1 and RAG-R1 take 0.001."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus, per token; Search-R1 and RAG-R1 take 0.001."""
    from_trajectories: str = ""
    """Run directory, or folder of ``*.arrow`` files, whose groups are trained on; only evaluations are sampled. Empty
    (default): the env runners sample."""
    options: dict[str, Any] = {}
    """Options of the algorithm, by its option names: for ``ppo`` ``{vf_clip: 0.5}``; see ``learners/options.py``."""
    guard: GuardSettings = GuardSettings()
    """Guard against the collapse of training: ``{action: roll_back}``; by default it warns."""


MICRO_BATCH_TOKENS = 16384
"""Value of ``learners.micro_batch_tokens`` if it is not set and nothing has chosen it."""


class LoraSettings(Section):
    """Low-rank adapters: a weight W is used as W + alpha / rank * B A (Hu et al., arXiv:2106.09685)."""

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


class LearnerSettings(Section):
    """Learner group: the DeepSpeed ranks that compute gradients."""

    num_learners: int = Field(1, ge=0)
    """Learner ranks, each an actor; 0 learns in the driver. Name and meaning of 0: RLlib."""
    num_cpus_per_learner: float = Field(1, ge=0)
    """CPUs that Ray reserves per learner rank; with 0 a single rank uses the free ones of its node. Default: RLlib."""
    num_gpus_per_learner: float = Field(0, ge=0, le=1)
    """GPUs that Ray reserves per learner rank; at most 1. Default: RLlib."""
    placement: Literal["pack", "spread"] = "pack"
    """Placement of the ranks: ``pack`` (default) uses as few nodes as possible, one if it has room, so that gradients
    stay within a machine; ``spread`` uses as many as possible. Names: Ray's placement strategies."""
    label_selector: LabelSelector = {}
    """Nodes that learner ranks may run on, like ``env_runners.label_selector``."""
    zero_stage: Literal[0, 1, 2, 3] | None = None
    """DeepSpeed's ZeRO stage: 0 replicates everything; 1 shards the optimizer, 2 also gradients, 3 also weights.
    Default: 0 for one rank, which shares nothing; 1 for several ranks, or if the optimizer is offloaded."""
    micro_batch_tokens: int | None = Field(None, ge=32)
    """Token budget of one forward and backward pass per rank. Default: the largest of 16384, 8192, ... 1024 with which
    the learner fits this machine by `ragr1 plan`, or 16384 on a cluster."""
    gradient_checkpointing: Checkpointing = False
    """Whether the backward pass computes activations again instead of keeping them: less memory, a third more time.
    ``selective`` (not with ``zero_stage`` 3) keeps what matrix products and attention return: the rest costs little."""
    offload: list[Literal["optimizer", "params", "reference", "critic"]] = []
    """Parts kept in the host's memory: ``optimizer`` (states and step; ``zero_stage`` 1 to 3) and ``params``
    (``zero_stage`` 3) always, ``reference`` and ``critic`` between their uses."""
    lora: LoraSettings | None = None
    """Low-rank adapters, which are then trained alone (arXiv:2106.09685): ``{rank: 16, alpha: 32, target_modules:
    [q_proj, v_proj]}``; null (default) trains every weight."""

    @property
    def stage(self) -> int:
        """Value of ``zero_stage``, or its default if it is not set."""
        default = 1 if self.num_learners > 1 or "optimizer" in self.offload else 0
        return default if self.zero_stage is None else self.zero_stage

    @property
    def row_tokens(self) -> int:
        """Value of ``micro_batch_tokens``, or its default if it is not set."""
        return self.micro_batch_tokens or MICRO_BATCH_TOKENS


class EvaluationSettings(Section):
    """Greedy evaluation on held-out tasks."""

    interval: int = Field(0, ge=0)
    """Iterations between evaluations, which run beside the sampling of the next batch; 0 (default) evaluates at the
    ends of the stages only."""
    num_tasks: int = Field(200, ge=1)
    """Held-out tasks, one trajectory each."""


class CheckpointingSettings(Section):
    """Checkpoints and trajectories that a run keeps on disk."""

    interval: int = Field(10, ge=1)
    """Iterations between checkpoints; the end of each stage writes one too."""
    interval_minutes: float = Field(0, ge=0)
    """Minutes after which the next iteration, or step of SFT, writes one too; 0 (default) counts iterations only."""
    num_to_keep: int = Field(2, ge=1)
    """Newest checkpoints that are kept."""
    best_metric: str = ""
    """Measure, ``em``, ``f1`` or one of the environment's, whose best checkpoint on the held-out tasks is also kept, as
    ``checkpoints/best``; empty: none."""
    keep_trajectories: bool = True
    """Whether trajectories of demonstrations, iterations and evaluations are written to ``trajectories/*.arrow``."""


class FaultToleranceSettings(Section):
    """Retries, restarts and time limits."""

    max_task_retries: int = Field(3, ge=0)
    """Number of times that a task is issued again after its environment or reward raised, before it goes into
    quarantine; evaluation also counts failures of engine and retrieval."""
    failed_trajectories: Literal["refill", "shrink"] = "refill"
    """Treatment of a group with failed trajectories: ``refill`` (default) samples it again as a whole, and trains on
    the others only after the last try; ``shrink`` trains on the others at once, if at least two are left."""
    max_learner_restarts: int = Field(2, ge=0)
    """Number of times per run that the learner group is restarted after a rank failed, without losing a batch; 0 ends
    the run at the first failure."""
    hang_timeout_s: float = Field(20, gt=0)
    """Seconds of silence after which an env runner, retriever, encoder or learner rank counts as hung: it is ended and
    restarted. So is a learner rank whose update makes no progress for twice as long and three times its longest
    step."""
    hedge_factor: float = Field(4, ge=0)
    """Multiple of the median time after which an idle runner samples a group too; the first result counts. 0: off."""
    storage_retry_s: float = Field(120, ge=0)
    """Seconds for which a failed call to the storage of a run directory at a URI is repeated before the run ends."""
    stale_groups: Literal["wait", "drop"] = "wait"
    """Treatment of groups that would exceed ``training.max_policy_lag``: the learner waits for them before its next
    batch (``wait``, default: no sample is lost), or they are dropped and their tasks sampled again (``drop``)."""


class DebuggingSettings(Section):
    """Seed, threads, trackers and fault tolerance."""

    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of all random draws in a run, except in the generated world."""
    num_threads: int = Field(0, ge=0)
    """Threads per env runner, engine included, and per learner rank; 0 (default): the CPUs that Ray reserves for it."""
    trackers: list[Literal["wandb", "mlflow"]] = []
    """Services that get the metrics besides the run directory: Weights & Biases, MLflow or both."""
    fault_tolerance: FaultToleranceSettings = FaultToleranceSettings()
    """Treatment of parts that fail, hang or fall behind: ``{hang_timeout_s: 60}``. Name: RLlib's section."""


class SamplerConfig(BaseModel):
    """Sections that sampling reads: ``ragr1 evaluate``, ``ask`` and ``select`` need only these of a run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    environment: EnvironmentSettings = EnvironmentSettings()
    policy: PolicySettings = PolicySettings()
    env_runners: EnvRunnerSettings = EnvRunnerSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    debugging: DebuggingSettings = DebuggingSettings()


class RunConfig(SamplerConfig):
    """Resolved configuration of a run: every key has a value. Stored as ``config.yaml``."""

    sft: SFTSettings = SFTSettings()
    training: TrainingSettings = TrainingSettings()
    learners: LearnerSettings = LearnerSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpointing: CheckpointingSettings = CheckpointingSettings()

    def to_yaml(self) -> str:
        """Return every section and key with its value, as YAML."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True)

    def changes(self) -> dict[str, Any]:
        """Return the keys that differ from the defaults: ``{"training.lr": 5e-4, "training.guard.patience": 3}``."""
        changed = self.model_dump(exclude_defaults=True)
        found: dict[str, Any] = {}
        for section, keys in changed.items():
            settings = type(getattr(self, section))
            for key, value in keys.items():
                is_group = isinstance(value, dict) and settings.group(key) is not None
                inner = {f"{key}.{name}": one for name, one in value.items()} if is_group else {key: value}
                found |= {f"{section}.{name}": one for name, one in inner.items()}
        return found
