"""The published sets: every format read whole, names, and EM, F1 and recall as the official scripts compute them."""

from __future__ import annotations

import csv
import json
import re
import string
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from envs.measures import exact_match, token_f1
from envs.tasks.files import load_tasks
from envs.tasks.published_sets import PUBLISHED, SETS, load_sets, published_em
from ragr1_actors.core.errors import DataError
from ragr1_actors.core.types import Task
from ragr1_actors.runs.scores import normalize_rag_r1

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
TITLES = {"title": ["Ana", "Bo", "Ana"], "sent_id": [0, 1, 2]}


def write_lines(path: Path, *records: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


TRIVIAQA = {
    "Answer": {
        "Value": "U.S.",
        "Aliases": ["America", "U.S."],
        "NormalizedAliases": ["u s"],
        "Type": "WikipediaEntity",
    },
    "Question": "Which land?",
    "QuestionId": "tc_1",
    "SearchResults": [],
}
HUB_TRIVIAQA = {
    "question": "Which land?",
    "question_id": "tc_1",
    "answer": {"value": "U.S.", "aliases": ["America"], "normalized_aliases": ["u s"], "type": "WikipediaEntity"},
}


@pytest.mark.parametrize(
    ("record", "task_id", "answers", "category", "titles"),
    [
        ({"question": "who?", "answer": ["Ana", "A."]}, "t/0", ("Ana", "A."), "", ()),  # NQ
        (HUB_TRIVIAQA, "t/tc_1", ("U.S.", "America", "u s"), "", ()),
        (
            {"id": 7, "question": "What job?", "prop": "occupation", "possible_answers": '["poet", "bard"]'},  # PopQA
            "t/7",
            ("poet", "bard"),
            "occupation",
            (),
        ),
        ({"Question": "Who?", "Answer": "Ana"}, "t/0", ("Ana",), "", ()),  # Bamboogle
        (
            {  # FlashRAG's HotpotQA
                "id": "dev_0",
                "question": "Who?",
                "golden_answers": ["Ana"],
                "metadata": {"type": "bridge", "supporting_facts": TITLES, "context": {}},
            },
            "t/dev_0",
            ("Ana",),
            "bridge",
            ("Ana", "Bo"),
        ),
        (
            {  # FlashRAG's MuSiQue
                "id": "dev_1",
                "question": "Who?",
                "golden_answers": ["Ana"],
                "metadata": {
                    "answer_aliases": ["A."],
                    "question_decomposition": [{"support_paragraph": {"title": "Bo", "paragraph_text": "A text."}}],
                },
            },
            "t/dev_1",
            ("Ana", "A."),
            "",
            ("Bo",),
        ),
        (
            {"_id": "x", "question": "Who?", "answer": "Ana", "supporting_facts": '[["Ana", 0]]'},  # the hub's 2Wiki
            "t/x",
            ("Ana",),
            "",
            ("Ana",),
        ),
    ],
)
def test_a_record_is_read_whole(
    tmp_path: Path,
    record: dict[str, Any],
    task_id: str,
    answers: tuple[str, ...],
    category: str,
    titles: tuple[str, ...],
) -> None:
    (task,) = load_tasks(write_lines(tmp_path / "t.jsonl", record), whole=True).tasks
    assert (task.task_id, task.golden_answers, task.category, task.supporting_ids) == (
        task_id,
        answers,
        category,
        titles,
    )


SPANS = [
    {"short_answers": [{"start_token": 3, "end_token": 6}], "yes_no_answer": "NONE"},
    {"short_answers": [], "yes_no_answer": "YES"},
]
WORDS = ["<P>", "Born", "in", "Old", "<B>", "Riga", "."]
HUB_SPANS = {
    "id": ["1", "2"],
    "yes_no_answer": [-1, 0],
    "short_answers": [
        {"start_token": [3, 5], "end_token": [6, 6], "text": ["Old Riga", "Riga"]},
        {"start_token": [], "end_token": [], "text": []},
    ],
}


@pytest.mark.parametrize(
    ("record", "answers"),
    [
        (  # EfficientQA's: what people judged right afterwards counts
            {
                "question": "where?",
                "answer": ["Riga"],
                "def_correct_predictions": ["Old Riga"],
                "poss_correct_predictions": ["Latvia"],
                "answer_and_def_correct_predictions": ["Riga", "Old Riga"],
            },
            ("Riga", "Old Riga"),
        ),
        ({"question_text": "where?", "document_text": " ".join(WORDS), "annotations": SPANS}, ("Old Riga", "yes")),
        (
            {
                "question_text": "where?",
                "example_id": 5,
                "document_tokens": [{"token": word, "html_token": "<" in word} for word in WORDS],
                "annotations": SPANS,
            },
            ("Old Riga", "yes"),
        ),
        (
            {
                "question": {"text": "where?", "tokens": ["where", "?"]},
                "document": {"tokens": {"token": WORDS, "is_html": ["<" in word for word in WORDS]}},
                "annotations": HUB_SPANS,
            },
            ("Old Riga", "Riga", "no"),
        ),
    ],
)
def test_annotated_forms_of_natural_questions(tmp_path: Path, record: dict[str, Any], answers: tuple[str, ...]) -> None:
    (task,) = load_tasks(write_lines(tmp_path / "nq.jsonl", record), whole=True).tasks
    assert (task.question, task.golden_answers) == ("where?", answers)
    assert task.task_id == f"nq/{record.get('example_id', 0)}"


def test_an_annotated_question_without_an_answer_is_counted_and_a_wrong_span_refused(tmp_path: Path) -> None:
    nothing = {"question_text": "why?", "document_text": "a", "annotations": [{"short_answers": []}]}
    path = write_lines(tmp_path / "nq.jsonl", nothing, {"question": "who?", "answer": ["Ana"]})
    assert load_tasks(path, whole=True).report.num_empty_answers == 1
    wrong = {"question_text": "why?", "document_text": "a b", "annotations": SPANS}
    with pytest.raises(DataError, match=r"line 1: got a short answer of the tokens 3 to 6, expected a part of the doc"):
        load_tasks(write_lines(tmp_path / "wrong.jsonl", wrong))


def test_2wikis_other_names_count_where_their_file_is(tmp_path: Path) -> None:
    asked = {"_id": "x", "question": "Where?", "answer": "Riga", "answer_id": "Q1773", "supporting_facts": []}
    path = write_lines(tmp_path / "dev.json", asked, asked | {"_id": "y", "question": "Who?", "answer_id": None})
    assert [task.golden_answers for task in load_tasks(path, whole=True).tasks] == [("Riga",), ("Riga",)]
    names = {"Q_id": "Q1773", "aliases": ["Riga city", "Riga"], "demonyms": ["Rigan"]}
    write_lines(tmp_path / "id_aliases.json", {"Q_id": "Q1", "aliases": ["All"], "demonyms": []}, names)
    loaded = load_tasks(path, whole=True)
    assert [task.golden_answers for task in loaded.tasks] == [("Riga", "Riga city", "Rigan"), ("Riga",)]
    assert "1 answers with other names (50%)" in str(loaded.report)
    (tmp_path / "id_aliases.json").write_text('{"Q_id": "Q1"}\n')
    with pytest.raises(DataError, match=r"id_aliases\.json, line 1: expected .*fetch it again"):
        load_tasks(path)


def test_triviaqas_own_file(tmp_path: Path) -> None:
    path = tmp_path / "web-dev.json"
    path.write_text(json.dumps({"Data": [TRIVIAQA], "Version": 1.0}, indent=2))
    (task,) = load_tasks(path, whole=True).tasks
    assert (task.task_id, task.golden_answers) == ("web-dev/tc_1", ("U.S.", "America", "u s"))


def test_tables(tmp_path: Path) -> None:
    with (tmp_path / "popqa.tsv").open("w", newline="") as file:
        rows = csv.writer(file, delimiter="\t")
        rows.writerows([["id", "question", "possible_answers"], ["7", "What job?", '["poet", "O\'Hara"]']])
    (task,) = load_tasks(tmp_path / "popqa.tsv").tasks
    assert (task.task_id, task.golden_answers) == ("popqa/7", ("poet", "O'Hara"))
    (tmp_path / "bamboogle.csv").write_text('Question,Answer\n"Who, then?",Ana\n')
    (task,) = load_tasks(tmp_path / "bamboogle.csv").tasks
    assert (task.question, task.golden_answers) == ("Who, then?", ("Ana",))
    (tmp_path / "bad.csv").write_text("Question,Answer\nWho, then?,Ana\n")
    with pytest.raises(DataError, match=r"bad\.csv, row 1: not as many cells"):
        load_tasks(tmp_path / "bad.csv")


def test_search_r1s_ids_restart_with_every_source(tmp_path: Path) -> None:
    truth = {"style": "rule", "ground_truth": {"target": ["Ana", "A."]}}
    rows = [
        {"id": "test_0", "data_source": "nq", "question": "who?", "reward_model": truth},
        {"id": "test_0", "data_source": "popqa", "question": "what?", "reward_model": truth},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "test.parquet")
    loaded = load_tasks(tmp_path / "test.parquet", whole=True)
    assert [task.task_id for task in loaded.tasks] == ["test/nq/test_0", "test/popqa/test_0"]
    assert {task.golden_answers for task in loaded.tasks} == {("Ana", "A.")}


CHAT = [{"role": "system", "content": "Question: no."}, {"role": "user", "content": "Answer it. Question: Which land?"}]
TRAINERS = [
    {  # verl's and SkyRL's scripts for Search-R1
        "data_source": "searchR1_nq",
        "prompt": CHAT,
        rule: {"style": "rule", "ground_truth": {"target": ["Latvia", "LV"]}},
        "extra_info": {"index": 7, "split": "train", "question": "Which land is it?"},
    }
    for rule in ("reward_model", "reward_spec")
]


@pytest.mark.parametrize(
    ("record", "task_id", "question", "answers"),
    [
        *[(record, "t/searchR1_nq/train_7", "Which land is it?", ("Latvia", "LV")) for record in TRAINERS],
        ({**TRAINERS[0], "extra_info": {"index": 7}}, "t/searchR1_nq/7", "Which land?", ("Latvia", "LV")),
        ({**TRAINERS[0], "reward_model": {"ground_truth": ["LV"]}, "extra_info": None}, "t/0", "Which land?", ("LV",)),
        (
            {**TRAINERS[0], "reward_model": {"ground_truth": "LV"}, "data_source": 1},
            "t/0",
            "Which land is it?",
            ("LV",),
        ),
        ({"id": "5", "question": "Who?", "answers": {"text": ["Ana"], "answer_start": [3]}}, "t/5", "Who?", ("Ana",)),
    ],
)
def test_rows_of_trainers_scripts(
    tmp_path: Path, record: dict[str, Any], task_id: str, question: str, answers: tuple[str, ...]
) -> None:
    pq.write_table(pa.Table.from_pylist([record]), tmp_path / "t.parquet")
    (task,) = load_tasks(tmp_path / "t.parquet").tasks
    assert (task.task_id, task.question, task.golden_answers) == (task_id, question, answers)


@pytest.mark.parametrize("prompt", [None, [], "Question: x", [{"role": "user", "content": "Answer it."}], [3]])
def test_a_trainers_row_without_a_question_is_refused(tmp_path: Path, prompt: Any) -> None:
    path = write_lines(tmp_path / "t.jsonl", {**TRAINERS[0], "prompt": prompt, "extra_info": {}})
    with pytest.raises(DataError, match=r"line 1: got the keys .*, expected a question"):
        load_tasks(path)


def test_tasks_of_kilt(tmp_path: Path) -> None:
    places = [{"title": "Ana Bell", "wikipedia_id": "1"}, {"title": "Riga"}, {"title": "Ana Bell"}, {}]
    outputs = [{"answer": "Riga", "provenance": places}, {"answer": "Rīga"}, {"provenance": None}]
    path = write_lines(tmp_path / "nq-dev-kilt.jsonl", {"id": "5d", "input": "Where was she born?", "output": outputs})
    (task,) = load_tasks(path).tasks
    assert (task.task_id, task.question) == ("nq-dev-kilt/5d", "Where was she born?")
    assert (task.golden_answers, task.supporting_ids) == (("Riga", "Rīga"), ("Ana Bell", "Riga"))


def test_a_kilt_file_without_answers_says_so(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "nq-test_without_answers-kilt.jsonl", {"id": "5d", "input": "Where?", "meta": {}})
    with pytest.raises(DataError, match=r"line 1: no answer; expected one of the keys golden_answers"):
        load_tasks(path)


FACTS = {"title": ["Ana", "Riga"], "sent_id": [0, 2]}
HOTPOT = {"type": "bridge", "level": "easy", "supporting_facts": FACTS, "context": {"title": ["Ana"]}}
CALL = {"ground_truth": {"target": ["Riga"]}, "question": "Where was Ana born?", "data_source": "searchR1_hotpotqa"}
INFO = {"index": 3, "need_tools_kwargs": True, "question": CALL["question"], "split": "train"}
INFO |= {"tools_kwargs": {"search": {"create_kwargs": CALL}}}
RULE = {"style": "rule", "ground_truth": {"target": ["Riga"]}}
SOURCED = {"data_source": "searchR1_hotpotqa", "prompt": CHAT, "ability": "fact-reasoning", "extra_info": INFO}
EVIDENCE = {"wikipedia_id": "1", "title": "Ana", "start_paragraph_id": 1, "bleu_score": 1.0, "section": "Section::::A."}
KILT = {"id": "5a7a", "input": "Where was Ana born?", "meta": {"left_context": ""}}
KILT |= {
    "output": [
        {"answer": "Riga", "provenance": [EVIDENCE], "meta": {"score": -1}},
        {"answer": "", "provenance": [{**EVIDENCE, "title": ""}, {**EVIDENCE, "title": "Riga"}], "meta": {"score": -1}},
    ]
}
SQUAD_QUESTION = {"question": "Where was Ana born?", "answers": [{"text": "Riga", "answer_start": 3}] * 2}
PEERS: dict[str, tuple[dict[str, Any], str, str, tuple[str, ...]]] = {
    # shape: (what the script or the hub writes, id, category, supporting ids)
    "verl rows": (
        {**SOURCED, "reward_model": RULE, "metadata": HOTPOT},
        "searchR1_hotpotqa/train_3",
        "bridge",
        ("Ana", "Riga"),
    ),
    "verl rows without a rule": (
        {**SOURCED, "reward_model": None, "metadata": None},
        "searchR1_hotpotqa/train_3",
        "",
        (),
    ),
    "SkyRL rows": (
        {**SOURCED, "env_class": "search", "reward_spec": RULE, "metadata": HOTPOT},
        "searchR1_hotpotqa/train_3",
        "bridge",
        ("Ana", "Riga"),
    ),
    "ReSearch rows": (
        {
            "data_source": "musique",
            "question": "Where was Ana born?",
            "ability": "qa",
            "reward_model": {"style": "rule", "ground_truth": ["Riga"]},
            "extra_info": {"id": "2hop__1_2"},
        },
        "musique/2hop__1_2",
        "",
        (),
    ),
    "Search-R1 rows": (
        {
            "id": "train_3",
            "question": "Where was Ana born?",
            "golden_answers": ["Riga"],
            "data_source": "hotpotqa",
            "prompt": CHAT[1:],
            "ability": "fact-reasoning",
            "reward_model": RULE,
            "extra_info": {"index": 3, "split": "train"},
            "metadata": HOTPOT,
        },
        "hotpotqa/train_3",
        "bridge",
        ("Ana", "Riga"),
    ),
    "FlashRAG": (
        {"id": "dev_3", "question": "Where was Ana born?", "golden_answers": ["Riga"], "metadata": HOTPOT},
        "dev_3",
        "bridge",
        ("Ana", "Riga"),
    ),
    "RAG-R1": ({"question": "Where was Ana born?", "golden_answers": "Riga"}, "0", "", ()),
    "KILT": (KILT, "5a7a", "", ("Ana", "Riga")),
    "SQuAD": (
        {
            "id": "56be",
            "title": "Ana",
            "context": "In Riga.",
            "question": "Where was Ana born?",
            "answers": {"text": ["Riga", "Riga"], "answer_start": [3, 3]},
        },
        "56be",
        "",
        (),
    ),
    "SQuAD of a list": ({"id": "56be", "context": "In Riga.", **SQUAD_QUESTION}, "56be", "", ()),
}


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("ending", ["parquet", "jsonl"])
def test_what_the_scripts_of_others_write_is_read_and_said(tmp_path: Path, name: str, ending: str) -> None:
    """verl's preprocess_search_r1_dataset.py, SkyRL's searchr1_dataset.py, ReSearch's prepare_musique.py, Search-R1's
    qa_search_train_merge.py, and the records of FlashRAG, KILT and SQuAD."""
    record, local_id, category, supporting_ids = PEERS[name]
    path = tmp_path / f"train.{ending}"
    if ending == "parquet":
        pq.write_table(pa.Table.from_pylist([record]), path)
    else:
        write_lines(path, record)
    loaded = load_tasks(path)
    question = "Where was Ana born?"
    plan = (("Ana",), ("Riga",)) if supporting_ids == ("Ana", "Riga") else ()  # the question names Ana only
    assert loaded.tasks == (Task(f"train/{local_id}", question, ("Riga",), category, supporting_ids, plan),)
    shape = name.partition(" without")[0].partition(" of")[0]
    assert str(loaded.report) == f"train.{ending} ({shape}): 1 tasks of 1 records"


def test_squads_own_file(tmp_path: Path) -> None:
    impossible = {
        "id": "b",
        "question": "Why?",
        "answers": [],
        "is_impossible": True,
        "plausible_answers": [{"text": "x"}],
    }
    articles = [
        {"title": "Ana", "paragraphs": [{"context": "In Riga.", "qas": [{"id": "a", **SQUAD_QUESTION}]}]},
        {"title": "Bo", "paragraphs": [{"context": "x", "qas": []}, {"context": "y", "qas": [impossible]}]},
    ]
    path = tmp_path / "dev-v2.0.json"
    path.write_text(json.dumps({"version": "v2.0", "data": articles}))
    loaded = load_tasks(path, whole=True)
    assert loaded.tasks == (Task("dev-v2.0/a", "Where was Ana born?", ("Riga",)),)
    assert str(loaded.report) == (
        "dev-v2.0.json (SQuAD): 1 tasks of 2 records; "
        "1 without a usable answer left out (paragraph 2 of entry 2 of data)"
    )
    path.write_text(json.dumps({"data": [{"question": "Where?", "answer": "Riga"}]}))
    assert load_tasks(path).tasks == (Task("dev-v2.0/0", "Where?", ("Riga",)),)


SHAPES: list[tuple[str, dict[str, Any]]] = [
    ("TriviaQA", TRIVIAQA),
    ("TriviaQA", HUB_TRIVIAQA),
    ("PopQA", {"question": "What job?", "possible_answers": '["poet"]'}),
    ("Bamboogle", {"Question": "Who?", "Answer": "Ana"}),
    ("Natural Questions", {"question": "Who?", "annotations": [], "answer": "Ana"}),
    ("MuSiQue", {"question": "Who?", "answer": "Ana", "paragraphs": []}),
    ("2Wiki", {"_id": "x", "question": "Who?", "answer": "Ana", "evidences": [], "supporting_facts": []}),
    ("HotpotQA", {"_id": "x", "question": "Who?", "answer": "Ana", "supporting_facts": []}),
    ("question and answer", {"question": "Who?", "answer": ["Ana"], "paragraphs": None}),
]


@pytest.mark.parametrize(("shape", "record"), SHAPES)
def test_the_shape_of_a_record_is_told_by_its_keys(tmp_path: Path, shape: str, record: dict[str, Any]) -> None:
    loaded = load_tasks(write_lines(tmp_path / "t.jsonl", record), whole=True)
    assert loaded.report.shapes == (("t", shape),)


@pytest.mark.parametrize("content", [b"", b"PAR1 is not enough"])
def test_a_damaged_parquet_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.parquet").write_bytes(content)
    with pytest.raises(DataError, match="no Parquet file that can be read"):
        load_tasks(tmp_path / "t.parquet")


def test_answers_that_are_no_json(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "t.jsonl", {"question": "What?", "possible_answers": "poet"})
    with pytest.raises(DataError, match=r"line 1: possible_answers: got 'poet', expected a JSON list"):
        load_tasks(path)


def test_a_set_by_its_name(tmp_path: Path) -> None:
    write_lines(tmp_path / "2wikimultihopqa" / "dev.jsonl", {"id": "dev_0", "question": "q?", "golden_answers": ["a"]})
    write_lines(tmp_path / "nq.jsonl", {"question": "q?", "answer": ["a"]})
    assert load_sets("2wiki", tmp_path).tasks[0].task_id == "2wiki/dev_0"
    assert load_sets("nq", tmp_path).tasks[0].task_id == "nq/0"
    assert load_sets(tmp_path / "nq.jsonl").tasks[0].task_id == "nq/0"
    with pytest.raises(DataError, match=r"has no set musique; expected musique/dev\.jsonl"):
        load_sets("musique", tmp_path)


def test_without_the_hub_the_message_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"the set bamboogle cannot be loaded from the hub .* with --data"):
        load_sets("bamboogle")


