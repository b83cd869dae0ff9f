"""Subject of ``ragr1 evaluate``: a policy, the settings with which it acts, and the method.

::

    run, or a checkpoint or policy in it
                                   its policy, and the settings that the run stored
    model folder --recipe R        any Hugging Face folder or hub name, and the settings of a recipe
    --endpoint URL --model NAME    a hosted model, and the settings of a run, of a recipe, or the defaults
    --baseline B                   changes the settings of any of these: no search, one search, one query per turn

Imports neither torch nor Ray, so that the command line reports a wrong request within a second.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cluster.storage import is_uri
from envs.base import read_options, search_options
from envs.options import SearchOptions
from envs.tasks.paths import NamedTasks
from ragr1_actors.core.config import EncoderActors, EndpointSettings, RunConfig, SamplerConfig
from ragr1_actors.core.disk.files import INDEX
from ragr1_actors.core.errors import ConfigError, DataError, shortened
from ragr1_actors.core.resolve import Sections, override, read_recipe, resolve, split_assignment
from ragr1_actors.evaluation.baselines import DIRECT_PROMPT, RAG_PROMPT
from ragr1_actors.runs.run_directory import CONFIG_FILE, find_checkpoint, open_run_directory, run_of_policy
from ragr1_actors.runs.storage.store import RunStore
from retrieval.base import needs_index

Baseline = Literal["direct", "rag", "single-query"]
BASELINES: dict[Baseline, dict[str, Any]] = {
    "direct": {"options": {"mode": "direct"}, "prompt": DIRECT_PROMPT, "max_turns": 1},
    "rag": {"options": {"mode": "rag"}, "prompt": RAG_PROMPT, "max_turns": 1},
    "single-query": {"options": {"max_queries_per_turn": 1, "query_format": "single"}},
}
"""Changes of each baseline in the section ``environment``; options that they do not name stay."""
NO_RETRIEVER = "ragr1_actors.evaluation.baselines:NoRetriever"
ENDPOINT_CONCURRENCY = 8
"""Number of requests at the same time, unless ``--concurrency`` sets it: most endpoints limit their rate."""
_OF_TRAINING = {"sft", "training", "learners", "checkpointing"}
_NOT_IN_DIGEST = {"options", "tasks", "eval_tasks", "reward"}
_SHAPES_ANSWERS = {
    "env_runners": ("engine", "max_context_tokens", "max_new_tokens_per_turn"),
    "retrieval": ("type", "options", "encoder", "reranker"),
    "policy": ("dtype",),
}


@dataclass(frozen=True)
class EvalRequest:
    """Request of a person for an evaluation."""

    source: str = ""
    """Run, checkpoint, or with ``recipe`` a model folder or hub name; may be empty with ``endpoint``."""
    recipe: str = ""
    """Name or path of a recipe; empty takes the run's settings, or with ``endpoint`` alone the defaults."""
    overrides: tuple[str, ...] = ()
    """Assignments ``section.key=value`` for run or recipe."""
    index: Path | None = None
    """Index; None takes the run's or the recipe's. Another one brings its encoder, unless ``overrides`` name one."""
    prompt: Path | None = None
    """Text file that replaces ``environment.prompt``."""
    baseline: Baseline | None = None
    endpoint: EndpointSettings | None = None
    concurrency: int | None = None
    """Trajectories at the same time; None: ``env_runners.max_concurrent_trajectories``, or 8 with an endpoint."""
    tasks: NamedTasks | None = None
    """Files or names of published sets; None takes the tasks that the run held out."""
    data: Path | None = None
    """Folder of the published sets; None takes the hub."""
    num_tasks: int | None = None
    """Number of the first tasks that are used; None uses all."""
    num_alone: int = 0
    """Number of the first tasks that are also answered one at a time, for their latency."""
    against: Path | None = None
    """Scores of another policy, which must have one of these tasks."""


