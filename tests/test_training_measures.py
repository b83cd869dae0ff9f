"""Measures of a custom environment: in metrics and the report, and to choose a checkpoint by."""

from __future__ import annotations

from typing import ClassVar

import pytest

from envs.search import SearchEnv
from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.service_settings import AgentSettings
from ragr1_actors.core.types import Trajectory
from ragr1_actors.evaluation.evaluate import eval_result, own_measures
from ragr1_actors.planning.preflight import _check_best_metric, check_names
from ragr1_actors.rollout.groups import GroupSummary
from ragr1_actors.runs.report import RunReport, StageReport, TaskCounts, _table_rows


def cautious(trajectory: Trajectory) -> float:
    return float(len(trajectory.calls) > 1)


class MeasuredEnv(SearchEnv):
    measures: ClassVar = {"cautious": cautious, "em": cautious}


def config(metric: str, env: str = f"{__name__}:MeasuredEnv") -> RunConfig:
    keys = {"checkpointing": {"best_metric": metric}, "environment": {"env": env}}
    return RunConfig.model_validate(keys)


def test_a_measure_of_the_environment_is_averaged_and_stands_in_the_report() -> None:
    means = {"em": 1.0, "f1": 1.0, "rounds": 2.0, "queries": 3.0, "tokens": 9.0}
    summaries = [GroupSummary((1.0,), 0, (), 0, means | {"cautious": value, "other": 7.0}) for value in (1.0, 0.0, 0.5)]
    found = eval_result(summaries, 0, own_measures(config("em").environment))
    assert found.measures == {"cautious": 0.5}
    assert found.by_name()["cautious"] == 0.5 and found.by_name()["queries_per_round"] == 1.5
    assert "measures" not in found.by_name()
    report = RunReport((StageReport("rl", found, 1.0),), 1.0, 1, TaskCounts(1, 1, 0, 0, 0))
    assert ("cautious", "0.500") in _table_rows(report)


def test_an_agent_has_no_measures_of_the_environment_that_it_replaces() -> None:
    settings = config("em").environment.model_copy(update={"agent": AgentSettings(function="my_agent:solve")})
    assert own_measures(settings) == ()


@pytest.mark.parametrize("metric", ["em", "f1", "cautious", ""])
def test_a_checkpoint_is_chosen_by_any_measure(metric: str) -> None:
    check_names(config(metric))


def test_a_metric_that_the_environment_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"checkpointing\.best_metric: got 'cautios'; did you mean 'cautious'\?"):
        check_names(config("cautios"))
    with pytest.raises(ConfigError, match=r"checkpointing\.best_metric: got 'cautious'; expected one of: em, f1, "):
        check_names(config("cautious", "search"))
    with pytest.raises(ConfigError, match=r"best_metric: got 'repeated_queries'; did you mean 'queries'"):
        check_names(config("repeated_queries"))  # no evaluation reports it
    agent = {"agent": AgentSettings(function="my_agent:solve")}
    of_agent = config("em").environment.model_copy(update=agent)
    with pytest.raises(ConfigError, match=r"best_metric: got 'cautious'"):
        _check_best_metric(config("cautious").model_copy(update={"environment": of_agent}))
