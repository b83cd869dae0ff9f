"""Corpus formats, their errors, and that reading them needs no memory to speak of."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragr1_actors.core.errors import ConfigError, DataError
from retrieval.base import Passage
from retrieval.corpora import json_stream
from retrieval.corpora.readers import CORPUS_FORMATS, Namer, read_passages
from retrieval.corpora.text import HashTable, hash_text

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
real_data = pytest.mark.skipif(not DATA.is_dir(), reason="no folder ../shared/data with the public corpora")


def read(tmp_path: Path, content: str | bytes, name: str = "corpus.json", corpus_format: str = "auto") -> list[Passage]:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return list(read_passages(path, corpus_format=corpus_format))


def lines(*records: Any) -> str:
    return "\n".join(map(json.dumps, records))


PLAIN = '[{"title": "Riga", "text": "In Latvia."}]'
SEARCH_R1 = lines({"id": "0", "contents": '"Riga"\nIn Latvia.'})
DPR = "id\ttext\ttitle\n1\tIn Latvia.\tRiga\n"
KILT = lines({"_id": "290", "wikipedia_title": "Riga", "text": ["Riga\n", "In Latvia.\n"], "categories": "a,b"})
HOTPOTQA = '{"Riga": ["In Latvia."]}'
QUESTION = json.dumps([{"question": "?", "answer": "x", "context": [["Riga", ["In Latvia."]]]}])
MUSIQUE = lines({"id": "2hop", "question": "?", "paragraphs": [{"title": "Riga", "paragraph_text": "In Latvia."}]})
FILES = {
    "plain": ("c.json", PLAIN),
    "search_r1": ("c.jsonl", SEARCH_R1),
    "dpr": ("c.tsv", DPR),
    "kilt": ("kilt_knowledgesource.json", KILT),
    "hotpotqa": ("c.json", HOTPOTQA),
    "2wiki": ("c.json", QUESTION),
    "musique": ("c.jsonl", MUSIQUE),
}


def test_every_format_has_its_example() -> None:
    assert {"auto", *FILES} == set(CORPUS_FORMATS)


@pytest.mark.parametrize(
    "pack", [lambda data: data, gzip.compress, bz2.compress, lzma.compress], ids=["", "gz", "bz2", "xz"]
)
@pytest.mark.parametrize("name", FILES)
def test_formats_are_told_apart_and_read_alike_by_name(
    tmp_path: Path, name: str, pack: Callable[[bytes], bytes]
) -> None:
    file_name, content = FILES[name]
    for suffix in ("", ".gz", ".xz"):  # the content says whether it is compressed, not the name
        for corpus_format in ("auto", name):
            passages = read(tmp_path, pack(content.encode()), file_name + suffix, corpus_format)
            assert [(p.title, p.text) for p in passages] == [("Riga", "In Latvia.")]


def test_rows_of_a_parquet_table_are_records(tmp_path: Path) -> None:
    rows = [{"id": 3, "title": None, "contents": '"Riga"\nIn Latvia.'}, {"id": None, "title": "Oslo", "contents": "x"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c")  # told by its first bytes
    assert list(read_passages(tmp_path / "c")) == [Passage("3", "Riga", "In Latvia."), Passage("Oslo", "Oslo", "x")]
    with pytest.raises(DataError, match="row 1: got keys"):
        list(read_passages(tmp_path / "c", corpus_format="plain"))


def test_the_pieces_of_a_document_are_numbered(tmp_path: Path) -> None:
    records = [{"docid": docid, "text": "t"} for docid in ("a", "b", "a", 7, "a")]
    assert [p.id for p in read(tmp_path, "\n".join(map(json.dumps, records)), "c.jsonl")] == [
        "a",
        "b",
        "a#2",
        "7",
        "a#3",
    ]


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_format_than_the_one_named_is_refused(tmp_path: Path, name: str) -> None:
    file_name, content = FILES[name]
    alike = {"plain": {"2wiki"}, "2wiki": {"hotpotqa"}}  # 2Wiki's files have shapes that others have too
    for other in set(FILES) - {name} - alike.get(name, set()):
        with pytest.raises(DataError, match="expected"):
            read(tmp_path, content, file_name, other)


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
        {"text": "five"},
        {"id": None, "text": "six"},
    ]
    passages = read(tmp_path, json.dumps(records, indent=indent))
    assert [p.id for p in passages] == ["Riga", "Riga#2", "7", "Łódź 東京", "#1", "#2"]
    assert [p.text for p in passages] == ["one", "two", "three", "four", "five", "six"]


def test_json_lines_and_search_r1_contents(tmp_path: Path) -> None:
    rows = [
        '{"id": "0", "contents": "\\"Riga\\"\\nRiga lies\\nin Latvia."}',
        "",
        '{"title": "Ana", "text": "\tb\x01"}',
    ]
    expected = [Passage("0", "Riga", "Riga lies\nin Latvia."), Passage("Ana", "Ana", "\tb\x01")]
    assert read(tmp_path, "\r\n".join(rows), "c.jsonl") == expected
    assert read(tmp_path, b"\xef\xbb\xbf" + "\n".join(rows).encode(), "c.txt") == expected


def test_contents_with_quotes_without_a_title_and_beside_a_text(tmp_path: Path) -> None:
    content = lines(
        {"id": 1, "contents": '""Heroes" (album)"\nBy Bowie.'},
        {"id": 2, "contents": "No title here."},
        {"id": 3, "contents": "Riga\nIn Latvia."},
        {"id": 4, "title": "Riga", "contents": "Riga\nIn Latvia."},
        {"id": 5, "title": "Riga", "contents": "A port.\nIn Latvia."},
        {"id": 6, "title": "Riga", "text": "In Latvia.", "contents": "Riga\nIn Latvia."},
    )
    assert [(p.title, p.text) for p in read(tmp_path, content, "c.jsonl")] == [
        ('"Heroes" (album)', "By Bowie."),
        ("", "No title here."),
        ("Riga", "In Latvia."),
        ("Riga", "In Latvia."),
        ("Riga", "A port.\nIn Latvia."),
        ("Riga", "In Latvia."),
    ]


def test_dpr_quotes_are_undone(tmp_path: Path) -> None:
    content = 'id\ttext\ttitle\r\n1\t"He said ""no""\tand\n\nleft."\t"""Heroes"""\r\n\r\n2\tplain \'text\'\tT\r\n'
    expected = [Passage("1", '"Heroes"', 'He said "no"\tand\n\nleft.'), Passage("2", "T", "plain 'text'")]
    assert read(tmp_path, content, "psgs_w100.tsv") == expected
    assert read(tmp_path, content, "known_by_its_header") == expected
    assert read(tmp_path, "title\tid\ttext\nT\t2\tx", "c.tsv") == [Passage("2", "T", "x")]


def test_a_text_of_a_table_may_be_as_long_as_one_of_json(tmp_path: Path) -> None:
    csv.field_size_limit(131_072)  # Python's default, which another reader may have raised
    text = "word " * 30_000
    assert read(tmp_path, f"id\ttext\ttitle\n1\t{text}\tA\n", "c.tsv") == [Passage("1", "A", text)]


def test_kilt_articles_lose_their_markers(tmp_path: Path) -> None:
    paragraphs = [
        "Riga\n",
        "Riga is a city: BULLET::::s.\n",
        "Section::::History.:Early.\n",
        "BULLET::::- Founded in 1201\n",
        "\n",
        "Big.\n",
    ]
    content = lines({"_id": "7", "wikipedia_id": "9", "wikipedia_title": "Riga", "text": paragraphs})
    expected = "Riga is a city: BULLET::::s.\nHistory: Early.\nFounded in 1201\nBig."
    assert read(tmp_path, content, "kilt.json") == [Passage("7", "Riga", expected)]


def test_paragraphs_of_questions_are_kept_once(tmp_path: Path) -> None:
    contexts = [
        [["Riga", ["One.", " Two."]], ["Oslo", ["A port."]]],
        [["Oslo", ["A port."]], ["Riga", ["Another text."]], ["Riga", ["One.", "Two."]]],
    ]
    expected = [
        Passage("Riga", "Riga", "One. Two."),
        Passage("Oslo", "Oslo", "A port."),
        Passage("Riga#2", "Riga", "Another text."),
    ]
    questions = [{"_id": str(i), "question": "?", "context": context} for i, context in enumerate(contexts)]
    assert read(tmp_path, json.dumps(questions)) == expected
    assert read(tmp_path, lines(*questions), "c.jsonl") == expected
    of_the_hub = [
        {"id": "q", "context": {"title": [t for t, _ in context], "sentences": [s for _, s in context]}}
        for context in contexts
    ]
    assert read(tmp_path, json.dumps(of_the_hub)) == expected
    as_text = [{"_id": "q", "question": "?", "context": json.dumps(context)} for context in contexts]
    assert read(tmp_path, json.dumps(as_text)) == expected
    with pytest.raises(DataError, match=r"got the context '\[\[\"Riga.*which is not JSON: Expecting"):
        read(tmp_path, json.dumps([{"_id": "q", "question": "?", "context": '[["Riga", ["One."]'}]))
    paragraphs = [[{"title": t, "paragraph_text": " ".join(s).replace("  ", " ")} for t, s in c] for c in contexts]
    assert read(tmp_path, lines(*({"paragraphs": item} for item in paragraphs)), "c.jsonl") == expected


@pytest.mark.parametrize(
    ("content", "name", "said"),
    [
        ('{"title": "a", "text": "b"}\n{"title": "c", "te', "c.jsonl", "line 2: not valid JSON"),
        ('[{"title": "a", "text": "b"},\n{"title": "c", "te', "c.json", "line 2: not valid JSON (Unterminated"),
        ('[{"title": "a", "text": "b"}\n{"title": "c"}]', "c.json", "line 2: not valid JSON (Expecting ',' delimiter"),
        ('[{"title": "a", "text": "b"},\n]', "c.json", "line 2: not valid JSON (Expecting value"),
        ('[{"title": "a", "text": "b"}]\n\n[]', "c.json", "line 3: not valid JSON (Extra data"),
        ('{"a": ["b"],\n5: ["c"]}', "c.json", "line 2: not valid JSON (Expecting property name"),
        ('{"a": ["b"],\n"c"\n["c"]}', "c.json", "line 3: not valid JSON (Expecting ':' delimiter"),
        (b'{"title": "a", "text": "b"}\n{"title": "\xff", "text": "b"}', "c.jsonl", "line 2: not UTF-8 text (byte 11)"),
        (b'[{"title": "a", "text": "b"},\n\n{"title": "\xff", "text": "b"}]', "c.json", "line 3: not UTF-8"),
        (b'[{"title": "a", "text": "b"},\n\n{"title": "\xe6\x9d', "c.json", "line 3: not UTF-8"),
        ('{"title": "a", "text": "b"}\n{"title": "c", "body": "d"}', "c.jsonl", "line 2: got keys ['body', 'title']"),
        ('{"title": "a", "text": "b"}\n[1]', "c.jsonl", "line 2: got a JSON list"),
        ('[{"title": "a", "text": 5}]', "c.json", "entry 1: got keys"),
        ('[{"title": 5, "text": "a"}]', "c.json", "entry 1: the title is 5"),
        ('{"a": ["x"], "b": "y"}', "c.json", "entry 2 ('b')"),
        ('{"a": ["1"], "b": ["2"], "a": ["3"]}', "c.json", "'a' is used twice, as entry 1 and entry 3"),
        ('{"text": "a",\n"text": "b"}', "c.jsonl", "line 1: not valid JSON"),
        ('{"text": "a", "text": "b"}', "c.jsonl", "line 1: not valid JSON (key 'text' is used twice)"),
        ('{"id": [1], "title": "a", "text": "b"}', "c.jsonl", "line 1: the id is [1]"),
        ('{"id": NaN, "title": "a", "text": "b"}', "c.jsonl", "line 1: the id is nan"),
        ('{"id": true, "title": "a", "text": "b"}', "c.jsonl", "line 1: the id is True"),
        ('{"id": ' + "1" * 5000 + ', "text": "b"}', "c.jsonl", "line 1: not valid JSON (Exceeds the limit"),
        ('[\n{"id": ' + "1" * 5000 + ', "text": "b"}]', "c.json", "line 2: not valid JSON (Exceeds the limit"),
        ('{"text": ' + "[" * 100_000, "c.jsonl", "line 1: not valid JSON (nested too deep)"),
        ("[\n" + "[" * 100_000, "c.json", "line 2: not valid JSON (nested too deep)"),
        ('{"text": "a", "context": [["b", ["c"]]]}', "c.jsonl", "line 1: got keys ['context', 'text'], which could be"),
        ('[{"context": [["b", "c"]]}]', "c.json", "entry 1: got ['b', 'c'] in the context"),
        ('[{"context": {"title": ["b"], "sentences": []}}]', "c.json", "entry 1: got the context"),
        ('{"paragraphs": [{"title": "b"}]}', "c.jsonl", "line 1: got {'title': 'b'} among the paragraphs"),
        ("id\ttext\n1\tb", "c.tsv", "line 1: got the columns 'id, text'"),
        ("id\ttext\ttitle\n1\tb", "c.tsv", "line 2: got 2 columns, expected 3"),
        ('id\ttext\ttitle\n1\t"b\tc\n2\td\te', "c.tsv", "line 3: not tab-separated text"),
        ('id\ttext\ttitle\n1\t"b" c\td', "c.tsv", "line 2: not tab-separated text"),
        (b"id\ttext\ttitle\n1\t\xff\td", "c.tsv", "line 2: not UTF-8"),
        (gzip.compress(PLAIN.encode() * 99, mtime=0)[:-9], "c.json.gz", "not a whole gzip file"),
        (b"\x1f\x8b" + bytes(50), "c.json", "not a whole gzip file"),
        (bz2.compress(PLAIN.encode() * 99)[:-9], "c.json", "not a whole bzip2 file"),
        (lzma.compress(PLAIN.encode() * 99)[:-9], "c.json", "not a whole xz file"),
        (b"BZh9" + bytes(50), "c.json", "not a whole bzip2 file"),
        (b"PAR1" + bytes(50), "c.json", "is no Parquet file that can be read"),
        ("", "c.json", "no passages"),
        (gzip.compress(b"", mtime=0), "c.json.gz", "no passages"),
        ("[]", "c.json", "no passages"),
        ("{}", "c.json", "no passages"),
        ("id\ttext\ttitle\n", "c.tsv", "no passages"),
        ("\n\n", "c.jsonl", "no passages"),
        ("5", "c.json", "got a JSON int"),
        ("Once upon a time", "c.txt", "got something that begins with 'O', expected a JSON list"),
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
    assert len(message) < 1500


def test_missing_files_and_unknown_formats_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no corpus file .*nowhere\.json"):
        read_passages(tmp_path / "nowhere.json")
    with pytest.raises(ConfigError, match="unknown corpus format 'hotpot'; did you mean 'hotpotqa'"):
        read_passages(tmp_path, corpus_format="hotpot")
    with pytest.raises(ConfigError, match="expected one of: auto, plain"):
        read_passages(tmp_path, corpus_format="zzz")


def test_what_is_before_the_damage_is_read(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('[{"title": "a", "text": "b"}, {"title": ')
    passages = read_passages(path)
    assert next(passages).id == "a"
    with pytest.raises(DataError, match="line 1: not valid JSON"):
        next(passages)


def test_passages_are_split_on_request(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('[{"title": "Riga", "text": "one two three"}]')
    assert [p.id for p in read_passages(path, split_words=2)] == ["Riga#0", "Riga#1"]
    with pytest.raises(ConfigError, match="-1 words"):
        read_passages(path, split_words=-1)


def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    (passage,) = read(tmp_path, '[{"title": "a\\ud800b", "text": "\\ud83d\\ude00"}]')
    assert passage == Passage("a\ufffdb", "a\ufffdb", "😀")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@given(values=st.lists(JSON_VALUES, max_size=6), chunk=st.integers(1, 40), indent=st.sampled_from([None, 0, 3]))
def test_json_is_read_alike_whatever_the_chunks(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], chunk: int, indent: int | None
) -> None:
    path = tmp_path_factory.mktemp("json") / "c.json"
    for content in (values, {str(number): value for number, value in enumerate(values)}):
        path.write_text(json.dumps(content, indent=indent, ensure_ascii=chunk % 2 == 0), encoding="utf-8")
        with path.open("rb") as file, pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_stream, "_CHUNK", chunk)
            stream = json_stream.JsonStream(file, path)
            assert (list(stream.elements()) if isinstance(content, list) else dict(stream.items())) == content


def test_errors_in_small_chunks_name_the_same_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = '[{"title": "東京",\n"text": "b"},\n\n{"title": "c" "text": "d"}, ' + PLAIN * 50
    monkeypatch.setattr(json_stream, "_CHUNK", 3)
    with pytest.raises(DataError, match="line 4: not valid JSON"):
        read(tmp_path, content)
    with pytest.raises(DataError, match="line 3: not UTF-8 text"):
        read(tmp_path, content.encode().replace(b"\n\n", b"\n\xe6\n"))


def test_a_quote_that_is_not_closed_does_not_read_on_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_stream, "MAX_ENTRY", 2**20)
    with pytest.raises(DataError, match=r"line 2: not valid JSON .an entry longer than 1 MiB"):
        read(tmp_path, '[\n{"text": "' + "x" * 2**21)
    with pytest.raises(DataError, match="line 1: longer than 1 MiB"):
        read(tmp_path, "x" * 2**21, "c.jsonl")


def test_names_are_never_given_twice() -> None:
    namer = Namer()
    names = [namer.name(title) for title in ["a", "a#2", "a", "a", "", "", "#2", "a#2"]]
    assert names == ["a", "a#2", "a#3", "a#4", "#1", "#2", "#2#2", "a#2#3"]


@given(st.lists(st.sampled_from(["a", "b", "", "a#2", "a#3", "#1", "#2", "b#2#2"]), max_size=40))
def test_names_of_any_titles_are_unique(titles: list[str]) -> None:
    namer = Namer()
    names = [namer.name(title) for title in titles]
    assert len(set(names)) == len(names)


def test_the_hash_table_is_a_dict() -> None:
    table = HashTable()
    expected = {hash_text(str(number)): number + 1 for number in range(5000)}
    for key, value in expected.items():
        table.set(key, value)
        table.set(key, value)
    assert all(table.get(key) == value for key, value in expected.items())
    assert table.get(hash_text("absent")) == 0


@real_data
def test_real_files_are_read_whole() -> None:
    hotpotqa = list(read_passages(DATA / "hotpotqa_corpus_994.json"))
    assert len(hotpotqa) == 994
    wiki = list(read_passages(DATA / "2wikimultihopqa_corpus_6119.json"))
    assert len(wiki) == len({passage.id for passage in wiki}) == 6119
    assert (wiki[0].id, wiki[0].title) == ("Teutberga", "Teutberga")


@real_data
def test_the_paragraphs_of_real_questions_are_their_corpus() -> None:
    corpus = {passage.id: passage for passage in read_passages(DATA / "hotpotqa_corpus_994.json")}
    assert {passage.id: passage for passage in read_passages(DATA / "hotpotqa_100.json")} == corpus


@real_data
def test_real_questions_without_paragraphs_are_no_corpus() -> None:
    with pytest.raises(DataError, match=r"entry 1: got keys \['golden_answers', 'question'\], expected"):
        list(read_passages(DATA / "ragr1_mq_test_351.json"))


def test_ids_that_other_rows_lack_are_whole_numbers(tmp_path: Path) -> None:
    rows = [{"id": number, "title": f"T{row}", "text": "x"} for row, number in enumerate((7.0, None))]
    assert [passage.id for passage in read(tmp_path, lines(*rows))] == ["7", "T1"]
    with pytest.raises(DataError, match=r"the id is 1\.5, expected a string or a whole number"):
        read(tmp_path, lines({"id": 1.5, "title": "T", "text": "x"}))
