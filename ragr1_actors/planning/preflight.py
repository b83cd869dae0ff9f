"""Checks before a run directory is made: names in a configuration, files that it reads, services, and the room.

Without ``learners.micro_batch_tokens`` a row gets the largest budget of tokens for which there is room.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from cluster.storage import is_uri, without_secrets
from envs.base import ENVS, TextEnv, read_options
from envs.checker import Check, problem_of, stand_in_context
from envs.measures import MEASURES, REWARDS, Reward
from envs.options import ToolOptions
from envs.sources import SOURCES, TaskSources, TeacherSource, is_source
from envs.tasks.curriculum import (
    CURRICULA,
    Curriculum,
    Stats,
    TaskStats,
    all_skipped,
    checked_order,
    checked_skip,
    make_curriculum,
)
from envs.tools.base import check_retriever, make_tools
from envs.tools.env import ToolEnv
from envs.tools.mcp import all_tools, list_tools
from learners.options import LEARNERS, learner_options
from ragr1_actors.core.config import (
    RETRIEVAL_TYPES,
    EnvironmentSettings,
    EnvRunnerSettings,
    RunConfig,
    SamplerConfig,
    TaskNames,
)
from ragr1_actors.core.disk.json_files import read_json
from ragr1_actors.core.errors import ConfigError, UserError, nearest, one_line
from ragr1_actors.core.models.model_files import check_code, check_files, load_model
from ragr1_actors.core.resolve import CORRECT, MIXTURE, load_object, named, named_folder, path_of, place_of
from ragr1_actors.core.types import Message, Task
from ragr1_actors.planning.fit import C, changed, reserved_gpus
from ragr1_actors.planning.machine import Machine, this_machine
from ragr1_actors.planning.plan import corpus_of, count_passages, learner_fits, make_plan
from ragr1_actors.planning.tiny_policy import POLICIES, policy_maker
from ragr1_actors.rollout.chat_format import chat_format_of
from ragr1_actors.rollout.engines.base import ENGINES, Engine, load_tokenizer
from ragr1_actors.rollout.engines.chat_client import ChatClient, open_models
from ragr1_actors.rollout.gateway.agents import check_agent
from ragr1_actors.rollout.groups import STRATEGIES, RolloutStrategy, make_strategy
from ragr1_actors.runs.report import EvalResult
from ragr1_actors.runs.run_directory import stored_tools
from ragr1_actors.runs.storage.store import RunStore
from retrieval.base import RETRIEVERS, SHARED_KEYS, ProbedRetriever, needs_index
from retrieval.local import named_index, open_retriever, retriever_class

logger = logging.getLogger(__name__)
_ENGINE_METHODS = ("generate", "release", "update_weights", "check", "close")


def check_names(config: RunConfig, *, has_index: bool = False, has_policy: bool = False) -> None:
    """Check every name of a run's configuration. The libraries behind known names are not imported.

    ``has_index`` means that the run has made its index and does not need the corpus; ``has_policy``, that it has the
    policy of its start.

    Raises:
        ConfigError: a name is unknown; the message has the key, what was got and what was expected.
        DataError: ``retrieval.index`` names a directory without an index, or an index of another encoder; or a file of
            tasks or demonstrations is damaged.
    """
    environment, demonstrations = config.environment, config.sft.demonstrations
    check_classes(config)
    _check_tasks("environment.tasks", environment.tasks, environment)
    if environment.eval_tasks:
        _check_tasks("environment.eval_tasks", environment.eval_tasks, environment)
    check_sampler(config, has_index=has_index, has_policy=has_policy)
    if config.env_runners.engine == "endpoint":
        raise ConfigError(
            "env_runners.engine: got endpoint, which has neither token ids nor log-probs to train on; set it to vllm "
            "or transformers, and evaluate the endpoint with `ragr1 evaluate --endpoint URL --model NAME`"
        )
    check_curriculum(environment)
    _check_best_metric(config)
    if _is_file("sft.demonstrations", demonstrations, "a file of demonstrations", CORRECT, MIXTURE):
        TeacherSource(environment, demonstrations)


def _check_best_metric(config: RunConfig) -> None:
    """Raise a ``ConfigError`` if no evaluation has the metric by which checkpoints are compared."""
    metric, environment = config.checkpointing.best_metric, config.environment
    measures = check_environment(environment.env).measures if environment.agent is None else {}
    own = [name for name in measures if name not in MEASURES]
    known = [*(one.name for one in fields(EvalResult) if one.name in MEASURES), *own]
    if metric and metric not in known:
        raise ConfigError(f"checkpointing.best_metric: got {metric!r}{nearest(metric, known)}")


def check_room(config: RunConfig, run_dir: Path) -> list[str]:
    """Compare the needs of a run with this machine, by ``ragr1 plan``; return warnings about small reserves.

    A run that reserves more GPUs than this machine has runs on a cluster, and is not checked.

    Raises:
        ConfigError: a memory is too small, or a search would exceed its timeout.
    """
    machine = this_machine(run_dir)
    try:
        plan = make_plan(config, machine, count_passages(config))
    except ConfigError as error:
        return [f"memory and time are not checked: {error}"]
    if plan.num_gpus > machine.num_gpus:
        return []
    impossible = [need.problem for need in plan.needs if need.is_impossible]
    if plan.times.is_too_slow:
        impossible.append(plan.times.problem)
    if impossible:
        raise ConfigError(f"the run does not fit this machine: {'; '.join(impossible)}")
    return plan.problems


def check_sampler(config: SamplerConfig, *, has_index: bool = False, has_policy: bool = False) -> None:
    """Check what ``RolloutFleets`` need: environment, reward, policy, retrieval; errors as of ``check_names``."""
    check_classes(config)
    if config.env_runners.engine == "vllm" and find_spec("vllm") is None:
        raise ConfigError("env_runners.engine: got vllm, which is not installed; pip install -e '.[gpu]', on GPUs")
    policy_maker(config.policy)
    model = config.policy.model
    if not has_policy and (policy := _model_folder("policy.model", model, "Qwen/Qwen2.5-7B", *POLICIES)) is not None:
        check_code(policy, trusted=config.policy.trust_remote_code)
        _check_model(policy, trusted=config.policy.trust_remote_code)
        check_tokenizer(config)
    retrieval = config.retrieval
    if retrieval.reranker and needs_index(retrieval.type):
        _model_folder("retrieval.reranker", retrieval.reranker, "cross-encoder/ms-marco-MiniLM-L6-v2")
    run = str(retrieval.options.get("run", ""))
    if retrieval.type == "replay" and is_uri(run) and "@" in run:
        raise ConfigError(
            f"retrieval.options: the URI {without_secrets(run)} has credentials, which would be stored with the run; "
            "put them into the environment"
        )
    if not needs_index(retrieval.type) and (retrieval.autoscaling or retrieval.encoders.autoscaling):
        raise ConfigError(
            f"retrieval.autoscaling: got settings with retrieval.type={retrieval.type}, which has no actors to scale; "
            "leave autoscaling and encoders.autoscaling empty"
        )
    if retrieval.type in SHARED_KEYS:  # it reads its options when it is made
        shared = {key: getattr(retrieval.requests, key) for key in SHARED_KEYS[retrieval.type]}
        load_object(retrieval.type, RETRIEVERS)(shared | retrieval.options)
    elif needs_index(retrieval.type) and retrieval.index:
        named_index(retrieval)
    elif needs_index(retrieval.type) and not has_index:
        expected = "a corpus file, or retrieval.index=FOLDER of an index that is built"
        if not retrieval.corpus or is_source(retrieval.corpus):
            corpus_of(config)
        else:
            _is_file("retrieval.corpus", retrieval.corpus, expected, *SOURCES)


def check_classes(config: SamplerConfig) -> None:
    """Check the names of classes and functions, custom ones too; ``ConfigError`` for one that cannot be used."""
    check_environment(config.environment.env)
    read_options(config.environment)
    _load("environment.reward", config.environment.reward, REWARDS)
    Reward(config.environment)
    open_models(config.environment.models)
    for name, settings in config.environment.models.items():
        key = f"environment.models.{name}"
        if settings.engine == "endpoint":
            raise ConfigError(f"{key}.engine: got endpoint; leave it empty, and give the address as {key}.url")
        if settings.engine:
            _check_engine(f"{key}.engine", settings.engine)
            _model_folder(f"{key}.model", settings.model, "Qwen/Qwen2.5-7B-Instruct")
    _check_engine("env_runners.engine", config.env_runners.engine)
    check_strategy(config.env_runners)
    _check_retrieval_type(config.retrieval.type)
    if issubclass(check_environment(config.environment.env), ToolEnv):
        make_tools(config.environment.tools, stand_in_context(config.environment), ToolOptions())
        check_retriever(config.environment.tools, retriever_class(config.retrieval.type))
    elif config.environment.mcp:
        raise ConfigError("environment.mcp: only environment.env=tools offers its tools; set it, or leave mcp out")
    check_agent(config)
    if isinstance(config, RunConfig):
        _check_learner(config)


def check_environment(name: str) -> type[TextEnv]:
    """Return the environment's class; ``ConfigError`` if it is no ``TextEnv``, lacks methods or takes other input."""
    found: type[TextEnv] = _load("environment.env", name, ENVS)
    _check_class("environment.env", name, found, TextEnv, "(settings, context)", 2)
    return found


