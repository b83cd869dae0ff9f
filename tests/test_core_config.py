from pathlib import Path

import pytest
import yaml

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import ConfigError
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


def test_there_are_at_most_100_keys_in_two_levels() -> None:
    keys = [(name, key) for name, field in RunConfig.model_fields.items() for key in field.annotation.model_fields]  # type: ignore[union-attr]
    assert len(keys) <= 100
