"""Documents of every input format, and the one clear line for each kind of bad input."""

from __future__ import annotations

import errno
import gzip
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from orthros_train.data import documents
from orthros_train.data.documents import DocumentFormat, decode_batch
from orthros_train.data.input_files import find_inputs
from orthros_train.data.sources import dataset_source, file_sources, read_all
from orthros_train.errors import InputError

TEXTS = ["first\nsecond line", "Zwölf — 十二", "third"]
JSON_LINES = "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(TEXTS)).encode()


def read(*paths: Path, separator: str = "file", text_key: str = "text") -> list[tuple[str, str]]:
    """(label, text) of every document."""
    sources = file_sources(list(paths), DocumentFormat(text_key, separator))
    return [document[:2] for batch in read_all(sources) for document in decode_batch(batch, text_key)]


def texts(*paths: Path, separator: str = "file", text_key: str = "text") -> list[str]:
    return [text for _, text in read(*paths, separator=separator, text_key=text_key)]


def write(path: Path, content: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": lambda data: data,
    ".gz": gzip.compress,
    ".zst": lambda data: zstandard.compress(data[:40]) + zstandard.compress(data[40:]),  # two frames are one stream
}


@pytest.fixture(params=COMPRESSIONS)
def suffix(request: pytest.FixtureRequest) -> str:
    return request.param


# ---- formats


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson"])
def test_json_lines(name: str, suffix: str, tmp_path: Path) -> None:
    assert texts(write(tmp_path / f"{name}{suffix}", COMPRESSIONS[suffix](JSON_LINES))) == TEXTS


def test_parquet(suffix: str, tmp_path: Path) -> None:
    table = pa.table({"text": TEXTS, "id": [1, 2, 3]})
    pq.write_table(table, tmp_path / "plain.parquet")
    path = write(tmp_path / f"a.parquet{suffix}", COMPRESSIONS[suffix]((tmp_path / "plain.parquet").read_bytes()))
    assert read(path) == [(f"{path}, row {n}", text) for n, text in enumerate(TEXTS, start=1)]


def test_a_text_file_is_one_document_byte_for_byte(suffix: str, tmp_path: Path) -> None:
    text = "  one\r\n\n\ntwo \n"
    path = write(tmp_path / f"a.txt{suffix}", COMPRESSIONS[suffix](text.encode()))
    assert texts(path) == [text]


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    assert texts(write(tmp_path / "a.txt", b"\xef\xbb\xbfhi")) == ["hi"]
    assert texts(write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "hi"}')) == ["hi"]


@pytest.mark.parametrize(
    ("separator", "expected"),
    [
        ("line", ["one", "two ", "#three", "four#five", "#"]),
        ("blank-line", ["one\r\ntwo ", "#three\nfour#five", "#"]),
        ("#", ["one\r\ntwo \n \t", "three\nfour", "five"]),
    ],
)
def test_separators(separator: str, expected: list[str], tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "\n\none\r\ntwo \n \t\n\n#three\nfour#five\n\n#\n")
    assert texts(path, separator=separator) == expected


@given(st.lists(st.sampled_from(["a", "bb", " ", "\n", "#", "\n\n"]), max_size=30))
def test_a_separator_cuts_as_str_split_does(parts: list[str]) -> None:
    text = "".join(parts)
    pieces = documents._split_at(_Lines(text.encode()), b"#", "x")
    expected = [piece.strip("\r\n") for piece in text.split("#") if piece.strip()]
    assert [piece.decode() for _, piece in pieces] == expected


class _Lines:
    """Iterates over lines as a binary stream does."""

    def __init__(self, data: bytes) -> None:
        self._lines = data.splitlines(keepends=True)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._lines)


def test_labels_name_the_line_a_document_starts_at(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one\n\n\ntwo\nthree\n\nfour")
    labels = [label for label, _ in read(path, separator="blank-line")]
    assert labels == [f"{path}, document at line {n}" for n in (1, 4, 7)]
    path = write(tmp_path / "b.jsonl", b'{"text": "x"}\n\n{"text": "y"}\n')
    assert [label for label, _ in read(path)] == [f"{path}, line 1", f"{path}, line 3"]


def test_a_folder_stands_for_the_files_below_it_sorted(tmp_path: Path) -> None:
    write(tmp_path / "b.txt", "2")
    write(tmp_path / "a" / "c.jsonl", b'{"text": "1"}')
    write(tmp_path / "README.md", "not data")
    assert texts(tmp_path) == ["1", "2"]


def test_a_local_data_set(tmp_path: Path) -> None:
    write(tmp_path / "d" / "train.jsonl", JSON_LINES)
    source = dataset_source(str(tmp_path / "d"), None, "train", "text")
    batches = list(read_all([source]))
    assert [text for batch in batches for _, text, _ in decode_batch(batch, "text")] == TEXTS
    assert (batches[-1].consumed, source.extent) == (3, 3)


# ---- batches


def test_batches_cover_the_input_in_order_and_report_how_far_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "BATCH_DOCUMENTS", 2)
    paths = [write(tmp_path / f"{name}.jsonl", JSON_LINES) for name in "ab"]
    sources = file_sources(paths, DocumentFormat())
    batches = list(read_all(sources))
    assert [len(batch.items) for batch in batches] == [2, 1, 2, 1]
    assert [batch.consumed for batch in batches] == sorted(batch.consumed for batch in batches)
    assert batches[-1].consumed == sum(path.stat().st_size for path in paths)
    monkeypatch.setattr(documents, "BATCH_BYTES", 10)
    assert [len(batch.items) for batch in read_all(sources)] == [1] * 6


