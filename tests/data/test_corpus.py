"""A corpus on disk: what is written is what is read, and whatever is wrong with it is one clear line."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest

from orthros_train.config import TokenizerSection
from orthros_train.data.corpus import open_corpus
from orthros_train.data.documents import DocumentFormat
from orthros_train.data.manifest import bin_path, idx_path, manifest_path, read_manifest
from orthros_train.data.preprocessing import preprocess, token_dtype
from orthros_train.data.sources import file_sources
from orthros_train.data.tokenizers import ByteTokenizer
from orthros_train.errors import InputError
from tests.data.conftest import MakeCorpus

TEXTS = ["abc", "défg", "", "h"]


@pytest.fixture
def prefix(make_corpus: MakeCorpus) -> Path:
    return make_corpus("c", TEXTS)


def refuse(prefix: Path, message: str, vocab_size: int = 259) -> None:
    with pytest.raises(InputError, match=message) as error:
        open_corpus(prefix, ByteTokenizer(), vocab_size)
    assert "\n" not in str(error.value)
    assert prefix.name in str(error.value)


def test_documents_come_back_with_their_eod(prefix: Path) -> None:
    corpus = open_corpus(prefix, ByteTokenizer(), 259)
    documents = [corpus.indexed[i].tolist() for i in range(len(corpus.indexed))]
    assert documents == [[*text.encode(), 257] for text in TEXTS if text]
    assert corpus.lengths.tolist() == [4, 6, 2]


def test_the_manifest_says_what_is_there(prefix: Path) -> None:
    manifest = read_manifest(prefix)
    assert (manifest.documents, manifest.tokens, manifest.max_token_id, manifest.dtype) == (3, 12, 257, "uint16")
    assert (manifest.blank_documents_dropped, manifest.text_bytes) == (1, 9)
    assert manifest.tokenizer.fingerprint == ByteTokenizer.fingerprint
    assert manifest.bin.size_bytes == bin_path(prefix).stat().st_size == 24
    assert [Path(source.name).name for source in manifest.sources] == ["c.jsonl"]
    assert "null" not in manifest.model_dump_json()  # every field says something


@pytest.mark.parametrize("vocab_size", [1, 259, 65499, 65500, 65536, 65537, 200_000])
def test_id_width_is_megatron_cores(vocab_size: int) -> None:
    from megatron.core.datasets.indexed_dataset import DType  # noqa: PLC0415

    assert token_dtype(vocab_size) is DType.optimal_dtype(vocab_size)
    assert np.iinfo(token_dtype(vocab_size)).max >= vocab_size - 1


def test_missing_and_incomplete(prefix: Path, tmp_path: Path) -> None:
    refuse(tmp_path / "none", "there is no corpus .* make it with tools/preprocess_data.py")
    idx = idx_path(prefix).read_bytes()
    idx_path(prefix).unlink()
    refuse(prefix, r"c.idx is missing")
    idx_path(prefix).write_bytes(idx)
    manifest_path(prefix).unlink()
    refuse(prefix, "is not complete; make it again")


def test_truncated_bin(prefix: Path) -> None:
    bin_path(prefix).write_bytes(bin_path(prefix).read_bytes()[:-2])
    refuse(prefix, r"c.bin is truncated: 22 bytes, its manifest says 24")


def test_grown_bin(prefix: Path) -> None:
    bin_path(prefix).write_bytes(bin_path(prefix).read_bytes() + b"\0\0")
    refuse(prefix, r"c.bin is not the file that was made")


@pytest.mark.parametrize(
    ("offset", "content", "message"),
    [
        (0, b"X", "c.idx is damaged"),  # magic
        (17, b"\x04", "c.idx is damaged"),  # dtype code
        (18, struct.pack("<Q", 2), "c.idx is damaged"),  # documents
        (34, struct.pack("<i", 5), "c.idx does not fit .*c.bin"),  # a length
        (34 + 3 * 4 + 8, struct.pack("<q", 6), "c.idx does not fit .*c.bin"),  # an offset
        (34, struct.pack("<ii", 0, 10), "c.idx does not fit .*c.bin"),  # an empty document
    ],
)
def test_damaged_index(offset: int, content: bytes, message: str, prefix: Path) -> None:
    data = bytearray(idx_path(prefix).read_bytes())
    data[offset : offset + len(content)] = content
    idx_path(prefix).write_bytes(data)
    refuse(prefix, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"documents": "many"}, r"c.manifest.json is damaged .documents:"),
        ({"surprise": 1}, r"c.manifest.json is damaged .surprise:"),
        ({"format_version": 99}, "has format version 99"),
        ({"tokens": 13}, "c.idx is damaged or does not belong"),
    ],
)
def test_damaged_manifest(change: dict[str, object], message: str, prefix: Path) -> None:
    content = json.loads(manifest_path(prefix).read_text())
    manifest_path(prefix).write_text(json.dumps(content | change))
    refuse(prefix, message)


def test_manifest_that_is_no_json(prefix: Path) -> None:
    manifest_path(prefix).write_text("{")
    refuse(prefix, r"c.manifest.json is damaged .the file:")


def test_another_tokenizer_is_refused(prefix: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ByteTokenizer, "fingerprint", "f" * 64)
    refuse(prefix, "was made with another tokenizer .*; set tokenizer to that one or preprocess the text again")


def test_an_id_outside_the_models_vocabulary_is_refused(prefix: Path) -> None:
    open_corpus(prefix, ByteTokenizer(), 258)
    refuse(
        prefix, "holds token id 257, outside the model's vocabulary of 257; set model.vocab_size to at least 259", 257
    )


def test_overwriting_replaces_the_whole_corpus(prefix: Path, tmp_path: Path) -> None:
    (tmp_path / "new.txt").write_text("new")
    sources = file_sources([tmp_path / "new.txt"], DocumentFormat())
    with pytest.raises(InputError, match="exists; pass --overwrite"):
        preprocess(sources, TokenizerSection(), prefix)
    preprocess(sources, TokenizerSection(), prefix, overwrite=True)
    assert open_corpus(prefix, ByteTokenizer(), 259).lengths.tolist() == [4]
    assert sorted(path.name for path in prefix.parent.iterdir()) == ["c.bin", "c.idx", "c.manifest.json"]
