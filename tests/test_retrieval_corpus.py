"""Corpus formats, their errors, and the Arrow file."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragr1_actors.errors import DataError
from retrieval.base import Passage
from retrieval.corpus import CORPUS_FILE, SCHEMA, Corpus, read_passages, write_corpus


def read(tmp_path: Path, content: str | bytes, name: str = "corpus.json") -> list[Passage]:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return list(read_passages(path))


def test_hotpotqa_object_joins_sentences_and_takes_the_title_as_id(tmp_path: Path) -> None:
    passages = read(tmp_path, json.dumps({"Alû": ["A demon.", " It sleeps."], "text": ["The title is a word."]}))
    assert passages == [
        Passage("Alû", "Alû", "A demon. It sleeps."),
        Passage("text", "text", "The title is a word."),
    ]


@pytest.mark.parametrize("indent", [None, 2])
def test_json_list_with_and_without_ids(tmp_path: Path, indent: int | None) -> None:
    records = [
        {"title": "Riga", "text": "one"},
        {"title": "Riga", "text": "two"},
        {"id": 7, "title": "Riga", "text": "three"},
        {"title": "Łódź 東京", "text": "four"},
    ]
    passages = read(tmp_path, json.dumps(records, indent=indent))
    assert [p.id for p in passages] == ["Riga", "Riga#2", "7", "Łódź 東京"]
    assert [p.text for p in passages] == ["one", "two", "three", "four"]


def test_json_lines_and_search_r1_contents(tmp_path: Path) -> None:
    lines = [
        '{"id": "0", "contents": "\\"Riga\\"\\nRiga lies\\nin Latvia."}',
        "",
        '{"title": "Ana", "text": "\tb\x01"}',
    ]
    expected = [Passage("0", "Riga", "Riga lies\nin Latvia."), Passage("Ana", "Ana", "\tb\x01")]
    assert read(tmp_path, "\r\n".join(lines), "c.jsonl") == expected
    assert read(tmp_path, b"\xef\xbb\xbf" + "\n".join(lines).encode(), "c.txt") == expected


@pytest.mark.parametrize(
    ("content", "name", "said"),
    [
        ('{"title": "a", "text": "b"}\n{"title": "c", "te', "c.jsonl", "line 2: not valid JSON"),
        ('[{"title": "a", "text": "b"},\n{"title": "c", "te', "c.json", "line 2: not valid JSON"),
        (b'{"title": "a", "text": "b"}\n{"title": "\xff", "text": "b"}', "c.jsonl", "line 2: not UTF-8"),
        (b'[{"title": "a", "text": "b"},\n\n{"title": "\xff", "text": "b"}]', "c.json", "line 3: not UTF-8"),
        ('{"title": "a", "text": "b"}\n{"title": "c", "body": "d"}', "c.jsonl", "line 2: got keys"),
        ('{"title": "a", "text": "b"}\n[1]', "c.jsonl", "line 2: got a JSON list"),
        ('[{"title": "a", "text": 5}]', "c.json", "entry 1"),
        ('{"a": ["x"], "b": "y"}', "c.json", "entry 2 ('b')"),
        ('{"id": [1], "title": "a", "text": "b"}', "c.jsonl", "line 1: the id is [1]"),
        ("", "c.json", "no passages"),
        ("[]", "c.json", "no passages"),
        ("{}", "c.json", "no passages"),
        ("\n\n", "c.jsonl", "no passages"),
        ("5", "c.json", "got a JSON int"),
    ],
)
def test_broken_files_are_one_sentence_with_the_place(
    tmp_path: Path, content: str | bytes, name: str, said: str
) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, content, name)
    message = str(caught.value)
    assert said in message
    assert name in message
    assert "\n" not in message


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no corpus file .*nowhere\.json"):
        list(read_passages(tmp_path / "nowhere.json"))


def test_duplicate_ids_name_the_id_and_both_places(tmp_path: Path) -> None:
    lines = ['{"id": "x", "title": "a", "text": "b"}', "", '{"id": "y", "text": "b"}', '{"id": "x", "text": "c"}']
    with pytest.raises(DataError, match=r"'x' is used twice, at line 1 and at line 4"):
        read(tmp_path, "\n".join(lines), "c.jsonl")
    with pytest.raises(DataError, match=r"'a' is used twice, as entry 1 and entry 3"):
        read(tmp_path, '{"a": ["1"], "b": ["2"], "a": ["3"]}')
    with pytest.raises(DataError, match=r"'p' is used twice, at passage 1 and at passage 2"):
        write_corpus([Passage("p", "", ""), Passage("p", "", "")], tmp_path)


def test_an_empty_corpus_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no passages"):
        write_corpus([], tmp_path)


@given(
    rows=st.lists(
        st.tuples(st.text(max_size=5), st.text(max_size=20), st.text()), min_size=1, unique_by=lambda row: row[0]
    )
)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, str]]) -> None:
    directory = tmp_path_factory.mktemp("corpus")
    passages = [Passage(*row) for row in rows]
    write_corpus(passages, directory)
    corpus = Corpus.open(directory)
    assert list(corpus) == passages
    assert len(corpus) == len(passages)
    assert corpus[-1] == passages[-1]
    assert [corpus.row_of(passage.id) for passage in passages] == list(range(len(passages)))


def test_take_agrees_with_single_rows_on_both_paths(tmp_path: Path) -> None:
    passages = [Passage(f"p{i}", f"Title {i}", "x" * i) for i in range(300)]
    write_corpus(passages, tmp_path)
    corpus = Corpus.open(tmp_path)
    for rows in ([], [5], [7, 3, 3], list(range(299, -1, -1))):
        assert corpus.take(rows) == [passages[row] for row in rows]
    assert corpus[10:20] == passages[10:20]
    with pytest.raises(IndexError):
        corpus[300]
    with pytest.raises(KeyError):
        corpus.row_of("p300")


def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    (passage,) = read(tmp_path, '[{"title": "a\\ud800b", "text": "\\ud83d\\ude00"}]')
    assert passage == Passage("a\ufffdb", "a\ufffdb", "😀")
    write_corpus([Passage("\ud800", "", "")], tmp_path)
    assert Corpus.open(tmp_path)[0].id == "\ufffd"


def test_open_refuses_what_is_not_one_whole_chunk(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no corpus"):
        Corpus.open(tmp_path)
    path = write_corpus([Passage("a", "b", "c" * 5000)], tmp_path)
    path.write_bytes(path.read_bytes()[:-300])
    with pytest.raises(DataError, match="not a whole Arrow file"):
        Corpus.open(tmp_path)
    batch = pa.record_batch([pa.array([x], pa.large_string()) for x in "abc"], schema=SCHEMA)
    with pa.ipc.new_file(str(tmp_path / CORPUS_FILE), SCHEMA) as writer:
        writer.write_batch(batch)
        writer.write_batch(batch)
    with pytest.raises(DataError, match="2 chunks, expected"):
        Corpus.open(tmp_path)
