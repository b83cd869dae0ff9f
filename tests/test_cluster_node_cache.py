"""The cache of a node: one fetch for many processes, whole or absent, bounded, and never without what is in use."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from storage_world import start_python

from cluster.node_cache import FileContent, NodeCache
from cluster.storage import content_name, read_contents
from ragr1_actors.core.errors import DataError, UserError

SIZE = 1000


def fill(letter: str, num_bytes: int = SIZE) -> Callable[[Path], None]:
    return lambda folder: (folder / "weights").write_bytes(letter.encode() * num_bytes) and None


class Entry:
    """A folder of one file, made from a letter."""

    def __init__(self, directory: Path, letter: str, num_bytes: int = SIZE) -> None:
        folder = directory / f"source_{letter}"
        folder.mkdir(parents=True)
        self.fill = fill(letter, num_bytes)
        self.fill(folder)
        self.files = read_contents(folder)
        self.name = content_name(self.files)

    def get(self, cache: NodeCache) -> bytes:
        return (cache.get(self.name, self.files, self.fill) / "weights").read_bytes()


def never(folder: Path) -> None:
    raise AssertionError("it is in the cache")


GETS = """
import os, sys, time
from pathlib import Path
from cluster.node_cache import NodeCache
from cluster.storage import content_name, read_contents
cache, source, log = NodeCache(Path(sys.argv[1]), int(sys.argv[4])), Path(sys.argv[2]), Path(sys.argv[3])
files = read_contents(source)
num_askers = int(sys.argv[5])
log.with_name(f"asks_{os.getpid()}").touch()
def fetch(folder):
    while len(list(log.parent.glob("asks_*"))) < num_askers:
        time.sleep(0.01)
    with log.open("a") as file:
        file.write("fetched\\n")
    half = (source / "weights").read_bytes()[:10]
    (folder / "weights").write_bytes(half)
    if log.with_name("hang").exists():
        log.with_name("hangs").touch()
        time.sleep(1000)
    (folder / "weights").write_bytes((source / "weights").read_bytes())
