"""Wire format: trajectory groups as an Arrow record batch, in the object store and on disk.

One row per trajectory; siblings are next to each other and share ``group``. The rows of a conversation that was
rewritten are one behind the other in the token columns, with ``row_lengths``. The token columns are lists over flat
buffers, so a reader gets numpy views into shared memory, not copies::

    group  trajectory_id          token_ids (list<int32>)   kinds (list<uint8>)  ...  reward
    0      world/train/17#0/0     [1 40 41 2 7 ...]         [0 0 0 0 1 ...]           1.0
    0      world/train/17#0/1     [1 40 41 2 9 ...]         [0 0 0 0 1 ...]           0.0
    1      world/train/4#0/0      [1 52 ...]                [0 0 ...]                 1.0
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray
from pydantic import TypeAdapter

from ragr1_actors.core.content import Image, PlacedImage
from ragr1_actors.core.errors import DataError, one_line, valid_unicode
from ragr1_actors.core.types import FinishReason, StopReason, Task, Trajectory, TrajectoryGroup, Turn

TRAJECTORIES = "trajectories"
"""Name of the folder of a run with its trajectories, and the searches that they recorded."""
_STRINGS = pa.list_(pa.string())
TASK_TYPE = pa.struct(
    {
        "task_id": pa.string(),
        "question": pa.string(),
        "golden_answers": _STRINGS,
        "category": pa.string(),
        "supporting_ids": _STRINGS,
        "plan": pa.list_(_STRINGS),
        "source": pa.string(),
        "meta": pa.string(),  # JSON
    }
)
RECORD_TYPE = pa.struct(
    {
        "id": pa.string(),
        "title": pa.string(),
        "text": pa.string(),
        "score": pa.float64(),
        "image": pa.int32(),  # position in the trajectory's images; null: none
    }
)
CALL_TYPE = pa.struct(
    {
        "tool": pa.string(),
        "arguments": pa.string(),  # JSON
        "result": pa.string(),
        "records": pa.list_(RECORD_TYPE),
        "latency_s": pa.float64(),
        "waited_s": pa.float64(),
        "is_cached": pa.bool_(),
        "version": pa.string(),
    }
)
TURN_TYPE = pa.struct(
    {
        "completion_text": pa.string(),
        "num_model_tokens": pa.int32(),
        "action": pa.string(),
        "calls": pa.list_(CALL_TYPE),
        "observation": pa.string(),
        "reward": pa.float64(),
        "finish_reason": pa.string(),
    }
)
IMAGE_TYPE = pa.struct({"media_type": pa.string(), "data": pa.binary_view()})  # the uses of an image share its bytes
PLACE_TYPE = pa.struct({"image": pa.int32(), "start": pa.int32(), "rows": pa.int32(), "cols": pa.int32()})
FORMAT = "4"
"""Number of ``TRAJECTORY_SCHEMA`` in the metadata of its files; it changes with the columns."""
_OLDER_FORMATS = ("1", "2", "3")
_SINCE_3: dict[str, Any] = {
    "variant": "",
    "parent": "",
    "num_copied_tokens": 0,
    "row_lengths": [],
    "behaviour_logprobs": None,
}
"""Columns that formats before 3 lack, after ``metrics``, with the values for their trajectories."""
_SINCE_4: dict[str, Any] = {"images": [], "image_places": []}
"""Columns that format 3 lacks, after ``behaviour_logprobs``."""
_FORMAT_KEY = b"ragr1_actors.format"
TRAJECTORY_SCHEMA = pa.schema(
    {
        "group": pa.int32(),
        "trajectory_id": pa.string(),
        "task": TASK_TYPE,
        "token_ids": pa.large_list(pa.int32()),
        "kinds": pa.large_list(pa.uint8()),
        "logprobs": pa.large_list(pa.float32()),
        "policy_versions": pa.large_list(pa.int32()),
        "turns": pa.list_(TURN_TYPE),
        "stop_reason": pa.string(),
        "reward": pa.float64(),
        "answer": pa.string(),
        "error": pa.string(),
        "metrics": pa.map_(pa.string(), pa.float64()),
        "variant": pa.string(),
        "parent": pa.string(),
        "num_copied_tokens": pa.int32(),
        "row_lengths": pa.list_(pa.int32()),
        "behaviour_logprobs": pa.large_list(pa.float32()),  # null: the engine's log-probs
        "images": pa.list_(IMAGE_TYPE),  # of a trajectory, each once
        "image_places": pa.list_(PLACE_TYPE),
    },
    metadata={_FORMAT_KEY: FORMAT},
)
LEARNED_SCHEMA = pa.schema(
    {
        "trajectory_id": pa.string(),
        "advantages": pa.large_list(pa.float32()),
        "ratios": pa.large_list(pa.float32()),
    }
)
"""Values that a learner computed per MODEL token of an update: the advantage, and the policy ratio in the last pass
over the token. Files of trained trajectories have both columns, null for trajectories that were not trained on."""
WRITTEN_BYTES = 4 << 20
"""Bytes of a record batch in a file, before compression: a reader of one trajectory decompresses its batch."""
_VIEW = np.dtype("V16")
"""Item of Arrow's type ``binary_view``: a length, and the place of the bytes."""
_TOKEN_COLUMNS = ("token_ids", "kinds", "logprobs", "policy_versions")
# pydantic converts between dataclasses and dicts faster than Python does, and turns lists back into tuples
_TASK = TypeAdapter(Task)
_TURNS = TypeAdapter(tuple[Turn, ...])
_KNOWN_IMAGES: WeakValueDictionary[str, Image] = WeakValueDictionary()  # by digest
_PICTURES: Any = {"__all__": {"calls": {"__all__": {"records": {"__all__": {"image"}}}}}}


