"""A folder that is complete or absent: written beside its place under another name, then renamed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from orthros_train.data.storage import fsync_path
from orthros_train.errors import InputError

SPARE_BYTES = 2**26  # configuration, tokenizer, model code, model card


@contextlib.contextmanager
def finished_folder(output: Path, needed_bytes: int) -> Iterator[Path]:
    """Give a new folder to write to; it becomes `output` when the block ends well, and is removed when it does not.

    What a killed process left behind is removed by the next call. The content is on the disk before the rename.

    Args:
        output: must not exist, or be an empty folder.
        needed_bytes: of weights that will be written.

    Raises:
        InputError: `output` holds something, cannot be made, is being written by another process, or the disk has not
            enough room.
    """
    output = output.absolute()
    check_vacant(output)
    _check_space(output, needed_bytes + SPARE_BYTES)
    unfinished = output.with_name(f".{output.name}.unfinished")
    try:
        unfinished.mkdir(parents=True, exist_ok=True)
        with _sole_use(unfinished):
            try:
                _empty(unfinished)
                yield unfinished
                for path in (*unfinished.rglob("*"), unfinished):
                    fsync_path(path)
                unfinished.rename(output)
                fsync_path(output.parent)
            finally:
                shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise InputError(f"cannot write {output}: {error.strerror or error}") from error


def check_vacant(output: Path) -> None:
    """Raise InputError if `output` exists and is anything but an empty folder."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output} exists and is not empty; choose another output folder")


def _check_space(output: Path, needed: int) -> None:
    place = next(path for path in output.parents if path.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise InputError(
            f"{place} has no space left for {output.name}: {free / 2**30:.2f} GiB free, {needed / 2**30:.2f} GiB "
            "needed; make room or choose another output folder"
        )


@contextlib.contextmanager
def _sole_use(folder: Path) -> Iterator[None]:
    """Hold a folder against other processes; the kernel frees it when this one ends, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(f"another process is writing {folder} now; choose another output folder") from error
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP):
                raise  # the rest: a file system without locks, where one process is trusted to be alone
        yield
    finally:
        os.close(descriptor)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
