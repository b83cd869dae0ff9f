"""Folders of models that bring Python code: refused everywhere, or run where the recipe trusts them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from processes import run_python
from small_world import invoke

from ragr1_actors.core.errors import ConfigError, DataError
from ragr1_actors.core.models.model_files import check_code, find_code
from ragr1_actors.planning.tiny_policy import make_tiny_policy

REFUSED = r"brings Python code \(auto_map in {}\), which is not run"
CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
Path({marker!r}).touch()
class Config(Qwen2Config):
    model_type = "made_up"
class Model(Qwen2ForCausalLM):
    config_class = Config
class Tokens(PreTrainedTokenizerFast):
    pass
"""
LOAD = """
import sys
from pathlib import Path
import torch
from learners.models.scoring import PolicyModel, ValueModel
from ragr1_actors.rollout.engines.base import EngineArguments, PolicyTokenizer
from ragr1_actors.rollout.engines.transformers_engine import TransformersEngine
folder, trusted = Path(sys.argv[1]), sys.argv[2] == "True"
plain = PolicyTokenizer(sys.argv[3])
for load in (
    lambda: PolicyTokenizer(folder, trust_remote_code=trusted),
    lambda: TransformersEngine(folder, plain, EngineArguments(1, 64, trust_remote_code=trusted)).model,
    lambda: PolicyModel(folder, torch.float32, 1.0, trust_remote_code=trusted).model,
    lambda: ValueModel(folder, torch.float32, False, trusted).backbone,
):
    try:
        print("loaded", type(load()).__name__)
    except Exception as error:
        print("refused", type(error).__name__, str(error).splitlines()[0])
"""


def make_policy(folder: Path) -> Path:
    make_tiny_policy(folder, ["Where was Ana ?"], seed=0, vocab_size=300, hidden_size=32, num_layers=1, num_heads=2)
    return folder


def change(path: Path, **keys: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A policy that only its own code can load; importing the code leaves the file ``ran``."""
    folder = make_policy(tmp_path / "policy")
    (folder / "made_up.py").write_text(CODE.format(marker=str(tmp_path / "ran")))
    code = {"AutoConfig": "made_up.Config", "AutoModelForCausalLM": "made_up.Model"}
    change(folder / "config.json", model_type="made_up", auto_map=code)
    change(
        folder / "tokenizer_config.json",
        tokenizer_class="Tokens",
        auto_map={"AutoTokenizer": [None, "made_up.Tokens"]},
    )
    return folder


@pytest.mark.engine
@pytest.mark.parametrize("trusted", [False, True])
def test_code_runs_only_where_the_recipe_trusts_it(
    policy: Path, tmp_path: Path, trusted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Standard input is closed: a question on the terminal would fail."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))  # where transformers copies the code
    done = run_python(LOAD, policy, trusted, make_policy(tmp_path / "plain"))
    found = [line for line in done.splitlines() if line.startswith(("loaded", "refused"))]
    assert len(found) == 4
    assert all(line.startswith("loaded" if trusted else "refused") for line in found), done
    assert (tmp_path / "ran").exists() == trusted


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json", "processor_config.json"])
def test_a_policy_with_code_is_refused_before_anything_starts(tmp_path: Path, file: str) -> None:
    folder = make_policy(tmp_path / "policy")
    check_code(folder, trusted=False)
    (folder / file).touch()
    (folder / file).write_text(json.dumps({"auto_map": {"AutoConfig": "made_up.Config"}}))
    with pytest.raises(ConfigError, match=REFUSED.format(file)):
        check_code(folder, trusted=False)
    check_code(folder, trusted=True)
    said = invoke("train", "quickstart", f"policy.model={folder}", "--run-dir", str(tmp_path / "run"))
    assert "brings Python code" in said and "policy.trust_remote_code=true" in said
    assert not (tmp_path / "run").exists()


def test_a_damaged_configuration_names_no_code(tmp_path: Path) -> None:
    for content in ("{", "[]", "\ud83d".encode("utf-16", "surrogatepass").decode("latin-1"), '{"auto_map": {}}'):
        (tmp_path / "config.json").write_text(content)
        assert find_code(tmp_path) == ""
    assert find_code(tmp_path / "none") == ""


@pytest.mark.engine
def test_code_of_encoders_and_rerankers_is_never_run(tmp_path: Path) -> None:
    from retrieval.encoders.encoder import Encoder
    from retrieval.encoders.reranker import Reranker

    folder = make_policy(tmp_path / "model")  # of an architecture that transformers knows
    change(folder / "config.json", auto_map={"AutoModel": "made_up.Model"})
    for load in (Encoder.load, Reranker.load):
        with pytest.raises(DataError, match="brings Python code from its repository, which is never run here"):
            load(folder)
