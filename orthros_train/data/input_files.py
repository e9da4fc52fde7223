"""Input files of the data tools: found, told apart by name and checked before any work starts.

Text (.txt), JSON lines (.jsonl, .json, .ndjson) and parquet, each also compressed (.gz, .zst). A stream
raises InputError where the compressed data is damaged, cut short included.
"""

from __future__ import annotations

import gzip
import io
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, cast

import zstandard

from orthros_train.errors import InputError

Format = Literal["text", "json", "parquet"]
Compression = Literal["gz", "zst"]

_FORMATS: dict[str, Format] = {
    ".txt": "text",
    ".jsonl": "json",
    ".json": "json",
    ".ndjson": "json",
    ".parquet": "parquet",
}
_COMPRESSIONS: dict[str, Compression] = {".gz": "gz", ".zst": "zst"}
_KNOWN = ".txt, .jsonl, .json, .ndjson or .parquet, with or without .gz or .zst"
CACHE_SUFFIX = ".cache"  # of folders that are no data
_HEAD_BYTES = 65536


@dataclass(frozen=True)
class InputFile:
    """One file, its format by name, and its size on disk."""

    path: Path
    format: Format
    compression: Compression | None
    size_bytes: int


def find_inputs(paths: Sequence[str | Path]) -> list[InputFile]:
    """Check the named files; a folder stands for the files of a known format below it, sorted by name.

    Raises:
        InputError: a file is missing, unreadable, empty, binary or of an unknown format, or a folder holds none of a
            known format.
    """
    files: list[InputFile] = []
    for path in map(Path, paths):
        if path.is_dir():
            below = [p for p in files_below(path) if classify(p) is not None]
            if not below:
                raise InputError(f"folder {path} holds no input file; expected {_KNOWN}")
            files += [_check(p) for p in below]
        else:
            files.append(_check(path))
    return files


def files_below(folder: Path) -> list[Path]:
    """The files in a folder and its folders, sorted; caches (`*.cache`, which runs keep beside their data) left out."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return sorted(p for p in found if not any(f.name.endswith(CACHE_SUFFIX) for f in p.relative_to(folder).parents))


def classify(path: Path) -> tuple[Format, Compression | None] | None:
    """What a file is by its name; None if that says nothing."""
    compression = _COMPRESSIONS.get(path.suffix)
    format_ = _FORMATS.get(Path(path.stem).suffix if compression else path.suffix)
    return None if format_ is None else (format_, compression)


def _check(path: Path) -> InputFile:
    if not path.exists():
        raise InputError(f"input {path} does not exist")
    if not path.is_file():
        raise InputError(f"input {path} is neither a file nor a folder; write what it gives to a file first")
    kind = classify(path)
    if kind is None:
        raise InputError(f"input {path} has an unknown format; expected {_KNOWN}")
    file = InputFile(path, *kind, path.stat().st_size)
    if file.size_bytes == 0:
        raise InputError(f"input {path} is empty; remove it from the input")
    if file.format == "parquet" and file.compression:
        return file  # looked into when it is decompressed
    try:
        with InputStream(file) as stream:
            head = stream.read(_HEAD_BYTES)
    except OSError as error:
        raise InputError(f"input {path} cannot be read: {error.strerror or error}") from error
    if not head:
        raise InputError(f"input {path} is empty once decompressed; remove it from the input")
    if file.format == "parquet":
        if not head.startswith(b"PAR1"):
            raise InputError(f"input {path} is not a parquet file")
    elif b"\0" in head:
        raise InputError(f"input {path} is a binary file (it holds NUL bytes); expected UTF-8 text")
    return file


class InputStream(io.RawIOBase):
    """The decompressed bytes of a file, and how much of the file itself has been read.

    Raises:
        InputError: on reading, where the compressed data is damaged or ends too early.
    """

    def __init__(self, file: InputFile) -> None:
        self._file = file
        self._raw = file.path.open("rb")
        self._stream: BinaryIO = self._raw
        if file.compression == "gz":
            self._stream = cast(BinaryIO, gzip.GzipFile(fileobj=self._raw))
        elif file.compression == "zst":
            self._stream = cast(BinaryIO, _ZstandardStream(self._raw))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        try:
            chunk = self._stream.read(len(buffer))
        except (EOFError, zlib.error, gzip.BadGzipFile, DamagedZstandardError) as error:
            raise InputError(
                f"input {self._file.path} is damaged {self._file.compression} data ({error}); fetch or make it again"
            ) from error
        buffer[: len(chunk)] = chunk
        return len(chunk)

    def close(self) -> None:
        self._raw.close()
        super().close()

    @property
    def consumed_bytes(self) -> int:
        """Bytes of the file on disk that have been read."""
        return self._raw.tell()


class DamagedZstandardError(Exception):
    """Zstandard data cannot be decoded, or ends inside a frame."""


class _ZstandardStream(io.RawIOBase):
    """Decompresses consecutive frames; unlike the library's own reader it refuses a frame that is cut short."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._frame: zstandard.ZstdDecompressionObj | None = None
        self._compressed = b""
        self._decompressed = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._decompressed:
            if not self._fill():
                return 0
        count = min(len(buffer), len(self._decompressed))
        buffer[:count] = self._decompressed[:count]
        self._decompressed = self._decompressed[count:]
        return count

    def _fill(self) -> bool:
        """Decompress some more; False at the end of the data."""
        if not self._compressed:
            self._compressed = self._raw.read(_HEAD_BYTES)
        if not self._compressed:
            if self._frame is not None:
                raise DamagedZstandardError("it ends inside a frame")
            return False
        if self._frame is None:
            self._frame = zstandard.ZstdDecompressor().decompressobj()
        try:
            self._decompressed = memoryview(self._frame.decompress(self._compressed))
        except zstandard.ZstdError as error:
            raise DamagedZstandardError(str(error)) from error
        self._compressed = self._frame.unused_data if self._frame.eof else b""
        if self._frame.eof:
            self._frame = None
        return True


def decompress_to_temporary(file: InputFile) -> BinaryIO:
    """A seekable, nameless copy of a file's decompressed bytes, for formats that are read from their end."""
    temporary = tempfile.TemporaryFile()  # noqa: SIM115 (the caller's)
    with InputStream(file) as stream:
        while chunk := stream.read(1 << 20):
            temporary.write(chunk)
    temporary.seek(0)
    return cast(BinaryIO, temporary)
