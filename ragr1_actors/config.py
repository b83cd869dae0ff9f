"""Configuration: RLlib's fluent sections over validated models; YAML recipes load into it.

Two levels, ``section.key``. The same names everywhere: in a recipe file, on the command line and in Python::

    config = (
        AlgorithmConfig.from_recipe("quickstart")
        .training(lr=5e-4, group_size=8)
        .env_runners(num_env_runners=2)
        .debugging(seed=1)
    )
    algorithm = config.build_algo(run_dir="runs/mine")

An unknown key, a wrong type or a value out of range is a ``ConfigError`` that names the nearest key there is.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ragr1_actors.config_checks import check_settings, check_value, first_problem, nearest, parse_yaml, read_yaml_file
from ragr1_actors.errors import ConfigError

if TYPE_CHECKING:  # algorithm imports config, and pulls in Ray
    from ragr1_actors.algorithm import Algorithm

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
    """How new weights come from the learner: ``cluster/weight_sync.py`` has the table. ``auto`` broadcasts where both
    sides have whole GPUs, and takes ``ipc`` where they share one; neither has been run on GPUs yet."""


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
    """Of the algorithm, by its own names: for ``ppo`` ``{vf_clip: 0.5}``; ``learners/options.py`` has them all."""


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


class RunConfig(BaseModel):
    """The resolved configuration of a run: every key has a value. Stored as ``config.yaml``."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    environment: EnvironmentSettings = EnvironmentSettings()
    policy: PolicySettings = PolicySettings()
    env_runners: EnvRunnerSettings = EnvRunnerSettings()
    retrieval: RetrievalSettings = RetrievalSettings()
    sft: SFTSettings = SFTSettings()
    training: TrainingSettings = TrainingSettings()
    learners: LearnerSettings = LearnerSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpointing: CheckpointingSettings = CheckpointingSettings()
    debugging: DebuggingSettings = DebuggingSettings()

    def to_yaml(self) -> str:
        """Every section and key with its value."""
        return yaml.safe_dump(self.model_dump(), sort_keys=False, allow_unicode=True)


class AlgorithmConfig:
    """Builder of a ``RunConfig``, one method a section, each returning ``self`` as in RLlib."""

    def __init__(self, sections: dict[str, dict[str, Any]] | None = None) -> None:
        """Start from the defaults, or from ``{section: {key: value}}``."""
        self._sections: dict[str, dict[str, Any]] = {}
        for section, settings in (sections or {}).items():
            self._update(section, settings)

    @classmethod
    def from_recipe(cls, name_or_path: str) -> Self:
        """Load a recipe of the project by name, or a YAML file by path."""
        if Path(name_or_path).suffix in (".yaml", ".yml"):
            instead = f"give an existing YAML file or one of: {', '.join(recipe_names())}"
            sections = read_yaml_file(Path(name_or_path), instead)
        elif name_or_path in recipe_names():
            sections = parse_yaml(_recipe_text(name_or_path), name_or_path)
        else:
            raise ConfigError(f"unknown recipe {name_or_path[:80]!r}{nearest(name_or_path, recipe_names())}")
        sections = {} if sections is None else sections
        if not isinstance(sections, dict) or not all(isinstance(keys, dict) for keys in sections.values()):
            raise ConfigError(f"{name_or_path}: expected sections of keys, such as 'training: {{lr: 1e-6}}'")
        return cls(sections)

    def override(self, assignments: list[str]) -> Self:
        """Apply ``section.key=value`` strings, values read as YAML."""
        for assignment in assignments:
            name, equals, value = assignment.partition("=")
            section, dot, key = name.partition(".")
            if not equals or not dot:
                raise ConfigError(f"got {assignment!r}, expected section.key=value, such as training.lr=1e-4")
            self._update(section, {key: parse_yaml(value, name) if value else ""})
        return self

    def _update(self, section: str, settings: dict[str, Any]) -> Self:
        known = RunConfig.model_fields
        if section not in known:
            raise ConfigError(f"unknown section {section!r}{nearest(str(section), list(known))}")
        section_class = known[section].annotation
        assert section_class is not None
        keys = list(section_class.model_fields)
        for key, value in settings.items():
            if key not in keys:
                raise ConfigError(f"unknown key {section}.{key}{nearest(str(key), keys)}")
            check_value(f"{section}.{key}", value)
        self._sections[section] = self._sections.get(section, {}) | settings
        return self

    def environment(self, **settings: Any) -> Self:
        """Set keys of ``EnvironmentSettings``."""
        return self._update("environment", settings)

    def policy(self, **settings: Any) -> Self:
        """Set keys of ``PolicySettings``."""
        return self._update("policy", settings)

    def env_runners(self, **settings: Any) -> Self:
        """Set keys of ``EnvRunnerSettings``."""
        return self._update("env_runners", settings)

    def retrieval(self, **settings: Any) -> Self:
        """Set keys of ``RetrievalSettings``."""
        return self._update("retrieval", settings)

    def sft(self, **settings: Any) -> Self:
        """Set keys of ``SFTSettings``."""
        return self._update("sft", settings)

    def training(self, **settings: Any) -> Self:
        """Set keys of ``TrainingSettings``."""
        return self._update("training", settings)

    def learners(self, **settings: Any) -> Self:
        """Set keys of ``LearnerSettings``."""
        return self._update("learners", settings)

    def evaluation(self, **settings: Any) -> Self:
        """Set keys of ``EvaluationSettings``."""
        return self._update("evaluation", settings)

    def checkpointing(self, **settings: Any) -> Self:
        """Set keys of ``CheckpointingSettings``."""
        return self._update("checkpointing", settings)

    def debugging(self, **settings: Any) -> Self:
        """Set keys of ``DebuggingSettings``."""
        return self._update("debugging", settings)

    def freeze(self) -> RunConfig:
        """Validate everything and return the resolved configuration."""
        try:
            config = RunConfig.model_validate(self._sections)
        except ValidationError as error:
            name, found, problem = first_problem(error)
            raise ConfigError(f"{name}: got {found!r}; {problem}") from error
        check_settings(config)
        return config

    def build_algo(self, run_dir: str | Path) -> Algorithm:
        """Validate, make ``run_dir`` the directory of a new run, and build the algorithm that writes into it."""
        from ragr1_actors.algorithm import Algorithm  # pulls in Ray and torch

        return Algorithm.create(self.freeze(), Path(run_dir))


def recipe_names() -> list[str]:
    """Names of the recipes that ship with the project."""
    files = resources.files("ragr1_actors.recipes").iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def recipe_descriptions() -> dict[str, str]:
    """The first line of each recipe's opening comment, by the recipe's name."""
    return {name: _recipe_text(name).partition("\n")[0].lstrip("# ") for name in recipe_names()}


def _recipe_text(name: str) -> str:
    return resources.files("ragr1_actors.recipes").joinpath(f"{name}.yaml").read_text(encoding="utf-8")
