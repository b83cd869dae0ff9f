"""Jobs on a Ray cluster, over the HTTP address of its head (the dashboard): submit, follow, stop and list them.

::

    working directory ──size check──► upload ──► job on the cluster: python -m ragr1_actors train ...
                                                   │ logs            ▲ SIGTERM: it writes a checkpoint and ends
                                                   ▼                 │
                                                 follow             stop

The job runs in the uploaded copy of the working directory, and so does every actor: modules in it load everywhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from zipfile import ZipFile

from ragr1_actors.core.credentials import refuse_credentials
from ragr1_actors.core.errors import ConfigError, DataError, UserError, advised, one_line

if TYPE_CHECKING:  # importing Ray takes a second
    from requests import Response

PACKAGES = ("cluster", "envs", "learners", "ragr1_actors", "retrieval")
"""Packages uploaded with a working directory that is no checkout, so that the cluster needs only the dependencies."""
ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 6.0
"""Limit in seconds of a request without an upload; with the connection it is less than 15 s, the limit for errors."""
UPLOAD_TIMEOUT_S = 120.0
LOST_AFTER_S = 60.0
"""Seconds for a silent head to come back while a job is followed."""
STOP_WAIT_S = 600
"""Seconds between SIGTERM and SIGKILL when a job is stopped: time to end an optimizer step and write a checkpoint."""
_STOP_WAIT = "RAY_JOB_STOP_WAIT_TIME_S"
_STOPPED = 143
"""Exit status of a stopped job, which the run itself returns after SIGTERM."""
_JOB_ID = re.compile(r"\w[\w.-]*")
_PACKAGING = "ray._private.runtime_env.packaging"
"""Module of Ray that packs a working directory, and the name of its logger."""
_NUM_LARGEST = 3
_ZIP_ENTRY_BYTES = 76
"""Bytes of the headers of a file in an archive, besides its name, which is there twice."""


@dataclass(frozen=True)
class Job:
    """Job that was submitted to the cluster."""

    job_id: str
    """Id of the job: ``raysubmit_4LamXRuQpYdSMg7J``."""
    status: str
    """Status: ``PENDING``, ``RUNNING``, ``SUCCEEDED``, ``FAILED`` or ``STOPPED``."""
    command: str
    started_s: float
    """Unix time of the start; 0 before it."""
    exit_status: int | None
    """Exit status; None while it runs."""
    problem: str
    """Reason why it ended before its command could run; "" if the command ran."""


@contextmanager
def _prefer(address: str) -> Iterator[None]:
    """Let Ray's client use its argument, since it prefers its environment variables."""
    before = os.environ.get(ADDRESS_VARIABLE)
    os.environ[ADDRESS_VARIABLE] = address
    try:
        yield
    finally:
        del os.environ[ADDRESS_VARIABLE]
        if before is not None:
            os.environ[ADDRESS_VARIABLE] = before


