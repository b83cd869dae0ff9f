"""Rollout strategies: groups of any size, variants, and forks that copy their parent's tokens."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
from fakes import ByteTokenizer, OnePassage
from pydantic import Field

from envs.base import EnvContext, StepResult
from envs.measures import RewardContext, RewardResult, Split
from envs.search import SearchEnv
from ragr1_actors.core.config import EnvironmentSettings, EnvRunnerSettings, SamplerConfig
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.schema import groups_from_record_batch, groups_to_record_batch
from ragr1_actors.core.section import Section
from ragr1_actors.core.types import Completion, Message, StopReason, Task, TokenKind, Trajectory, TrajectoryGroup
from ragr1_actors.planning.preflight import check_classes
from ragr1_actors.rollout.engines.base import ScriptedEngine
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.groups import GroupRequest, Play, RolloutStrategy, summarize, try_strategy

HERE = __name__
TASK = Task("t", "Where?", ("Riga",))
TOKENIZER = ByteTokenizer()
SEARCH, WRONG, RIGHT = "<search>Riga</search>", "<answer>Oslo</answer>", "<answer>Riga</answer>"
HINT = "<think>Look again:"


class Counting(OnePassage):
    """Counts what is searched."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def search(self, queries: list[str], k: int) -> list[Any]:
        self.asked += queries
        return await super().search(queries, k)


def runner(strategy: str, scripts: dict[str, list[str]], retriever: Counting | None = None, **more: Any) -> EnvRunner:
    settings = EnvRunnerSettings(strategy=f"{HERE}:{strategy}", **more.pop("env_runners", {}))
    config = SamplerConfig(env_runners=settings, environment=EnvironmentSettings(**more))
    engine = ScriptedEngine(scripts, TOKENIZER.encode, version=3)
    return EnvRunner(config, TOKENIZER, retriever or Counting(), engine)


async def sample(made: EnvRunner, count: int = 2, split: Split = "train") -> TrajectoryGroup:
    return await made.sample_group(GroupRequest("t", TASK, count, 0.0, context=RewardContext(split)))


class Retry(RolloutStrategy):
    """One attempt, and a fork of it if it is wrong."""

    async def sample(self, request: GroupRequest, play: Play) -> list[Trajectory]:
        first = await play(0)
        return [first, await play(1, fork=(first, len(first.turns) - 1, HINT))]


async def test_a_fork_has_its_parents_tokens_and_a_text_that_it_did_not_sample() -> None:
    retriever = Counting()
    made = runner("Retry", {"t/0": [SEARCH, WRONG], "t/1": ["</think>" + RIGHT]}, retriever)
    group = await sample(made)
    parent, fork = group.trajectories
    assert (parent.parent, fork.parent, fork.num_copied_tokens) == ("", "t/0", len(SEARCH))
    assert (parent.reward, fork.reward, fork.answer) == (0.0, 1.0, "Riga")
    cut = int(np.flatnonzero(parent.kinds == TokenKind.MODEL)[len(SEARCH)])
    for name in ("token_ids", "kinds", "logprobs", "policy_versions"):
        np.testing.assert_array_equal(getattr(fork, name)[:cut], getattr(parent, name)[:cut])
    injected = fork.token_ids[fork.kinds == TokenKind.INJECTED]
    assert TOKENIZER.decode(injected.tolist()) == HINT
    assert not fork.logprobs[fork.kinds == TokenKind.INJECTED].any()
    assert TOKENIZER.decode(fork.token_ids[cut:].tolist()) == HINT + "</think>" + RIGHT
    assert [turn.completion_text for turn in fork.turns] == [SEARCH, "</think>" + RIGHT]
    assert fork.turns[0] == parent.turns[0]
    assert retriever.asked == ["Riga", "Riga"]  # the environment acted on the parent's turn again
    # what the engine sampled counts once; what is learned from counts for both
    assert summarize(group).num_sampled_tokens == len(SEARCH + WRONG) + len("</think>" + RIGHT)
    assert fork.num_model_tokens == len(SEARCH) + len("</think>" + RIGHT)
    (again,) = groups_from_record_batch(groups_to_record_batch([group]))
    assert again.trajectories[1].parent == "t/0" and again.trajectories[1].num_copied_tokens == len(SEARCH)


class Reversing(SearchEnv):
    """The environment rewrites its conversation after each search."""

    async def step(self, queries: list[str]) -> Any:
        return replace(await super().step(queries), restart=(Message("user", f"after {queries[0]}"),))


