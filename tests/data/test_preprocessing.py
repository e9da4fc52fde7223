"""Preprocessing as a whole: nothing half-written, whatever goes wrong; the same bytes for any number of workers."""

from __future__ import annotations

import errno
import json
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from orthros_train.config import TokenizerSection
from orthros_train.data import corpus_writer
from orthros_train.data.corpus import open_corpus
from orthros_train.data.corpus_writer import CorpusWriter
from orthros_train.data.documents import DocumentFormat
from orthros_train.data.manifest import TokenizerRecord
from orthros_train.data.preprocessing import preprocess, token_dtype
from orthros_train.data.sources import Source, file_sources
from orthros_train.data.tokenizers import ByteTokenizer
from orthros_train.errors import InputError

RECORD = TokenizerRecord(type="byte", fingerprint="f", vocab_size=259, eod_id=257)


@pytest.fixture
def sources(tmp_path: Path) -> list[Source]:
    """Several batches of documents in two files."""
    for name in "ab":
        lines = (json.dumps({"text": f"{name}{n} " * 50}) for n in range(6000))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return file_sources([tmp_path / "a.jsonl", tmp_path / "b.jsonl"], DocumentFormat())


def files(folder: Path) -> dict[str, bytes]:
    return {path.name.split(".", 1)[1]: path.read_bytes() for path in sorted(folder.iterdir())}


def test_the_output_does_not_depend_on_the_number_of_workers(sources: list[Source], tmp_path: Path) -> None:
    for workers in (1, 2):
        preprocess(sources, TokenizerSection(), tmp_path / f"{workers}" / "c", workers=workers)
    one, two = files(tmp_path / "1"), files(tmp_path / "2")
    assert set(one) == {"bin", "idx", "manifest.json"}
    assert one == two
    assert open_corpus(tmp_path / "1" / "c", ByteTokenizer(), 259).manifest.documents == 12000


def refuse(sources: list[Source], folder: Path, message: str) -> None:
    with pytest.raises(InputError, match=message):
        preprocess(sources, TokenizerSection(), folder / "c")
    assert list(folder.iterdir()) == []


def test_too_little_disk_space_is_refused_before_anything_is_written(
    sources: list[Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(CorpusWriter, "add", lambda self, batch: pytest.fail("written"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 1 << 20))
    refuse(
        sources, tmp_path / "out", r"too little disk space for .*/c: about \d+.\d MiB needed, 1.0 MiB free; free some"
    )


def test_a_disk_that_fills_up_leaves_nothing(
    sources: list[Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, calls = CorpusWriter.add, []

    def full(self: CorpusWriter, batch: object) -> None:
        calls.append(batch)
        if len(calls) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(self, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(CorpusWriter, "add", full)
    refuse(sources, tmp_path / "out", "cannot be made: .*No space left on device; free space or choose")


def test_bad_input_in_the_middle_leaves_nothing(sources: list[Source], tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"text": "x"}\n{"text": ')
    refuse(sources, tmp_path / "out", r"b\.jsonl, line 2: malformed JSON")


def test_a_failed_run_keeps_the_corpus_that_it_was_to_replace(sources: list[Source], tmp_path: Path) -> None:
    preprocess(sources[:1], TokenizerSection(), tmp_path / "c")
    (tmp_path / "b.jsonl").write_text("{")
    with pytest.raises(InputError):
        preprocess(sources, TokenizerSection(), tmp_path / "c", overwrite=True)
    assert open_corpus(tmp_path / "c", ByteTokenizer(), 259).manifest.documents == 6000


def test_a_crash_before_the_manifest_leaves_no_complete_corpus(
    sources: list[Source], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*arguments: object) -> None:
        raise KeyboardInterrupt

    preprocess(sources, TokenizerSection(), tmp_path / "c")
    monkeypatch.setattr(corpus_writer, "write_manifest", crash)
    with pytest.raises(KeyboardInterrupt):
        preprocess(sources[:1], TokenizerSection(), tmp_path / "c", overwrite=True)
    with pytest.raises(InputError, match="is not complete; make it again"):  # not the old manifest on the new files
        open_corpus(tmp_path / "c", ByteTokenizer(), 259)


def test_no_document_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": " "}\n')
    refuse(
        file_sources([tmp_path / "a.jsonl"], DocumentFormat()),
        tmp_path / "out",
        r"no document with text \(2 blank\); nothing was written",
    )


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with CorpusWriter(tmp_path / "c", RECORD, token_dtype(259), overwrite=False):
        second = CorpusWriter(tmp_path / "c", RECORD, token_dtype(259), overwrite=False)
        with pytest.raises(InputError, match=r"another process is writing .*/c"), second:
            pass


def test_what_a_killed_writer_left_is_cleared(sources: list[Source], tmp_path: Path) -> None:
    (tmp_path / "c.partial").mkdir()
    (tmp_path / "c.partial" / "data.bin").write_bytes(b"left")
    preprocess(sources[:1], TokenizerSection(), tmp_path / "c")
    assert not (tmp_path / "c.partial").exists()