class JobClient:
    """Connection to the head of a cluster. Every method raises ``UserError`` if the head does not answer."""

    def __init__(self, address: str) -> None:
        """Connect, and compare the versions of Ray and Python.

        Args:
            address: address of the dashboard, ``http://HOST:8265``.

        Raises:
            UserError: no Ray cluster answers there within 15 s, it refuses the token or wants one, or it has another
                version of Ray or Python.
        """
        check_address(address)
        self._address = address.rstrip("/")
        from ray.job_submission import JobSubmissionClient

        _warn_only("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk", _PACKAGING)

        class Client(JobSubmissionClient):
            """Client of Ray with timeouts, which Ray's class lacks."""

            def _do_request(self, method: str, endpoint: str, **options: Any) -> Response:
                answer_s = UPLOAD_TIMEOUT_S if method == "PUT" else ANSWER_TIMEOUT_S
                return super()._do_request(method, endpoint, timeout=(CONNECT_TIMEOUT_S, answer_s), **options)

        with self._explained(), _prefer(self._address):
            self._client = Client(self._address)
            self._check_versions()

    def submit(self, working_dir: Path, arguments: Sequence[str]) -> str:
        """Upload a working directory, start ``python -m ragr1_actors ARGUMENTS`` in it, and return the job's id.

        ``check_size`` must have accepted the directory; it needs no connection, so the caller calls it before.
        """
        entrypoint = shlex.join(["python", "-m", "ragr1_actors", *arguments])
        with TemporaryDirectory() as folder:
            package = pack(working_dir, Path(folder))
            runtime_env = {"working_dir": str(package), "env_vars": {_STOP_WAIT: str(STOP_WAIT_S)}}
            with self._explained():
                return str(self._client.submit_job(entrypoint=entrypoint, runtime_env=runtime_env))

    def follow(self, job_id: str, write: Callable[[str], None], start: int = 0) -> Job:
        """Pass the job's log to ``write``, from the character ``start`` on, and return the job when it has ended.

        A lost connection is opened again.
        """
        return asyncio.run(self._follow(job_id, write, start))

    def job(self, job_id: str) -> Job:
        """Return a job; ``UserError`` if there is none with this id."""
        _check_id(job_id)
        with self._explained(job_id):
            return _job(self._client.get_job_info(job_id))

    def jobs(self) -> list[Job]:
        """Return all jobs of the cluster, the newest last."""
        with self._explained():
            found = [details for details in self._client.list_jobs() if details.submission_id]
        return sorted(map(_job, found), key=lambda job: job.started_s)

    def num_log_chars(self, job_id: str) -> int:
        """Return the number of characters of a job's log so far, for ``follow``; 0 if the log cannot be read."""
        _check_id(job_id)
        with suppress(UserError), self._explained(job_id):
            return len(self._client.get_job_logs(job_id))
        return 0

    def stop(self, job_id: str) -> bool:
        """Ask a job to end, with SIGTERM, and return at once; return False if it has ended already."""
        _check_id(job_id)
        with self._explained(job_id):
            return bool(self._client.stop_job(job_id))

    async def _follow(self, job_id: str, write: Callable[[str], None], num_shown: int) -> Job:
        import aiohttp

        await asyncio.to_thread(self.job, job_id)
        answered = time.monotonic()
        while True:
            num_read = 0
            try:
                async for text in self._client.tail_job_logs(job_id):  # after a new connection, from the beginning
                    write(text[max(0, num_shown - num_read) :])
                    num_read += len(text)
                    num_shown = max(num_shown, num_read)
                    answered = time.monotonic()
                job = await asyncio.to_thread(self.job, job_id)
                answered = time.monotonic()
                if job.exit_status is not None:
                    with suppress(UserError), self._explained(job_id):  # Ray's tail may end before the last lines
                        write((await asyncio.to_thread(self._client.get_job_logs, job_id))[num_shown:])
                    return job
            except (UserError, RuntimeError, aiohttp.ClientError) as error:  # RuntimeError: the connection is closed
                if time.monotonic() - answered > LOST_AFTER_S:
                    raise UserError(
                        f"the log of job {job_id} cannot be read ({one_line(error)}); the job goes on: follow it with "
                        f"{advised('submit', '--logs', job_id, '--address', self._address)}"
                    ) from error
            await asyncio.sleep(1)

    def _check_versions(self) -> None:
        import ray

        metadata = self._client._do_request("GET", "/api/v0/cluster_metadata").json()["data"]
        theirs = f"Ray {metadata['rayVersion']} and Python {metadata['pythonVersion']}"
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        same_python = metadata["pythonVersion"].split(".")[:2] == python.split(".")
        if metadata["rayVersion"] != ray.__version__ or not same_python:
            raise UserError(
                f"the cluster at {self._address} runs {theirs}, expected Ray {ray.__version__} and Python {python} as "
                "on this machine; install the same versions on one of the two"
            )

    @contextmanager
    def _explained(self, job_id: str = "") -> Iterator[None]:
        """Turn errors of Ray's client into one sentence."""
        import requests
        from ray.exceptions import AuthenticationError

        try:
            yield
        except AuthenticationError as error:
            has_token = "invalid" in str(error)
            problem = "refuses the token" if has_token else "asks for a token"
            raise UserError(
                f"the cluster at {self._address} {problem}; set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN to the "
                "cluster's token or RAY_AUTH_TOKEN_PATH to a file with it"
            ) from error
        except (requests.exceptions.InvalidHeader, UnicodeEncodeError):
            raise UserError(
                "the token holds characters that cannot be sent; set RAY_AUTH_TOKEN, or the file that "
                "RAY_AUTH_TOKEN_PATH names, to the cluster's token without line breaks and non-ASCII characters"
            ) from None  # the error before holds the token
        except requests.Timeout as error:
            if error.request is not None and error.request.method == "PUT":
                raise UserError(
                    f"the head at {self._address} did not take the upload in {UPLOAD_TIMEOUT_S:g} s; name what the run "
                    "does not need in a .rayignore file in the working directory, or submit from nearer"
                ) from error
            raise UserError(
                f"the head at {self._address} does not answer in {ANSWER_TIMEOUT_S:g} s; check that it is up, or try "
                "again"
            ) from error
        except (ConnectionError, requests.ConnectionError) as error:
            raise UserError(
                f"no Ray head answers at {self._address}; give the address of its dashboard with --address, such as "
                "http://10.0.0.2:8265, and check that this machine reaches it"
            ) from error
        except (requests.RequestException, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"what answers at {self._address} is no Ray dashboard ({one_line(error)}); give its address with "
                "--address, such as http://10.0.0.2:8265"
            ) from error
        except RuntimeError as error:
            if job_id and "404" in str(error):
                raise UserError(
                    f"the cluster at {self._address} has no job {job_id}; "
                    f"{advised('submit', '--list', '--address', self._address)} shows the jobs"
                ) from error
            raise UserError(f"the cluster at {self._address} refused the request: {one_line(error)}") from error