async def test_a_fork_of_a_parent_with_rows_has_the_rows_before_it() -> None:
    scripts = {"t/0": [SEARCH, SEARCH, WRONG], "t/1": ["</think>" + RIGHT]}
    parent, fork = (await sample(runner("Retry", scripts, env=f"{HERE}:Reversing"))).trajectories
    assert len(parent.rows) == len(fork.rows) == 3
    assert fork.row_lengths[:2] == parent.row_lengths[:2]
    last = TOKENIZER.decode(fork.token_ids[fork.rows[2]].tolist())
    assert last == "user: after Riga\n" + HINT + "</think>" + RIGHT


def by_turn(trajectory: Trajectory, context: RewardContext) -> RewardResult:
    return RewardResult(1.0, [0.25 * (number + 1) for number in range(len(trajectory.turns))])


class Paying(SearchEnv):
    """Pays for each search."""

    async def step(self, queries: list[str]) -> StepResult:
        return replace(await super().step(queries), reward=0.125)


async def test_the_reward_of_a_copied_turn_is_counted_once() -> None:
    scripts = {"t/0": [SEARCH, SEARCH, WRONG], "t/1": ["</think>" + RIGHT]}
    group = await sample(runner("Retry", scripts, env=f"{HERE}:Paying", reward=f"{HERE}:by_turn"))
    parent, fork = group.trajectories
    assert parent.turn_rewards == fork.turn_rewards == (0.375, 0.625, 0.75)
    assert parent.reward == fork.reward == 1.25


class Chain(RolloutStrategy):
    """A fork, and a fork of it at the same turn and behind it."""

    async def sample(self, request: GroupRequest, play: Play) -> list[Trajectory]:
        first = await play(0)
        second = await play(1, fork=(first, 0, self.options["text"]))
        return [first, second, *[await play(2 + turn, fork=(second, turn, "")) for turn in range(2)]]


class Hearing(SearchEnv):
    """Keeps the texts of the turns that it acts on; its prompt begins the first turn with a word."""

    heard: ClassVar[list[str]] = []

    async def reset(self, task: Task) -> list[Message]:
        return [Message("user", task.question), Message("assistant", "<think>Hm")]

    async def act(self, turn: Completion) -> StepResult:
        self.heard.append(turn.text)
        return await super().act(turn)


async def test_a_fork_reads_its_turns_behind_what_code_had_written() -> None:
    """The thought is open where code opened it, for a fork of a fork and for an environment's own words."""
    found = "</think>" + SEARCH
    scripts = {f"t/{index}": [found, WRONG] for index in range(3)} | {"t/3": [RIGHT]}
    Hearing.heard.clear()
    options = {"strategy_options": {"text": "</think><think>again"}}
    group = await sample(runner("Chain", scripts, env=f"{HERE}:Hearing", env_runners=options))
    assert [one.stop_reason for one in group.trajectories] == [StopReason.ANSWERED] * 4
    whole = "<think>" + found
    assert Hearing.heard == [whole, WRONG, whole, WRONG, whole, WRONG, whole, RIGHT]


async def test_only_trained_groups_are_chosen() -> None:
    for split in ("eval", "demonstration"):
        (only,) = (await sample(runner("Retry", {"t/0": [SEARCH, WRONG]}), 1, split)).trajectories
        assert (only.trajectory_id, only.parent, only.stop_reason) == ("t/0", "", StopReason.ANSWERED)


class Odd(SearchEnv):
    """Cannot be made for one variant."""

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        super().__init__(settings, context)
        if context.variant == "odd":
            raise KeyError("odd")


async def test_an_environment_that_cannot_be_made_ends_its_trajectory_alone() -> None:
    options = {"strategy_options": {"names": ["plain", "odd"]}}
    made = runner("Variants", {"t/0": [RIGHT], "t/1": [RIGHT]}, env=f"{HERE}:Odd", env_runners=options)
    plain, odd = (await sample(made)).trajectories
    assert (plain.reward, odd.stop_reason, odd.variant) == (1.0, StopReason.ENV_ERROR, "odd")
    assert f"{__file__}, line " in odd.error and odd.error.endswith("KeyError: 'odd'")


