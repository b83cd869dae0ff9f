"""Commands ``ragr1 evaluate``, ``select`` and ``rescore``: answers to many tasks, scored."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ragr1_actors.cli import IndexOption, JsonLinesOption, JsonOption, errors, print_json, print_line, print_values
from ragr1_actors.core.errors import ConfigError, DataError, shortened

if TYPE_CHECKING:  # torch, Ray and transformers are loaded inside the commands
    from ragr1_actors.core.config import EndpointSettings
    from ragr1_actors.evaluation.evaluated_policy import EvalRequest
    from ragr1_actors.runs.scores import TaskScore

NO_EXAMPLE = "YOUR QUESTION"


SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="[SOURCE]",
        help="A run directory or URI (its newest checkpoint is used), or a checkpoint or policy in it; with --recipe, "
        "any Hugging Face model folder or hub name.",
    ),
]
RecipeOption = Annotated[
    str, typer.Option("--recipe", help="Prompt, formats, limits and retrieval of this recipe, for a model or endpoint.")
]
PromptOption = Annotated[
    Path | None, typer.Option("--prompt", help="A text file with the prompt; {question} is replaced by the question.")
]
BaselineOption = Annotated[
    Literal["direct", "rag", "single-query"] | None,
    typer.Option("--baseline", help="Answer without a search, after one with the question, or with a query per turn."),
]
EndpointOption = Annotated[
    str, typer.Option("--endpoint", help="Ask an OpenAI-compatible chat endpoint, such as http://10.0.0.2:8000/v1.")
]
ModelOption = Annotated[str, typer.Option("--model", help="The endpoint's model.")]
KeyOption = Annotated[
    str, typer.Option("--key-env", help="The environment variable with the endpoint's key, if it needs one.")
]
BodyOption = Annotated[
    str, typer.Option("--body", help="JSON fields of every request to the endpoint; null leaves one out.")
]
ConcurrencyOption = Annotated[
    int | None,
    typer.Option("--concurrency", min=1, help="Questions at the same time; default: the recipe's, 8 at an endpoint."),
]
TasksOption = Annotated[
    list[str] | None,
    typer.Option(
        "--tasks",
        help="A task file, a folder of them or a quoted pattern, or nq, triviaqa, popqa, hotpotqa, 2wiki, musique, "
        "bamboogle; repeatable; default: the tasks that the run held out.",
    ),
]
DataOption = Annotated[
    Path | None, typer.Option("--data", help="The folder of FlashRAG's sets, for a name; default: the hub.")
]
LatencyTasksOption = Annotated[
    int | None,
    typer.Option("--latency-tasks", min=1, help="How many tasks --latency answers one at a time.", show_default="100"),
]
OutOption = Annotated[
    Path | None,
    typer.Option("--out", help="A JSON-lines file with the score of every task; the same command goes on with it."),
]
AgainstOption = Annotated[
    Path | None, typer.Option("--against", help="The --out of another policy, to compare with task by task.")
]


def evaluate(
    source: SourceArgument = "",
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    tasks: TasksOption = None,
    data: DataOption = None,
    index: IndexOption = None,
    num_tasks: Annotated[int | None, typer.Option("--num-tasks", min=1, help="Use the first tasks only.")] = None,
    recipe: RecipeOption = "",
    prompt: PromptOption = None,
    baseline: BaselineOption = None,
    endpoint: EndpointOption = "",
    model: ModelOption = "",
    key_env: KeyOption = "OPENAI_API_KEY",
    body: BodyOption = "{}",
    concurrency: ConcurrencyOption = None,
    latency: Annotated[bool, typer.Option("--latency", help="Measure latency, one at a time and at load.")] = False,
    latency_tasks: LatencyTasksOption = None,
    out: OutOption = None,
    against: AgainstOption = None,
    as_json: JsonOption = False,
) -> None:
    """Answer tasks with a run's policy, a model folder or an endpoint; print EM, F1, recall and searches.

    Answers are greedy unless env_runners.temperature=T is given.
    """
    from ragr1_actors.evaluation.evaluated_policy import EvalRequest

    if latency_tasks is not None and not latency:
        raise ConfigError(f"--latency-tasks: got {latency_tasks} without --latency; add it, or leave it out")
    words = [word for word in (source, *(overrides or [])) if word]
    is_named = bool(words) and not (endpoint and re.match(r"\w+(\.\w+)+=", words[0]))
    request = EvalRequest(
        source=words.pop(0) if is_named else "",
        recipe=recipe,
        overrides=tuple(words),
        index=index,
        prompt=prompt,
        baseline=baseline,
        endpoint=read_endpoint(endpoint, model, key_env, body),
        concurrency=concurrency,
        tasks=tasks or None,
        data=data,
        num_tasks=num_tasks,
        num_alone=(latency_tasks or 100) if latency else 0,
        against=against,
    )
    check_request(request, out)
    from ragr1_actors.core.process.progress_bar import counted_bar, elapsed_time
    from ragr1_actors.evaluation.evaluate import evaluate_policy

    with counted_bar(errors, "answering") as on_task:
        found = evaluate_policy(request, out, on_task, partial(elapsed_time, errors))
    details = summarise(found.scores, against, tasks)
    details |= {"decoding": found.decoding, "latency": [asdict(one) for one in found.latency]}
    if tasks:
        details["num_trained_on"] = found.num_trained_on
    if as_json:
        print_json({"policy": found.policy, "method": found.method, **found.result.by_name(), **details})
        return
    print_evaluation(found.result.by_name(), details)


def read_endpoint(url: str, model: str, key_env: str, body: str) -> EndpointSettings | None:
    """Return the endpoint of the options; None if no option names one.

    Raises:
        ConfigError: one of ``--endpoint`` and ``--model`` is missing, the address is wrong or holds a secret, or
            ``--body`` is not a JSON object.
    """
    from ragr1_actors.core.config import EndpointSettings
    from ragr1_actors.core.credentials import refuse_credentials
    from ragr1_actors.core.disk.json_files import checked
    from retrieval.http.retriever import check_url

    if bool(url) != bool(model):
        raise ConfigError("--endpoint URL and --model NAME belong together; give both or neither")
    if not url:
        return None
    refuse_credentials(url, "--endpoint")
    check_url(url, "--endpoint")
    refused = ConfigError(f"--body: got {shortened(body)!r}, expected a JSON object such as '{{\"seed\": 1}}'")
    fields = checked(dict[str, Any], body.encode("utf-8", "replace"), lambda *_: refused)
    return EndpointSettings(url=url, model=model, key_env=key_env, body=fields)


def select(
    source: Annotated[str, typer.Argument(help="A recipe, whose policy.model samples; or a run or checkpoint.")],
    tasks: Annotated[
        list[str],
        typer.Option("--tasks", help="The task file to choose from, a folder of them or a quoted pattern; repeatable."),
    ],
    out: Annotated[Path, typer.Option("--out", help="The task file to write (JSONL).")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value ...")] = None,
    index: IndexOption = None,
    num_samples: Annotated[int, typer.Option("--num-samples", min=1, help="Trajectories per task.")] = 10,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="Sampling temperature; 0 is greedy.")
    ] = 1.2,
    max_turns: Annotated[int, typer.Option("--max-turns", min=1, help="Turns per trajectory, answer included.")] = 11,
    max_pass_rate: Annotated[
        float,
        typer.Option(
            "--max-pass-rate", min=0.0, max=1.0, help="A task with at most this share of right answers is hard."
        ),
    ] = 0.5,
    easy_share: Annotated[
        float, typer.Option("--easy-share", min=0.0, max=1.0, help="Share of the easy tasks that is kept.")
    ] = 0.25,
    as_json: JsonOption = False,
) -> None:
    """Keep the tasks that a policy answers sometimes, and a share of the easy ones, as RAG-R1 chose its RL tasks."""
    from ragr1_actors.core.process.progress_bar import counted_bar, elapsed_time
    from ragr1_actors.evaluation.selection import SelectionArguments
    from ragr1_actors.evaluation.selection import select as select_tasks

    settings = SelectionArguments(num_samples, temperature, max_turns, max_pass_rate, easy_share)
    with counted_bar(errors, "sampling") as on_task:
        counts = select_tasks(
            source,
            tasks,
            out,
            settings,
            overrides=overrides or [],
            index=index,
            on_task=on_task,
            show=partial(elapsed_time, errors),
        )
    if as_json:
        print_json(asdict(counts))
        return
    print_values(asdict(counts))
    print_line(f"{out} holds the {counts.kept:,} tasks that are kept")


def check_request(request: EvalRequest, out: Path | None) -> None:
    """Refuse a request that cannot be met, before torch takes seconds to load; ``UserError`` names what is wrong."""
    from envs.tasks.published_sets import load_sets
    from ragr1_actors.evaluation.evaluated_policy import open_policy
    from ragr1_actors.planning.fit import check_gpus
    from ragr1_actors.runs.scores import read_scores

    check_gpus(open_policy(request).config)
    if request.tasks:
        load_sets(request.tasks, request.data)
    if request.against is not None:
        read_scores(request.against)
    if out is not None and not out.absolute().parent.is_dir():
        raise DataError(f"there is no folder {out.absolute().parent} for --out; make it first")


def summarise(scores: Sequence[TaskScore], against: Path | None, tasks: list[str] | None) -> dict[str, Any]:
    """Return the results besides the means: intervals, comparison, published figures, if there are any."""
    from envs.tasks.published_sets import published_em
    from ragr1_actors.runs.scores import compare, intervals, read_scores

    found: dict[str, Any] = {"intervals": {name: asdict(interval) for name, interval in intervals(scores).items()}}
    if against is not None:
        found["against"] = asdict(compare(scores, read_scores(against)[1]))
    if tasks and len(tasks) == 1 and (published := published_em(tasks[0])):
        found["published"] = [{"method": method, "em": em, "settings": how} for method, how, em in published]
    return found


def print_evaluation(result: dict[str, Any], details: Mapping[str, Any]) -> None:
    """Print the means of an evaluation, with their intervals, and what ``summarise`` returns, for people."""
    intervals = details["intervals"]
    for name, value in (result | {name: None for name in intervals if name not in result}).items():
        if name in intervals:
            found = intervals[name]
            print_line(f"{name:>20}  {found['mean']:.3f}, 95 % interval {found['low']:.3f} to {found['high']:.3f}")
        else:
            print_values({name: value})
    if decoding := details.get("decoding"):
        print_values({"decoding": decoding})
    if compared := details.get("against"):
        em, f1 = compared["em_difference"], compared["f1_difference"]
        print_line(f"against the other policy, on {compared['num_tasks']:,} tasks that both answered:")
        for name, found in (("em", em), ("f1", f1)):
            print_line(f"{name:>20}  {found['mean']:+.3f}, 95 % interval {found['low']:+.3f} to {found['high']:+.3f}")
        counts = f"{compared['only_first']:,} right here only, {compared['only_second']:,} there only"
        print_line(f"{'McNemar':>20}  p = {compared['p_value']:.3g}: {counts}")
    for measured in details.get("latency", []):
        beside = "one at a time" if measured["concurrency"] == 1 else f"{measured['concurrency']:,} at the same time"
        means = ", ".join(f"{measured[name]:.1f} {name}" for name in ("tokens", "rounds", "queries"))
        print_line(
            f"{'latency':>20}  {measured['median_s']:.2f} s median, {measured['p95_s']:.2f} s for 95 %, {beside} "
            f"({measured['num_tasks']:,} questions; {means} each)"
        )
    if details.get("num_trained_on"):
        print_line(
            f"warning: {details['num_trained_on']:,} of these questions are in the training file, environment.tasks"
        )
    if published := details.get("published"):
        print_line("published exact match, each with its own settings:")
        for row in published:
            print_line(f"{row['em']:>20.3f}  {row['method']} ({row['settings']})")


def example_question(run_dir: Path) -> str:
    """Return a question of the last batch, answered with searches if any is; ``DataError`` if its file is damaged."""
    from ragr1_actors.core.schema import read_trajectories

    files = sorted((run_dir / "trajectories").glob("iteration_*.arrow"))
    if not files:
        return NO_EXAMPLE
    trajectories = [t for group in read_trajectories(files[-1]) for t in group.trajectories]
    if not trajectories:
        return NO_EXAMPLE
    return max(trajectories, key=lambda t: (t.reward, len(t.calls))).task.question


_TAKEN = ("environment.reward_options", "environment.models")
"""Keys of a recipe on which a reward depends."""


def rescore(
    run: Annotated[str, typer.Argument(help="A run directory or URI.")],
    reward: Annotated[str, typer.Option("--reward", help="exact_match, token_f1, none or my_module:my_reward.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="environment.reward_options.key=value, environment.models.name=value ...")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the trajectories with the new rewards here.")] = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Compute the rewards of a run's trajectories again, with another reward. Nothing is sampled."""
    from ragr1_actors.core.resolve import override, resolve
    from ragr1_actors.core.schema import TRAJECTORIES
    from ragr1_actors.evaluation.evaluate import Rescored
    from ragr1_actors.evaluation.evaluate import rescore as compute
    from ragr1_actors.runs.run_directory import open_run_directory
    from ragr1_actors.runs.storage.store import find_store

    store = find_store(run)
    sections = override(open_run_directory(store).model_dump(), [*(overrides or []), f"environment.reward={reward}"])
    _check_overrides(overrides or [])

    def show(found: Rescored) -> None:
        if as_json:
            print_json(asdict(found))
            return
        correlation = "-" if found.correlation is None else f"{found.correlation:.3f}"
        print_line(
            f"{found.file:<28} {found.num_trajectories:>6,} trajectories   mean {found.before:.3f} -> {found.after:.3f}"
            f"   changed {found.changed:.3f}   correlation {correlation}"
        )

    compute(resolve(sections), store.bring(TRAJECTORIES).parent, out, show)


def _check_overrides(overrides: Sequence[str]) -> None:
    """Refuse overrides without an effect; raises ``ConfigError``."""
    from ragr1_actors.core.resolve import split_assignment

    for name in (split_assignment(assignment)[0] for assignment in overrides):
        if name == "environment.reward":
            raise ConfigError("got environment.reward, which --reward replaces; leave it out")
        if ".".join(name.split(".")[:2]) not in _TAKEN:
            raise ConfigError(f"got {name}, which has no effect on rewards; leave it out")
