"""The examples, played by scripts, in at most 60 lines each."""

from __future__ import annotations

import ast
import asyncio
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from fakes import ByteTokenizer, DictRetriever
from http_stub import stub_server

from envs.base import EnvContext
from envs.checker import check_reward, check_source, check_tool
from envs.measures import Reward, RewardContext
from envs.options import ToolOptions
from envs.sources import TaskSources
from envs.tasks.curriculum import TaskStats
from envs.tools.base import make_tools
from examples.hop_curriculum import ByHops
from ragr1_actors.core.config import EnvironmentSettings, EnvRunnerSettings, SamplerConfig
from ragr1_actors.core.types import StopReason, Task, Trajectory, TrajectoryGroup
from ragr1_actors.planning.preflight import check_classes, check_curriculum, try_curriculum
from ragr1_actors.rollout.engines.base import ScriptedEngine
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.groups import GroupRequest
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from retrieval.base import Passage

FOLDER = Path(__file__).resolve().parent.parent / "examples"
TOKENIZER = ByteTokenizer()
ANA, BO = Passage("a", "Ana", "Ana was born in Riga.", 0.4), Passage("b", "Bo", "Bo was born in Oslo.", 0.9)
TASK = Task("t", "Ana", ("Riga",), supporting_ids=("Ana", "Bo"))
SEARCH, RIGHT, WRONG = "<search>Ana</search>", "<answer>Riga</answer>", "<answer>Oslo</answer>"
TRAINING = RewardContext("train", 0.5)


class Finds(DictRetriever):
    """Finds the passage of the name, or both for any other query."""

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        found = await super().search(queries, k)
        return [hits if hits and k == 3 else [BO, ANA][:k] for hits in found]


async def sample(
    scripts: list[list[str]],
    *,
    task: Task = TASK,
    context: RewardContext = TRAINING,
    env_runners: Mapping[str, Any] | None = None,
    **environment: Any,
) -> TrajectoryGroup:
    settings = EnvironmentSettings.model_validate({"prompt": "{question}", **environment})
    config = SamplerConfig(environment=settings, env_runners=EnvRunnerSettings(**(env_runners or {})))
    engine = ScriptedEngine({f"t/{n}": script for n, script in enumerate(scripts)}, TOKENIZER.encode)
    runner = EnvRunner(config, TOKENIZER, Finds([ANA, BO]), engine)
    group = await runner.sample_group(GroupRequest("t", task, len(scripts), 1.0, context=context))
    assert [one.error for one in group.trajectories] == [""] * len(group.trajectories)
    return group


async def play(*script: str, **more: Any) -> Trajectory:
    return (await sample([list(script)], **more)).trajectories[0]


def test_each_example_is_short() -> None:
    lengths = {path.name: len(path.read_text().splitlines()) for path in FOLDER.glob("*.py")}
    assert len(lengths) == 4 and max(lengths.values()) <= 60, lengths


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_has_a_command_that_trains_with_it(path: Path) -> None:
    text = (ast.get_docstring(ast.parse(path.read_text())) or "").replace("\\\n", " ")
    [words] = [shlex.split(line) for line in text.splitlines() if line.strip().startswith("ragr1 ")]
    assert words[:3] == ["ragr1", "train", "quickstart"] and any(f"examples.{path.stem}:" in word for word in words)
    config = AlgorithmConfig.from_recipe("quickstart").override(words[3:]).freeze()
    check_classes(config)
    check_curriculum(config.environment)


async def test_sums_are_a_source_and_a_tool() -> None:
    settings = EnvironmentSettings(tasks="examples.sums:Sums")
    assert {one.problem for one in check_source("examples.sums:Sums", settings)} == {""}
    source = TaskSources.open(settings.tasks, settings)
    train, evaluation = source.tasks("train", 0), source.tasks("eval", 0)
    assert (len(train), len(evaluation)) == (1000, 100)
    assert not {task.question for task in train} & {task.question for task in evaluation}
    assert {one.problem for one in await check_tool("examples.sums:add", settings)} == {""}
    tool = make_tools(["examples.sums:add"], EnvContext(Finds(), list), ToolOptions())["add"]  # type: ignore[arg-type]
    (found,) = await tool.call([{"numbers": train[0].meta["numbers"]}])
    assert found.text == train[0].golden_answers[0]


async def test_a_judge_is_asked_in_training_only() -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append((await request.json())["messages"][0]["content"])
        return web.json_response({"choices": [{"message": {"content": "Yes."}, "finish_reason": "stop"}]})

    async with stub_server(answer) as url:
        keys = {"reward": "examples.judge:Judge", "models": {"judge": {"url": url, "model": "big"}}}
        lenient = await play("<answer>the Latvian capital</answer>", **keys)
        strict = await play("<answer>the Latvian capital</answer>", context=RewardContext("eval"), **keys)
        plain = await play(RIGHT, **keys)
    assert [one.reward for one in (lenient, strict, plain)] == [1.0, 0.0, 1.0]
    assert len(asked) == 1 and "the Latvian capital" in asked[0]
    assert lenient.metrics["reward_judged"] == 1.0


def test_a_curriculum_by_hops() -> None:
    tasks = [Task(f"t/{n}", "?", ("a",), meta={"hops": hops}) for n, hops in enumerate((3, 1, 2, 1))]
    order = ByHops({}).order(tasks, {}, 0, np.random.default_rng(0))
    assert [tasks[at].meta["hops"] for at in order] == [1, 1, 2, 3]
    known = {"t/0": TaskStats(8, 8, 8.0), "t/1": TaskStats(8, 7, 7.0), "t/2": TaskStats(4, 4, 4.0)}
    assert [ByHops({}).skip(task, known) for task in tasks] == [True, False, False, False]
    assert [check.problem for check in try_curriculum(ByHops({}))] == ["", ""]


async def test_rewards_of_turns_are_where_they_were_earned() -> None:
    keys = {"reward": "examples.turn_rewards:gained"}
    found = await play(SEARCH, SEARCH, "<search>Bo</search>", RIGHT, **keys)
    assert (found.turn_rewards, found.reward) == ((0.25, 0.0, 0.25, 1.0), 1.5)
    assert found.metrics["reward_evidence"] == 1.0 and found.stop_reason is StopReason.ANSWERED


@pytest.mark.parametrize("name", ["turn_rewards:gained"])
def test_ragr1_check_finds_nothing_wrong(name: str) -> None:
    settings = EnvironmentSettings(reward=f"examples.{name}")
    assert [check.problem for check in asyncio.run(check_reward(settings))] == [""] * 3
    assert Reward(settings).name == f"examples.{name}"