class Changing(RolloutStrategy):
    """Gives a trajectory other numbers."""

    async def sample(self, request: GroupRequest, play: Play) -> list[Trajectory]:
        first = await play(0)
        acted = first.logprobs + np.float32(self.options["shift"])
        return [replace(first, reward=self.options["reward"], behaviour_logprobs=acted[self.options["cut"] :])]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"shift": np.nan}, ""),
        (
            {"reward": np.nan},
            ") returned t/0 with the reward nan and (0.0,) of its turns, expected finite",
        ),
        ({"cut": 1}, ") returned t/0 with behaviour_logprobs of the shape ("),
        ({"shift": -np.inf}, ") returned t/0 with behaviour_logprobs of the shape ("),
        ({"shift": 50.0}, ") returned t/0 with behaviour_logprobs of the shape ("),
    ],
)
async def test_numbers_that_a_strategy_gives_are_checked(changes: dict[str, float], problem: str) -> None:
    options = {"strategy_options": {"reward": 0.5, "shift": -1.0, "cut": 0} | changes}
    (one,) = (await sample(runner("Changing", {"t/0": [RIGHT]}, env_runners=options))).trajectories
    assert (one.stop_reason is StopReason.ENV_ERROR) == bool(problem) and problem in one.error


class Replacing(RolloutStrategy):
    """Gives a trajectory what it may not."""

    changed: ClassVar[Callable[[Trajectory], Trajectory]]

    async def sample(self, request: GroupRequest, play: Play) -> list[Trajectory]:
        return [type(self).changed(await play(0))]


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (lambda one: replace(one, token_ids=one.token_ids[:-1]), "other token_ids than were sampled; change reward"),
        (lambda one: replace(one, kinds=one.kinds * 0 + 1), "other kinds than were sampled"),
        (lambda one: replace(one, logprobs=one.logprobs + np.nan), "other logprobs than were sampled"),
        (lambda one: replace(one, answer="Oslo"), "other answer than were sampled"),
        (lambda one: replace(one, stop_reason="answered"), ""),  # the same text
        (lambda one: replace(one, turns=()), "other turns than were sampled"),
        (lambda one: replace(one, reward="much"), "the reward much and (0.0,) of its turns, expected finite numbers"),
        (lambda one: replace(one, metrics={"a": None}), "the metric a of None, expected a number"),
        (lambda one: replace(one, metrics={"a": 1.0}, variant="x", reward=0.25), ""),
    ],
)
async def test_what_was_sampled_cannot_be_changed(
    changed: Callable[[Trajectory], Trajectory], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Replacing, "changed", staticmethod(changed), raising=False)
    (one,) = (await sample(runner("Replacing", {"t/0": [RIGHT]}))).trajectories
    assert (one.stop_reason is StopReason.ENV_ERROR) == bool(problem)
    assert problem in one.error
    if problem:
        assert re.search(r"Replacing\.sample \(.*test_rollout_strategy\.py, line \d+\) returned t/0 with", one.error)


class Foreign(RolloutStrategy):
    """Forks a trajectory of the group before, or one that was changed."""

    kept: ClassVar[list[Trajectory]] = []

    async def sample(self, request: GroupRequest, play: Play) -> list[Trajectory]:
        self.kept.append(await play(0))
        parent = self.kept[0] if len(self.kept) > 1 else replace(self.kept[0], token_ids=self.kept[0].token_ids[:3])
        return [self.kept[-1], await play(1, fork=(parent, 0, ""))]


async def test_a_fork_of_another_group_or_of_what_was_not_sampled_is_refused() -> None:
    Foreign.kept.clear()
    made = runner("Foreign", {f"{task}/{index}": [RIGHT] for task in "tu" for index in range(2)})
    (one,) = (await sample(made)).trajectories
    assert "got a fork of t/0, with other token_ids than were sampled" in one.error
    other = GroupRequest("u", replace(TASK, task_id="u"), 2, 0.0, context=RewardContext("train"))
    (one,) = (await made.sample_group(other)).trajectories
    assert "play(1) got a fork of t/0, which was not played; expected a trajectory that play returned" in one.error


class LongHint(RolloutStrategy):
    """Writes more into a turn than the context holds."""

    async def sample(self, request: GroupRequest, play: Play) -> list[Trajectory]:
        first = await play(0)
        return [first, await play(1, fork=(first, 0, "word " * 500))]


async def test_a_text_that_does_not_fit_is_not_written() -> None:
    made = runner("LongHint", {"t/0": [RIGHT], "t/1": [RIGHT]}, env_runners={"max_context_tokens": 1000})
    _, fork = (await sample(made)).trajectories
    assert fork.stop_reason is StopReason.ENV_ERROR
    assert "got a text of 2500 tokens to write into a turn, and the context has room for" in fork.error
    assert fork.num_tokens < 1000


