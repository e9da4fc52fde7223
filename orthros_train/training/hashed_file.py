"""Writing a file and its SHA-256 in one pass."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orthros_train.training.manifest import FileRecord

DTYPE_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}  # safetensors' own


class HashedFile:
    """A file object, write-only and sequential, that hashes what passes through it."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "wb")  # noqa: SIM115  closed by finish or abandon
        self._hash = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        """Write `data`."""
        self._hash.update(data)
        self._bytes += self._file.write(data)

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


def save_tensors(tensors: Mapping[str, Tensor], metadata: dict[str, str], path: Path, name: str) -> FileRecord:
    """Write a safetensors file to `path`, tensor by tensor and synced; its record under the given name.

    The library's own writer would hold all tensors in memory once more, and read the file again to hash it.

    Raises:
        OSError: the disk is full or fails; nothing is left open.
    """
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for key, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[key] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    file = HashedFile(path)
    try:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return file.finish(name)
    except BaseException:
        file.abandon()
        raise


def record_existing(folder: Path, path: Path) -> FileRecord:
    """Sync a file written by someone else; its record relative to `folder`."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return FileRecord(path.relative_to(folder).as_posix(), path.stat().st_size, digest)
