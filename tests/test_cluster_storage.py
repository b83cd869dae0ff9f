"""Folders on a storage: named by content, whole by their listing, and without the secrets of their URI."""

from __future__ import annotations

import io
import json
import logging
import pickle
import re
from collections.abc import Iterator
from pathlib import Path, PosixPath
from typing import Any

import pytest
from storage_world import KEY, SECRET, CutConnection, Mender, give_up_soon, options, s3_server, s3_uri

from cluster.storage import Storage, StorageWriter, StoredFolder, is_uri, read_contents, share, without_secrets
from ragr1_actors.core.disk.folders import Folder, FolderWriter, on_this_node
from ragr1_actors.core.errors import ConfigError, DataError, UserError


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.integration)])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "folder":
        return Storage(f"file://{tmp_path / 'stored'}", retry_s=0)
    return Storage(s3_uri(request.getfixturevalue("port"), tmp_path.name), retry_s=0)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAGR1_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_folder(folder: Path, **files: str) -> Path:
    for name, text in (files or {"config.json": "{}", "weights": "0123"}).items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def hidden(stored: StoredFolder) -> StoredFolder:
    """As a node has it that does not see the driver's disk."""
    return pickle.loads(pickle.dumps(StoredFolder(stored.files, stored.name, "", stored.storage, stored.prefix)))


def contents(folder: Path) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_reaches_a_node_that_does_not_see_it(storage: Storage, tmp_path: Path, own_cache: Path) -> None:
    folder = make_folder(tmp_path / "policy", config="{}", deep__er__weights="0123")
    put = storage.put(folder, "policy")
    assert isinstance(put, Folder)
    assert on_this_node(put) == folder, "nothing is copied where the node sees it"
    assert not own_cache.exists()
    found = on_this_node(hidden(put))
    assert found == own_cache / put.content
    assert contents(Path(found)) == contents(folder) == {"config": "{}", "deep/er/weights": "0123"}
    part = hidden(put).only("deep/")
    assert contents(part.fetch()) == {"deep/er/weights": "0123"}
    (folder / "config").write_text("[]")  # another run wrote there
    assert on_this_node(put) == found


