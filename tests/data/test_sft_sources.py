"""The same rows from every kind of file."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from orthros_train.config.sft import SFTSource
from orthros_train.data.sft_sources import open_source
from orthros_train.errors import InputError

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo", "note": "x"}]},
    {"messages": [{"role": "user", "content": "é\n"}, {"role": "assistant", "content": "日本"}]},
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS)


def rows(path: Path | str, **options: Any) -> list[dict[str, Any]]:
    opened = open_source(SFTSource(path=str(path), **options))
    found = list(opened.read())
    assert [row.consumed for row in found] == sorted(row.consumed for row in found)
    assert found[-1].consumed <= opened.extent
    return [row.columns() for row in found]


def test_json_lines(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text("\ufeff" + LINES + "\n", encoding="utf-8")
    with gzip.open(tmp_path / "chats.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(LINES)
    assert rows(tmp_path / "chats.jsonl") == rows(tmp_path / "chats.jsonl.gz") == ROWS


def test_a_json_list(tmp_path: Path) -> None:
    (tmp_path / "chats.json").write_text(json.dumps(ROWS, indent=2), encoding="utf-8")
    assert rows(tmp_path / "chats.json") == ROWS


def test_tables(tmp_path: Path) -> None:
    """Parquet and Arrow fill structs with nulls, which are taken away again."""
    table = pa.Table.from_pylist(ROWS)
    assert table.column("messages")[0].as_py()[0]["note"] is None
    pq.write_table(table, tmp_path / "chats.parquet")
    with pa.ipc.new_stream(tmp_path / "stream.arrow", table.schema) as writer:
        writer.write_table(table)
    with pa.ipc.new_file(tmp_path / "file.arrow", table.schema) as writer:
        writer.write_table(table)
    for name in ("chats.parquet", "stream.arrow", "file.arrow"):
        assert rows(tmp_path / name) == ROWS, name


def test_a_saved_data_set_and_a_named_one(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "saved"))
    assert rows(tmp_path / "saved") == ROWS
    (tmp_path / "named").mkdir()
    (tmp_path / "named" / "train.jsonl").write_text(LINES, encoding="utf-8")
    opened = open_source(SFTSource(dataset=str(tmp_path / "named")))
    assert [row.columns() for row in opened.read()] == ROWS
    assert opened.extent == 2


def test_a_folder_is_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text(LINES, encoding="utf-8")
    (tmp_path / "a.json").write_text(json.dumps(ROWS[:1]), encoding="utf-8")
    assert rows(tmp_path) == [ROWS[0], *ROWS]


@pytest.mark.parametrize("name", ["a.jsonl", "a.arrow"])
def test_caches_are_no_data(tmp_path: Path, name: str) -> None:
    """What a run keeps beside a file, and tools in hidden folders, is not read when the folder becomes a source."""
    if name == "a.arrow":
        table = pa.Table.from_pylist(ROWS)
        with pa.ipc.new_stream(tmp_path / name, table.schema) as writer:
            writer.write_table(table)
    else:
        (tmp_path / name).write_text(LINES, encoding="utf-8")
    before = open_source(SFTSource(path=str(tmp_path))).fingerprint
    for below in (f"{name}.cache/0123", "sub/b.jsonl.cache/4567", ".cache/huggingface/download"):
        (tmp_path / below).mkdir(parents=True)
        for file in ("sha256.json", "c.jsonl", "d.jsonl.gz", "e.arrow", "f.parquet"):
            (tmp_path / below / file).write_text('{"tokens": "00"}', encoding="utf-8")
    assert rows(tmp_path) == ROWS
    assert open_source(SFTSource(path=str(tmp_path))).fingerprint == before


def test_a_named_cache_is_read(tmp_path: Path) -> None:
    """A folder that is the source itself is data, whatever its name."""
    (tmp_path / "my.cache").mkdir()
    (tmp_path / "my.cache" / "a.jsonl").write_text(LINES, encoding="utf-8")
    assert rows(tmp_path / "my.cache") == ROWS


@pytest.mark.parametrize(
    "suffix", [".json", ".jsonl", ".ndjson", ".parquet", ".jsonl.gz", ".ndjson.zst", ".parquet.gz"]
)
def test_files_beside_arrow_files_are_read(tmp_path: Path, suffix: str) -> None:
    """A saved data set's own records (`state.json` and the like) are not."""
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "a"))
    assert rows(tmp_path) == ROWS
    content = LINES.encode()
    if ".parquet" in suffix:
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(ROWS), buffer)
        content = buffer.getvalue()
    packed = {".gz": gzip.compress, ".zst": zstandard.compress}.get(Path(suffix).suffix, bytes)
    (tmp_path / f"b{suffix}").write_bytes(packed(content))
    assert rows(tmp_path) == ROWS + ROWS


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    for name, content in (("a.jsonl", LINES), ("b.jsonl", LINES), ("c.jsonl", LINES.replace("Yo", "Ye"))):
        (tmp_path / name).write_text(content, encoding="utf-8")
    a, b, c = (open_source(SFTSource(path=str(tmp_path / f"{name}.jsonl"))).fingerprint for name in "abc")
    assert a == b != c


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"messages": [\n', "a.jsonl, line 1: malformed JSON"),
        ("a.jsonl", b'{"a": 1}\n["Hi"]\n', r"a.jsonl, line 2: expected a JSON object, found list"),
        ("a.json", b'[{"messages": []}', "a.json: malformed JSON"),
        ("a.json", b"[3]", "a.json, entry 1: expected a JSON object, found int"),
        ("a.jsonl", b'{"prompt": "\xff"}\n', "line 1: malformed JSON"),
        ("a.parquet", b"PAR1 broken", "cannot be read as parquet"),
        ("a.arrow", b"broken", "cannot be read as Arrow"),
        ("a.txt", b"Hi", "is plain text, which has no conversations"),
        ("a.csv", b"Hi", "unknown format"),
        ("a.jsonl", b"", "is empty"),
    ],
)
def test_broken_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=message):
        rows(tmp_path / name)


def test_missing_sources(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        open_source(SFTSource(path=str(tmp_path / "none.jsonl")))
    with pytest.raises(InputError, match=r"data set .*nowhere\[train\] cannot be loaded"):
        open_source(SFTSource(dataset=str(tmp_path / "nowhere")))
