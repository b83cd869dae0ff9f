"""What is odd in a corpus file is counted, with its place, and told where an index is built of it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from encoder_world import change_json
from small_world import invoke

from ragr1_actors.core.config import RunConfig
from ragr1_actors.core.errors import DataError
from ragr1_actors.planning.prepare import prepare_index
from ragr1_actors.training.algorithm_config import AlgorithmConfig
from retrieval.base import Passage
from retrieval.build import build_index, building_dir
from retrieval.corpora import json_stream
from retrieval.corpora.readers import read_passages
from retrieval.corpora.report import CorpusReport
from retrieval.indexes.manifest import Manifest
from retrieval.local import LocalRetriever

CONTENTS, PLAIN = '{"id", "contents"}', '{"title", "text"[, "id"]}'


def lines(*records: Any) -> str:
    return "\n".join(json.dumps(record) for record in records)


def report_of(path: Path, content: str | bytes = b"", **arguments: Any) -> CorpusReport:
    if content:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    passages = read_passages(path, **arguments)
    assert passages.report.num_passages == 0
    assert sum(1 for _ in passages) == passages.report.num_passages
    return passages.report


ODD = [
    {"docid": "a", "title": "Riga", "text": "A port."},
    {"docid": "b", "title": "", "text": " -\n"},
    {"docid": "a", "title": "Riga", "text": "In Latvia."},
    {"docid": "c", "title": "Oslo", "text": "…"},
    {"docid": "d", "title": "—", "text": ""},
    {"docid": "a", "title": "", "text": "東京"},
    {"docid": "e", "title": "Bonn", "text": None},
    {"docid": "f", "title": None, "text": None},
    {"docid": "g", "text": "?!"},
]
"""Four empty passages, two titles without a text, and an id that comes three times."""


@pytest.mark.parametrize("kind", ["lines", "list", "packed", "parquet"])
def test_faults_are_counted_with_their_first_places(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(ODD), path)
        found, what, skipped = report_of(path), "row", 0
    elif kind == "list":
        path = tmp_path / "c.json"
        found, what, skipped = report_of(path, json.dumps(ODD, indent=1)), "entry", 0
    else:
        content = "\n" + lines(*ODD)  # blank lines are lines
        found, what, skipped = report_of(path, gzip.compress(content.encode()) if kind == "packed" else content), "", 1
        what = "line"
    places = {
        "num_empty": tuple(f"{what} {skipped + number}" for number in (2, 5, 8)),
        "num_titles": tuple(f"{what} {skipped + number}" for number in (4, 7)),
        "num_repeated_ids": tuple(f"{what} {skipped + number}" for number in (3, 6)),
    }
    assert found == CorpusReport(path.name, (PLAIN,), 9, 9, 4, 2, 2, places)
    first = (
        f"{path.name} ({PLAIN}): 9 passages of 9 records; 4 passages without a letter or a digit, never found (44%; "
    )
    assert str(found).startswith(
        first + f"{what} {2 + skipped}, {what} {5 + skipped}, {what} {8 + skipped}, ...); 2 of"
    )
    assert str(found).endswith(
        f'2 ids that another passage had, with "#2" behind them (22%; {what} {3 + skipped}, {what} {6 + skipped})'
    )


QUESTION = {"question": "?", "context": [["Riga", ["A port."]], ["Oslo", [""]], ["Riga", ["Another."]]]}
SHAPES = {
    lines({"id": 1, "contents": '"Riga"\nx'}, {"text": "y"}, {"id": 2, "contents": "-"}): (
        (CONTENTS, PLAIN),
        (3, 3),
        {"num_empty": ("line 3",)},
    ),
    'id\ttext\ttitle\n1\t"two\n lines"\tRiga\n2\t\tOslo\n3\t.\t\n': (
        ("tab-separated id, text, title",),
        (3, 3),
        {"num_titles": ("line 4",), "num_empty": ("line 5",)},
    ),
    lines({"_id": "7", "wikipedia_title": "Riga", "text": ["Riga\n"]}): (
        ('{"_id", "wikipedia_title", "text": [paragraph, ...]}',),
        (1, 1),
        {"num_titles": ("line 1",)},
    ),
    '{"Riga": ["A port."], "?": ["!"]}': (("{title: [sentence, ...]}",), (2, 2), {"num_empty": ("entry 2",)}),
    json.dumps([QUESTION, QUESTION]): (
        ('{"question", "context": [[title, [sentence, ...]], ...]}',),
        (2, 3),  # a paragraph comes once
        {"num_titles": ("entry 1",), "num_repeated_ids": ("entry 1",)},
    ),
}


@pytest.mark.parametrize("content", SHAPES)
def test_the_shape_of_every_format_is_told(content: str, tmp_path: Path) -> None:
    shapes, counts, places = SHAPES[content]
    found = report_of(tmp_path / "corpus", content)
    assert (found.shapes, (found.num_records, found.num_passages), found.places) == (shapes, counts, places)
    assert (found.num_empty, found.num_titles) == tuple(len(places.get(f"num_{x}", ())) for x in ("empty", "titles"))


def test_pieces_are_at_the_place_of_their_record(tmp_path: Path) -> None:
    content = lines({"text": "one two"}, {"text": "- - - - one"}, {"text": "three"})
    found = report_of(tmp_path / "c.jsonl", content, split_words=2)
    assert (found.num_records, found.num_passages, found.num_empty) == (3, 5, 2)
    assert found.places == {"num_empty": ("line 2", "line 2")}


def test_a_text_that_is_null_hides_no_other_text(tmp_path: Path) -> None:
    content = lines(
        {"id": 1, "text": None, "contents": '"Riga"\nA port.'},
        {"id": 2, "title": "Oslo", "text": "A city.", "contents": None},
        {"id": 3, "text": None, "contents": None},
    )
    (tmp_path / "c.jsonl").write_text(content)
    found = list(read_passages(tmp_path / "c.jsonl"))
    assert found == [Passage("1", "Riga", "A port."), Passage("2", "Oslo", "A city."), Passage("3", "", "")]
    for record in ({"id": 1, "title": None}, {"_id": 1, "wikipedia_title": "Riga", "text": None}):
        (tmp_path / "c.jsonl").write_text(lines(record))
        with pytest.raises(DataError, match="line 1: got keys"):
            list(read_passages(tmp_path / "c.jsonl"))


def test_lines_that_are_no_json_are_told_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, path = '{"text": "a"}', tmp_path / "c.jsonl"
    path.write_text("\n".join([good, "{", good, "", "nul", good, '{"text": "a" "b"}', "[" * 100_000, '{"a": 1', good]))
    expected = (
        r"line 2: not valid JSON \(.*\); fix or remove it, and 4 of the next 8 lines \(line 5, line 7, line 8, ...\)"
    )
    with pytest.raises(DataError, match=expected):
        list(read_passages(path))
    monkeypatch.setattr(json_stream, "_LOOKED_AHEAD", 4)
    with pytest.raises(DataError, match=r"it, and 1 of the next 4 lines \(line 5\)$"):
        list(read_passages(path))
    monkeypatch.setattr(json_stream, "_LOOKED_AHEAD", 2)
    with pytest.raises(DataError, match=r"fix or remove it$"):
        list(read_passages(path))
    path.write_bytes(b"{\nnul\n\xff\nnul")  # not text: found once the others are mended
    monkeypatch.undo()
    with pytest.raises(DataError, match=r"line 1: not valid JSON .*, and 1 of the next 1 lines \(line 2\)"):
        list(read_passages(path))


# Where it is told

RECORDS = [{"id": str(n), "title": f"Town {n}", "text": f"Town {n} lies by river {n}."} for n in range(30)]
EMPTY = [{"id": f"e{n}", "title": "", "text": "." * n} for n in range(20)]
TOLD = (
    f"c.jsonl ({PLAIN}): 50 passages of 50 records; 20 passages without a letter or a digit, never found "
    "(40%; line 1, line 2, line 3, ...)"
)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "c.jsonl").write_text(lines(*EMPTY, *RECORDS))
    return tmp_path / "c.jsonl"


@pytest.mark.engine
@pytest.mark.parametrize("index_type", ["flat", "ivf", "hnsw", "bm25", "hybrid"])
def test_an_index_is_built_without_empty_passages_and_keeps_the_report(
    index_type: str, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes: list[str] = []
    index = corpus.parent / "index"
    build_index(read_passages(corpus), index, index_type=index_type, on_note=notes.append)
    assert notes == [TOLD]
    assert TOLD not in " ".join(capsys.readouterr().out.split())
    manifest = Manifest.read(index)
    assert manifest.corpus_report is not None
    assert (str(manifest.corpus_report), manifest.count) == (TOLD, 30)
    found = LocalRetriever(index).search_batch(["Town 3 lies by river 3", "."], 40)
    assert found[0][0].id == "3"
    assert not {passage.id for passages in found for passage in passages} & {record["id"] for record in EMPTY}


def test_the_version_of_an_index_does_not_depend_on_its_report(corpus: Path) -> None:
    index, of_a_list = corpus.parent / "index", corpus.parent / "other"
    build_index(read_passages(corpus), index, index_type="bm25", progress=False)
    build_index(list(read_passages(corpus)), of_a_list, index_type="bm25", progress=False)
    assert Manifest.read(of_a_list).corpus_report is None
    assert Manifest.read(of_a_list).version == Manifest.read(index).version
    content = json.loads((index / "manifest.json").read_text())
    del content["corpus_report"], content["digest"]
    (index / "manifest.json").write_text(json.dumps(content))  # as earlier versions wrote it
    assert Manifest.read(index).corpus_report is None
    change_json(index / "manifest.json", corpus_report={"source": "c.jsonl"})
    with pytest.raises(DataError, match="is damaged: corpus_report"):
        Manifest.read(index)


def test_a_build_that_goes_on_has_the_whole_report(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Iterator[Passage]:
        raise KeyboardInterrupt

    index = corpus.parent / "index"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("retrieval.indexes.bm25.build_bm25", interrupted)
        build_index(read_passages(corpus), index, index_type="bm25", progress=False)
    assert (building_dir(index) / "corpus.arrow").is_file()
    build_index(read_passages(corpus), index, index_type="bm25", progress=False)
    assert str(Manifest.read(index).corpus_report) == TOLD


def test_the_command_line_tells_and_keeps_it(corpus: Path) -> None:
    index = corpus.parent / "index"
    printed = invoke("index", "build", "--corpus", str(corpus), "--out", str(index), "--type", "bm25")
    assert TOLD in printed.splitlines()
    assert "30 passages" in printed.splitlines()[-1]
    kept = json.loads(invoke("index", "info", str(index), "--json"))["corpus_report"]
    assert (kept["source"], kept["num_empty"], kept["places"]["num_empty"][0]) == ("c.jsonl", 20, "line 1")
    assert "corpus_report" in invoke("index", "info", str(index))


def test_a_run_that_builds_an_index_tells_it_once(corpus: Path) -> None:
    config: RunConfig = AlgorithmConfig().retrieval(corpus=str(corpus), type="bm25").freeze()
    notes: list[str] = []
    for _ in range(2):  # a resumed run does not build it again
        assert prepare_index(config, corpus.parent / "run", notes.append) == corpus.parent / "run" / "index"
    assert notes == [TOLD]


def test_passages_of_no_file_have_no_report_but_a_count(tmp_path: Path) -> None:
    notes: list[str] = []
    passages = [Passage("a", "Riga", "x"), *(Passage(str(n), "", "-") for n in range(3))]
    build_index(islice(passages, 4), tmp_path / "index", index_type="bm25", on_note=notes.append)
    assert notes == ["3 passages without a letter or a digit are left out"]