class Exits(RolloutStrategy):
    """Ends the process, or awaits what was cancelled."""

    async def sample(self, request: GroupRequest, play: Play) -> list[Trajectory]:
        if request.num_trajectories == 1:
            sys.exit(7)
        waiting = asyncio.ensure_future(asyncio.sleep(60))
        waiting.cancel()
        await waiting
        return []


@pytest.mark.parametrize(("count", "problem"), [(1, "it called sys.exit(7)"), (2, "it awaited what was cancelled")])
async def test_a_strategy_ends_its_group_only(count: int, problem: str) -> None:
    (one,) = (await sample(runner("Exits", {}), count)).trajectories
    assert one.stop_reason is StopReason.ENV_ERROR
    assert re.search(rf"test_rollout_strategy\.py, line \d+: .*{re.escape(problem)}", one.error)


class Variants(RolloutStrategy):
    """Plays three attempts, each with another variant; ignores the number that is asked for."""

    class Names(Section):
        names: list[str] = Field(["plain"], min_length=1)

    options_class = Names

    async def sample(self, request: GroupRequest, play: Play) -> list[Trajectory]:
        plays = (play(index, variant=name) for index, name in enumerate(self.options.names))
        return list(await asyncio.gather(*plays))


class Varied(SearchEnv):
    """Shows its variant and begins the policy's first turn with it."""

    seeds: ClassVar[list[int]] = []

    def __init__(self, settings: EnvironmentSettings, context: EnvContext) -> None:
        super().__init__(settings, context)
        self.seeds.append(context.seed)

    async def reset(self, task: Task) -> list[Message]:
        return [Message("user", task.question), Message("assistant", f"<think>{self._context.variant}")]


async def test_a_variant_reaches_the_environment_and_is_recorded() -> None:
    names = ["plain", "odd", "short"]
    scripts = {f"t/{index}": ["</think>" + RIGHT] for index in range(3)}
    options = {"strategy_options": {"names": names}}
    Varied.seeds.clear()
    found = await sample(runner("Variants", scripts, env=f"{HERE}:Varied", env_runners=options), count=8)
    assert [one.variant for one in found.trajectories] == names
    assert all(one.stop_reason is StopReason.ANSWERED for one in found.trajectories)  # the thought was open
    injected = [one.token_ids[one.kinds == TokenKind.INJECTED].tolist() for one in found.trajectories]
    assert [TOKENIZER.decode(ids) for ids in injected] == [f"<think>{name}" for name in names]
    assert len(set(Varied.seeds)) == 3 and all(seed >= 0 for seed in Varied.seeds)


class Unforkable(RolloutStrategy):
    """Forks what cannot be forked."""

    async def sample(self, request: GroupRequest, play: Play) -> list[Trajectory]:
        first = await play(0)
        return [first, await play(1, fork=(first, self.options["turns"], ""))]


@pytest.mark.parametrize(("script", "turns"), [([SEARCH, WRONG], 2), ([SEARCH, WRONG], -1), ([], 0)])
async def test_a_fork_that_cannot_be_fails_alone(script: list[str], turns: int) -> None:
    options = {"strategy_options": {"turns": turns}}
    made = runner("Unforkable", {"t/0": script, "t/1": [RIGHT]}, env_runners=options)
    parent, fork = (await sample(made)).trajectories
    assert parent.stop_reason is (StopReason.ANSWERED if script else StopReason.ENGINE_ERROR)
    assert fork.stop_reason is StopReason.ENV_ERROR
    assert fork.error.startswith("got a fork of t/0, which ended as")
    assert "expected a parent that did not fail" in fork.error
    assert f"Unforkable.sample ({__file__}, line " in fork.error


class Raises(RolloutStrategy):
    """Raises."""

    async def sample(self, request: GroupRequest, play: Play) -> list[Trajectory]:
        await play(0)
        raise KeyError("variant")


class Empty(RolloutStrategy):
    """Returns nothing."""

    async def sample(self, request: GroupRequest, play: Play) -> list[Trajectory]:
        return []


class Twice(RolloutStrategy):
    """Plays an index twice."""

    async def sample(self, request: GroupRequest, play: Play) -> list[Trajectory]:
        return [await play(0), await play(0)]


class Plain(RolloutStrategy):
    """Is not async."""

    def sample(self, request: GroupRequest, play: Play) -> Any:
        return []


