"""The passages of an index on disk: what is written is read, and takes no private memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import run_python

from ragr1_actors.core.errors import DataError
from retrieval.base import Passage
from retrieval.corpora import corpus as corpus_module
from retrieval.corpora.corpus import CORPUS_FILE, SCHEMA, Corpus, write_corpus


def numbered(count: int) -> list[Passage]:
    return [Passage(f"p{i}", f"Title {i}", "x" * (i % 300)) for i in range(count)]


@given(
    rows=st.lists(
        st.tuples(st.text(max_size=5), st.text(max_size=20), st.text()), min_size=1, unique_by=lambda row: row[0]
    )
)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str, str]]) -> None:
    directory = tmp_path_factory.mktemp("corpus")
    passages = [Passage(*row) for row in rows]
    assert write_corpus(passages, directory) == len(passages)
    corpus = Corpus.open(directory)
    assert list(corpus) == passages
    assert len(corpus) == len(passages)
    assert corpus[-1] == passages[-1]
    assert corpus.titles([*(passage.id for passage in passages), "absent!"]) == {one.id: one.title for one in passages}
    assert [path.name for path in directory.iterdir()] == [CORPUS_FILE]


def test_every_way_to_read_agrees(tmp_path: Path) -> None:
    passages = numbered(10_000)
    write_corpus(iter(passages), tmp_path)
    corpus = Corpus.open(tmp_path)
    for rows in ([], [5], [7, 3, 3], list(range(299, -1, -1))):
        assert corpus.take(rows) == [passages[row] for row in rows]
    for part in (slice(10, 20), slice(None, None, -7), slice(4000, 9000), slice(9990, 20_000), slice(5, 5)):
        assert corpus[part] == passages[part]
    assert list(corpus) == passages
    assert set(corpus.titles(["p7", "p9999", "p10000", ""])) == {"p7", "p9999"}
    assert corpus.titles([]) == {}
    for row in (10_000, -10_001):
        with pytest.raises(IndexError):
            corpus[row]


def test_one_chunk_of_one_file(tmp_path: Path) -> None:
    write_corpus(numbered(20_000), tmp_path)
    with pa.ipc.open_file(str(tmp_path / CORPUS_FILE)) as reader:
        assert (reader.num_record_batches, reader.schema) == (1, SCHEMA)
        reader.get_batch(0).validate(full=True)


def test_an_id_used_twice_is_named_with_both_places(tmp_path: Path) -> None:
    passages = [Passage(passage_id, "", "") for passage_id in "abxcdzefxzxz"]
    with pytest.raises(DataError, match="passage id 'x' is used twice, as passage 3 and passage 9; ids must be unique"):
        write_corpus(passages, tmp_path)
    with pytest.raises(DataError, match="'p7' is used twice, as passage 8 and passage 20001"):
        write_corpus([*numbered(20_000), *numbered(8)[7:]], tmp_path)
    with pytest.raises(DataError, match="'same' is used twice, as passage 1 and passage 2;"):
        write_corpus([Passage("same", "", "")] * 20_000, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_ids_that_share_a_hash_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashes of two values, so that thousands of ids share each, and rows must be told by the ids themselves."""
    monkeypatch.setattr(corpus_module, "hash_text", lambda text: (len(text) % 2) << 63)
    passages = numbered(300)
    write_corpus(passages, tmp_path)
    assert list(Corpus.open(tmp_path)) == passages
    with pytest.raises(DataError, match="'p5' is used twice, as passage 6 and passage 301"):
        write_corpus([*passages, passages[5], passages[8]], tmp_path)