# ---- bad input


BAD_FILES = [
    ("a.txt", b"", "is empty"),
    ("a.txt.gz", gzip.compress(b""), "is empty once decompressed"),
    ("a.txt", b"text\0text", "binary file"),
    ("a.txt", b"x" * 70000 + b"\0", "document 1: binary data"),
    ("a.txt", b"caf\xe9", "document 1: invalid UTF-8 at byte 3"),
    ("a.jsonl", b'{"text": "x"}\n{"text": "caf\xe9"}', "line 2: invalid UTF-8"),
    ("a.jsonl", b'{"text": "x"}\n{"text": ', "line 2: malformed JSON"),
    ("a.jsonl", b'{"text": "x"}\n["x"]', "line 2: expected one JSON object a line, found list"),
    ("a.json", b"[" * 100000, "line 1: (malformed|JSON nested)"),
    (
        "a.jsonl",
        b'{"body": "x", "id": 1}',
        "line 1: no field 'text' .there are: body, id.; name one with --text-key",
    ),
    ("a.jsonl", b'{"text": "x", "id": ' + b"1" * 5000 + b"}", "line 1: malformed JSON"),
    ("a.jsonl", b'{"text": 5}', "line 1: field 'text' is int, not a string"),
    ("a.jsonl", b'{"text": "\\ud800"}', "line 1: character 0 is half of a surrogate pair"),
    ("a.csv", b"x", "unknown format"),
    ("a.parquet", b"no parquet", "not a parquet file"),
    ("a.parquet", b"PAR1 cut short", "cannot be read as parquet"),
    ("a.txt.gz", b"not gzip", "damaged gz data"),
    ("a.txt.gz", gzip.compress(b"x" * 1000)[:-9], "damaged gz data"),
    ("a.txt.zst", b"not zstandard", "damaged zst data"),
    ("a.txt.zst", zstandard.compress(b"some text " * 1000)[:-5], "damaged zst data .it ends inside a frame"),
]


@pytest.mark.parametrize(("name", "content", "message"), BAD_FILES, ids=[row[2] for row in BAD_FILES])
def test_bad_files(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / name, content)
    with pytest.raises(InputError, match=message) as error:
        read(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(InputError, match="neither a file nor a folder"):
        find_inputs([tmp_path / "a.txt"])


def test_an_unreadable_file_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x")

    def refuse(self: Path, mode: str = "r") -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(InputError, match=r"a\.txt cannot be read: Permission denied"):
        find_inputs([tmp_path / "a.txt"])


def test_missing_input_and_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        read(tmp_path / "no.txt")
    with pytest.raises(InputError, match="holds no input file"):
        read(tmp_path)
    with pytest.raises(InputError, match="no input; name files"):
        read()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"body": ["x"]}, "no field 'text' .there are: body"),
        ({"text": ["x", None]}, "row 2: field 'text' is NoneType"),
        ({"text": [1, 2]}, "row 1: field 'text' is int"),
    ],
)
def test_bad_parquet_columns(table: dict[str, list[object]], message: str, tmp_path: Path) -> None:
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=message):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize("separator", ["file", "#"])
def test_a_document_beyond_the_limit_names_the_remedy(
    separator: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", 20)
    path = write(tmp_path / "a.txt", "0123456789\n" * 3)
    with pytest.raises(InputError, match=r"line 1: a document of more than .* --document-separator"):
        read(path, separator=separator)


def test_a_data_set_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"data set .*\[train\] cannot be loaded"):
        dataset_source(str(tmp_path / "no"), None, "train", "text")
    write(tmp_path / "d" / "train.jsonl", JSON_LINES)
    with pytest.raises(InputError, match=r"\[nosplit\] cannot be loaded"):
        dataset_source(str(tmp_path / "d"), None, "nosplit", "text")
    source = dataset_source(str(tmp_path / "d"), None, "train", "body")
    with pytest.raises(InputError, match="no field 'body'"):
        list(source.read())


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