def groups_to_record_batch(groups: Sequence[TrajectoryGroup]) -> pa.RecordBatch:
    """Return groups as one record batch of ``TRAJECTORY_SCHEMA``, one row per trajectory."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    own = [name for name in TRAJECTORY_SCHEMA.names if name not in ("group", *_SINCE_4)]
    columns = {name: [getattr(t, name) for t in trajectories] for name in own}
    images = [_images_used(t) for t in trajectories]
    columns["image_places"] = [_place_fields(t, used) for t, used in zip(trajectories, images, strict=True)]
    columns["group"] = [index for index, group in enumerate(groups) for _ in group.trajectories]
    # warnings: a custom retriever's scores may be numpy's floats, which Arrow takes
    columns["task"] = [_task_fields(task) for task in columns["task"]]
    columns["turns"] = [_turn_fields(t.turns, used) for t, used in zip(trajectories, images, strict=True)]
    columns["metrics"] = [list(metrics.items()) for metrics in columns["metrics"]]
    arrays = [
        _flat_list(columns[field.name], field.type.value_type)
        if field.name in _TOKEN_COLUMNS
        else _image_column(images)
        if field.name == "images"
        else _array(columns[field.name], field.type)
        for field in TRAJECTORY_SCHEMA
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=TRAJECTORY_SCHEMA)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return a column; halves of surrogate pairs, which a file cannot hold, become U+FFFD."""
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:
        return pa.array([_as_writable(value) for value in values], kind)


def _as_writable(value: Any) -> Any:
    if isinstance(value, str):
        return valid_unicode(value)
    if isinstance(value, dict):
        return {name: _as_writable(one) for name, one in value.items()}
    return type(value)(map(_as_writable, value)) if isinstance(value, list | tuple) else value


def groups_from_record_batch(batch: pa.RecordBatch, *, decode_texts: bool = True) -> list[TrajectoryGroup]:
    """Read groups back; the token arrays are read-only views into the batch's buffers.

    With ``decode_texts=False``, ``turns`` and ``metrics`` of a trajectory are decoded only if they are read: a learner
    rank reads tokens and rewards, and the texts of passages are most of a batch.
    """
    tokens = {name: _views(batch.column(name)) for name in _TOKEN_COLUMNS}
    pictures = _images_of(batch.column("images"))
    eager = [name for name in TRAJECTORY_SCHEMA.names if name not in (*_TOKEN_COLUMNS, "task", "images")]
    others = batch.select([name for name in eager if decode_texts or name not in ("turns", "metrics")]).to_pylist()
    by_group: dict[int, list[Trajectory]] = {}
    for row, fields in enumerate(others):
        members = by_group.setdefault(fields.pop("group"), [])
        fields |= {name: views[row] for name, views in tokens.items()}
        fields["task"] = members[0].task if members else _task_of(batch.column("task")[row].as_py())
        fields["stop_reason"] = StopReason(fields["stop_reason"])
        fields["row_lengths"] = tuple(fields["row_lengths"])
        places = fields.pop("image_places")
        fields["images"] = tuple(PlacedImage(**place | {"image": pictures[row][place["image"]]}) for place in places)
        if (behaviour := fields["behaviour_logprobs"]) is not None:
            fields["behaviour_logprobs"] = np.array(behaviour, np.float32)
        if decode_texts:
            fields["turns"] = _turns_of(fields["turns"], pictures[row])
            fields["metrics"] = dict(fields["metrics"])
            members.append(Trajectory(**fields))
        else:
            members.append(_LazyTrajectory.from_row(batch, row, fields))
    return [TrajectoryGroup(members[0].task, tuple(members)) for members in by_group.values()]