def check_strategy(settings: EnvRunnerSettings) -> RolloutStrategy:
    """Return the strategy; ``ConfigError`` if it is no ``RolloutStrategy``, takes other input, or cannot be made."""
    key, name = "env_runners.strategy", settings.strategy
    _check_class(key, name, _load(key, name, STRATEGIES), RolloutStrategy, "(options)", 1)
    strategy = make_strategy(settings)
    _check_signature(key, f"{name}.sample", strategy.sample, "(request, play)", 2)
    if not inspect.iscoroutinefunction(strategy.sample):
        raise ConfigError(f"{key}: {named(strategy.sample)} is plain, expected async def")
    return strategy


def check_curriculum(environment: EnvironmentSettings) -> Curriculum:
    """Return the curriculum; ``ConfigError`` if it is no ``Curriculum``, takes other input, or cannot be made."""
    key, name = "environment.curriculum", environment.curriculum
    _check_class(key, name, _load(key, name, CURRICULA), Curriculum, "(options)", 1)
    curriculum = make_curriculum(environment)
    _check_signature(key, f"{name}.order", curriculum.order, "(rest, stats, epoch, rng)", 4)
    _check_signature(key, f"{name}.skip", curriculum.skip, "(task, stats)", 2)
    return curriculum


def try_curriculum(curriculum: Curriculum) -> list[Check]:
    """Ask for the order and the skips of made-up tasks, before any was trained and after."""
    tasks = [Task(f"check/{number}", "?", ("Riga",), meta={"pass_rate": number / 4}) for number in range(5)]
    trained = {task.task_id: TaskStats(4, number, float(number)) for number, task in enumerate(tasks)}

    def ask(stats: Stats) -> None:
        checked_order(curriculum, tasks, stats, 0, np.random.default_rng(0))
        skipped = [checked_skip(curriculum, task, stats) for task in tasks]
        if all(skipped) and not stats:
            raise all_skipped(curriculum, len(tasks), 0)

    cases: dict[str, Stats] = {"before anything was trained": {}, "of tasks that were trained": trained}
    return [
        Check(f"order and skip {when}", problem_of(partial(ask, MappingProxyType(stats)), curriculum))
        for when, stats in cases.items()
    ]