def _check_id(job_id: str) -> None:
    if not _JOB_ID.fullmatch(job_id):
        raise UserError(f"got the job id {job_id!r}, expected one such as raysubmit_4LamXRuQpYdSMg7J; see --list")


def check_address(address: str) -> None:
    """Refuse, with a ``ConfigError``, anything but ``http://HOST:PORT`` or ``https://`` without a password."""
    refuse_credentials(address, "--address")
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"--address: got {address!r}, expected the head's dashboard, such as http://10.0.0.2:8265")


def check_size(working_dir: Path, needed: str = "") -> int:
    """Return the bytes of a directory that Ray would upload, without the files in ``.rayignore`` and ``.gitignore``.

    Raises:
        DataError: there is no such directory, it is larger than Ray's limit, the file ``needed`` would not be uploaded,
            or a folder in it has the name of a package of this project.
    """
    from ray._private import ray_constants
    from ray._private.runtime_env import packaging

    _warn_only(_PACKAGING)  # it reports each file of patterns that it reads, several times
    if not working_dir.is_dir():
        raise DataError(f"--working-dir: there is no directory {working_dir}; give the one with your modules")
    for name in () if _is_checkout(working_dir) else PACKAGES:
        if (working_dir / name).exists():
            raise DataError(f"--working-dir: {working_dir} holds {name!r}, the name of a package of ragr1; rename it")
    root = working_dir.absolute()
    sizes: Counter[str] = Counter()
    lacks = {needed} - {""}

    def count(path: Path) -> None:
        if path.is_file():
            name = path.relative_to(root)
            lacks.discard(name.as_posix())
            sizes[name.parts[0]] += path.stat().st_size + _ZIP_ENTRY_BYTES + 2 * len(str(name))

    try:
        excludes = [packaging._get_excludes(root, ray_constants.get_runtime_env_default_excludes())]
        packaging._dir_travel(root, excludes, count, _reads_gitignore())
    except (UnicodeDecodeError, IndexError, ValueError) as error:  # errors of Ray's reader and of the patterns' library
        raise DataError(
            f"--working-dir: a .rayignore or .gitignore in {working_dir} cannot be read ({one_line(error)}); expected "
            "patterns as of .gitignore, in UTF-8"
        ) from error
    if lacks:
        raise DataError(
            f"{needed} is not uploaded, as a .gitignore or .rayignore of {working_dir} names it; take it out there, or "
            "put an exception below, such as !*.yaml"
        )
    sizes["the packages of ragr1"] = sum(
        file.stat().st_size + _ZIP_ENTRY_BYTES + 2 * len(str(name)) for file, name in _packages(working_dir)
    )
    limit = min(ray_constants.DASHBOARD_CLIENT_MAX_SIZE, packaging.GCS_STORAGE_MAX_SIZE)
    if sizes.total() >= limit:
        largest = ", ".join(f"{name} ({_mib(size)})" for name, size in sizes.most_common(_NUM_LARGEST))
        raise DataError(
            f"--working-dir: {working_dir} holds {_mib(sizes.total())}, and Ray uploads less than {_mib(limit)} with a "
            f"job; name what the run does not need in a .rayignore file there, the largest entries are {largest}"
        )
    return sizes.total()