def _task_fields(task: Task) -> dict[str, Any]:
    fields: dict[str, Any] = _TASK.dump_python(task, warnings=False)
    fields["meta"] = _json(fields["meta"])
    return fields


def _task_of(fields: dict[str, Any]) -> Task:
    return _TASK.validate_python(fields | {"meta": json.loads(fields["meta"])})


def _images_used(trajectory: Trajectory) -> list[Image]:
    """Return the distinct images of a trajectory: among its tokens, then of its records."""
    found = dict.fromkeys(place.image for place in trajectory.images)
    records = (record for call in trajectory.calls for record in call.records)
    return list(found | dict.fromkeys(record.image for record in records if record.image is not None))


def _place_fields(trajectory: Trajectory, used: list[Image]) -> list[dict[str, int]]:
    return [
        {"image": used.index(one.image), "start": one.start, "rows": one.rows, "cols": one.cols}
        for one in trajectory.images
    ]


def _image_column(rows: Sequence[Sequence[Image]]) -> pa.ListArray:
    """Return the column of the images of each row; each distinct image is in it once, and its uses view its bytes."""
    uses = [image for row in rows for image in row]
    numbers = {image: number for number, image in enumerate(dict.fromkeys(uses))}
    if not numbers:
        return pa.array(rows, TRAJECTORY_SCHEMA.field("images").type)
    _, views, *blocks = pa.array([image.data for image in numbers], pa.binary_view()).buffers()
    shared = np.frombuffer(views, _VIEW)[[numbers[image] for image in uses]]
    data = pa.Array.from_buffers(pa.binary_view(), len(uses), [None, pa.py_buffer(shared), *blocks])
    fields = [pa.array([image.media_type for image in uses]), data]
    offsets = pa.array(np.cumsum([0, *map(len, rows)]), pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(fields, fields=list(IMAGE_TYPE)))


def _images_of(column: pa.ListArray) -> list[list[Image]]:
    """Return the images of each row; a process holds those with the same bytes once."""
    found = column.flatten()
    if not len(found):
        return [[]] * len(column)
    data = found.field("data").cast(pa.binary_view())  # other tools may have written another type
    views = np.frombuffer(data.buffers()[1], _VIEW)[data.offset :][: len(data)].tolist()
    made = {view: Image(**found[at].as_py()) for view, at in {view: at for at, view in enumerate(views)}.items()}
    images = [_KNOWN_IMAGES.setdefault(made[view].digest, made[view]) for view in views]
    starts = column.offsets.to_numpy() - column.offsets[0].as_py()
    return [images[start:end] for start, end in pairwise(starts)]


def _turn_fields(turns: tuple[Turn, ...], used: list[Image]) -> list[dict[str, Any]]:
    fields: list[dict[str, Any]] = _TURNS.dump_python(turns, warnings=False, exclude=_PICTURES if used else None)
    for turn, written in zip(turns, fields, strict=True):
        for call, made in zip(turn.calls, written["calls"], strict=True):
            made["arguments"] = _json(made["arguments"])
            for record, kept in zip(call.records, made["records"], strict=True) if used else ():
                kept["image"] = None if record.image is None else used.index(record.image)
    return fields


def _turns_of(fields: list[dict[str, Any]], used: list[Image]) -> tuple[Turn, ...]:
    for turn in fields:
        for call in turn["calls"]:
            call["arguments"] = json.loads(call["arguments"])
            for record in call["records"] if used else ():
                if record["image"] is not None:
                    record["image"] = used[record["image"]]
    return _TURNS.validate_python(fields)


def _json(values: Mapping[str, Any]) -> str:
    return json.dumps(dict(values), ensure_ascii=False, default=str)  # a field of a file may be a date


