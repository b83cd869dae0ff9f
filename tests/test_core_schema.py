from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragr1_actors.core import schema
from ragr1_actors.core.errors import DataError
from ragr1_actors.core.schema import (
    LEARNED_SCHEMA,
    TRAJECTORY_SCHEMA,
    add_learned,
    groups_from_record_batch,
    groups_to_record_batch,
    read_trajectories,
    write_trajectories,
)
from ragr1_actors.core.types import (
    FinishReason,
    Record,
    StopReason,
    Task,
    TokenKind,
    ToolCall,
    Trajectory,
    TrajectoryGroup,
    Turn,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
string_tuples = st.lists(texts, max_size=3).map(tuple)
floats = st.floats(allow_nan=False, allow_infinity=False, width=32)
json_objects = st.dictionaries(texts, texts | st.integers() | floats | st.lists(texts, max_size=2), max_size=2)


@st.composite
def tasks(draw: st.DrawFn) -> Task:
    return Task(
        task_id=draw(texts),
        question=draw(texts),
        golden_answers=draw(string_tuples),
        category=draw(texts),
        supporting_ids=draw(string_tuples),
        plan=tuple(draw(st.lists(string_tuples, max_size=2))),
        source=draw(texts),
        meta=draw(json_objects),
    )


@st.composite
def turns(draw: st.DrawFn) -> Turn:
    records = st.lists(st.builds(Record, texts, texts, texts, floats), max_size=3).map(tuple)
    calls = st.builds(ToolCall, texts, json_objects, texts, records, floats, floats, st.booleans(), texts)
    return Turn(
        completion_text=draw(texts),
        num_model_tokens=draw(st.integers(0, 99)),
        action=draw(texts),
        calls=tuple(draw(st.lists(calls, max_size=2))),
        observation=draw(texts),
        reward=draw(floats),
        finish_reason=draw(st.sampled_from(FinishReason)),
    )


@st.composite
def trajectories(draw: st.DrawFn, task: Task) -> Trajectory:
    size = draw(st.integers(0, 12))
    kinds = draw(st.lists(st.sampled_from(TokenKind), min_size=size, max_size=size))
    return Trajectory(
        trajectory_id=draw(texts),
        task=task,
        token_ids=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size)), dtype=np.int32),
        kinds=np.array(kinds, dtype=np.uint8),
        logprobs=np.array(draw(st.lists(floats, min_size=size, max_size=size)), dtype=np.float32),
        policy_versions=np.array(draw(st.lists(st.integers(-1, 9), min_size=size, max_size=size)), dtype=np.int32),
        turns=tuple(draw(st.lists(turns(), max_size=3))),
        stop_reason=draw(st.sampled_from(StopReason)),
        reward=draw(floats),
        answer=draw(texts),
        error=draw(texts),
        metrics=draw(st.dictionaries(texts, floats, max_size=2)),
        variant=draw(texts),
        parent=draw(texts),
        num_copied_tokens=draw(st.integers(0, 99)),
        behaviour_logprobs=draw(st.none() | st.just(np.linspace(-1, 0, size, dtype=np.float32))),
        row_lengths=tuple(draw(st.lists(st.integers(0, 9), max_size=2))),
    )


@st.composite
def groups(draw: st.DrawFn) -> TrajectoryGroup:
    task = draw(tasks())
    return TrajectoryGroup(task, tuple(draw(st.lists(trajectories(task), min_size=1, max_size=3))))


