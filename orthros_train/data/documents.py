"""Documents of the input, in order, gathered into batches that a worker can take.

* The main process only reads, decompresses and cuts; UTF-8 and JSON are decoded by whoever takes the batch.
* Batches are cut by content alone, so the output does not depend on the number of workers.
* Text files: the whole file is one document unless a separator is named. JSON lines, parquet and `datasets`: one
  document a row, the string under `text_key`.
* White space between separators is no document; neither is a blank line of JSON lines.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, NamedTuple

from orthros_train.data.input_files import InputFile, InputStream, decompress_to_temporary
from orthros_train.errors import InputError

BATCH_BYTES = 1 << 20
BATCH_DOCUMENTS = 4096
MAX_DOCUMENT_BYTES = 1 << 30  # a document's length must fit the index's int32, and its tokens the memory
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class DocumentFormat:
    """How documents are found in the input.

    Attributes:
        text_key: the field or column that holds a document's text.
        separator: for text files, "file" (the whole file is one document), "blank-line" (one or more blank lines end a
            document), "line" (each line is one), or any other string, which ends a document wherever it occurs
            and belongs to none. Line breaks at the ends of separated documents are dropped.
    """

    text_key: str = "text"
    separator: str = "file"


@dataclass(frozen=True)
class Batch:
    """Some consecutive documents of one source, as read: text is str where it is decoded already."""

    source: str  # for messages: a path, or the name of a data set
    unit: str  # for messages: what the numbers count
    numbers: list[int]
    items: list[bytes | str]
    is_json: bool
    consumed: int  # of the input at the end of this batch: bytes on disk, or rows of a data set


class Document(NamedTuple):
    """Text of one document; `label` names it in messages, `size_bytes` is its length in UTF-8."""

    label: str
    text: str
    size_bytes: int

    @property
    def is_blank(self) -> bool:
        """It holds no visible character."""
        return not self.text or self.text.isspace()


def decode_batch(batch: Batch, text_key: str) -> Iterator[Document]:
    """The documents of a batch.

    Raises:
        InputError: invalid UTF-8, a NUL byte, malformed JSON, no string under `text_key`, or one that is no Unicode.
    """
    for number, item in zip(batch.numbers, batch.items, strict=True):
        label = f"{batch.source}, {batch.unit} {number}"
        text = item if isinstance(item, str) else _decode(item, label)
        if batch.is_json:
            if not text.strip():
                continue
            text = _json_text(text, text_key, label)
        yield Document(label, text, _utf8_length(text, label))


def _utf8_length(text: str, label: str) -> int:
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise InputError(
            f"{label}: character {error.start} is half of a surrogate pair, no Unicode text; correct the document"
        ) from error


def _decode(data: bytes, label: str) -> str:
    if b"\0" in data:
        raise InputError(f"{label}: binary data (a NUL byte); expected UTF-8 text")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{label}: invalid UTF-8 at byte {error.start}; convert the file to UTF-8") from error


def _json_text(line: str, text_key: str, label: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:  # JSONDecodeError, or a number of thousands of digits
        where = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise InputError(f"{label}: malformed JSON ({where}); correct the line") from error
    except RecursionError as error:
        raise InputError(f"{label}: JSON nested too deeply; correct the line") from error
    if not isinstance(row, dict):
        raise InputError(f"{label}: expected one JSON object a line, found {type(row).__name__}")
    return _require_text(row.get(text_key), text_key, label, list(row))


def _require_text(value: Any, text_key: str, label: str, names: list[str]) -> str:
    if isinstance(value, str):
        return value
    if text_key in names:
        raise InputError(f"{label}: field '{text_key}' is {type(value).__name__}, not a string")
    raise InputError(f"{label}: no field '{text_key}' (there are: {', '.join(names)}); name one with --text-key")


def read_file(file: InputFile, format_: DocumentFormat) -> Iterator[Batch]:
    """The documents of one input file.

    Raises:
        InputError: damaged compressed data, a document that is too large, or a parquet file without the text column.
    """
    source = str(file.path)
    if file.format == "parquet":
        yield from _read_parquet(file, format_.text_key)
        return
    with InputStream(file) as raw, io.BufferedReader(raw, BATCH_BYTES) as stream:
        if file.format == "json":
            yield from _gather(_lines(stream), source, "line", lambda: raw.consumed_bytes, is_json=True)
        else:
            unit = {"file": "document", "line": "line"}.get(format_.separator, "document at line")
            items = _split(stream, format_.separator, source)
            yield from _gather(items, source, unit, lambda: raw.consumed_bytes)


def read_dataset(dataset: Any, name: str, text_key: str) -> Iterator[Batch]:
    """The documents of a `datasets.Dataset`; a batch's `consumed` counts rows."""
    names = dataset.column_names
    if text_key not in names:
        _require_text(None, text_key, name, names)

    def rows() -> Iterator[tuple[int, str]]:
        for start, chunk in enumerate(dataset.select_columns([text_key]).iter(batch_size=1024)):
            for number, value in enumerate(chunk[text_key], start=start * 1024 + 1):
                yield number, _require_text(value, text_key, f"{name}, row {number}", names)

    for batch in _gather(rows(), name, "row", lambda: 0):
        yield replace(batch, consumed=batch.numbers[-1])


