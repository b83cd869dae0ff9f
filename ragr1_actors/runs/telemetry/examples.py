"""Trajectories as Markdown, for TensorBoard's page of texts."""

from __future__ import annotations

import re

from ragr1_actors.core.types import ToolCall, Trajectory

MAX_CHARS = 600
"""Limit of the shown text of a record, in characters."""


def as_markdown(trajectory: Trajectory) -> str:
    """Return question, turns with their calls, and answer. Texts of policy and corpus are in code blocks."""
    task = trajectory.task
    lines = [f"**question** {_block(task.question)}", f"**gold answers** {_block(' | '.join(task.golden_answers))}"]
    for number, turn in enumerate(trajectory.turns, start=1):
        lines.append(f"**turn {number}, {turn.num_model_tokens} tokens** {_block(turn.completion_text)}")
        lines += [_called(call) for call in turn.calls]
    end = f"**answer, reward {trajectory.reward:g}, {trajectory.stop_reason.value}**"
    lines.append(f"{end} {_block(trajectory.answer)}")
    return "\n\n".join(lines)


def _called(call: ToolCall) -> str:
    records = [f"{record.score:.3f}  {record.title}: {record.text[:MAX_CHARS]}" for record in call.records]
    result = "\n".join(filter(None, (call.result[:MAX_CHARS], *records)))
    return f"**{call.tool}** {_block(call.asked)}\n\n{_block(result)}"


def _block(text: str) -> str:
    """Return a code block; its fence is longer than any in the text."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"\n{fence}text\n{text}\n{fence}"