class _LazyTrajectory(Trajectory):
    """A row of a record batch whose ``turns`` and ``metrics`` are decoded when they are first read."""

    _batch: pa.RecordBatch
    _row: int

    @classmethod
    def from_row(cls, batch: pa.RecordBatch, row: int, fields: dict[str, Any]) -> Trajectory:
        trajectory = cls.__new__(cls)
        vars(trajectory).update(fields, _batch=batch, _row=row)  # __init__ would need all fields
        return trajectory

    @cached_property
    def turns(self) -> tuple[Turn, ...]:
        (images,) = _images_of(self._batch.column("images").slice(self._row, 1))
        return _turns_of(self._batch.column("turns")[self._row].as_py(), images)

    @cached_property
    def metrics(self) -> dict[str, float]:
        return dict(self._batch.column("metrics")[self._row].as_py())

    @property
    def turn_lengths(self) -> tuple[int, ...]:
        return super().turn_lengths if self._is_decoded else self._of_turns("num_model_tokens")

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        return super().turn_rewards if self._is_decoded else self._of_turns("reward")

    @property
    def _is_decoded(self) -> bool:
        return "turns" in vars(self)  # decoded, or copied by ``dataclasses.replace``, which has no batch

    def _of_turns(self, name: str) -> tuple[Any, ...]:
        return tuple(self._batch.column("turns")[self._row].values.field(name).to_pylist())


def add_learned(batches: Sequence[pa.RecordBatch], learned: pa.RecordBatch) -> list[pa.RecordBatch]:
    """Return batches of ``TRAJECTORY_SCHEMA`` with the columns of ``learned``, in ``LEARNED_SCHEMA``."""
    ids, *columns = learned.columns
    added = [LEARNED_SCHEMA.field(index) for index in range(1, len(LEARNED_SCHEMA))]
    schema = pa.schema([*TRAJECTORY_SCHEMA, *added], TRAJECTORY_SCHEMA.metadata)
    found = []
    for batch in batches:
        rows = pc.index_in(batch.column("trajectory_id"), ids)  # null if it was not trained on
        found.append(pa.RecordBatch.from_arrays([*batch.columns, *(c.take(rows) for c in columns)], schema=schema))
    return found


def write_trajectories(path: Path, batches: Sequence[pa.RecordBatch]) -> None:
    """Write record batches to a compressed Arrow IPC file that pandas, DuckDB and ``read_trajectories`` open.

    Neighbours become one batch of about ``WRITTEN_BYTES``: each column of a batch is compressed alone. 32 groups of 8
    short trajectories take 3 ms and 81 kB as one batch, and 29 ms and 267 kB as 32. A file without images has no views,
    so that all functions of pyarrow take it.
    """
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    if not any(len(batch.column("images").flatten()) for batch in batches):
        batches = [_without_views(batch) for batch in batches]
    schema = batches[0].schema if batches else TRAJECTORY_SCHEMA
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema, options=options) as writer:
        waiting: list[pa.RecordBatch] = []
        num_bytes = 0
        for batch in batches:
            waiting.append(batch)
            num_bytes += batch.get_total_buffer_size()
            if num_bytes >= WRITTEN_BYTES:
                writer.write_batch(_merge(waiting))
                waiting, num_bytes = [], 0
        if waiting:
            writer.write_batch(_merge(waiting))


