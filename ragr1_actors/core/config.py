"""The configuration of a run: sections of keys, each with its type, default and meaning.

Two levels, ``section.key``, with the same names in a recipe file, on the command line and in Python
(``training/algorithm_config.py``). A key may be a group of keys itself: ``training.guard.action``. ``resolve.py`` makes
a ``RunConfig`` from a recipe and refuses wrong values.

Every key says what it means, its unit, and where its default comes from. "Search-R1" is its published GRPO run on
7B (recipe ``search_r1_grpo_7b``), "RAG-R1" its published PPO run with several queries (recipe ``ragr1_mq_7b``).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

from ragr1_actors.core.section import LabelSelector, Section
from ragr1_actors.core.service_settings import AgentSettings, McpServer, named_function

DEFAULT_PROMPT = (
    "Answer the question below. Reason inside <think> and </think> whenever you learn something new. If a fact is "
    "missing, search for it: write up to {max_queries} queries, {query_format}, inside <search> and </search>; what is "
    "found will stand inside <information> and </information>. Search as often as you need. Once you know, write only "
    "the short answer inside <answer> and </answer>.\nQuestion: {question}"
)
LINEAR_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""The linear layers of a decoder layer of Qwen2, Llama and Mistral."""
DEFAULT_KEY_ENV = "OPENAI_API_KEY"
RETRIEVAL_TYPES = ("flat", "fp16", "sq8", "pq", "ivf", "ivf_pq", "hnsw", "bm25", "hybrid", "replay", "http", "web")
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
    """One of several sources of tasks."""

    source: str | list[str]
    """``world``, the path of task files, a list of paths, or a class ``my_module:MySource``."""
    weight: float | None = Field(None, gt=0)
    """Its share of the training tasks, beside those of the other sources; without weights, all tasks are taken."""
    options: dict[str, Any] = {}
    """Options of the source, by its own names: for ``world`` ``{seed: 1}``."""


def _check_task_names(value: Any, info: ValidationInfo) -> Any:
    """Refuse all but a text, a source and a list of these, in the words of one error: a union has one per type."""
    if isinstance(value, str):
        return value
    listed = value if isinstance(value, list) else [value]
    if listed and all(isinstance(one, str | dict | SourceSettings) for one in listed):
        key = f"environment.{info.field_name}"
        return [SourceSettings.read(one, key) if isinstance(one, dict) else one for one in listed]
    raise ValueError("expected the path of a task file, a source {source: ..., weight: ...}, or a list of these")


TaskNames = Annotated[str | list[str | SourceSettings], BeforeValidator(_check_task_names)]


class EndpointSettings(Section):
    """A model at an endpoint with OpenAI's API, and how it is asked; the options of the engine ``endpoint``."""

    url: str
    """Address of the API, such as ``http://10.0.0.2:8000/v1``; ``/v1`` is added to an address without a path."""
    model: str = Field(min_length=1)
    """Name of the model, as the endpoint lists it."""
    key_env: str = DEFAULT_KEY_ENV
    """Name of the environment variable with the API key. That of the default may be missing: no key is sent then."""
    timeout_s: float = Field(300, gt=0)
    """Per attempt."""
    max_retries: int = Field(5, ge=0)
    """Attempts after the first one, of a request that another attempt may help: status 408, 425, 429 and 5xx, no
    connection, no answer in time."""
    body: dict[str, Any] = Field({})
    """Fields of every request in place of the usual ones; null leaves a field out, such as ``stop``."""


class ModelSettings(EndpointSettings):
    """A language model that rewards, environments and retrievers ask: at an endpoint, or in each env runner."""

    url: str = ""
    """Address of the endpoint; empty with ``engine``."""
    engine: str = ""
    """``transformers``, ``vllm`` or ``my_module:MyEngine``, which runs the folder ``model``; empty with ``url``."""
    max_in_flight: int = Field(16, ge=1)
    """Questions that each env runner asks at once."""
    max_context_tokens: int = Field(4096, ge=16)
    """Longest question and answer together, in tokens; used with ``engine``."""


