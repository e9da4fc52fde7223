"""The same rows from every kind of file."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orthros_train.config_sft import SFTSource
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
