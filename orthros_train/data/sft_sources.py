"""The rows of a source of conversations, in order and one at a time.

* Files: JSON lines (also .gz and .zst, also a JSON list in a .json file), parquet, and the Arrow files that the
  `datasets` library writes. JSON is decoded by whoever takes the row, so rows that are not needed cost little.
* Parquet and Arrow give every struct the fields of all others, as nulls; those are taken away again.
* JSON is read here and not by `datasets`, which would add such nulls to the arguments of tool calls.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from orthros_train.config.sft import SFTSource
from orthros_train.data.input_files import (
    CACHE_SUFFIX,
    InputFile,
    InputStream,
    classify,
    decompress_to_temporary,
    files_below,
    find_inputs,
)
from orthros_train.data.storage import sha256_file
from orthros_train.errors import InputError

ARROW_SUFFIX = ".arrow"
BATCH_ROWS = 1024
_RECORDS = ("state.json", "dataset_info.json", "dataset_dict.json")  # of a saved data set, beside its Arrow files
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Row(NamedTuple):
    """One row as read; `label` names it in messages, `consumed` is how far into the source it ends."""

    label: str
    content: bytes | dict[str, Any]
    consumed: int

    def columns(self) -> dict[str, Any]:
        """The row's columns. Raises InputError if it is JSON text of anything but an object."""
        if isinstance(self.content, dict):
            return self.content
        try:
            value = json.loads(self.content)
        except (ValueError, RecursionError) as error:  # also invalid UTF-8
            raise InputError(f"{self.label}: malformed JSON ({error}); correct the line") from error
        return _object(value, self.label)


@dataclass(frozen=True)
class SourceRows:
    """A source, opened.

    Attributes:
        fingerprint: SHA-256 of its content.
        extent: what `Row.consumed` reaches at the end.
        read: starts reading from the beginning.
        cache_dir: where its encoded conversations are kept unless data.cache_dir says otherwise.
    """

    fingerprint: str
    extent: int
    read: Callable[[], Iterator[Row]]
    cache_dir: Path


def open_source(source: SFTSource) -> SourceRows:
    """Check a source and hash it.

    Raises:
        InputError: a file is missing, empty or of an unknown format, or the data set cannot be loaded.
    """
    return _open_dataset(source) if source.path is None else _open_files(Path(source.path))


def source_files(path: Path) -> list[Path]:
    """The files that a source at `path` reads. Raises InputError as `open_source` does, but for their content."""
    inputs, arrow = _find(path)
    return [*(file.path for file in inputs), *arrow]


def _find(path: Path) -> tuple[list[InputFile], list[Path]]:
    """The source's files of other formats than Arrow, and those of Arrow."""
    if not path.is_dir():
        return ([], [path]) if path.suffix == ARROW_SUFFIX and path.is_file() else (find_inputs([path]), [])
    below = files_below(path)
    arrow = [file for file in below if file.suffix == ARROW_SUFFIX]
    if not arrow:
        return find_inputs([path]), []
    return find_inputs([file for file in below if classify(file) and file.name not in _RECORDS]), arrow


def _open_files(path: Path) -> SourceRows:
    inputs, arrow = _find(path)
    if text := next((file for file in inputs if file.format == "text"), None):
        raise InputError(f"input {text.path} is plain text, which has no conversations; give .jsonl, .json or .parquet")
    readers = [*((file.path, file.size_bytes, _reader(file)) for file in inputs)]
    readers += [(file, file.stat().st_size, _arrow_reader(file)) for file in arrow]
    readers.sort(key=lambda reader: str(reader[0]))

    def read() -> Iterator[Row]:
        before = 0
        for _, size, rows in readers:
            for row in rows():
                yield row._replace(consumed=before + row.consumed)
            before += size

    hashes = [sha256_file(file) for file, _, _ in readers]
    fingerprint = hashlib.sha256("\n".join(hashes).encode()).hexdigest()
    return SourceRows(fingerprint, sum(size for _, size, _ in readers), read, Path(f"{path}{CACHE_SUFFIX}"))


