"""Unmodified clients of OpenAI's API are agents: the official one, litellm, smolagents and pydantic-ai."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from gateway_world import CALL, play
from tool_templates import write_tool_family

from ragr1_actors.core.types import StopReason, TokenKind
from ragr1_actors.rollout.engines.base import PolicyTokenizer

pytestmark = pytest.mark.integration
EXAMPLES = Path(__file__).parents[1] / "examples" / "agents"
FINAL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "Riga"}}\n</tool_call>'
RESULT = '<tool_call>\n{"name": "final_result", "arguments": {"answer": "Riga"}}\n</tool_call>'
TWO = f"I look.\n{CALL}\n{CALL.replace('Ana', 'Zürich')}"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PolicyTokenizer:
    return write_tool_family(tmp_path_factory.mktemp("clients") / "policy", "qwen2.5")


@pytest.mark.parametrize(
    ("client", "variable", "last", "num_rows"),
    [
        ("openai", "", "Riga", 1),
        ("openai", "STREAM=1", "Riga", 1),
        ("litellm", "", "Riga", 1),
        ("litellm", "STREAM=1", "Riga", 1),
        ("pydantic_ai", "", "Riga", 1),
        ("pydantic_ai", "OUTPUT=model", RESULT, 1),
        ("smolagents", "", FINAL, 3),  # it sends calls back as text
        ("smolagents", "STREAM=1", FINAL, 3),
    ],
)
async def test_a_client_is_an_agent(
    tokenizer: PolicyTokenizer, client: str, variable: str, last: str, num_rows: int
) -> None:
    thought = "<think>\nHm\n</think>\n\n" if client != "smolagents" else ""
    turns = [f"{thought}{TWO}", CALL.replace("Ana", "Bo"), last]
    scripts = (
        {"t/0": turns} if num_rows == 1 else {f"t/0~{n}".removesuffix("~0"): [turn] for n, turn in enumerate(turns)}
    )
    command = ["env", *filter(None, [variable]), sys.executable, str(EXAMPLES / f"with_{client}.py"), "{question}"]
    (found,) = await play(tokenizer, {"command": command, "deadline_s": 120}, scripts)
    assert found.stop_reason is StopReason.ANSWERED, (found.error, found.turns)
    assert (found.answer, found.reward) == ("Riga", 1.0), found.turns
    assert [turn.completion_text for turn in found.turns] == turns
    assert len(found.rows) == num_rows
    for turn, at in zip(turns, found.turn_positions, strict=True):
        assert found.token_ids[at].tolist() == tokenizer.encode_frame(turn)[0] + [tokenizer.end_of_turn_id]
        assert set(found.kinds[at].tolist()) == {TokenKind.MODEL}
    asked: list[Any] = [call.arguments["query"] for call in found.calls if call.tool == "retrieve"]
    assert sorted(asked) == ["Ana", "Bo", "Zürich"]  # pydantic-ai calls at once
