"""What a run's folder says of its attempts, read without torch; and the record that launchers keep there.

    status.json, metrics.jsonl, checkpoints/   the training's own
    slurm/jobs.jsonl                           one object a submitted job: id, kind, log
    slurm/attempts.jsonl                       one object a start: job, restart, nodes, what was there before, the end

Files that are being written by another process are read as they are: a last line without its end does not count.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from launchers.sbatch_script import LOG_FOLDER
from orthros_train.data.storage import file_lock, write_text_atomically
from orthros_train.errors import InputError
from orthros_train.launch_environment import environment_number
from orthros_train.training.checkpoint_folders import checkpoint_folders
from orthros_train.training.manifest import InvalidCheckpointError, read_manifest, step_of

_TAIL_BYTES = 1 << 16


@dataclass(frozen=True)
class Status:
    """status.json: the state of the newest attempt, as rank 0 last wrote it."""

    state: str
    exit_code: int | None
    step: int
    attempt: int
    reason: str | None


@dataclass(frozen=True)
class Job:
    """A submitted job. `log` is a pattern of SLURM where the job is an array."""

    job_id: int
    kind: str  # train, export or evaluate
    log: str
    submitted: str


@dataclass(frozen=True)
class Attempt:
    """One start of a training. `ended` and `outcome` stay None where its node was lost."""

    job_id: int | None  # None outside SLURM
    restart: int
    nodes: str
    started: str
    attempt_before: int  # the newest attempt and checkpoint that were there already
    checkpoint_before: int
    ended: str | None = None
    outcome: str | None = None


def now() -> str:
    """This moment as ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_status(run: Path) -> Status | None:
    """status.json of a run; None where none has started.

    Raises:
        InputError: it is damaged.
    """
    try:
        content = json.loads((run / "status.json").read_text(encoding="utf-8"))
        return Status(**content)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{run / 'status.json'} is damaged ({error}); restore it from a copy or remove it") from error


def last_metrics(run: Path, count: int) -> list[dict[str, Any]]:
    """The last few records of metrics.jsonl, oldest first, from the end of the file alone."""
    try:
        with open(run / "metrics.jsonl", "rb") as file:
            size = file.seek(0, os.SEEK_END)
            start = max(0, size - _TAIL_BYTES)
            file.seek(start)
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    whole = lines[1:] if start else lines
    try:
        return [json.loads(line) for line in whole[-count:]]
    except ValueError as error:
        raise InputError(f"{run / 'metrics.jsonl'} is damaged: {error}") from error


def newest_checkpoint(run: Path) -> int:
    """The step of the newest checkpoint whose manifest is sound, 0 without one; its files are not hashed."""
    for folder in checkpoint_folders(run / "checkpoints"):
        try:
            read_manifest(folder)
        except (InvalidCheckpointError, InputError):  # damaged, or of another format
            continue
        return step_of(folder) or 0
    return 0


def add_job(run: Path, job: Job) -> None:
    """Record a submitted job."""
    with _alone(run):
        _rewrite(_jobs_file(run), [*map(asdict, read_jobs(run)), asdict(job)])


def read_jobs(run: Path) -> list[Job]:
    """The jobs that were submitted for a run, oldest first."""
    return [Job(**values) for values in _read(_jobs_file(run))]


def add_attempt(run: Path, attempt: Attempt) -> None:
    """Record a start."""
    with _alone(run):
        _rewrite(_attempts_file(run), [*map(asdict, read_attempts(run)), asdict(attempt)])


def end_attempt(run: Path, outcome: str) -> None:
    """Record how the newest attempt of this job, or outside SLURM the newest of all, ended.

    Raises:
        InputError: it has none.
    """
    with _alone(run):
        attempts = read_attempts(run)
        own = own_attempt(run, attempts)
        changed = [replace(one, ended=now(), outcome=outcome) if one is own else one for one in attempts]
        _rewrite(_attempts_file(run), list(map(asdict, changed)))


def own_attempt(run: Path, attempts: Sequence[Attempt]) -> Attempt:
    """Of the attempts in `run`, the newest of this job, since another's may have been recorded later; outside SLURM,
    the newest of all.

    Raises:
        InputError: it has none.
    """
    job_id = environment_number("SLURM_JOB_ID", 0)
    for attempt in reversed(attempts):
        if not job_id or attempt.job_id == job_id:
            return attempt
    raise InputError(f"no start of this job is recorded in {run}: launchers call `begin` first")


def read_attempts(run: Path) -> list[Attempt]:
    """The starts of a run by launchers, oldest first."""
    return [Attempt(**values) for values in _read(_attempts_file(run))]


@contextmanager
def _alone(run: Path) -> Iterator[None]:
    """Let no other launcher change the records meanwhile, as far as the file system has locks."""
    (run / LOG_FOLDER).mkdir(parents=True, exist_ok=True)
    with file_lock(run / LOG_FOLDER / ".records.lock", blocking=True):
        yield


def _jobs_file(run: Path) -> Path:
    return run / LOG_FOLDER / "jobs.jsonl"


def _attempts_file(run: Path) -> Path:
    return run / LOG_FOLDER / "attempts.jsonl"


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise InputError(f"{file} is damaged ({error}); remove it, the run itself is apart") from error


def _rewrite(file: Path, records: list[dict[str, Any]]) -> None:
    write_text_atomically(file, "".join(json.dumps(record) + "\n" for record in records))