def test_nothing_is_left_where_nothing_is_written(tmp_path: Path) -> None:
    def breaks_off() -> Iterator[Passage]:
        yield from numbered(5000)
        raise DataError("line 5001 is broken")

    with pytest.raises(DataError, match="no passages"):
        write_corpus([], tmp_path)
    with pytest.raises(DataError, match="line 5001"):
        write_corpus(breaks_off(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_corpus_is_replaced_once_the_new_one_is_whole(tmp_path: Path) -> None:
    write_corpus(numbered(3), tmp_path)
    with pytest.raises(DataError):
        write_corpus([*numbered(3), *numbered(1)], tmp_path)
    assert len(Corpus.open(tmp_path)) == 3
    write_corpus(numbered(4), tmp_path)
    assert len(Corpus.open(tmp_path)) == 4


def test_lone_surrogates_are_replaced(tmp_path: Path) -> None:
    write_corpus([Passage("\ud800", "", "\ud83d\ude00")], tmp_path)
    assert Corpus.open(tmp_path)[0] == Passage("\ufffd", "", "😀")


def _cut(name: str, num_bytes: int) -> Callable[[Path], object]:
    return lambda d: (d / name).write_bytes((d / name).read_bytes()[:-num_bytes])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda d: (d / CORPUS_FILE).unlink(), "no corpus"),
        (_cut(CORPUS_FILE, 300), "not a whole Arrow file"),
        (lambda d: (d / CORPUS_FILE).write_bytes(b""), "not a whole Arrow file"),
        (lambda d: (d / CORPUS_FILE).write_text("something else"), "not a whole Arrow file"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, damage: Callable[[Path], object], said: str) -> None:
    write_corpus(numbered(300), tmp_path)
    damage(tmp_path)
    with pytest.raises(DataError, match=said) as caught:
        Corpus.open(tmp_path)
    assert "\n" not in str(caught.value)


def test_two_chunks_are_refused(tmp_path: Path) -> None:
    batch = pa.record_batch([pa.array([x], pa.large_string()) for x in "abc"], schema=SCHEMA)
    with pa.ipc.new_file(str(tmp_path / CORPUS_FILE), SCHEMA) as writer:
        writer.write_batch(batch)
        writer.write_batch(batch)
    with pytest.raises(DataError, match="2 chunks, expected"):
        Corpus.open(tmp_path)


def test_a_full_disk_is_an_os_error_and_leaves_nothing(tmp_path: Path) -> None:
    """A limit on file sizes fails every writer in turn, as a full disk does: spilled texts, Arrow, hashes."""
    printed = run_python(
        """
        import errno, os, resource, sys
        from retrieval.base import Passage
        from retrieval.corpora.corpus import write_corpus
        passages = [Passage(str(i), f"T{i}", "a b c " * 4) for i in range(20_000)]
        for limit in (1_000, 100_000, 170_000, 500_000, 900_000, 2_000_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            try:
                print("written", write_corpus(passages, sys.argv[1]))
            except OSError as error:
                print(errno.errorcode[error.errno], os.listdir(sys.argv[1]))
        """,
        tmp_path,
    )
    assert printed.splitlines() == ["EFBIG []"] * 5 + ["written 20000"]


MEASURE = """
    import json, sys, threading, time
    from pathlib import Path
    from retrieval.corpora.corpus import Corpus, write_corpus
    from retrieval.corpora.readers import read_passages

    def private():
        status = Path("/proc/self/status").read_text()
        return int(status.split("RssAnon:")[1].split()[0]) / 1024

    kind, count, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    text = "many words of a passage " * 15
    with (folder / "c.json").open("w") as file:
        for i in range(count):
            if kind == "list":
                record = {"id": f"p{i}", "title": f"T{i}", "text": f"{i} {text}"}
                file.write("[," [i > 0] + json.dumps(record))
            elif kind == "object":
                file.write("{," [i > 0] + json.dumps(f"T{i}") + ": " + json.dumps([f"{i} ", text]))
            else:
                file.write(json.dumps({"question": "?", "context": [[f"T{i // 2}", [f"{i} {text}"]]]}) + "\\n")
        file.write({"list": "]", "object": "}"}.get(kind, ""))
    before = peak = private()
    is_over = threading.Event()

    def watch():
        global peak
        while not is_over.wait(0.002):
            peak = max(peak, private())

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.perf_counter()
    assert write_corpus(read_passages(folder / "c.json"), folder) == count
    taken = time.perf_counter() - start
    assert len(Corpus.open(folder)) == count
    is_over.set()
    watcher.join()
    megabytes = (folder / "c.json").stat().st_size / 1e6
    print(f"{count} {kind}: {megabytes / taken:.0f} MB/s, private MB {before:.0f} before", file=sys.stderr)
    print(peak - before)
"""


@pytest.mark.integration
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc to see private memory")
@pytest.mark.parametrize(
    ("kind", "few", "many", "most_mb"),
    [
        ("list", 3_000, 30_000, 10),  # in memory: 13 MB of texts, twice
        pytest.param("list", 20_000, 200_000, 10, marks=pytest.mark.slow),
        pytest.param("object", 20_000, 200_000, 15, marks=pytest.mark.slow),  # its keys' hashes: 12 bytes per slot
        pytest.param("questions", 20_000, 200_000, 25, marks=pytest.mark.slow),  # paragraphs' and titles' hashes
    ],
)
def test_private_memory_does_not_grow_with_the_corpus(
    tmp_path: Path, kind: str, few: int, many: int, most_mb: float
) -> None:
    grown = []
    for count in (few, many):
        folder = tmp_path / str(count)
        folder.mkdir()
        grown.append(float(run_python(MEASURE, kind, count, folder)))
    print(f"{kind}: private memory grows by {grown[0]:.1f} MB at {few}, {grown[1]:.1f} MB at {many} passages")
    assert grown[1] - grown[0] < most_mb


@pytest.mark.integration
def test_an_open_corpus_costs_no_memory_per_passage(tmp_path: Path) -> None:
    write_corpus(numbered(50_000), tmp_path)
    private_mb = run_python(
        """
        import sys
        from pathlib import Path
        from retrieval.corpora.corpus import Corpus

        def private():
            return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) / 1024

        Corpus.open(sys.argv[1]).take(range(100))
        before = private()
        corpora = [Corpus.open(sys.argv[1]) for _ in range(20)]
        assert [corpus[49_999].id for corpus in corpora] == ["p49999"] * 20
        print(private() - before)
        """,
        tmp_path,
    )
    assert float(private_mb) < 0.25 * 20  # per replica; 5 bytes per passage would be 0.25 MB