def _check_engine(key: str, name: str) -> None:
    if name not in ENGINES:
        engine = _load(key, name, ENGINES)
        expected = f"a class with the methods {', '.join(_ENGINE_METHODS)}, see {Engine.__module__}"
        _check_methods(key, name, engine, _ENGINE_METHODS, expected)
        _check_signature(key, name, engine, "(policy_dir, tokenizer, settings)", 3)


def _check_learner(config: RunConfig) -> None:
    key, name = "training.algorithm", config.training.algorithm
    if name == "sft":
        raise ConfigError(f"{key}: got sft, which is stage 1; set sft.num_steps, and name an algorithm of stage 2 here")
    if name not in LEARNERS:
        learner = _load(key, name, {known: LEARNERS[known] for known in LEARNERS if known != "sft"})
        from learners.learner import Learner  # imports torch and transformers: only to check a custom class

        _check_class(key, name, learner, Learner, "(config, policy_dir, rank, world_size)", 4)
    learner_options(config.training).check(config)


def _check_retrieval_type(name: str) -> None:
    if ":" in name:
        expected = "a class with the method async search(queries, k), see retrieval.base.Retriever"
        _check_methods("retrieval.type", name, _load("retrieval.type", name, {}), ("search",), expected)
    elif name not in RETRIEVAL_TYPES:
        raise ConfigError(
            f"retrieval.type: got {name!r}, expected one of {', '.join(RETRIEVAL_TYPES)} or my_module:MyRetriever"
        )


def _model_folder(key: str, model: str, example: str, *words: str) -> Path | None:
    """Return the folder of a model; None for a word or a hub name. ``ConfigError`` for any other text."""
    path = path_of(model, *words)
    if path is None:
        return None
    kinds = [*words, "a Hugging Face folder (config.json, weights and tokenizer) or a hub name such as " + example]
    expected = ", ".join(kinds)
    try:
        folder, has_config = named_folder(model), (path / "config.json").is_file()
        file = next((found for found in (path, path.parent) if found.is_file()), None)
    except OSError as error:
        raise ConfigError(f"{key}: {model[:80]!r}: {error.strerror}; expected {expected}") from error
    if file is not None:
        raise ConfigError(f"{key}: {file} is a file, expected {expected}")
    if folder is not None and not has_config:
        raise ConfigError(f"{key}: the folder {model} holds no config.json, expected {expected}")
    if folder is None and (not model or model[0] in "/.~" or model.count("/") > 1):  # no hub name looks like these
        raise ConfigError(f"{key}: there is no folder {model!r}, expected {expected}")
    return folder


