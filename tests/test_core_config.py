from pathlib import Path
from typing import Any

import pytest
import yaml

from learners.options import TurnCredit, learner_options
from ragr1_actors.core.config import LearnerSettings, LoraSettings, RunConfig
from ragr1_actors.core.errors import ConfigError
from ragr1_actors.core.resolve import override, resolve
from ragr1_actors.training.algorithm_config import AlgorithmConfig


def test_sections_are_fluent_and_the_last_setting_wins() -> None:
    config = AlgorithmConfig().training(lr=1e-4, group_size=3).training(lr=2e-4).debugging(seed=4).freeze()
    assert (config.training.lr, config.training.group_size, config.debugging.seed) == (2e-4, 3, 4)


def test_a_recipe_takes_overrides_as_yaml() -> None:
    config = (
        AlgorithmConfig.from_recipe("quickstart").override(["training.lr=1e-4", "environment.tasks=a b.json"]).freeze()
    )
    assert config.training.lr == 1e-4
    assert config.environment.tasks == "a b.json"


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("trainin.lr=1", "unknown section 'trainin'; did you mean 'training'?"),
        ("training.learning=1", "unknown key training.learning"),
        ("training.group_sze=1", "did you mean 'group_size'?"),
        ("training.lr", "expected section.key=value"),
        ("lr=1", "expected section.key=value"),
        ("training.lr=fast", "training.lr: got 'fast'; input should be a valid number"),
        ("training.lr=-1", "training.lr: got -1; input should be greater than 0"),
        ("learners.zero_stage=4", "learners.zero_stage: got 4"),
        ("environment.prompt=[", "environment.prompt: not valid YAML"),
    ],
)
def test_a_wrong_override_is_one_sentence(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AlgorithmConfig().override([assignment]).freeze()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_one_rank_has_no_zero_stage_unless_its_optimizer_is_offloaded() -> None:
    def stage(**settings: Any) -> int:
        return LearnerSettings(**settings).stage

    assert [stage(num_learners=count) for count in (0, 1, 2)] == [0, 0, 1]
    assert stage(offload=["optimizer"]) == 1 and stage(offload=["reference"]) == 0
    assert [stage(zero_stage=given, num_learners=count) for given, count in ((0, 2), (2, 1), (3, 0))] == [0, 2, 3]


def test_an_unknown_recipe_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'quickstart'"):
        AlgorithmConfig.from_recipe("quikstart")
    with pytest.raises(ConfigError, match="no recipe file"):
        AlgorithmConfig.from_recipe(str(tmp_path / "none.yaml"))
    broken = tmp_path / "broken.yaml"
    broken.write_text("training: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        AlgorithmConfig.from_recipe(str(broken))


def test_the_resolved_configuration_reads_back_as_it_was() -> None:
    config = AlgorithmConfig.from_recipe("quickstart").freeze()
    assert AlgorithmConfig(yaml.safe_load(config.to_yaml())).freeze() == config


def test_there_are_at_most_95_keys_and_a_group_is_one() -> None:
    keys = [(name, key) for name, field in RunConfig.model_fields.items() for key in field.annotation.model_fields]  # type: ignore[union-attr]
    assert len(keys) <= 95


JUDGE = {"url": "http://10.0.0.2:8000/v1", "model": "qwen"}


def test_models_are_named_in_a_recipe_and_on_the_command_line() -> None:
    assert resolve({"environment": {"models": {"judge": JUDGE}}}).environment.models["judge"].model == "qwen"
    named = override({}, ["environment.models={judge: {url: 'http://10.0.0.2:8000/v1', model: qwen}}"])
    deep = override(named, ["environment.models.judge.max_in_flight=3", "environment.models.other={model: m}"])
    models = resolve(deep).environment.models
    assert (models["judge"].url, models["judge"].max_in_flight) == (JUDGE["url"], 3)
    assert models["other"].model == "m"
    assert resolve(deep).changes()["environment.models"]["judge"]["model"] == "qwen"
    for wrong in ({"judge": JUDGE | {"modle": "qwen"}}, {"a": JUDGE, "judge": JUDGE | {"modle": "qwen"}}):
        with pytest.raises(
            ConfigError, match=r"^unknown key environment\.models\.judge\.modle; did you mean 'model'\?$"
        ):
            resolve({"environment": {"models": wrong}})


@pytest.mark.parametrize("env", ["direct", "rag"])
def test_a_baseline_of_the_last_release_is_said_with_its_new_name(env: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^environment\.env: {env} is a mode .*; write environment\.options\.mode={env}$"
    ):
        resolve({"environment": {"env": env}})


def test_a_value_for_a_group_of_keys_is_refused_in_the_words_of_a_recipe() -> None:
    expected = r"^training\.guard: got 'warn'; expected keys with values, such as \{key: value\}$"
    with pytest.raises(ConfigError, match=expected):
        resolve({"training": {"guard": "warn"}})


@pytest.mark.parametrize(
    "assignment",
    ["training.lr=on", "training.num_iterations=yes", "training.guard.patience=true", "learners.lora={rank: true}"],
)
def test_true_is_no_number(assignment: str) -> None:
    with pytest.raises(ConfigError, match="got True; expected a number"):
        AlgorithmConfig().override([assignment]).freeze()


def test_an_empty_group_has_the_defaults_and_null_is_none() -> None:
    config = AlgorithmConfig().override(["learners.lora={}", "training.options.turn_credit={}"]).freeze()
    assert config.learners.lora == LoraSettings()
    options = learner_options(config.training)
    assert options.turn_credit == TurnCredit()
    off = AlgorithmConfig().override(["learners.lora=null", "training.options.turn_credit=null"]).freeze()
    assert (off.learners.lora, learner_options(off.training).turn_credit) == (None, None)


def test_the_limits_of_an_alarm_are_in_order() -> None:
    with pytest.raises(ConfigError, match="expected the lower limit of grad_norm first"):
        AlgorithmConfig().override(["training.guard.limits={grad_norm: [10, 1]}"]).freeze()