def pack(working_dir: Path, folder: Path) -> Path:
    """Write the archive for the upload into ``folder``: the directory and, if it is no checkout, ``PACKAGES``."""
    from ray._private.ray_constants import get_runtime_env_default_excludes
    from ray._private.runtime_env.packaging import create_package

    package = folder / "working_dir.zip"
    create_package(str(working_dir), package, _reads_gitignore(), excludes=get_runtime_env_default_excludes())
    with ZipFile(package, "a", strict_timestamps=False) as archive:
        for file, name in _packages(working_dir):
            archive.write(file, name)
    return package


def _packages(working_dir: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the files of ``PACKAGES`` and their names in the archive; none if the directory is a checkout."""
    root = Path(__file__).resolve().parent.parent
    for package in () if _is_checkout(working_dir) else PACKAGES:
        for file in sorted((root / package).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                yield file, file.relative_to(root)


def _warn_only(*loggers: str) -> None:
    for name in loggers:
        logging.getLogger(name).setLevel(logging.WARNING)


def is_job() -> bool:
    """Return whether this process was started as a job of a cluster, and not by a person."""
    return "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ


def stop_warning() -> str:
    """Return a warning for the start of a run that Ray would kill seconds after ``ray job stop``; "" otherwise."""
    if not is_job() or _STOP_WAIT in os.environ:
        return ""
    return (
        f"ray job stop kills this run after 3 s, perhaps before its checkpoint is written; submit it with {_STOP_WAIT}="
        f"{STOP_WAIT_S} in env_vars of the job's runtime environment, or by ragr1 submit"
    )


def _is_checkout(working_dir: Path) -> bool:
    return (working_dir / "ragr1_actors" / "__main__.py").is_file()


def _reads_gitignore() -> bool:
    """Return whether files in ``.gitignore`` are not uploaded, which is so unless Ray's variable says otherwise."""
    from ray._private.ray_constants import RAY_RUNTIME_ENV_IGNORE_GITIGNORE

    return os.environ.get(RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"


def _job(details: Any) -> Job:
    status = str(details.status.value)
    code = details.driver_exit_code or 1
    failed = code if code > 0 else 128 - code  # a signal ended it
    exit_status = {"SUCCEEDED": 0, "FAILED": failed, "STOPPED": _STOPPED}.get(status)
    is_early = status == "FAILED" and details.driver_exit_code is None
    return Job(
        details.submission_id,
        status,
        details.entrypoint,
        (details.start_time or 0) / 1000,
        exit_status,
        one_line(RuntimeError(details.message)) if is_early and details.message else "",
    )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
