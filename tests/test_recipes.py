"""The methods of ``ragr1_actors/recipes``: what each folder has, and the rewards and masks of fixed trajectories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import yaml
from fakes import ByteTokenizer, DictRetriever

from envs.measures import RewardContext
from ragr1_actors.core.config import SamplerConfig
from ragr1_actors.core.resolve import CLAIM_FILE, RECIPES, copy_method, method_recipes
from ragr1_actors.core.types import Task, TokenKind, Trajectory, TrajectoryGroup
from ragr1_actors.lab.claim import claim_files, read_claim
from ragr1_actors.recipes.mmoa_rag.mmoa_rag import GeneratorLearner
from ragr1_actors.recipes.stepsearch.stepsearch import key_match
from ragr1_actors.rollout.engines.base import ScriptedEngine
from ragr1_actors.rollout.env_runner import EnvRunner
from ragr1_actors.rollout.groups import GroupRequest
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from retrieval.base import Passage

FIXED = Path(__file__).with_name("recipes")
MAX_PYTHON_LINES, MAX_README_LINES = 150, 15
TOKENIZER = ByteTokenizer()
_IN_BYTES = ("env_runners.max_context_tokens=8192", "env_runners.max_new_tokens_per_turn=1000")


class Finds(DictRetriever):
    """Finds what it is told to find, or else the passage whose title is the query."""

    def __init__(self, passages: list[Passage], found: Mapping[str, list[str]]) -> None:
        super().__init__(passages)
        by_id = {passage.id: passage for passage in passages}
        self.found = {query: [by_id[name] for name in ids] for query, ids in found.items()}

    async def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        by_title = await super().search(queries, k)
        return [self.found.get(query, hits)[:k] for query, hits in zip(queries, by_title, strict=True)]


@dataclass(frozen=True)
class Fixed:
    """Five trajectories of a method, with what they must be: a file of ``tests/recipes``.

    ``turns`` is what the policy writes, ``kinds`` the tokens by their kind, one token per byte: ``P24 M60 O80 M39`` are
    24 tokens of the prompt, then 60 of the policy. Attempts of one group are under ``trajectories`` in turn.
    """

    recipe: str
    task: Mapping[str, Any]
    trajectories: list[dict[str, Any]]
    passages: list[list[str]] = field(default_factory=list)
    found: dict[str, list[str]] = field(default_factory=dict)
    """Ids of the passages that a query finds; another query finds the passage of this title."""
    keys: list[str] = field(default_factory=list)
    progress: float = 0.5
    together: bool = False
    """Whether the trajectories are one group, which a strategy makes."""

    async def play(self) -> list[Trajectory]:
        scripts = [one["turns"] for one in self.trajectories]
        if self.together:
            return await self._sample(scripts, self.progress)
        progress = [one.get("progress", self.progress) for one in self.trajectories]
        groups = [await self._sample([script], at) for script, at in zip(scripts, progress, strict=True)]
        return [one for group in groups for one in group]

    async def _sample(self, scripts: list[list[str]], progress: float) -> list[Trajectory]:
        config = AlgorithmConfig.from_recipe(self.recipe).override([*_IN_BYTES, *self.keys]).freeze()
        sampler = SamplerConfig(
            environment=config.environment, env_runners=config.env_runners, retrieval=config.retrieval
        )
        engine = ScriptedEngine({f"t/{n}": script for n, script in enumerate(scripts)}, TOKENIZER.encode)
        retriever = Finds([Passage(*passage) for passage in self.passages], self.found)
        runner = EnvRunner(sampler, TOKENIZER, retriever, engine)
        task, context = (
            Task("t", **{name: _frozen(value) for name, value in self.task.items()}),
            RewardContext("train", progress),
        )
        num_asked = len([one for one in self.trajectories if not one.get("parent")]) if self.together else 1
        group = await runner.sample_group(GroupRequest("t", task, num_asked, 1.0, context=context))
        assert [one.error for one in group.trajectories] == [""] * len(scripts)
        return list(group.trajectories)


def fixed() -> Iterator[Fixed]:
    for path in sorted(FIXED.glob("*.yaml")):
        yield Fixed(**yaml.safe_load(path.read_text()))


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def kinds(trajectory: Trajectory) -> str:
    runs = ((TokenKind(kind).name[0], len(list(same))) for kind, same in groupby(trajectory.kinds.tolist()))
    return " ".join(f"{name}{count}" for name, count in runs)


@pytest.mark.parametrize("method", [path.stem for path in sorted(FIXED.glob("*.yaml"))])
async def test_fixed_trajectories_have_their_rewards_and_masks(method: str) -> None:
    expected = Fixed(**yaml.safe_load((FIXED / f"{method}.yaml").read_text()))
    assert len(expected.trajectories) >= 5
    found = await expected.play()
    for one, trajectory in zip(expected.trajectories, found, strict=True):
        got = {"turns": one["turns"], "reward": round(trajectory.reward, 6), "kinds": kinds(trajectory)}
        assert got == {name: one[name] for name in got}
        rewards = [round(reward, 6) for reward in trajectory.turn_rewards]
        assert rewards == one.get("turn_rewards", rewards)
        assert trajectory.parent == one.get("parent", "")
        measures = {name: pytest.approx(value, abs=1e-6) for name, value in one.get("measures", {}).items()}
        assert {name: trajectory.metrics[name] for name in measures} == measures


@pytest.mark.parametrize("method", list(method_recipes()))
def test_a_method_has_what_it_needs(method: str) -> None:
    folder = RECIPES / method
    readme = (folder / "README.md").read_text().splitlines()
    assert readme[0].startswith("# ") and len(readme) <= MAX_README_LINES
    lines = sum(len(path.read_text().splitlines()) for path in folder.glob("*.py") if path.name != "__init__.py")
    assert lines <= MAX_PYTHON_LINES
    assert (FIXED / f"{method}.yaml").is_file()


def test_recipes_have_names_of_their_own() -> None:
    files = [path for path in RECIPES.rglob("*.yaml") if path.name != CLAIM_FILE]
    assert len({path.stem for path in files}) == len(files)
    modules = [path for path in RECIPES.rglob("*.py") if path.name != "__init__.py"]
    assert len({path.stem for path in modules}) == len(modules)  # beside one another where several are copied


@pytest.mark.parametrize("method", list(claim_files()))
def test_the_runs_of_a_claim_have_valid_settings(method: str, tmp_path: Path) -> None:
    claim = read_claim(method)
    run_dirs = {name: tmp_path / name for name in claim.runs}
    for plan in claim.runs.values():
        keys = {key: value for key, value in plan.overrides(run_dirs).items() if key != "policy.model"}
        AlgorithmConfig.from_recipe(plan.recipe).override([f"{key}={value}" for key, value in keys.items()]).freeze()


@pytest.mark.parametrize("method", list(method_recipes()))
def test_a_copied_method_has_the_same_settings(method: str, tmp_path: Path) -> None:
    for path in copy_method(method, tmp_path / "mine"):
        copied = AlgorithmConfig.from_recipe(str(path)).freeze().model_dump_json()
        original = AlgorithmConfig.from_recipe(path.stem).freeze().model_dump_json()
        package = f"ragr1_actors.recipes.{method}."
        assert copied.replace(f"{tmp_path / 'mine'}/", "").replace(".py:", ":") == original.replace(package, "")


@pytest.mark.parametrize("method", list(claim_files()))
def test_a_copied_claim_runs_the_copied_code(method: str, tmp_path: Path) -> None:
    copy_method(method, tmp_path / "mine")
    for name, plan in read_claim(str(tmp_path / "mine")).runs.items():
        keys = "\n".join(str(value) for value in [plan.recipe, *plan.set.values()])
        assert f"ragr1_actors.recipes.{method}." not in keys, name
        for module in (tmp_path / "mine").glob("*.py"):
            assert f"{module.stem}:" not in keys.replace(f"{module}:", ""), name


async def test_the_generator_alone_is_not_charged_for_the_roles_before_it() -> None:
    attempts = await Fixed(**yaml.safe_load((FIXED / "mmoa_rag.yaml").read_text())).play()
    learner = object.__new__(GeneratorLearner)  # what it keeps does not depend on a policy
    (group,) = learner.connect([TrajectoryGroup(attempts[0].task, tuple(attempts))])
    assert [one.reward for one in group.trajectories] == [1.0, 1.0, 0.0, 1.0, -1.0, 0.0]
    assert [sum(one.turn_rewards) for one in group.trajectories] == [0.0, 0.0, 0.0, 0.0, -1.0, 0.0]


async def test_a_session_ends_at_the_limit_of_its_turns() -> None:
    fixed = Fixed(**yaml.safe_load((FIXED / "faq.yaml").read_text()))
    ended = await replace(fixed, keys=["environment.max_turns=2"]).play()
    assert [len(one.turns) for one in ended] == [2] * len(ended)


def test_gold_queries_of_a_file_are_wordings_of_which_one_counts() -> None:
    task = Task("t", "?", ("Riga",), meta={"search_keys": [["who directed it", "the director"], ["her birthplace"]]})
    assert key_match(task, ["the director"]) == 0.5
    assert key_match(task, ["who directed it", "her birthplace"]) == 1.0
