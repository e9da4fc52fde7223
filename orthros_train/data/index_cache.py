"""Index arrays on disk, built once and memory-mapped by every rank.

* An entry is a folder that is renamed into place when complete. Its content is a pure function of its key, so any rank
  on any host may build it: nobody waits for a rank 0 that may have another disk.
* Where the file system has locks, one process builds while the others wait; where it has none, several may build the
  same arrays and the first rename wins.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orthros_train.data.storage import file_lock, fsync_path
from orthros_train.errors import InputError

Arrays = Mapping[str, NDArray[Any]]


def cached_arrays(
    folder: Path, key: str, names: tuple[str, ...], build: Callable[[], Arrays]
) -> dict[str, NDArray[Any]]:
    """The arrays of entry `key`, memory-mapped; built and stored first if the entry is missing.

    Args:
        folder: the cache; made if missing.
        key: a hash of all that the arrays depend on.
        names: the arrays of an entry.
        build: computes them.

    Raises:
        InputError: the folder cannot be written, or an entry is damaged.
    """
    entry = folder / key
    try:
        if not entry.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            with file_lock(folder / f".{key}.lock", blocking=True) as locked:
                if not entry.is_dir():
                    _store(entry, build(), remove_unfinished=locked)
    except OSError as error:
        raise InputError(f"index cache {folder} cannot be written ({error}); set data.cache_dir") from error
    try:
        return {name: np.load(entry / f"{name}.npy", mmap_mode="r") for name in names}
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"index cache {entry} is damaged ({error}); delete that folder") from error


def _store(entry: Path, arrays: Arrays, *, remove_unfinished: bool) -> None:
    """Write an entry under another name and rename it into place, unless someone else was faster."""
    if remove_unfinished:  # under the lock, what is unfinished belongs to a process that died
        for left in entry.parent.glob(f".{entry.name}.partial-*"):
            shutil.rmtree(left, ignore_errors=True)
    partial = entry.with_name(f".{entry.name}.partial-{socket.gethostname()}-{os.getpid()}")
    partial.mkdir()
    try:
        for name, array in arrays.items():
            np.save(partial / f"{name}.npy", array)
            fsync_path(partial / f"{name}.npy")
        fsync_path(partial)
        with contextlib.suppress(OSError):  # the entry exists: its content is the same
            partial.rename(entry)
        if not entry.is_dir():
            raise OSError(f"{partial} could not be renamed to {entry}")
        fsync_path(entry.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