class EnvironmentSettings(Section):
    """The environment that the policy acts in, and its tasks."""

    env: str = "search"
    """Environment: ``search`` (queries in tags), ``tools`` (tool calls), or a class ``my_module:MyEnv``."""
    tools: list[str] = ["search"]
    """Tools of the environment ``tools``: ``search``, ``open_page``, ``read_section``, and functions and classes:
    ``[search, my_tools:add]``."""
    agent: Annotated[AgentSettings | None, BeforeValidator(named_function)] = None
    """An agent that acts in the environment's place, and asks the policy at the gateway of its env runner:
    ``my_agent:solve``, or ``{command: [python, agent.py, "{question}"], deadline_s: 60}``. null (default): none."""
    mcp: dict[str, McpServer] = {}
    """MCP servers by name, whose tools the environment ``tools`` has, too: ``{weather: {url: "http://10.0.0.2/mcp"}}``."""
    options: dict[str, Any] = {}
    """Options of the environment, by its own names: for ``search`` ``{top_k: 3, query_format: json}``."""
    tasks: TaskNames = "world"
    """Training tasks: ``world`` (generated); a task file, a folder of such files, a pattern such as
    ``data/train-*.parquet``, or a list of these; a class ``my_module:MySource``; or several sources:
    ``[{source: world, weight: 1, options: {seed: 1}}, {source: nq.json, weight: 2}]``."""
    eval_tasks: TaskNames = ""
    """Held-out tasks, named as in ``tasks``. Empty takes the held-out tasks of the sources of ``tasks``, or else holds
    ``evaluation.num_tasks`` of the ``tasks`` out of training, a fifth of them at most."""
    curriculum: str = "shuffle"
    """Order of the training tasks: ``shuffle`` (another one in each epoch), ``difficulty`` (easy ones first, by the
    pass rates of `ragr1 select`), ``adaptive`` (those passed half of the time first), or ``my_module:MyCurriculum``."""
    curriculum_options: dict[str, Any] = {}
    """Options of the curriculum, by its own names: for ``difficulty`` ``{field: pass_rate}``."""
    prompt: str = DEFAULT_PROMPT
    """The user message, with the fields ``{question}``, ``{max_queries}`` and ``{query_format}`` ("one a line"). The
    default is that of ``env: search``; ``env: tools`` has another."""
    reward: str = "exact_match"
    """Reward of a trajectory: ``exact_match`` (RAG-R1) or ``token_f1`` of its answer, ``none``, or a function or class
    ``my_module:my_reward``."""
    reward_options: dict[str, Any] = {}
    """Options of the reward, by its own names."""
    models: dict[str, ModelSettings] = {}
    """Language models that reward, environment and a custom retriever ask, by name:
    ``{judge: {url: "http://10.0.0.2:8000/v1", model: qwen}}``."""
    max_turns: int = Field(5, ge=1)
    """Turns per trajectory, the answer included; the policy can search in all turns but the last. Default: Search-R1
    and RAG-R1, four searches and an answer."""


class PolicySettings(Section):
    """The model that is trained."""

    model: str = "tiny"
    """A Hugging Face folder or hub name; a run directory, for its newest policy; or ``tiny``: a small Qwen2 with random
    weights and its tokenizer, made in the run directory."""
    options: dict[str, Any] = {}
    """Options of a policy that is made, by its own names: for ``tiny`` ``{hidden_size: 128, num_layers: 3}``."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights in learners and engines; ``bfloat16`` on GPUs, ``float32`` (default) on CPUs."""
    chat_format: str = "auto"
    """How messages are framed, and tool calls written: ``tags`` (what is added to a turn is plain text), or the chat
    template with the calls of ``hermes``, ``qwen3_coder``, ``llama3_json``, ``pythonic``, ``mistral`` or
    ``my_module:MyFormat``. ``auto`` is ``tags`` for ``env: search``; for ``env: tools`` and agents it is the form of
    the template, or the tool calls of an endpoint."""
    template_options: dict[str, Any] = {}
    """Options of the policy's chat template, by its own names: ``{enable_thinking: false}``."""
    trust_remote_code: bool = False
    """Whether Python code in the policy's folder or repository (``auto_map``) is run, in every learner and engine; by
    default such a policy is refused. Code of encoders and rerankers is never run."""


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
    """How the env runners follow their load."""

    target_starvation: float | None = Field(None, gt=0, lt=1)
    """Share of its time that the learner may wait for samples; more runners are started above it. null takes 0.05 if
    ``training.max_policy_lag`` lets runners and learner work at the same time, else 0.5: equal times."""


class RetrieverAutoscaling(AutoscalingSettings):
    """How the retrievers, or the encoders, follow their load."""

    target_utilization: float = Field(0.9, gt=0, le=1)
    """Share of their time that the replicas should work."""
    target_queue_time_s: float = Field(10.0, gt=0)
    """Seconds within which the fleet should answer the queries that wait."""


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
    strategy: str = "independent"
    """Which attempts make a group: ``independent``, or a class ``my_module:MyStrategy``."""
    strategy_options: dict[str, Any] = {}
    """Options of the strategy, by its own names."""
    autoscaling: RunnerAutoscaling | None = None
    """Let the number of env runners follow the load: ``{min_replicas: 1, max_replicas: 8}``. null (default) keeps
    ``num_env_runners``, which is the number at the start otherwise."""


class EncoderActors(Section):
    """The actors that only encode queries."""

    num_encoders: int = Field(0, ge=0)
    """Number of these actors; 0 (default) lets each retriever encode the queries it gets."""
    num_cpus: float = Field(1, ge=0)
    """CPUs that Ray reserves per encoder actor."""
    num_gpus: float = Field(0, ge=0)
    """GPUs that Ray reserves per encoder actor."""
    autoscaling: RetrieverAutoscaling | None = None
    """As ``retrieval.autoscaling``, for ``num_encoders``."""


