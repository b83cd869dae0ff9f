"""Command line ``ragr1``, and the common parts of its commands: consoles, options, and JSON for programs.

The modules of this package import only typer and rich at the top, so that ``ragr1 --help`` answers within a second.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

# without emoji codes, which names of users' classes such as "src:Cat: ..." resemble
console = Console(emoji=False)
errors = Console(stderr=True, emoji=False)
START_AGAIN = "start the same command again"
"""Advice of an interrupted command that has left nothing from which it could continue."""


class Group(TyperGroup):
    """Commands under one name, whose ``--help`` needs no pydantic, which takes a tenth of a second to import."""

    def get_help_option(self, ctx: Any) -> Any:  # typer does not export their types
        """Return ``--help`` with a default, since typer converts the value None with pydantic."""
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option


CheckpointArgument = Annotated[
    str, typer.Argument(help="A run directory or URI (its newest checkpoint is used), or a checkpoint or policy in it.")
]
IndexOption = Annotated[Path | None, typer.Option("--index", help="An index directory; default: the run's own.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs: one object, on one line.")]
JsonLinesOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs: one object per line.")]
RerankerOption = Annotated[
    str, typer.Option("--reranker", help="A cross-encoder (folder or hub name) that ranks the passages again.")
]
HostOption = Annotated[str, typer.Option("--host", help="Address to listen on; all but loopback need --token-env.")]
PortOption = Annotated[int, typer.Option("--port", min=0, max=65535, help="Port to listen on; 0: any free port.")]
TokenEnvOption = Annotated[
    str, typer.Option("--token-env", metavar="NAME", help="Environment variable that holds the bearer token.")
]
AllowHostOption = Annotated[
    list[str] | None,
    typer.Option("--allow-host", metavar="NAME", help="Name by which clients reach it, such as a proxy's; repeatable."),
]
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
_STYLES = {"ok": "green", "warning": "yellow", "missing": "bold red", "wrong": "bold red"}


def printable(text: str) -> str:
    r"""Return the text with U+FFFD in place of every control character except newline and tab.

    A terminal obeys such characters, and passages may come from the web: ``printable("a\x1b[2J") == "a\ufffd[2J"``.
    """
    return text.replace("\r\n", "\n").translate(_CONTROLS)


def print_line(text: str) -> None:
    """Print a line unchanged: not wrapped, without colours and markup; control characters are replaced."""
    console.print(printable(text), soft_wrap=True, highlight=False, markup=False)


def print_error(text: str, style: str = "red") -> None:
    """Print a line to standard error."""
    errors.print(printable(text), style=style, soft_wrap=True, highlight=False, markup=False)


def print_json(value: Any) -> None:
    """Print a value as one line of JSON."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def print_values(values: Mapping[str, float | str]) -> None:
    """Print a name and a value per line, such as ``em  0.925``."""
    for name, value in values.items():
        shown = f"{value:.3f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
        print_line(f"{name:>20}  {shown}")


def print_state(state: str, name: str, rest: str) -> None:
    """Print the result of a check, such as ``ok  torch: 2.13.0, expected ==2.13.0``, the state in its colour."""
    line = Text(f"{state:>8}", style=_STYLES[state])
    line.append(f"  {name}: {rest}" if rest else f"  {name}", style="default")
    console.print(line, soft_wrap=True, highlight=False)