def _without_views(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch that has no images, with their column in a type that is no view."""
    image = pa.struct({"media_type": pa.string(), "data": pa.large_binary()})
    column = pa.array([[]] * batch.num_rows, pa.list_(image))
    return batch.set_column(batch.schema.get_field_index("images"), "images", column)


def _merge(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    """Merge batches into one; the numbers of the groups in each follow the previous batch's."""
    numbers, start = [], 0
    for batch in batches:
        groups = batch.column("group").to_numpy() + start
        numbers.append(groups)
        start = int(groups.max(initial=start - 1)) + 1
    (merged,) = pa.Table.from_batches(batches).combine_chunks().to_batches() or batches[:1]
    if any(used := _images_of(merged.column("images"))):  # groups may have the same ones
        at = merged.schema.get_field_index("images")
        merged = merged.set_column(at, TRAJECTORY_SCHEMA.field("images"), _image_column(used))
    return merged.set_column(0, TRAJECTORY_SCHEMA.field("group"), pa.array(np.concatenate(numbers), pa.int32()))


def check_format(path: Path, schema: pa.Schema) -> None:
    """Raise ``DataError`` unless ``current_format`` knows the format of a file."""
    found = (schema.metadata or {}).get(_FORMAT_KEY, b"").decode(errors="replace")
    if found not in (*_OLDER_FORMATS, FORMAT):
        got = f"trajectories in format {found}" if found else "no trajectories"
        raise DataError(f"{path} has {got}, expected format {FORMAT}; use the version of ragr1 that wrote it")


def current_format(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return a batch of any format, or some columns of one, in the present format."""
    found = (batch.schema.metadata or {}).get(_FORMAT_KEY)
    if found == FORMAT.encode():
        return batch
    for name, mend in (("task", _task_before_3), ("turns", _turns_before_3)):
        if name in batch.schema.names and found != b"3":
            field = TRAJECTORY_SCHEMA.field(name)
            column = pa.array([mend(value) for value in batch.column(name).to_pylist()], field.type)
            batch = batch.set_column(batch.schema.get_field_index(name), field, column)
    if "turns" in batch.schema.names and found == b"3":  # the records get the image null
        field = TRAJECTORY_SCHEMA.field("turns")
        batch = batch.set_column(batch.schema.get_field_index("turns"), field, batch.column("turns").cast(field.type))
    added = ({"metrics": _SINCE_3} if found != b"3" else {}) | {"behaviour_logprobs": _SINCE_4}
    for before, columns in added.items():
        for number, (name, value) in enumerate(columns.items() if before in batch.schema.names else (), start=1):
            field = TRAJECTORY_SCHEMA.field(name)
            place = batch.schema.get_field_index(before) + number
            batch = batch.add_column(place, field, pa.array([value] * batch.num_rows, field.type))
    return batch.replace_schema_metadata(TRAJECTORY_SCHEMA.metadata)


def _task_before_3(task: dict[str, Any]) -> dict[str, Any]:
    return task | {"source": "", "meta": "{}"}


def _turns_before_3(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        turn
        | {
            "calls": [_call_before_3(found) for found in turn["retrievals"]],
            "reward": 0.0,
            "finish_reason": FinishReason.STOP.value,
        }
        for turn in turns
    ]


def _call_before_3(found: dict[str, Any]) -> dict[str, Any]:
    """Return the call of a search; format 1 kept only the ids of its passages."""
    ids, scores = found["passage_ids"], found["scores"]
    titles, texts = (found.get(name) or [""] * len(ids) for name in ("titles", "texts"))
    return {
        "tool": "search",
        "arguments": _json({"query": found["query"], "k": found.get("k", len(ids))}),
        "result": "",
        "records": [
            {"id": i, "title": title, "text": text, "score": score}
            for i, title, text, score in zip(ids, titles, texts, scores, strict=True)
        ],
        "latency_s": found["latency_s"],
        "waited_s": found.get("waited_s", 0.0),
        "is_cached": found.get("is_cached", False),
        "version": found.get("index_version", ""),
    }


def read_trajectories(path: Path) -> list[TrajectoryGroup]:
    """Read every group of a file that ``write_trajectories`` wrote.

    Raises:
        DataError: the file has another format, or Arrow finds it damaged.
    """
    try:
        with pa.memory_map(str(path)) as source:
            reader = pa.ipc.open_file(source)
            check_format(path, reader.schema)
            batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
            for number, batch in enumerate(batches):
                batch.validate(full=True)  # damaged offsets would lead out of the mapped memory
                batches[number] = batch = current_format(batch)
                filled = [name for name in TRAJECTORY_SCHEMA.names if name != "behaviour_logprobs"]
                if lacking := [name for name in filled if batch.column(name).null_count]:
                    raise ValueError(f"nulls in {', '.join(lacking)}")
        return [group for batch in batches for group in groups_from_record_batch(batch)]
    except DataError:
        raise
    # a flipped bit causes nulls or other columns; a length below 0 raises SystemError
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, AttributeError, SystemError) as error:
        raise DataError(f"{path} cannot be read: {one_line(error)}; restore it, or remove it from the run") from error


def _flat_list(arrays: list[NDArray[Any]], value_type: pa.DataType) -> pa.LargeListArray:
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
    values = np.concatenate(arrays) if arrays else np.zeros(0)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values, value_type))


def _views(column: pa.LargeListArray) -> list[NDArray[Any]]:
    # flatten() honours a slice's bounds, but .values returns the parent's buffer
    values = column.flatten().to_numpy(zero_copy_only=True)
    offsets = column.offsets.to_numpy(zero_copy_only=True) - column.offsets[0].as_py()
    return [values[start:end] for start, end in pairwise(offsets)]
