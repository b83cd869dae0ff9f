"""The list of a folder's files: what is damaged or gone is named, what a person adds is no error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragr1_actors.core.disk.digests import LIST_FILE, FileDigest, check_digests, digest_files, read_list, write_list
from ragr1_actors.core.disk.files import WRITING
from ragr1_actors.core.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a list of its own inside."""
    policy = tmp_path / "step_8" / "policy"
    policy.mkdir(parents=True)
    (policy / "weights").write_bytes(bytes(range(256)) * 20_000)
    (policy / "words").write_text("words")
    write_list(policy)
    (policy.parent / "state.json").write_text("{}")
    write_list(policy.parent, digest_files(policy.parent, ["state.json", f"policy/{LIST_FILE}"]))
    return policy.parent


def test_a_whole_folder_and_what_a_person_adds(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "README.md").write_text("mine")
    (folder / f"{WRITING}half").write_text("")
    check_digests(folder)
    check_digests(folder / "policy")
    assert read_list(folder / "policy").keys() == {"weights", "words"}
    assert read_list(folder).keys() == {"state.json", f"policy/{LIST_FILE}"}
    assert not caplog.text


@pytest.mark.parametrize("name", ["state.json", "policy/weights", "policy/words", f"policy/{LIST_FILE}"])
@pytest.mark.parametrize("damage", ["byte", "cut", "gone"])
def test_each_damaged_file_is_named(folder: Path, name: str, damage: str) -> None:
    path = folder / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content if damage == "byte" else content[:-1])
    with pytest.raises(DataError, match=f"^{path} ") as error:
        check_digests(folder)
        check_digests(folder / "policy")
    assert ("expected" in str(error.value)) and "\n" not in str(error.value)
    checked = folder if name == "state.json" or LIST_FILE in name else folder / "policy"
    others = [other for other in read_list(checked) if other not in name]
    check_digests(checked, others.__contains__)


@given(data=st.data())
def test_no_changed_character_of_a_list_is_passed_over(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("listed")
    (folder / "weights").write_bytes(b"weights")
    write_list(folder)
    content = (folder / LIST_FILE).read_bytes()
    position = data.draw(st.sampled_from([index for index, byte in enumerate(content) if byte not in b" \n"]))
    changed = bytearray(content)
    changed[position] ^= data.draw(st.integers(1, 255))
    (folder / LIST_FILE).write_bytes(changed)
    with pytest.raises(DataError, match=LIST_FILE):
        check_digests(folder)


def test_a_size_is_enough_where_the_content_is_not_read(folder: Path) -> None:
    path = folder / "policy" / "weights"
    path.write_bytes(bytes(path.stat().st_size))
    check_digests(folder / "policy", is_read="words".__eq__)
    path.write_bytes(b"")
    with pytest.raises(DataError, match="weights is damaged: got 0 bytes, expected 5,120,000"):
        check_digests(folder / "policy", is_read="words".__eq__)


def test_ranks_share_the_files(folder: Path) -> None:
    (folder / "policy" / "words").write_text("other")
    check_digests(folder / "policy", share=(0, 2))
    with pytest.raises(DataError, match="words"):
        check_digests(folder / "policy", share=(1, 2))


def test_a_list_that_is_gone_is_warned_about_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "policy" / LIST_FILE).unlink()
    for _ in range(2):
        check_digests(folder / "policy")
    assert caplog.text.count(f"{folder / 'policy'}: no {LIST_FILE}, so that damaged files are not noticed") == 1
    caplog.clear()
    (folder / LIST_FILE).write_text(json.dumps({"files": "of somebody else"}))
    check_digests(folder / "policy")
    check_digests(folder.parent)
    assert not caplog.text


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one")
    before = FileDigest.of(path)
    assert FileDigest.of(path) == before == FileDigest(3, before.digest)
    path.unlink()
    (tmp_path / "other").write_bytes(b"two")
    (tmp_path / "other").rename(path)
    assert FileDigest.of(path) != before
