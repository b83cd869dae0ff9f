"""The commands that use a trained policy: ``ragr1 evaluate``, ``ask`` and ``select``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from ragr1_actors.cli import (
    CheckpointArgument,
    IndexOption,
    JsonOption,
    console,
    errors,
    print_json,
    print_line,
    print_values,
)
from ragr1_actors.core.errors import DataError

if TYPE_CHECKING:  # torch, Ray and transformers are loaded inside the commands
    from ragr1_actors.core.types import Trajectory

NO_EXAMPLE = "YOUR QUESTION"


def evaluate(
    checkpoint: CheckpointArgument,
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            help="A task file, or nq, triviaqa, popqa, hotpotqa, 2wiki, musique, bamboogle; default: the tasks that "
            "the run held out.",
        ),
    ] = None,
    data: Annotated[
        Path | None, typer.Option("--data", help="The folder of FlashRAG's sets, for a name; default: the hub.")
    ] = None,
    index: IndexOption = None,
    num_tasks: Annotated[int | None, typer.Option("--num-tasks", min=1, help="Use the first tasks only.")] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="A JSON-lines file with the score of every task; the same command goes on with it."),
    ] = None,
    against: Annotated[
        Path | None, typer.Option("--against", help="The --out of another policy, to compare with task by task.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Answer tasks greedily with a trained policy; print exact match, F1 and the number of searches."""
    check_inputs(checkpoint, tasks, data)
    check_results(out, against)
    from ragr1_actors.training.evaluation import evaluate as evaluate_policy
    from ragr1_actors.training.evaluation import num_trained_on

    result = asdict(evaluate_policy(checkpoint, tasks=tasks, data=data, index=index, num_tasks=num_tasks, out=out))
    details = summarise(out, against, tasks)
    if tasks is not None:
        details["num_trained_on"] = num_trained_on(checkpoint, tasks, data)
    if as_json:
        print_json(result | details)
        return
    print_values(result)
    print_details(details)


def ask(
    run: CheckpointArgument, question: Annotated[str, typer.Argument(help="The question.")], as_json: JsonOption = False
) -> None:
    """Answer one question with a trained policy, and show its searches."""
    check_inputs(run)
    from ragr1_actors.training.evaluation import ask as ask_policy

    trajectory = ask_policy(run, question)
    if as_json:
        turns = [{"queries": turn.queries, "text": turn.completion_text} for turn in trajectory.turns]
        print_json({"answer": trajectory.answer, "stop_reason": trajectory.stop_reason, "turns": turns})
    else:
        console.print(render_trajectory(trajectory))


def select(
    source: Annotated[str, typer.Argument(help="A recipe, whose policy.model samples; or a run or checkpoint.")],
    tasks: Annotated[Path, typer.Option("--tasks", help="The task file to choose from.")],
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
    from ragr1_actors.training.evaluation import SelectionSettings
    from ragr1_actors.training.evaluation import select as select_tasks

    settings = SelectionSettings(num_samples, temperature, max_turns, max_pass_rate, easy_share)
    columns = (TextColumn("sampling"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors) as progress:
        bar = progress.add_task("sampling", total=None)
        counts = select_tasks(
            source,
            tasks,
            out,
            settings,
            overrides=overrides or [],
            index=index,
            on_task=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    if as_json:
        print_json(asdict(counts))
        return
    print_values(asdict(counts))
    print_line(f"{out} holds the {counts.kept:,} tasks that are kept")


def check_results(out: Path | None, against: Path | None) -> None:
    """Refuse results files that cannot be used; ``UserError`` names the option."""
    from ragr1_actors.runs.scores import read_scores

    if against is not None and out is None:
        raise DataError("--against compares task by task, which needs --out FILE for this policy; add it")
    if against is not None:
        read_scores(against)
    if out is not None and not out.absolute().parent.is_dir():
        raise DataError(f"there is no folder {out.absolute().parent} for --out; make it first")


def summarise(out: Path | None, against: Path | None, tasks: str | None) -> dict[str, Any]:
    """Return what is known beside the means: intervals, comparison, published figures; each only if there is one."""
    from envs.tasks.published_sets import published_em
    from ragr1_actors.runs.scores import compare, intervals, read_scores

    found: dict[str, Any] = {}
    if out is not None:
        _, scores = read_scores(out)
        found["intervals"] = {name: asdict(interval) for name, interval in intervals(scores).items()}
        if against is not None:
            found["against"] = asdict(compare(scores, read_scores(against)[1]))
    if published := published_em(tasks or ""):
        found["published"] = [{"method": method, "em": em, "settings": how} for method, how, em in published]
    return found


def print_details(details: dict[str, Any]) -> None:
    """Print what ``summarise`` returns, for people."""
    for name, found in details.get("intervals", {}).items():
        print_line(f"{name:>20}  {found['mean']:.3f}, 95 % interval {found['low']:.3f} to {found['high']:.3f}")
    if compared := details.get("against"):
        em, f1 = compared["em_difference"], compared["f1_difference"]
        print_line(f"against the other policy, on {compared['num_tasks']:,} tasks that both answered:")
        for name, found in (("em", em), ("f1", f1)):
            print_line(f"{name:>20}  {found['mean']:+.3f}, 95 % interval {found['low']:+.3f} to {found['high']:+.3f}")
        counts = f"{compared['only_first']:,} right here only, {compared['only_second']:,} there only"
        print_line(f"{'McNemar':>20}  p = {compared['p_value']:.3g}: {counts}")
    if details.get("num_trained_on"):
        print_line(f"warning: {details['num_trained_on']:,} of these questions are in the run's training file")
    if published := details.get("published"):
        print_line("published exact match, each with its own settings:")
        for row in published:
            print_line(f"{row['em']:>20.3f}  {row['method']} ({row['settings']})")


def check_inputs(checkpoint: str, tasks: str | None = None, data: Path | None = None) -> None:
    """Refuse what is no run or checkpoint, and a file of tasks that cannot be used, before torch takes seconds to load.

    Raises:
        UserError: the message names the path.
    """
    from envs.tasks.published_sets import load_set
    from ragr1_actors.runs.run_directory import find_checkpoint

    find_checkpoint(checkpoint)
    if tasks is not None:
        load_set(tasks, data)


def render_trajectory(trajectory: Trajectory) -> Text:
    """Lay a trajectory out for a terminal: the policy's text and the observations, each in its colour."""
    text = Text(f"{trajectory.task.question}\n", style="bold")
    for turn in trajectory.turns:
        text.append(f"{turn.completion_text}\n", style="green")
        if turn.observation:
            text.append(f"{turn.observation.strip()}\n", style="cyan")
    if trajectory.answer:
        text.append(f"answer: {trajectory.answer}", style="bold")
    else:
        text.append(f"no answer ({trajectory.stop_reason.value}) {trajectory.error}".rstrip(), style="bold red")
    return text


def example_question(run_dir: Path) -> str:
    """Return a question of the last batch, answered with searches if any is; ``DataError`` if its file is damaged."""
    import pyarrow as pa

    from ragr1_actors.core.errors import one_line
    from ragr1_actors.core.schema import read_trajectories

    files = sorted((run_dir / "trajectories").glob("iteration_*.arrow"))
    if not files:
        return NO_EXAMPLE
    try:
        trajectories = [t for group in read_trajectories(files[-1]) for t in group.trajectories]
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{files[-1]} is damaged ({one_line(error)}); delete it") from error
    if not trajectories:
        return NO_EXAMPLE
    return max(trajectories, key=lambda t: (t.reward, t.num_queries)).task.question