def _gather(
    items: Iterator[tuple[int, Any]], source: str, unit: str, consumed: Callable[[], int], *, is_json: bool = False
) -> Iterator[Batch]:
    """Cut numbered items into batches."""
    numbers: list[int] = []
    texts: list[Any] = []
    size = 0
    for number, text in items:
        numbers.append(number)
        texts.append(text)
        size += len(text)
        if size >= BATCH_BYTES or len(texts) >= BATCH_DOCUMENTS:
            yield Batch(source, unit, numbers, texts, is_json, consumed())
            numbers, texts, size = [], [], 0
    if texts:
        yield Batch(source, unit, numbers, texts, is_json, consumed())


def _lines(stream: BinaryIO) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(stream, start=1):
        yield number, line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line


def _split(stream: BinaryIO, separator: str, source: str) -> Iterator[tuple[int, bytes]]:
    """Cut text into (number of the document's first line, document)."""
    if separator == "file":
        yield 1, _join([stream.read(MAX_DOCUMENT_BYTES + 1)], source, 1).removeprefix(_BYTE_ORDER_MARK)
    elif separator == "line":
        yield from ((number, line.rstrip(b"\r\n")) for number, line in _lines(stream) if line.strip())
    else:
        yield from _split_at(stream, None if separator == "blank-line" else separator.encode(), source)


def _split_at(stream: BinaryIO, separator: bytes | None, source: str) -> Iterator[tuple[int, bytes]]:
    """Cut at each occurrence of `separator`, or at blank lines (None); what is blank in between is no document."""
    parts: list[bytes] = []
    first, size = 1, 0
    for number, line in _lines(stream):
        for index, piece in enumerate(_pieces(line, separator)):
            if index:  # a separator stood before this piece
                document = _join(parts, source, first).strip(b"\r\n")
                if document.strip():
                    yield first, document
                parts, size = [], 0
            if not parts:
                first = number
            if parts or piece.strip(b"\r\n"):
                parts.append(piece)
                size += len(piece)
        if size > MAX_DOCUMENT_BYTES:
            _join(parts, source, first)
    document = _join(parts, source, first).strip(b"\r\n")
    if document.strip():
        yield first, document


def _pieces(line: bytes, separator: bytes | None) -> list[bytes]:
    """The parts of a line between separators; a blank line is one itself where `separator` is None."""
    if separator is None:
        return [line] if line.strip() else [b"", b""]
    return line.split(separator)


def _join(parts: list[bytes], source: str, line: int) -> bytes:
    document = b"".join(parts)
    if len(document) > MAX_DOCUMENT_BYTES:
        raise InputError(
            f"{source}, line {line}: a document of more than {MAX_DOCUMENT_BYTES >> 20} MiB; "
            "cut the text into documents with --document-separator"
        )
    return document


def _read_parquet(file: InputFile, text_key: str) -> Iterator[Batch]:
    import pyarrow as pa  # noqa: PLC0415 (only where there is parquet)
    import pyarrow.parquet as pq  # noqa: PLC0415

    source = str(file.path)
    done = 0

    def rows() -> Iterator[tuple[int, str]]:
        nonlocal done
        for chunk in parquet.iter_batches(batch_size=1024, columns=[text_key]):
            for value in chunk.column(0).to_pylist():
                done += 1
                yield done, _require_text(value, text_key, f"{source}, row {done}", names)

    try:
        parquet = pq.ParquetFile(decompress_to_temporary(file) if file.compression else source)
        names = parquet.schema_arrow.names
        if text_key not in names:
            _require_text(None, text_key, source, names)
        total = max(parquet.metadata.num_rows, 1)
        yield from _gather(rows(), source, "row", lambda: file.size_bytes * done // total)
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        raise InputError(f"input {source} cannot be read as parquet ({error}); fetch or make it again") from error
