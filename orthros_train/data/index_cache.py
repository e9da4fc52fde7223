"""Index arrays on disk, built once and memory-mapped by every rank.

* An entry is a folder that is renamed into place when complete. Its content is a pure function of its key, so any rank
  on any host may build it: nobody waits for a rank 0 that may have another disk.
* An entry holds the hashes of its arrays, which are compared at every opening: one that a disk has damaged is replaced.
* Where the file system has locks, one process builds while the others wait; where it has none, several may build the
  same arrays and the first rename wins.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orthros_train.data.storage import file_lock, fsync_path, sha256_file, write_text_atomically
from orthros_train.errors import InputError

Arrays = Mapping[str, NDArray[Any]]
_HASHES = "sha256.json"


def cached_arrays(
    folder: Path, key: str, names: tuple[str, ...], build: Callable[[], Arrays]
) -> dict[str, NDArray[Any]]:
    """The arrays of entry `key`, memory-mapped; built and stored first if the entry is missing or damaged.

    Args:
        folder: the cache; made if missing.
        key: a hash of all that the arrays depend on.
        names: the arrays of an entry.
        build: computes them.

    Raises:
        InputError: the folder cannot be written.
    """
    entry = folder / key
    try:
        if not _is_whole(entry, names):
            folder.mkdir(parents=True, exist_ok=True)
            with file_lock(folder / f".{key}.lock", blocking=True) as locked:
                if not _is_whole(entry, names):
                    _store(entry, build(), remove_unfinished=locked)
        return {name: np.load(entry / f"{name}.npy", mmap_mode="r") for name in names}
    except OSError as error:
        raise InputError(f"index cache {folder} cannot be written ({error}); set data.cache_dir") from error


def _is_whole(entry: Path, names: tuple[str, ...]) -> bool:
    """Whether an entry is there and holds what was written."""
    try:
        hashes = json.loads((entry / _HASHES).read_bytes())
        return all(sha256_file(entry / f"{name}.npy") == hashes[name] for name in names)
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _store(entry: Path, arrays: Arrays, *, remove_unfinished: bool) -> None:
    """Write an entry under another name and rename it into place, unless someone else was faster.

    A damaged one that stands there is removed.
    """
    if remove_unfinished:  # under the lock, what is unfinished belongs to a process that died
        for left in entry.parent.glob(f".{entry.name}.partial-*"):
            shutil.rmtree(left, ignore_errors=True)
    partial = entry.with_name(f".{entry.name}.partial-{socket.gethostname()}-{os.getpid()}")
    partial.mkdir()
    try:
        for name, array in arrays.items():
            np.save(partial / f"{name}.npy", array)
            fsync_path(partial / f"{name}.npy")
        hashes = {name: sha256_file(partial / f"{name}.npy") for name in arrays}
        write_text_atomically(partial / _HASHES, json.dumps(hashes))
        if entry.exists() and not _is_whole(entry, tuple(arrays)):
            print(f"index cache {entry} is damaged: replaced", file=sys.stderr)
            if entry.is_dir():
                shutil.rmtree(entry)
            else:
                entry.unlink()
        with contextlib.suppress(OSError):  # the entry exists: its content is the same
            partial.rename(entry)
        if not entry.is_dir():
            raise OSError(f"{partial} could not be renamed to {entry}")
        fsync_path(entry.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