def _check_model(folder: Path, *, trusted: bool) -> None:
    """Refuse a damaged folder here, before every actor loads it; its weights are not read."""
    check_files(folder)
    is_quantized = "quantization_config" in read_json(Path(folder, "config.json"))
    if not trusted and not is_quantized:  # their packages may be on the actors' nodes only
        load_model(folder, device_map="meta", trust_remote_code=False)


def check_tokenizer(config: SamplerConfig) -> None:
    """Check the tokenizer and the chat template of a policy's folder with the recipe's prompt.

    A token that no text, prompt or end of a turn has, such as an unused pad, may be beyond the model's embeddings: a
    warning names it.

    Raises:
        ConfigError: the tokenizer cannot be used, the template refuses the prompt or leaves it out, or the embeddings
            lack a token.
    """
    folder = named_folder(config.policy.model)
    if folder is None or config.policy.trust_remote_code:  # the packages of its code may be on the actors' nodes only
        return
    tokenizer = load_tokenizer(folder, config.policy)
    chat_format_of(config, tokenizer)
    try:
        prompt_ids = tokenizer.prompt_ids([Message("user", config.environment.prompt)])
    except ConfigError:
        if config.environment.env in ENVS:
            raise
        prompt_ids = []  # maybe the template wants a prompt of other roles
    other = [Message("user", f"{config.environment.prompt} Riga")]
    if config.environment.env in ENVS and prompt_ids == tokenizer.prompt_ids(other):
        raise ConfigError(
            f"{folder}: its chat template leaves out what the user says, as one for a list of texts and images does; "
            "have it write message['content'], or take another model"
        )
    model = read_json(folder / "config.json")
    num_embeddings = model.get("vocab_size", model.get("text_config", {}).get("vocab_size"))
    if not isinstance(num_embeddings, int):
        return
    needed, unused = tokenizer.lacking(num_embeddings, prompt_ids)
    if needed:
        raise ConfigError(
            f"{folder}: the model has {num_embeddings:,} embeddings, and its tokenizer {len(needed):,} tokens beyond "
            f"them that may occur, such as {needed[0]!r}; resize the embeddings (resize_token_embeddings of "
            "transformers), or take the model's own tokenizer"
        )
    if unused:
        logger.warning(
            "%s: the model's %s embeddings lack %s tokens of its tokenizer, such as %r; nothing here uses them",
            folder,
            f"{num_embeddings:,}",
            f"{len(unused):,}",
            unused[0],
        )


def _check_tasks(key: str, named: TaskNames, environment: EnvironmentSettings) -> None:
    """Raise a ``ConfigError`` that begins with ``key`` if a source or file that it names does not exist.

    All tasks are read once: ``DataError`` if a file is damaged, or a source raises or returns other objects.
    """
    is_eval = key.endswith("eval_tasks")
    try:
        sources = TaskSources.open(named, environment, whole=is_eval)
        for files in sources.files:
            files.check_files()
    except UserError as error:
        raise ConfigError(f"{key}: {error}") from error
    if not is_eval:
        sources.tasks("train", seed=0)
    sources.tasks("eval", seed=0)


def _is_file(key: str, value: str, expected: str, *words: str) -> bool:
    """Return whether a key has the path of a file, not one of its words; ``ConfigError`` if it is neither."""
    path = path_of(value, *words)
    if path is None:
        return False
    expected = f"expected {' or '.join([*filter(None, [', '.join(words)]), expected])}"
    if not value:
        raise ConfigError(f"{key}: got nothing, {expected}")
    try:
        is_file = path.is_file()
    except OSError as error:
        raise ConfigError(f"{key}: {value[:80]!r}: {error.strerror}; {expected}") from error
    if not is_file:
        raise ConfigError(f"{key}: there is no file {value}, {expected}")
    return True


def _load(key: str, name: str, known: Mapping[str, Any]) -> Any:
    try:
        return load_object(name, known)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def _check_class(key: str, name: str, found: Any, base: type, arguments: str, count: int) -> None:
    if not isinstance(found, type) or not issubclass(found, base):
        raise _wrong_kind(key, name, found, f"a subclass of {base.__name__}")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(f"{key}: {name} lacks the methods {', '.join(missing)}; write them{_at(found)}")
    _check_signature(key, name, found, arguments, count)