def decoded(lazy: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """Read every field of every trajectory."""
    return [TrajectoryGroup(group.task, tuple(replace(t) for t in group.trajectories)) for group in lazy]


def assert_same(left: list[TrajectoryGroup], right: list[TrajectoryGroup]) -> None:
    assert [group.task for group in left] == [group.task for group in right]
    assert [group.task.meta for group in left] == [group.task.meta for group in right]  # not compared by ==
    ours = [t for group in left for t in group.trajectories]
    theirs = [t for group in right for t in group.trajectories]
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert vars(a).keys() == vars(b).keys()
        for name, value in vars(a).items():
            other = vars(b)[name]
            if isinstance(value, np.ndarray):
                assert value.dtype == other.dtype
                np.testing.assert_array_equal(value, other)
            else:
                assert value == other, name


@given(st.lists(groups(), max_size=4))
def test_groups_come_back_from_arrow_as_they_were(original: list[TrajectoryGroup]) -> None:
    batch = groups_to_record_batch(original)
    batch.validate(full=True)
    assert batch.schema.equals(TRAJECTORY_SCHEMA)
    assert_same(original, groups_from_record_batch(batch))
    lazy = groups_from_record_batch(batch, decode_texts=False)
    lengths = [[trajectory.turn_lengths for trajectory in group.trajectories] for group in lazy]
    assert lengths == [[trajectory.turn_lengths for trajectory in group.trajectories] for group in original]
    assert_same(original, decoded(lazy))
    copies = [[trajectory.turn_lengths for trajectory in group.trajectories] for group in decoded(lazy)]
    assert copies == lengths


@given(st.lists(groups(), min_size=2, max_size=4), st.data())
def test_a_slice_of_a_batch_reads_its_own_rows(original: list[TrajectoryGroup], data: st.DataObject) -> None:
    batch = groups_to_record_batch(original)
    first = len(original[0].trajectories)
    assert_same(original[1:], groups_from_record_batch(batch.slice(first)))
    assert_same(original[1:], decoded(groups_from_record_batch(batch.slice(first), decode_texts=False)))


def example_group(num_tokens: int = 5) -> TrajectoryGroup:
    task = Task("t/0", "Where?", ("Riga",))
    trajectory = Trajectory(
        "t/0#0/0",
        task,
        np.arange(num_tokens, dtype=np.int32),
        np.full(num_tokens, TokenKind.MODEL, dtype=np.uint8),
        np.zeros(num_tokens, dtype=np.float32),
        np.zeros(num_tokens, dtype=np.int32),
        (),
        StopReason.ANSWERED,
        1.0,
    )
    return TrajectoryGroup(task, (trajectory,))


def test_token_arrays_are_views_of_the_batch_not_copies() -> None:
    batch = groups_to_record_batch([example_group()])
    token_ids = groups_from_record_batch(batch)[0].trajectories[0].token_ids
    address = batch.column("token_ids").values.buffers()[1].address
    assert token_ids.ctypes.data == address
    with pytest.raises(ValueError, match="read-only"):
        token_ids[0] = 1


def test_a_file_of_batches_reads_back(tmp_path: object) -> None:
    path = tmp_path / "t.arrow"  # type: ignore[operator]
    write_trajectories(path, [groups_to_record_batch([example_group(n)]) for n in (3, 0, 7)])
    assert [g.trajectories[0].num_tokens for g in read_trajectories(path)] == [3, 0, 7]
    written = pa.ipc.open_file(path)
    assert written.schema.names == TRAJECTORY_SCHEMA.names and written.schema.metadata == TRAJECTORY_SCHEMA.metadata
    rows = written.read_all()
    assert rows.filter(pc.greater(rows["group"], 0)).num_rows == 2  # pyarrow cannot choose rows of views


@pytest.mark.parametrize(
    ("metadata", "got"),
    [
        ({"ragr1_actors.format": "5"}, "trajectories in format 5, expected format 4"),
        (None, "no trajectories, expected"),
    ],
)
def test_a_file_of_another_format_is_refused(tmp_path: Path, metadata: dict[str, str] | None, got: str) -> None:
    path = tmp_path / "t.arrow"
    write_trajectories(path, [groups_to_record_batch([example_group(1)]).replace_schema_metadata(metadata)])
    with pytest.raises(DataError, match=got):
        read_trajectories(path)


def test_damage_of_any_kind_is_one_sentence_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "t.arrow"
    batch = groups_to_record_batch([example_group(1)])
    rewards = batch.schema.get_field_index("reward")
    reasons = batch.schema.get_field_index("stop_reason")
    for damaged in (
        batch.remove_column(rewards),
        batch.set_column(reasons, "stop_reason", pa.array(["zz"] * batch.num_rows)),
        batch.set_column(rewards, "reward", pa.nulls(batch.num_rows, pa.float64())),
    ):
        write_trajectories(path, [damaged.replace_schema_metadata(TRAJECTORY_SCHEMA.metadata)])
        with pytest.raises(DataError, match=r"t\.arrow cannot be read: "):
            read_trajectories(path)
    for content in (b"", b"ARROW1" * 9):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"t\.arrow cannot be read: "):
            read_trajectories(path)