def test_published_figures_are_those_of_the_papers() -> None:
    means = {(method, settings[:14]): sum(em) / 7 for method, settings, em in PUBLISHED}
    averages = [0.167, 0.271, 0.368, 0.439, 0.455, 0.431, 0.385, 0.396]  # as the papers print them
    assert list(means.values()) == pytest.approx(averages, abs=0.0006)
    assert sum(published.num_tasks for published in SETS.values()) == 51_713
    assert ("RAG-R1, several queries", 0.556) in [(method, em) for method, _, em in published_em("2wiki")]
    assert published_em("questions.json") == []


@pytest.mark.skipif(not DATA.is_dir(), reason="no folder ../shared/data with the public question files")
@pytest.mark.parametrize("name", ["hotpotqa_100.json", "ragr1_mq_test_351.json", "ragr1_mq_train_6664.json"])
def test_em_and_f1_on_real_answers_are_the_official_ones_to_the_last_digit(name: str) -> None:
    tasks = load_tasks(DATA / name, whole=True).tasks
    golds = [task.golden_answers for task in tasks]
    assert len(tasks) == len(json.loads((DATA / name).read_text()))  # nothing is left out
    for shown in (
        lambda at: golds[at][0],
        lambda at: f"The {golds[at][0]}, {tasks[at].question}",
        lambda at: golds[at - 1][0],
    ):
        answers = [shown(at) for at in range(len(tasks))]
        for answer, gold in zip(answers, golds, strict=True):
            assert exact_match(answer, gold) == max(official_em(answer, one) for one in gold)
            assert token_f1(answer, gold) == max(official_f1(answer, one) for one in gold)
            assert exact_match(answer, gold, normalize_rag_r1) == max(official_em(answer, one, " ") for one in gold)
            expected = max(official_f1(answer, one, " ") for one in gold)
            assert token_f1(answer, gold, normalize_rag_r1) == expected


def official_normal(text: str, instead: str) -> str:
    """What SQuAD's and HotpotQA's scripts do to an answer, step by step and independent of the project's code.

    ``instead`` replaces punctuation: nothing there, a space in RAG-R1's evaluation.
    """
    lowered = text.lower()
    bare = "".join(instead if char in set(string.punctuation) else char for char in lowered)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def official_em(answer: str, gold: str, instead: str = "") -> float:
    return float(official_normal(answer, instead) == official_normal(gold, instead))


def official_f1(answer: str, gold: str, instead: str = "") -> float:
    said, wanted = official_normal(answer, instead), official_normal(gold, instead)
    if said != wanted and (said in ("yes", "no", "noanswer") or wanted in ("yes", "no", "noanswer")):
        return 0.0
    shared = sum((Counter(said.split()) & Counter(wanted.split())).values())
    if not shared:
        return 0.0
    precision, recall = 1.0 * shared / len(said.split()), 1.0 * shared / len(wanted.split())
    return (2 * precision * recall) / (precision + recall)
