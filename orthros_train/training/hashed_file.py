"""Writing a file and its SHA-256 in one pass."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import IO, Any, cast

import torch

from orthros_train.training.manifest import FileRecord


class HashedFile:
    """A file object, write-only and sequential, that hashes what passes through it."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")  # noqa: SIM115  closed by finish or abandon
        self._hash = hashlib.sha256()
        self._bytes = 0
        self.problem: OSError | None = None  # the first one; torch.save hides it behind one of its own

    def write(self, data: Any) -> int:
        """Write `data`, any bytes-like object."""
        self._hash.update(data)
        try:
            written = self._file.write(data)
        except OSError as error:
            self.problem = self.problem or error
            raise
        self._bytes += written
        return written

    def flush(self) -> None:
        """Hand buffered data to the system."""
        self._file.flush()

    def finish(self, name: str) -> FileRecord:
        """Sync and close the file; its record under the given name."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return FileRecord(name, self._bytes, self._hash.hexdigest())

    def abandon(self) -> None:
        """Close the file, whatever it holds."""
        with contextlib.suppress(OSError):  # a full disk refuses what is still buffered
            self._file.close()


def save_hashed(state: Any, path: Path, name: str) -> FileRecord:
    """torch.save `state` to `path`, synced; its record. Raises OSError, with nothing left open."""
    file = HashedFile(path)
    try:
        torch.save(state, cast(IO[bytes], file))
        return file.finish(name)
    except BaseException as error:
        file.abandon()
        raise file.problem or error from None


def record_existing(folder: Path, path: Path) -> FileRecord:
    """Sync a file written by someone else; its record relative to `folder`."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(path.relative_to(folder).as_posix(), path.stat().st_size, digest)