found = cache.get(content_name(files), files, fetch)
print((found / "weights").read_bytes() == (source / "weights").read_bytes(), flush=True)
sys.stdin.readline() if "stay" in sys.argv else None
"""


@pytest.mark.integration
def test_several_processes_ask_and_one_fetches(tmp_path: Path) -> None:
    Entry(tmp_path, "a")
    arguments = (GETS, tmp_path / "cache", tmp_path / "source_a", tmp_path / "log", 10 * SIZE, 4)
    processes = [start_python(*arguments) for _ in range(4)]
    outputs = [process.communicate(timeout=600) for process in processes]
    assert [output for output, _ in outputs] == ["True\n"] * 4, outputs
    assert (tmp_path / "log").read_text() == "fetched\n"


@pytest.mark.integration
def test_a_fetch_that_is_killed_is_never_seen_and_the_next_one_fetches(tmp_path: Path) -> None:
    entry = Entry(tmp_path, "a")
    (tmp_path / "hang").touch()
    arguments = (GETS, tmp_path / "cache", tmp_path / "source_a", tmp_path / "log", 10 * SIZE, 1)
    process = start_python(*arguments)
    while not (tmp_path / "hangs").exists():
        assert process.poll() is None, process.communicate()
    assert not (tmp_path / "cache" / entry.name).exists()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert list((tmp_path / "cache").glob(".writing_*"))
    assert entry.get(NodeCache(tmp_path / "cache", 10 * SIZE)) == b"a" * SIZE
    assert not list((tmp_path / "cache").glob(".writing_*"))


@pytest.mark.integration
def test_what_was_used_least_recently_goes_but_nothing_that_a_process_uses(tmp_path: Path) -> None:
    entries = {letter: Entry(tmp_path, letter) for letter in "abcd"}
    directory, bound = tmp_path / "cache", 3 * SIZE + SIZE // 2
    users = {}
    for letter in "abc":
        arguments = (GETS, directory, tmp_path / f"source_{letter}", tmp_path / "log", bound, 1, "stay")
        users[letter] = start_python(*arguments)
        assert users[letter].stdout is not None and users[letter].stdout.readline() == "True\n"

    def there() -> str:
        return "".join(letter for letter, entry in entries.items() if (directory / entry.name).exists())

    with pytest.raises(
        DataError, match=r"has room for 500 of 1,000 bytes beside what is in use; set RAGR1_CACHE_BYTES"
    ):
        entries["d"].get(NodeCache(directory, bound))
    assert there() == "abc"
    for letter in "bc":
        users[letter].kill()
        users[letter].communicate()
    assert entries["d"].get(NodeCache(directory, bound)) == b"d" * SIZE
    assert there() == "acd", "b is the one that was used first of those that are free"
    users["a"].kill()
    users["a"].communicate()


def test_a_damaged_entry_is_found_by_its_hash_and_fetched_again(tmp_path: Path) -> None:
    entry = Entry(tmp_path, "a")
    directory = tmp_path / "cache"
    process = start_python(GETS, directory, tmp_path / "source_a", tmp_path / "log", 10 * SIZE, 1)
    assert process.communicate(timeout=600)[0] == "True\n"
    (directory / entry.name / "weights").write_bytes(b"b" * SIZE)
    assert entry.get(NodeCache(directory, 10 * SIZE)) == b"a" * SIZE


def test_what_came_with_another_content_gets_no_name(tmp_path: Path) -> None:
    entry = Entry(tmp_path, "a")
    cache = NodeCache(tmp_path / "cache", 10 * SIZE)
    with pytest.raises(DataError, match="weights came with another content than expected"):
        cache.get(entry.name, entry.files, fill("b"))
    assert [path.name for path in cache.directory.iterdir()] == [".locks"]
    with pytest.raises(DataError, match="has room for 100 of 1,000 bytes"):
        entry.get(NodeCache(tmp_path / "cache", 100))


def test_the_files_of_locks_take_no_room(tmp_path: Path) -> None:
    cache = NodeCache(tmp_path / "cache", SIZE)
    (cache.directory / ".locks" / "other.fetch").write_bytes(bytes(SIZE))
    assert Entry(tmp_path, "a").get(cache) == b"a" * SIZE


def test_a_process_that_has_an_entry_looks_no_more(tmp_path: Path) -> None:
    entry = Entry(tmp_path, "a")
    cache = NodeCache(tmp_path / "cache", 10 * SIZE)
    entry.get(cache)
    assert cache.get(entry.name, entry.files, never) == cache.directory / entry.name


@pytest.mark.parametrize("name", ["../escape", "/etc/passwd", "a/../../b", "", ".", "a\\b", "a\0b"])
def test_a_listing_cannot_name_a_file_outside_the_folder(name: str) -> None:
    with pytest.raises(DataError, match="expected one inside a folder; the listing was tampered with"):
        FileContent(name, 1, "0", "0")


def test_a_user_without_a_home_is_told_to_name_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAGR1_CACHE", raising=False)
    monkeypatch.delenv("HOME")
    monkeypatch.setattr("os.getuid", lambda: 4242421)  # of no account, as in some containers
    with pytest.raises(UserError, match=r"^user 4242421 of node .* has no home directory .*; set RAGR1_CACHE to a"):
        NodeCache.of_this_node()


def test_the_cache_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    sentence = f"the cache {tmp_path / 'open'} belongs to another user or others may write to it; set RAGR1_CACHE to"
    with pytest.raises(UserError, match=re.escape(sentence)):
        NodeCache(tmp_path / "open")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be used .*; set RAGR1_CACHE to a local folder"):
        NodeCache(tmp_path / "file" / "cache")
    monkeypatch.setenv("RAGR1_CACHE", str(tmp_path / "mine"))
    assert NodeCache.of_this_node().directory == tmp_path / "mine"
    assert os.stat(tmp_path / "mine").st_mode & 0o777 == 0o700
    monkeypatch.setenv("RAGR1_CACHE_BYTES", "1e9")
    with pytest.raises(UserError, match=r"RAGR1_CACHE_BYTES: got '1e9', expected a whole number of bytes"):
        NodeCache.of_this_node()
