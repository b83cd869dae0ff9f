"""WebRecords: what a search API answered, on disk: a JSON file a request, named after the request. No network."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from pathlib import Path
from typing import Any

from ragr1_actors.core.errors import RetrievalError


class WebRecords:
    """A directory of answers that several processes may read and write at a time."""

    def __init__(self, directory: Path) -> None:
        """Keep records in ``directory``, which is made when there is something to keep."""
        self._directory = directory

    def read(self, request: dict[str, Any]) -> list[Any] | None:
        """Return the results of the same request before, or None.

        Raises:
            RetrievalError: there is a record, but it cannot be read.
        """
        path = self._path(request)
        try:
            record = json.loads(path.read_bytes())
            if record["request"] == request and isinstance(record["results"], list):
                return list(record["results"])
        except FileNotFoundError:
            return None
        except OSError as error:
            raise RetrievalError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError, TypeError, KeyError):
            pass
        raise RetrievalError(f"{path} is not the record of a search; delete it, and record it again with mode: record")

    def write(self, request: dict[str, Any], results: list[Any]) -> None:
        """Keep the results of a request. A reader sees all of it or nothing.

        Raises:
            RetrievalError: it cannot be written.
        """
        path = self._path(request)
        partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
        text = json.dumps({"request": request, "results": results}, ensure_ascii=False, indent=1)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                partial.write_bytes(text.encode("utf-8", "replace"))
                os.replace(partial, path)
            finally:
                partial.unlink(missing_ok=True)
        except OSError as error:
            raise RetrievalError(f"cannot write {path}: {error.strerror}") from error

    def _path(self, request: dict[str, Any]) -> Path:
        name = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()
        return self._directory / name[:2] / f"{name}.json"