class SearchRequests(Section):
    """How a search is asked, repeated and remembered."""

    timeout_s: float = Field(30, gt=0)
    """Seconds that one attempt at one replica may take."""
    max_retries: int = Field(2, ge=0)
    """Attempts on other replicas after the first, before the search counts as failed."""
    cache_size: int = Field(16384, ge=0)
    """Queries whose results each searching process keeps; 0 is no cache."""


class RetrievalSettings(Section):
    """The index and the retrievers that search it."""

    corpus: str = ""
    """The path of a corpus file, or a source with passages, such as ``world``; it is indexed into the run directory.
    Empty (default): the passages of the sources in ``environment.tasks``."""
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
    encoders: EncoderActors = EncoderActors()
    """Actors that only encode queries: ``{num_encoders: 2, num_cpus: 2}``."""
    label_selector: LabelSelector = {}
    """Nodes that retriever and encoder actors may run on, as ``env_runners.label_selector``."""
    autoscaling: RetrieverAutoscaling | None = None
    """Let the number of retriever replicas follow the load: ``{max_replicas: 8}``. null (default) keeps
    ``num_retrievers``, which is the number at the start otherwise."""
    requests: SearchRequests = SearchRequests()
    """How a search is asked, repeated and remembered: ``{timeout_s: 60}``."""


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


class GuardSettings(Section):
    """Alarms that compare the metrics of an iteration with those of the run before."""

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

    @field_validator("limits")
    @classmethod
    def _order_limits(
        cls, limits: dict[AlarmName, tuple[float | None, float | None]]
    ) -> dict[AlarmName, tuple[float | None, float | None]]:
        if wrong := [name for name, (low, high) in limits.items() if None not in (low, high) and low >= high]:  # type: ignore[operator]
            raise ValueError(f"expected the lower limit of {wrong[0]} first, and below the upper one")
        return limits


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
    kl_coeff: float = Field(0.0, ge=0)
    """Weight of the KL divergence from the policy at the start of the stage; ``options`` choose the estimator and
    where it enters. 0 (default) needs no reference; Search-R1 and RAG-R1 take 0.001."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus, per token; Search-R1 and RAG-R1 take 0.001."""
    from_trajectories: str = ""
    """A run directory, or a folder of ``*.arrow`` files: its groups are trained on, and only evaluations are sampled.
    Empty (default): the env runners sample."""
    options: dict[str, Any] = {}
    """Options of the algorithm, by its names: for ``ppo`` ``{vf_clip: 0.5}``; see ``learners/options.py``."""
    guard: GuardSettings = GuardSettings()
    """What happens when training collapses: ``{action: roll_back}``; by default it warns."""


MICRO_BATCH_TOKENS = 16384
"""Where ``learners.micro_batch_tokens`` is not set and nothing chose it."""


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
    lora: LoraSettings | None = None
    """Train low-rank adapters only (arXiv:2106.09685): ``{rank: 16, alpha: 32, target_modules: [q_proj, v_proj]}``;
    null (default) trains every weight."""

    @property
    def row_tokens(self) -> int:
        """``micro_batch_tokens``, whether it is set or not."""
        return self.micro_batch_tokens or MICRO_BATCH_TOKENS


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
    best_metric: str = ""
    """The checkpoint with the highest value on the held-out tasks is kept too, as ``checkpoints/best``: ``em``, ``f1``
    or a measure of the environment; empty: none."""
    keep_trajectories: bool = True
    """Write the trajectories of demonstrations, iterations and evaluations to ``trajectories/*.arrow``."""


class FaultToleranceSettings(Section):
    """Retries, restarts, time limits, and what becomes of what failed."""

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


class DebuggingSettings(Section):
    """Seed, threads, trackers and faults."""

    seed: int = Field(0, ge=0, lt=2**32)
    """Seed of everything random in a run but the generated world."""
    num_threads: int = Field(0, ge=0)
    """Threads per env runner, engine included, and per learner rank; 0 (default): the CPUs that Ray reserves for it."""
    trackers: list[Literal["wandb", "mlflow"]] = []
    """Where the metrics go besides the run directory: Weights & Biases, MLflow or both."""
    fault_tolerance: FaultToleranceSettings = FaultToleranceSettings()
    """What is done about parts that fail, hang or fall behind: ``{hang_timeout_s: 60}``. Name: RLlib's section."""


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
        """Return what differs from the defaults: ``{"training.lr": 5e-4, "training.guard.patience": 3}``."""
        changed = self.model_dump(exclude_defaults=True)
        found: dict[str, Any] = {}
        for section, keys in changed.items():
            settings = type(getattr(self, section))
            for key, value in keys.items():
                is_group = isinstance(value, dict) and settings.group(key) is not None
                inner = {f"{key}.{name}": one for name, one in value.items()} if is_group else {key: value}
                found |= {f"{section}.{name}": one for name, one in inner.items()}
        return found