def _check_methods(key: str, name: str, found: Any, methods: Sequence[str], expected: str) -> None:
    if not isinstance(found, type):
        raise _wrong_kind(key, name, found, expected)
    missing = [method for method in methods if not callable(inspect.getattr_static(found, method, None))]
    if missing:
        raise ConfigError(f"{key}: {name} has no {', '.join(missing)}; expected {expected}{_at(found)}")


def _check_signature(key: str, name: str, function: Callable[..., Any], arguments: str, count: int) -> None:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError as error:
        advice = f"let it take these{_at(function)}"
        raise ConfigError(f"{key}: {name} cannot be called with {arguments}: {error}; {advice}") from error
    except ValueError:  # written in C, without a signature
        return


def _wrong_kind(key: str, name: str, found: Any, expected: str) -> ConfigError:
    if isinstance(found, type):
        kind = f"the class {found.__name__}"
    else:
        kind = "a function" if inspect.isroutine(found) else f"a {type(found).__name__}"
    return ConfigError(f"{key}: {name} is {kind}, expected {expected}{_at(found)}")


def _at(written: Any) -> str:
    """Return the place of a user's class or function, as the end of a message."""
    place = place_of(written)
    return place and f" ({place})"


def check_services(config: C, store: RunStore | None = None) -> C:
    """Ask each model of ``environment.models`` at an endpoint a question, and let the retriever ask its service one.

    The retriever does so if it is a ``ProbedRetriever``. Each server of ``environment.mcp`` is asked for its tools. The
    returned configuration has these tools, or the tools at the start of the run in ``store``.

    Raises:
        ConfigError: a service does not answer; the message has its address and the error.
    """
    for model in open_models(config.environment.models).values():
        if isinstance(model, ChatClient):
            asyncio.run(model.probe())
    _check_retriever(config)
    return _with_tools(config, store) if config.environment.mcp else config


def _with_tools(config: C, store: RunStore | None) -> C:
    stored, servers = {} if store is None else stored_tools(store), {}
    for name, server in config.environment.mcp.items():
        known = stored.get(name)
        listed = asyncio.run(list_tools(name, server if known is None else server.with_tools(known)))
        servers[name] = server.with_tools(listed if known is None else known)
    config = changed(config, "environment", {"mcp": servers})
    # raises if two have the same name
    all_tools(config.environment, stand_in_context(config.environment), ToolOptions())
    return config


def _check_retriever(config: SamplerConfig) -> None:
    retrieval = config.retrieval
    if needs_index(retrieval.type):
        return
    found: object = load_object(retrieval.type, RETRIEVERS)
    if not isinstance(found, type) or not issubclass(found, ProbedRetriever):
        return
    try:
        retriever = open_retriever(None, retrieval)
        assert isinstance(retriever, ProbedRetriever)
        asyncio.run(retriever.probe())
    except UserError:
        raise
    except Exception as error:  # a user's retriever may raise anything
        raise ConfigError(
            f"retrieval.type={retrieval.type}: {one_line(error)}; start the service, or correct retrieval.options"
        ) from error


SIZES = (16384, 8192, 4096, 2048, 1024)
"""Candidates in tokens. Larger rows are not faster: the matrices are large enough from about 4,096 tokens on."""


def fit_micro_batch(config: RunConfig, run_dir: Path) -> RunConfig:
    """Return ``choose_micro_batch`` for this machine, or ``config`` itself if there is no choice.

    There is no choice on a cluster, or if the sizes of a model are unknown, which ``check_room`` reports.
    """
    machine = this_machine(run_dir)
    if config.learners.micro_batch_tokens is not None or reserved_gpus(config) > machine.num_gpus:
        return config
    try:
        return choose_micro_batch(config, machine, count_passages(config))
    except ConfigError:
        return config


def choose_micro_batch(config: RunConfig, machine: Machine, num_passages: int) -> RunConfig:
    """Return the configuration with ``learners.micro_batch_tokens`` set: the largest of ``SIZES`` that fits.

    A row shorter than the longest trajectory saves nothing, since that one gets a row alone. If nothing fits, the
    smallest is taken, and the plan reports which memory is too small.

    Raises:
        ConfigError: the sizes of the policy or of the encoder are not known.
    """
    if config.learners.micro_batch_tokens is not None:
        return config
    longest = config.env_runners.max_context_tokens
    sizes = sorted({max(size, longest) for size in SIZES}, reverse=True)
    tried = [changed(config, "learners", {"micro_batch_tokens": size}) for size in sizes]
    return next((one for one in tried if learner_fits(one, machine, num_passages)), tried[-1])
