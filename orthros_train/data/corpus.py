"""Opens a preprocessed corpus and refuses one that is incomplete, truncated, or made for another tokenizer."""

from __future__ import annotations

import struct
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orthros_train.data.manifest import FileRecord, Manifest, bin_path, idx_path, read_manifest
from orthros_train.data.tokenizers import Tokenizer
from orthros_train.errors import InputError

_HEADER = struct.Struct("<9sQBQQ")  # magic, version, dtype code, sequences, documents + 1
_MAGIC = b"MMIDIDX\x00\x00"
_CHUNK = 1 << 20  # documents checked at a time
_DTYPE_CODES = {"uint16": 8, "int32": 4}


@dataclass(frozen=True)
class Corpus:
    """A checked corpus.

    Attributes:
        prefix: of its three files.
        manifest: what they hold.
        indexed: megatron-core's IndexedDataset, memory-mapped; sequence i is document i with its EOD.
    """

    prefix: Path
    manifest: Manifest
    indexed: Any

    @property
    def lengths(self) -> NDArray[np.int32]:
        """(documents,) tokens of each document, EOD included."""
        return self.indexed.sequence_lengths


def open_corpus(prefix: str | Path, tokenizer: Tokenizer, vocab_size: int) -> Corpus:
    """Open PREFIX.bin and PREFIX.idx.

    Args:
        prefix: the PREFIX that tools/preprocess_data.py was given.
        tokenizer: the run's; the corpus must have been made with it.
        vocab_size: ids of the model's embedding; every id must be below it.

    Raises:
        InputError: the corpus is missing, incomplete, damaged, made with another tokenizer, or has an id outside the
            vocabulary.
    """
    prefix = Path(prefix)
    manifest = read_manifest(prefix)
    for path, record in ((bin_path(prefix), manifest.bin), (idx_path(prefix), manifest.idx)):
        _check_size(path, record)
    _check_header(idx_path(prefix), manifest)
    if manifest.tokenizer.fingerprint != tokenizer.fingerprint:
        raise InputError(
            f"corpus {prefix} was made with another tokenizer ({manifest.tokenizer.type}, "
            f"{manifest.tokenizer.vocab_size} ids, {manifest.tokenizer.fingerprint[:12]}) than the run's "
            f"({tokenizer.type}, {tokenizer.vocab_size} ids, {tokenizer.fingerprint[:12]}); set tokenizer to that one "
            "or preprocess the text again"
        )
    if manifest.max_token_id >= vocab_size:
        raise InputError(
            f"corpus {prefix} holds token id {manifest.max_token_id}, outside the model's vocabulary of {vocab_size}; "
            f"set model.vocab_size to at least {manifest.tokenizer.vocab_size}"
        )
    indexed = _indexed_dataset(prefix)
    if not _index_fits(indexed, manifest):
        raise InputError(f"{idx_path(prefix)} does not fit {bin_path(prefix)}; make the corpus again")
    return Corpus(prefix, manifest, indexed)


def _check_size(path: Path, record: FileRecord) -> None:
    if not path.is_file():
        raise InputError(f"{path} is missing; make the corpus again with tools/preprocess_data.py --overwrite")
    size = path.stat().st_size
    if size != record.size_bytes:
        what = "truncated" if size < record.size_bytes else "not the file that was made"
        raise InputError(
            f"{path} is {what}: {size} bytes, its manifest says {record.size_bytes}; copy it again or make the corpus "
            "again"
        )


def _check_header(path: Path, manifest: Manifest) -> None:
    """The header of the index agrees with the manifest, and its arrays with its size."""
    with path.open("rb") as file:
        header = file.read(_HEADER.size)
    expected = (_MAGIC, 1, _DTYPE_CODES.get(manifest.dtype), manifest.documents, manifest.documents + 1)
    arrays = 4 * manifest.documents + 8 * manifest.documents + 8 * (manifest.documents + 1)
    if (
        len(header) < _HEADER.size
        or _HEADER.unpack(header) != expected
        or manifest.idx.size_bytes != _HEADER.size + arrays
        or manifest.bin.size_bytes != manifest.tokens * np.dtype(manifest.dtype).itemsize
    ):
        raise InputError(f"{path} is damaged or does not belong to its manifest; make the corpus again")


def _index_fits(indexed: Any, manifest: Manifest) -> bool:
    """No document is empty, each starts where the one before it ends, and the last one ends with the file."""
    item_size = np.dtype(manifest.dtype).itemsize
    end = 0  # in tokens
    for first in range(0, manifest.documents, _CHUNK):
        part = slice(first, first + _CHUNK)
        lengths = indexed.sequence_lengths[part].astype(np.int64)
        ends = end + np.cumsum(lengths)
        if lengths.min() < 1 or not np.array_equal(indexed.index.sequence_pointers[part], (ends - lengths) * item_size):
            return False
        end = int(ends[-1])
    return end == manifest.tokens


def _indexed_dataset(prefix: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core's import warns of optional packages
        from megatron.core.datasets.indexed_dataset import IndexedDataset  # noqa: PLC0415 (takes seconds)
    return IndexedDataset(str(prefix))