@dataclass(frozen=True)
class EvaluatedPolicy:
    """Policy that is ready to be loaded."""

    name: str
    """Name for people and for files of scores."""
    folder: str
    """Hugging Face folder or hub name; empty for an endpoint."""
    config: SamplerConfig
    """Configuration with which it acts, in this process."""
    run: RunConfig
    """Settings of the run or recipe; they name its held-out tasks and its training tasks, which its own seed drew."""
    store: RunStore | None
    """Store of the run; None without a run."""
    method: str
    temperature: float = 0.0
    """Sampling temperature; 0 is greedy."""

    @property
    def decoding(self) -> str:
        """Decoding: ``greedy``, or ``temperature 0.7, top_p 1, seed 0``."""
        if not self.temperature:
            return "greedy"
        config = self.config
        return f"temperature {self.temperature:g}, top_p {config.env_runners.top_p:g}, seed {config.debugging.seed}"

    @property
    def index(self) -> str:
        """Index, or the type of a retriever without an index."""
        retrieval = self.config.retrieval
        return retrieval.index if needs_index(retrieval.type) else retrieval.type

    def digest(self) -> str:
        """Return 16 hexadecimal characters over the settings that affect answers."""
        sections = self.config.model_dump(mode="json")
        options = search_options(self.config.environment).model_dump(mode="json")
        mode = options.pop("mode")
        environment = sections["environment"] | options
        if mode != "search":  # the last release wrote digests without the mode search
            environment["env"] = mode
        shaping: dict[str, Any] = {
            name: {key: sections[name][key] for key in keys} for name, keys in _SHAPES_ANSWERS.items()
        }
        shaping["environment"] = {key: value for key, value in environment.items() if key not in _NOT_IN_DIGEST}
        if (chat_format := sections["policy"]["chat_format"]) != "auto":  # whose digest is as in the last release
            shaping["policy"]["chat_format"] = chat_format
        if template := sections["policy"]["template_options"]:
            shaping["policy"]["template_options"] = template
        shaping["options"] = sections["env_runners"]["engine_options"]
        if not isinstance(read_options(self.config.environment), SearchOptions) and sections["environment"]["options"]:
            shaping["own_options"] = sections["environment"]["options"]
        return hashlib.sha256(json.dumps(shaping, sort_keys=True).encode()).hexdigest()[:16]


def open_policy(request: EvalRequest) -> EvaluatedPolicy:
    """Return the policy that ``request`` names; nothing heavy is loaded and no endpoint is asked.

    Raises:
        UserError: there is no such run, folder, recipe or prompt, two parts of the request do not fit, or an override
            has no effect.
    """
    store, folder = _find(request)
    sections = _sections(request, store)
    run, own_seed = resolve(override(sections, request.overrides)), resolve(sections).debugging.seed
    changes = _changes(request, run)
    searches_index = request.index is not None or (store is not None and needs_index(run.retrieval.type))
    _check_overrides(request, run, changes | {"policy": {"model": folder}}, searches_index)
    retrieval = changes["retrieval"]
    if request.baseline == "direct":
        retrieval |= {
            "type": NO_RETRIEVER,
            "options": {},
            "index": "",
            "autoscaling": None,
            "encoders": EncoderActors(),
        }
    elif searches_index:
        retrieval["index"] = str(request.index or index_of(run, store))
        if request.index is not None and "retrieval.encoder" not in _named(request):
            retrieval["encoder"] = ""  # the index's encoder: the settings may name another
    changes["policy"] = {"model": folder} if folder and store is None else {}
    endpoint = request.endpoint
    name = f"{endpoint.model} at {endpoint.url}" if endpoint else folder
    temperature = run.env_runners.temperature if "env_runners.temperature" in _named(request) else 0.0
    config = sampler_config(run, **changes)
    split = run.model_copy(update={"debugging": run.debugging.model_copy(update={"seed": own_seed})})
    return EvaluatedPolicy(name, folder, config, split, store, request.baseline or "search", temperature)


def _find(request: EvalRequest) -> tuple[RunStore | None, str]:
    """Return the run, if the settings come from one, and the folder of the policy; empty for an endpoint."""
    source, recipe = request.source, request.recipe
    if request.endpoint is not None:
        if source and recipe:
            raise ConfigError(f"got {source} and --recipe {recipe} beside --endpoint; name one, whose settings it gets")
        return (find_checkpoint(source)[0] if source else None), ""
    if not source:
        raise ConfigError("nothing to evaluate: name a run, a checkpoint, a model folder with --recipe, or --endpoint")
    path = Path(source)
    is_model = not is_uri(source) and _exists(path / "config.json")
    if not recipe:
        if is_model and run_of_policy(path) is None:
            raise ConfigError(
                f"{source} is the folder of a model: name its prompt and formats with --recipe, such as search_r1_7b, "
                "ragr1_sq_7b or ragr1_mq_7b for the published checkpoints"
            )
        store, policy_dir = find_checkpoint(source)
        return store, str(policy_dir)
    if is_model:
        return None, str(path.absolute())
    if is_uri(source) or _exists(path / CONFIG_FILE) or path.is_dir():
        return None, str(find_checkpoint(source)[1].absolute())
    if source[0] in "/.~" or source.count("/") != 1:  # no hub name looks like these
        raise DataError(
            f"there is no folder {source}; give a run, a model folder, or a hub name such as Qwen/Qwen2.5-7B"
        )
    return None, source