def _reader(file: InputFile) -> Callable[[], Iterator[Row]]:
    return (lambda: _read_parquet(file)) if file.format == "parquet" else (lambda: _read_json(file))


def _arrow_reader(path: Path) -> Callable[[], Iterator[Row]]:
    return lambda: _read_arrow(path)


def _read_json(file: InputFile) -> Iterator[Row]:
    """JSON lines, or one JSON list where the first character says so."""
    with InputStream(file) as raw, io.BufferedReader(raw, 1 << 20) as stream:
        if stream.peek(64).removeprefix(_BYTE_ORDER_MARK).lstrip()[:1] == b"[":
            yield from _json_list(stream.read().removeprefix(_BYTE_ORDER_MARK), file)
            return
        for number, line in enumerate(stream, start=1):
            content = line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line
            if content.strip():
                yield Row(f"{file.path}, line {number}", content, raw.consumed_bytes)


def _json_list(content: bytes, file: InputFile) -> Iterator[Row]:
    try:
        values = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file.path}: malformed JSON ({error}); correct the file") from error
    for number, value in enumerate(values, start=1):
        label = f"{file.path}, entry {number}"
        yield Row(label, _object(value, label), file.size_bytes * number // len(values))


def _object(value: Any, label: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{label}: expected a JSON object, found {type(value).__name__}; correct the data")
    return value


def _read_parquet(file: InputFile) -> Iterator[Row]:
    import pyarrow as pa  # noqa: PLC0415 (only where there is parquet)
    import pyarrow.parquet as pq  # noqa: PLC0415

    try:
        parquet = pq.ParquetFile(decompress_to_temporary(file) if file.compression else str(file.path))
        batches = (batch.to_pylist() for batch in parquet.iter_batches(batch_size=BATCH_ROWS))
        yield from _table_rows(batches, str(file.path), parquet.metadata.num_rows, file.size_bytes)
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        raise InputError(f"input {file.path} cannot be read as parquet ({error}); fetch or make it again") from error


def _read_arrow(path: Path) -> Iterator[Row]:
    """Arrow's stream format, which `datasets` writes, or its file format."""
    import pyarrow as pa  # noqa: PLC0415 (only where there is Arrow)

    try:
        with pa.memory_map(str(path)) as mapped:
            try:
                table = pa.ipc.open_stream(mapped).read_all()
            except pa.ArrowInvalid:
                table = pa.ipc.open_file(mapped).read_all()
            batches = (batch.to_pylist() for batch in table.to_batches(max_chunksize=BATCH_ROWS))
            yield from _table_rows(batches, str(path), table.num_rows, path.stat().st_size)
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        raise InputError(f"input {path} cannot be read as Arrow ({error}); fetch or make it again") from error


def _open_dataset(source: SFTSource) -> SourceRows:
    import datasets  # noqa: PLC0415 (takes a second)

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        dataset = datasets.load_dataset(source.dataset, source.configuration, split=source.split)
    except Exception as error:  # the library and its readers raise many kinds
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise InputError(f"data set {source.label} cannot be loaded: {reason}") from error

    def read() -> Iterator[Row]:
        starts = range(0, len(dataset), BATCH_ROWS)
        batches = (dataset[start : start + BATCH_ROWS] for start in starts)
        rows = ([dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)] for batch in batches)
        return _table_rows(rows, source.label, len(dataset), len(dataset))

    cache = Path(datasets.config.HF_DATASETS_CACHE) / "orthros_conversations"
    return SourceRows(str(dataset._fingerprint), len(dataset), read, cache)


def _table_rows(batches: Iterator[list[dict[str, Any]]], name: str, rows: int, extent: int) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for columns in batch:
            number += 1
            yield Row(f"{name}, row {number}", _without_nulls(columns), extent * number // rows)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