def test_small_batches_become_one_and_keep_their_groups_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t.arrow"
    groups = [example_group(n) for n in range(6)]
    batches = [groups_to_record_batch(part) for part in (groups[:2], [], groups[2:3], groups[3:])]
    for limit, expected in ((schema.WRITTEN_BYTES, 1), (1, 4)):
        monkeypatch.setattr(schema, "WRITTEN_BYTES", limit)
        write_trajectories(path, batches)
        assert pa.ipc.open_file(path).num_record_batches == expected
        found = read_trajectories(path)
        assert [len(group.trajectories) for group in found] == [1] * 6
        assert [group.trajectories[0].num_tokens for group in found] == list(range(6))


def test_what_was_learned_is_beside_its_trajectory(tmp_path: Path) -> None:
    path = tmp_path / "t.arrow"
    learned = pa.RecordBatch.from_pydict(
        {"trajectory_id": ["b", "a"], "advantages": [[0.5, 1.0], None], "ratios": [[1.0, 2.0], [3.0]]},
        schema=LEARNED_SCHEMA,
    )
    named = ((1, "a"), (2, "b"), (1, "c"))
    members = [replace(example_group(count).trajectories[0], trajectory_id=name) for count, name in named]
    batches = [groups_to_record_batch([TrajectoryGroup(one.task, (one,))]) for one in members]
    write_trajectories(path, add_learned(batches, learned))
    table = pa.ipc.open_file(path).read_all()
    assert table.column("trajectory_id").to_pylist() == ["a", "b", "c"]
    assert table.column("advantages").to_pylist() == [None, [0.5, 1.0], None]
    assert table.column("ratios").to_pylist() == [[3.0], [1.0, 2.0], None]
    assert [group.trajectories[0].num_tokens for group in read_trajectories(path)] == [1, 2, 1]


@pytest.mark.parametrize(("number", "title", "text"), [("1", "", ""), ("2", "Riga", "Riga lies in Latvia.")])
def test_files_of_older_formats_are_read(number: str, title: str, text: str) -> None:
    """Both files were written by the code of their format."""
    (group,) = read_trajectories(Path(__file__).with_name(f"trajectories_format_{number}.arrow"))
    (trajectory,) = group.trajectories
    assert group.task.golden_answers == ("Riga",) and group.task.meta == {}
    assert (trajectory.reward, trajectory.answer, trajectory.num_model_tokens) == (1.0, "Riga", 5)
    searched, answered = trajectory.turns
    (call,) = searched.calls
    assert (searched.action, answered.calls, searched.reward) == ("search", (), 0.0)
    assert (call.tool, call.asked, call.latency_s) == ("search", "Ana Bell", 0.5)
    assert call.arguments["k"] == (2 if number == "1" else 3)  # format 1 kept no k: as many as were found
    assert [record.id for record in call.records] == ["ana_bell", "riga"]
    assert call.records[1] == Record("riga", title, text, 0.25)


def test_files_of_format_3_are_read() -> None:
    """The file was written by the code of its format."""
    (group,) = read_trajectories(Path(__file__).with_name("trajectories_format_3.arrow"))
    (trajectory,) = group.trajectories
    assert group.task.meta == {"pass_rate": 0.5} and trajectory.variant == "v"
    assert (trajectory.row_lengths, trajectory.behaviour_logprobs, trajectory.images) == ((4, 5), None, ())
    (call,) = trajectory.turns[0].calls
    assert call.records[1] == Record("riga", "Riga", "Riga lies in Latvia.", 0.25) and call.is_cached


def test_halves_of_surrogate_pairs_are_written_as_replacements() -> None:
    task = Task("t", "Where?", ("Riga",), meta={"a": 1})
    one = replace(example_group().trajectories[0], answer="a \ud800 b", error="\udfff", metrics={"reward_\ud800": 1.0})
    one = replace(one, turns=tuple(replace(turn, observation="x\ud800") for turn in one.turns))
    (group,) = groups_from_record_batch(groups_to_record_batch([TrajectoryGroup(task, (one,))]))
    read = group.trajectories[0]
    assert (read.answer, read.error, read.metrics) == ("a \ufffd b", "\ufffd", {"reward_\ufffd": 1.0})
    assert all(turn.observation == "x\ufffd" for turn in read.turns)
