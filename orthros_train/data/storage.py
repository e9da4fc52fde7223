"""Files that are complete or absent: durable writes, atomic renames, and locks that die with their owner."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

_LOCKS_UNSUPPORTED = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


def fsync_path(path: Path) -> None:
    """Force a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that a crash leaves the old content or the new one, never a part."""
    temporary = unfinished_path(path)
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    fsync_path(path.parent)


def unfinished_path(path: Path) -> Path:
    """Where this process writes what becomes `path`; no other process has it, on whatever machine."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}")


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def file_lock(path: Path, *, blocking: bool) -> Iterator[bool]:
    """Hold an exclusive lock on `path` (created if missing); the kernel frees it when the process ends.

    Yields:
        True while the lock is held; False where the file system offers no locks, in which case the caller must be
        correct without one.

    Raises:
        BlockingIOError: another process holds it and `blocking` is false.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if blocking else fcntl.LOCK_NB))
            held = True
        except OSError as error:
            if error.errno not in _LOCKS_UNSUPPORTED:
                raise
            held = False
        yield held
    finally:
        os.close(descriptor)