def test_an_empty_folder_is_there_after_it_was_fetched(storage: Storage, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    put = storage.put(tmp_path / "empty", "empty")
    (tmp_path / "empty").rmdir()  # as on a node with another disk
    part = hidden(storage.put(make_folder(tmp_path / "policy"), "policy")).only("adapter/")
    for stored in (put, hidden(put), part):
        found = stored.fetch()
        assert found.is_dir() and contents(found) == {}


def test_the_same_content_is_uploaded_once(storage: Storage, tmp_path: Path) -> None:
    first = storage.put(make_folder(tmp_path / "a"))
    names = storage.names()
    second = storage.put(make_folder(tmp_path / "b"))
    assert storage.names() == names
    assert first.content == second.content and first.name == second.name
    other = storage.put(make_folder(tmp_path / "c", config="{}"))
    assert other.content != first.content
    renamed = storage.put(make_folder(tmp_path / "d", **{"config.json": "{}", "weight": "0123"}))
    assert renamed.content not in (first.content, other.content)


def test_a_folder_counts_once_its_listing_is_there(storage: Storage, tmp_path: Path) -> None:
    old = storage.put(make_folder(tmp_path / "old", weights="old"), "checkpoints/step_0")
    writer = storage.writer("checkpoints/step_0")
    assert isinstance(writer, FolderWriter)
    for rank in range(2):
        with pickle.loads(pickle.dumps(writer)).part(f"rank {rank}") as folder:
            make_folder(folder, **{f"learner_{rank}": "new"})
    found = storage.find("checkpoints/step_0")
    assert found is not None and contents(hidden(found).fetch()) == {"weights": "old"}
    with pytest.raises(UserError, match=r"lacks state\.json; what was stored before is whole"):
        storage.finish(writer, ["learner_0", "learner_1", "state.json"])
    storage.finish(writer, ["learner_0", "learner_1"], before=old)
    found = storage.find("checkpoints/step_0")
    assert found is not None
    assert contents(hidden(found).fetch()) == {"learner_0": "new", "learner_1": "new"}
    assert not [name for name in storage.names() if name.startswith(old.prefix)], "the one before is removed"
    storage.link("checkpoints/best", found)
    assert storage.find("checkpoints/best") == StoredFolder(
        found.files, storage.at("checkpoints/best"), "", storage, found.prefix
    )
    storage.remove(storage.names())
    assert storage.find("checkpoints/step_0") is None


def test_a_part_that_fails_is_not_delivered(storage: Storage) -> None:
    writer = storage.writer("policy")
    with pytest.raises(RuntimeError, match="out of memory"), writer.part("driver") as folder:
        make_folder(folder)
        raise RuntimeError("out of memory")
    assert storage.names() == []


def test_damage_is_found_by_the_hash(storage: Storage, tmp_path: Path, own_cache: Path) -> None:
    put = storage.put(make_folder(tmp_path / "policy"), "policy")
    storage.write(f"{put.prefix}/weights", b"3210")
    with pytest.raises(DataError, match=r"weights is damaged: its SHA-256 is not that of its listing"):
        hidden(put).fetch()
    assert not (own_cache / put.content).exists()
    listing = json.loads(storage.read("policy.json") or b"")
    listing["files"][0]["name"] = "../../escape"
    storage.write("policy.json", json.dumps(listing).encode())
    with pytest.raises(DataError, match=r"policy\.json is damaged: .*expected one inside a folder"):
        storage.find("policy")
    storage.write("policy.json", json.dumps({"folder": "../runs", "files": []}).encode())
    with pytest.raises(DataError, match=r"policy\.json is damaged: .*expected one inside a folder"):
        storage.find("policy")
    storage.write("policy.json", b"{")
    with pytest.raises(DataError, match=r"policy\.json is damaged"):
        storage.find("policy")


@pytest.mark.integration
def test_a_cut_connection_is_one_sentence_and_a_mended_one_goes_on(
    port: int, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_up_soon(monkeypatch)
    connection = CutConnection(port)
    storage = Storage(s3_uri(connection.port, tmp_path.name), retry_s=0)
    before = storage.put(make_folder(tmp_path / "old", weights="old"), "policy")
    connection.cut_after = connection.num_bytes + 2_000_000
    big = make_folder(tmp_path / "new", weights="new" * 4_000_000)
    with pytest.raises(
        UserError, match=r"^cannot write s3://bucket/.*: .*; look at the network, the name and the"
    ) as error:
        storage.put(big, "policy")
    assert "\n" not in str(error.value)
    connection.mend()
    found = storage.find("policy")
    assert found is not None and found.files == before.files
    assert contents(hidden(found).fetch()) == {"weights": "old"}

    connection.cut_after = connection.num_bytes + 2_000_000
    patient = Storage(s3_uri(connection.port, tmp_path.name), retry_s=60)
    with caplog.at_level(logging.WARNING):
        mender = Mender(connection)
        caplog.handler.addFilter(mender)
        put = patient.put(big, "policy")
    assert "it is tried again for 60 s" in caplog.text
    assert mender.num_mended == 1
    assert (hidden(put).fetch() / "weights").read_text() == "new" * 4_000_000
    for secret in (KEY, SECRET):
        assert secret not in caplog.text and secret not in str(error.value)


@pytest.mark.integration
def test_what_cannot_be_reached_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    give_up_soon(monkeypatch)
    with pytest.raises(UserError, match=r"cannot read s3://bucket/run/config\.yaml: "):
        Storage(s3_uri(1, "run"), retry_s=0).read("config.yaml")
    with pytest.raises(ConfigError, match=r"expected a URI of pyarrow\.fs, such as s3://bucket/runs/mine") as error:
        Storage(f"s4://{KEY}:{SECRET}@bucket/run").names()
    assert SECRET not in str(error.value) and error.value.__cause__ is None
    with pytest.raises(ConfigError) as error:
        Storage(f"s3://{KEY}:{SECRET}@bucket/run?secret_key={SECRET}").names()
    assert SECRET not in str(error.value)


@pytest.mark.integration
def test_a_uri_is_shown_without_its_secrets(port: int, tmp_path: Path) -> None:
    uri = s3_uri(port, "runs/mine")
    assert without_secrets(uri) == f"s3://bucket/runs/mine?{options(port)}"
    assert without_secrets("s3://k:s%2F@b/run?region=eu&secret_key=x") == "s3://b/run?region=eu"
    assert without_secrets("gs://bucket/run/") == "gs://bucket/run"
    assert without_secrets("s3://KEY:sla/sh@bucket/run") == "s3://bucket/run", "a slash that should have been %2F"
    assert without_secrets("s3://KEY:que?s/tion@bucket/run?region=eu") == "s3://bucket/run"
    assert without_secrets("s3://KEY:ha#sh@bucket/run") == "s3://bucket/run"
    assert without_secrets("s3://KEY:s@bucket/run@2") == without_secrets("s3://bucket/run@2") == "s3://bucket/run@2"
    storage = Storage(uri)
    stored = Storage(f"file://{tmp_path}").put(make_folder(tmp_path / "policy"))
    for shown in (
        storage,
        StorageWriter(storage, "policy", "policy-1"),
        StoredFolder(stored.files, "policy", storage=storage),
    ):
        assert SECRET not in repr(shown) and SECRET not in str(shown)
    assert storage.at("config.yaml") == "s3://bucket/runs/mine/config.yaml"
    assert is_uri(uri) and not is_uri("runs/mine")


class CutFile(PosixPath):
    """Cannot be read to its end."""

    def open(self, *arguments: Any, **options: Any) -> Any:
        class Cut(io.BytesIO):
            num_reads = 0

            def read(self, size: int | None = -1) -> bytes:
                self.num_reads += 1
                if self.num_reads == 2:
                    raise KeyboardInterrupt
                return super().read(10)

        return Cut(bytes(100))


def test_a_file_is_replaced_as_a_whole(storage: Storage, tmp_path: Path) -> None:
    storage.write("metrics.jsonl", b"old")
    for name in ("metrics.jsonl", "report.json"):
        with pytest.raises(KeyboardInterrupt):
            storage.upload(name, CutFile(tmp_path / "file"))
    assert storage.names() == ["metrics.jsonl"]
    assert storage.read("metrics.jsonl") == b"old"


def test_an_upload_that_fails_leaves_nothing(storage: Storage, tmp_path: Path) -> None:
    class Folder(PosixPath):
        def open(self, *arguments: Any, **options: Any) -> Any:
            if self.name == "weights" and storage.names():  # the other file was uploaded
                raise KeyboardInterrupt
            return super().open(*arguments, **options)

    folder = make_folder(tmp_path / "policy")
    with pytest.raises(KeyboardInterrupt):
        storage.put(Folder(folder), "policy")
    assert storage.names() == []
    assert storage.put(folder, "policy").files == read_contents(folder)


def test_what_is_gone_already_is_removed(storage: Storage) -> None:
    storage.write("one", b"1")
    storage.remove(["gone", "one", "one"])
    assert storage.names() == []


def test_a_hub_name_stays_one_and_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert share("Qwen/Qwen2.5-7B", Storage(f"file://{tmp_path}")) == "Qwen/Qwen2.5-7B"
    with pytest.raises(DataError, match=re.escape(f"does not see the folder {tmp_path / 'nowhere'}")):
        on_this_node(tmp_path / "nowhere")


@pytest.mark.ray
def test_a_small_folder_travels_by_the_object_store(
    ray_local: object, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    folder = make_folder(tmp_path / "policy", config="{}", deep__weights="0123")
    assert share(folder) == folder, "a session of one machine has no other node"
    monkeypatch.setenv("RAY_ADDRESS", "a cluster, which may grow")
    stored = share(folder)
    assert isinstance(stored, StoredFolder)
    cache = tmp_path / "other"

    @ray.remote(num_cpus=0, runtime_env={"env_vars": {"RAGR1_CACHE": str(cache)}})
    def fetch(stored: StoredFolder) -> dict[str, str]:
        found = Path(on_this_node(stored))
        assert found.parent == cache
        return {path.relative_to(found).as_posix(): path.read_text() for path in found.rglob("*") if path.is_file()}

    away = tmp_path / "away"
    folder.rename(away)  # as on a node with another disk
    assert ray.get(fetch.remote(stored)) == contents(away)
    monkeypatch.setattr("cluster.storage.SMALL_BYTES", 3)
    assert share(away) == away