def _exists(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # for example the path is too long
        return False


def _sections(request: EvalRequest, store: RunStore | None) -> Sections:
    if store is not None:
        return open_run_directory(store).model_dump()
    return read_recipe(request.recipe) if request.recipe else {}


def _changes(request: EvalRequest, run: RunConfig) -> dict[str, dict[str, Any]]:
    """Return the request's changes of the settings, by section."""
    environment: dict[str, Any] = dict(BASELINES[request.baseline]) if request.baseline else {}
    if "options" in environment:
        environment["options"] = run.environment.options | environment["options"]
    named = _named(request)
    if request.prompt is not None:
        environment["prompt"] = _read_prompt(request.prompt)
    elif "environment.prompt" in named:
        environment["prompt"] = run.environment.prompt
    runners: dict[str, Any] = {"num_env_runners": 0}
    if request.concurrency is not None:
        runners["max_concurrent_trajectories"] = request.concurrency
    if request.endpoint is not None:
        if "env_runners.max_concurrent_trajectories" not in named:
            runners.setdefault("max_concurrent_trajectories", ENDPOINT_CONCURRENCY)
        endpoint = request.endpoint
        own = "env_runners.engine_options" in named
        runners["engine"] = "endpoint"
        runners["engine_options"] = {
            **(run.env_runners.engine_options if own else {}),  # the options of a recipe are for its engine
            **endpoint.model_dump(include={"url", "model", "key_env", "body"}),
        }
        runners["num_gpus_per_env_runner"] = 0
    return {"environment": environment, "env_runners": runners, "retrieval": {"num_retrievers": 0}}


def _named(request: EvalRequest) -> set[str]:
    """Return the keys that were overridden, such as ``env_runners.temperature``."""
    return {split_assignment(assignment)[0] for assignment in request.overrides}


def _check_overrides(
    request: EvalRequest, run: RunConfig, changes: dict[str, dict[str, Any]], searches_index: bool
) -> None:
    """Refuse an override that would have no effect.

    Two kinds are allowed: ``--baseline`` and ``--prompt`` replace overrides of the environment, so that both sides of a
    comparison take the same ones, and ``engine_options`` are merged with the endpoint's.
    """
    named = _named(request)
    for name in named - {"env_runners.engine_options"}:
        section, _, key = name.partition(".")
        if section == "evaluation":
            raise ConfigError(f"got {name}, which is the run's; take --num-tasks")
        if section in _OF_TRAINING or name.startswith("retrieval.encoders"):
            raise ConfigError(f"got {name}, which has no effect on an evaluation; leave it out")
        if section == "environment" or key not in changes.get(section, {}):
            continue
        given, taken = getattr(getattr(run, section), key), changes[section][key]
        if given != taken:
            raise ConfigError(f"got {name}={shortened(str(given))}, which evaluate replaces by {taken!r}; leave it out")
    if "env_runners.top_p" in named and "env_runners.temperature" not in named:
        raise ConfigError(
            "got env_runners.top_p, which has no effect on greedy answers; set env_runners.temperature too, or leave "
            "it out"
        )
    if searches_index and request.baseline != "direct" and "retrieval.corpus" in named:
        corpus = shortened(run.retrieval.corpus)
        raise ConfigError(
            f"got retrieval.corpus={corpus}, which has no effect where an index is searched; make one of it, ragr1 "
            f"index build --corpus {corpus} --out DIR, and name it with --index DIR"
        )


def _read_prompt(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--prompt: {path} cannot be read as UTF-8 text; name a text file") from error
    if "{question}" not in text:
        raise DataError(f"--prompt: {path} has no {{question}}, where the question of a task is put; write it in")
    return text.rstrip("\n")


def index_of(run: RunConfig, store: RunStore | None) -> Path:
    """Return the index of a run: the one that it named, if this machine has it, else the one in its store."""
    named = run.retrieval.index
    assert store is not None, "index_of() without a run"
    if not named or (not Path(named).is_dir() and store.bring(INDEX).is_dir()):
        return store.bring(INDEX)
    return Path(named)


def sampler_config(run: RunConfig, **changes: dict[str, Any]) -> SamplerConfig:
    """Return the part of a configuration that samples, with ``changes`` by section."""
    sections = {name: getattr(run, name) for name in SamplerConfig.model_fields}
    return SamplerConfig(**sections | {name: sections[name].model_copy(update=keys) for name, keys in changes.items()})
