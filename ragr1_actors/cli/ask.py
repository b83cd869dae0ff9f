"""Commands ``ragr1 ask`` and ``serve``: a trained policy answers a person, and any OpenAI client."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from ragr1_actors.cli import (
    START_AGAIN,
    AllowHostOption,
    CheckpointArgument,
    HostOption,
    JsonLinesOption,
    PortOption,
    TokenEnvOption,
    console,
    errors,
    print_error,
    print_json,
    printable,
)
from ragr1_actors.core.credentials import read_secret
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.process.imports import quick_imports
from ragr1_actors.core.process.interrupts import InterruptGuard, ended_during_imports

if TYPE_CHECKING:  # torch and transformers are loaded inside the command
    from ragr1_actors.core.types import Trajectory, Turn

PROMPT = "question (empty line to end): "


def ask(
    run: CheckpointArgument,
    question: Annotated[str, typer.Argument(help="The question; with --interactive, the first one.")] = "",
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Read questions from standard input, one a line.")
    ] = False,
    as_json: JsonLinesOption = False,
) -> None:
    """Answer a question with a trained policy; show its text, searches and documents as they come."""
    _check_text(question)
    if not question.strip() and not interactive:
        raise ConfigError("got no question; write it after the run, or add --interactive to type questions")
    check_inputs(run)
    with ended_during_imports(START_AGAIN), quick_imports():
        from ragr1_actors.evaluation.asking import Asker, answer_as_json
        from ragr1_actors.rollout.recorder import Watch

    with loading_policy():
        asker = Asker(run)
    with asker:
        for asked in questions(question, interactive):
            if as_json:
                found = asker.ask(asked)
                print_json(answer_as_json(found))
            else:
                console.print(shown_text(asked, "bold"), soft_wrap=True)
                shown = Shown()
                found = asker.ask(asked, Watch(shown.text, shown.turn))
                shown.end(found)
            if found.stop_reason.is_failure and not interactive:
                raise typer.Exit(1)


@contextmanager
def loading_policy() -> Iterator[None]:
    """Show how long the block, which loads a policy, takes; Ctrl-C ends the command at its end."""
    from ragr1_actors.core.process.progress_bar import elapsed_time

    with InterruptGuard() as guard, guard.held(), quick_imports(), elapsed_time(errors, "loading the policy"):
        yield  # an engine may start processes


def questions(first: str, interactive: bool) -> Iterator[str]:
    """Yield ``first`` if there is one, then the lines of standard input until an empty one.

    The prompt goes to standard error, so that standard output has nothing but answers.
    """
    if first.strip():
        yield first.strip()
    while interactive:
        errors.print(PROMPT, end="", highlight=False, markup=False)
        line = sys.stdin.readline().strip() if sys.stdin is not None else ""  # None: it is closed
        _check_text(line)
        if not line:
            errors.print()
            return
        yield line


def _check_text(question: str) -> None:
    """Refuse bytes that are not UTF-8, which Python keeps as halves of surrogate pairs."""
    try:
        question.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the question is not UTF-8 text (character {error.start + 1}); write it again in a UTF-8 terminal"
        ) from error


def shown_text(text: str, style: str) -> Text:
    """Return the text of a person, policy or passage in a style, without characters that the terminal would obey."""
    return Text(printable(text), style=style)


class Shown:
    """Display of one answer on the terminal."""

    def __init__(self) -> None:
        """Begin without text."""
        self._length = 0  # characters of the turn shown so far

    def text(self, text: str) -> None:
        """Print the new characters of the turn's text so far."""
        console.print(shown_text(text[self._length :], "green"), end="", soft_wrap=True)
        console.file.flush()
        self._length = len(text)

    def turn(self, turn: Turn) -> None:
        """Print the rest of a turn, and the results of its calls."""
        self.text(turn.completion_text)
        self._length = 0
        console.print()
        if turn.calls:
            for call in turn.calls:
                console.print(shown_text(f"  [{call.asked}]", "bold cyan"), soft_wrap=True)
                if call.result:
                    console.print(shown_text(f"  {call.result.strip()}", "cyan"), soft_wrap=True)
                for number, record in enumerate(call.records, start=1):
                    line = f"  ({number}) {record.score:.3f}  {record.title}: {record.text}"
                    console.print(shown_text(line, "cyan"), soft_wrap=True)
        elif turn.observation:
            console.print(shown_text(turn.observation.strip(), "cyan"), soft_wrap=True)

    def end(self, trajectory: Trajectory) -> None:
        """Print the answer, or why there is none."""
        if self._length:  # a turn that failed
            console.print()
        if trajectory.answer:
            line = shown_text(f"answer: {trajectory.answer}", "bold")
        else:
            reason = f"no answer ({trajectory.stop_reason.value}) {trajectory.error}".rstrip()
            line = shown_text(reason, "bold red")
        console.print(line, soft_wrap=True)


def check_inputs(checkpoint: str) -> None:
    """Refuse a path that is not a run or checkpoint before torch takes seconds to load; ``UserError`` names the path.

    A note says if the policy is from the middle of SFT.
    """
    from ragr1_actors.runs.run_directory import steps_in_sft

    if (steps := steps_in_sft(checkpoint)) is not None:
        done, num_steps = steps
        print_error(
            f"note: the policy is from the middle of SFT, step {done:,} of {num_steps:,}, and may not know the "
            "format yet; let the run go on",
            "yellow",
        )


def serve(
    run: CheckpointArgument,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8000,
    token_env: TokenEnvOption = "",
    allow_host: AllowHostOption = None,
) -> None:
    """Serve a trained policy to OpenAI's clients: POST /v1/chat/completions. The run's tools run in this process."""
    from cluster.http import check_token

    token = read_secret("--token-env", token_env)
    check_token(host, token)  # before the policy is loaded
    check_inputs(run)
    with ended_during_imports(START_AGAIN), quick_imports():
        from ragr1_actors.evaluation.serving import PolicyServer, load_policy, run_policy_server

    with loading_policy():
        policy = load_policy(run)
    run_policy_server(PolicyServer(policy, host=host, port=port, token=token, allowed_hosts=allow_host or ()))
