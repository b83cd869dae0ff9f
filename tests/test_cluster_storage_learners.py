"""Learner ranks and a storage: each delivers its part, a restart begins there, a cut connection is one sentence."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from learners_common import assert_same_arrays, make_config, make_groups, make_policy
from storage_world import SECRET, CutConnection, s3_server, s3_uri

from cluster.storage import Storage, share
from learners.ranks.learner_group import LearnerGroup
from ragr1_actors.core.disk.digests import LIST_FILE, check_digests, write_list
from ragr1_actors.core.disk.folders import Folder, part_of
from ragr1_actors.core.disk.learner_state import LEARNER_FILE, LEARNER_PREFIX, learner_files
from ragr1_actors.core.errors import UserError
from ragr1_actors.core.schema import groups_to_record_batch

pytestmark = [pytest.mark.engine, pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def connection() -> Iterator[CutConnection]:
    with s3_server() as port:
        yield CutConnection(port)


def test_ranks_deliver_their_parts_and_restart_from_them(
    ray_local: ModuleType, connection: CutConnection, tmp_path: Path
) -> None:
    storage = Storage(s3_uri(connection.port, "run"), retry_s=0)
    policy = make_policy(tmp_path / "policy")
    settings = {"num_learners": 2, "num_cpus_per_learner": 0.5, "zero_stage": 2}
    group = LearnerGroup(make_config(learners=settings))
    shared = share(policy, storage, "policy")
    policy.rename(tmp_path / "gone")  # as on a node that does not see it
    group.build("grpo", shared)
    group.update([groups_to_record_batch(make_groups(0))])
    writer = storage.writer("checkpoints/step_1")
    group.begin_save(writer)
    group.update([groups_to_record_batch(make_groups(1))])
    digests = group.finish_save()
    assert digests.keys() == {*learner_files(2), f"policy/{LIST_FILE}"}
    with writer.part("list") as folder:
        write_list(folder, digests)
    final = storage.finish(writer, [*digests, LIST_FILE])
    names = {file.name for file in final.files}
    assert {*learner_files(2), "policy/config.json", "policy/model.safetensors", f"policy/{LIST_FILE}"} <= names
    check_digests(final.only("policy/").fetch() / "policy")
    group.saved(writer, part_of(final, LEARNER_PREFIX, LIST_FILE))

    expected = group.get_state()
    os.kill(group.foreach_learner(lambda learner: os.getpid())[1], signal.SIGKILL)
    assert_same_arrays(group.get_state(), expected)
    assert group.num_restarts == 1

    cut = storage.writer("checkpoints/step_2")
    connection.cut()
    group.begin_save(cut)
    with pytest.raises(
        UserError, match=r"^cannot write s3://bucket/run/checkpoints/step_2-.*; look at the netw"
    ) as error:
        group.finish_save()
    assert SECRET not in str(error.value)
    assert group.is_stopped
    connection.mend()
    assert storage.find("checkpoints/step_1") is not None and storage.find("checkpoints/step_2") is None


def test_a_damaged_copy_in_a_cache_is_named_and_not_what_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beyond 64 MiB the cache of a node compares samples, and hands a copy out again."""
    monkeypatch.setenv("RAGR1_CACHE", str(tmp_path / "cache"))
    storage = Storage(f"file://{tmp_path / 'stored'}", retry_s=0)
    group = LearnerGroup(make_config())
    group.build("grpo", make_policy(tmp_path / "policy"))
    writer = storage.writer("checkpoints/step_1")
    group.begin_save(writer)
    with writer.part("list") as folder:
        write_list(folder, group.finish_save())
    final = part_of(storage.finish(writer, [LEARNER_FILE, LIST_FILE]), LEARNER_PREFIX, LIST_FILE)
    group.load_state(final)
    assert isinstance(final, Folder)
    copy = final.fetch() / LEARNER_FILE  # which this process does not compare again
    content = bytearray(copy.read_bytes())
    content[-1] ^= 1
    copy.write_bytes(content)
    advice = f"{copy} is damaged: .*; delete the copy {copy.parent}, and it is fetched again from {final}"
    with pytest.raises(UserError, match=advice):
        group.load_state(final)
    group.stop()