class Calling(RolloutStrategy):
    """Plays with what its options say."""

    async def sample(self, request: GroupRequest, play: Any) -> list[Trajectory]:
        first = await play(self.options.get("index", 0))
        return [first, await play(1, fork=self.options["fork"](first), variant=self.options.get("variant", ""))]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"index": -1}, "play got the index -1, expected a whole number from 0"),
        ({"index": "a"}, "play got the index 'a', expected a whole number from 0"),
        ({"fork": lambda first: None, "variant": 3}, r"play\(1\) got variant=3, expected text"),
        (
            {"fork": lambda first: first},
            r"play\(1\) got fork=Trajectory\(.*\.\.\., expected \(parent, number of turns, text",
        ),
        ({"fork": lambda first: (first, 0)}, r"play\(1\) got fork=.*, expected \(parent, number of turns, text\)"),
        ({"fork": lambda first: (first, 4, "x")}, "got a fork of check/0/0, .* after 2 turns, before its turn 5"),
    ],
)
async def test_a_wrong_play_is_said_with_the_line_of_the_strategy(options: dict[str, Any], problem: str) -> None:
    (found, _) = await try_strategy(Calling(options))
    assert re.match(rf".*test_rollout_strategy\.py, line \d+: \w+: {problem}", found.problem), found.problem


class Doubled(RolloutStrategy):
    """Returns a trajectory twice."""

    async def sample(self, request: GroupRequest, play: Play) -> list[Trajectory]:
        return [await play(0)] * 2


class Nothing(RolloutStrategy):
    """Returns no list."""

    async def sample(self, request: GroupRequest, play: Play) -> Any:
        return None


@pytest.mark.parametrize(
    ("strategy", "problem"),
    [
        ("Raises", "test_rollout_strategy.py, line "),
        ("Empty", "returned the trajectories [], expected at least one of [], each once"),
        ("Twice", "play(0) was called twice in one group; take another index"),
        ("Doubled", "returned the trajectories ['t/0', 't/0'], expected"),
        ("Nothing", "returned None, expected a list of trajectories"),
        ("Plain", "test_rollout_strategy.py, line "),
    ],
)
async def test_a_strategy_that_goes_wrong_ends_its_group_as_data(strategy: str, problem: str) -> None:
    made = runner(strategy, {"t/0": [RIGHT]})
    group = await sample(made)
    (failed,) = group.trajectories
    assert failed.stop_reason is StopReason.ENV_ERROR and problem in failed.error
    assert f"{__file__}, line " in failed.error and len(failed.error.splitlines()) == 1
    assert summarize(group).num_failed == 1 and summarize(group).data_errors
    again = await sample(runner("Independent2", {"t/0": [RIGHT], "t/1": [RIGHT]}))
    assert [one.reward for one in again.trajectories] == [1.0, 1.0]


class Independent2(RolloutStrategy):
    """As the default."""

    options_class = Section

    async def sample(self, request: GroupRequest, play: Play) -> list[Trajectory]:
        return [await play(index) for index in range(request.num_trajectories)]


async def test_a_strategy_is_tried_without_an_engine() -> None:
    async def problems(strategy: RolloutStrategy) -> list[str]:
        return [check.problem for check in await try_strategy(strategy)]

    assert await problems(Retry(Section())) == await problems(Independent2(Section())) == ["", ""]
    first, second = await problems(Raises(Section()))
    assert "test_rollout_strategy.py, line " in first and first == second
    assert "expected at least one of" in (await problems(Empty(Section())))[0]


class Unlike:
    """No strategy."""


class OtherInput(RolloutStrategy):
    """Takes something else."""

    async def sample(self, request: GroupRequest) -> list[Trajectory]:  # type: ignore[override]
        return []


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("Unlike", {}, r"env_runners\.strategy: .*Unlike.*RolloutStrategy"),
        ("OtherInput", {}, r"OtherInput\.sample.*\(request, play\)"),
        ("Missing", {}, "Missing"),
        ("Variants", {"nmes": ["a"]}, r"env_runners\.strategy_options\.nmes; did you mean 'names'"),
        ("Independent2", {"a": 1}, r"env_runners\.strategy_options"),
    ],
)
def test_what_is_no_strategy_is_refused_before_a_run(name: str, options: dict[str, Any], problem: str) -> None:
    settings = EnvRunnerSettings(strategy=f"{HERE}:{name}", strategy_options=options)
    with pytest.raises(ConfigError, match=problem):
        check_classes(SamplerConfig(env_runners=settings))
