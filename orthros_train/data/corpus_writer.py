"""Writes PREFIX.bin, PREFIX.idx and PREFIX.manifest.json so that they appear only when complete.

* Everything is written in the folder PREFIX.partial, made durable, renamed into place, and the manifest comes last: a
  corpus is complete exactly if it has a manifest.
* A lock in that folder refuses a second writer; what a killed one left is found unlocked and removed.
"""

from __future__ import annotations

import contextlib
import shutil
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from orthros_train.data.encoding import EncodedBatch
from orthros_train.data.manifest import (
    FileRecord,
    Manifest,
    SourceRecord,
    TokenizerRecord,
    bin_path,
    idx_path,
    manifest_path,
    write_manifest,
)
from orthros_train.data.sources import Source
from orthros_train.data.storage import file_lock, fsync_path, sha256_file
from orthros_train.errors import InputError


def check_writable(prefix: Path, overwrite: bool) -> None:
    """Raise InputError if there is a corpus at `prefix` that must not be replaced."""
    for path in (manifest_path(prefix), bin_path(prefix), idx_path(prefix)):
        if path.exists() and not overwrite:
            raise InputError(f"output {path} exists; pass --overwrite or choose another --output-prefix")


class CorpusWriter:
    """Collects encoded batches into a corpus; a context manager that removes what is unfinished.

    Args:
        prefix: of the three files; missing folders are made.
        tokenizer: recorded in the manifest.
        dtype: of the ids, as megatron-core's `DType.optimal_dtype` picks it.
        overwrite: replace a corpus that is there.

    Raises:
        InputError: the output exists and `overwrite` is false, or another process is writing it.
    """

    def __init__(
        self, prefix: Path, tokenizer: TokenizerRecord, dtype: type[np.number[Any]], *, overwrite: bool
    ) -> None:
        check_writable(prefix, overwrite)
        self._prefix, self._tokenizer, self._dtype = prefix, tokenizer, dtype
        self._partial = prefix.with_name(prefix.name + ".partial")
        self._lock = contextlib.ExitStack()
        self._builder: Any = None  # megatron-core's IndexedDatasetBuilder, whose import takes seconds
        self.documents = self.tokens = self.blank_documents = self.text_bytes = 0
        self._max_token_id = -1

    def __enter__(self) -> CorpusWriter:
        self._partial.mkdir(parents=True, exist_ok=True)
        try:
            self._lock.enter_context(file_lock(self._partial / "lock", blocking=False))
        except BlockingIOError as error:
            raise InputError(
                f"another process is writing {self._prefix}; wait for it or choose another prefix"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._builder is not None:
            self._builder.data_file.close()
        shutil.rmtree(self._partial, ignore_errors=True)
        self._lock.close()

    def add(self, batch: EncodedBatch) -> None:
        """Append the documents of a batch."""
        if self._builder is None:
            self._builder = _indexed_dataset_builder(bin_path(self._data), self._dtype)
        start = 0
        for length in batch.lengths.tolist():
            self._builder.add_document(batch.tokens[start : start + length], [length])
            start += length
        self.documents += len(batch.lengths)
        self.tokens += len(batch.tokens)
        self.blank_documents += batch.blank_documents
        self.text_bytes += batch.text_bytes
        self._max_token_id = max(self._max_token_id, batch.max_token_id)

    def finish(self, sources: list[Source]) -> Manifest:
        """Put the corpus in its place.

        Raises:
            InputError: there is no document.
        """
        if not self.documents:
            raise InputError(
                f"the input holds no document with text ({self.blank_documents} blank); nothing was written"
            )
        self._builder.finalize(str(idx_path(self._data)))
        for path in (bin_path(self._data), idx_path(self._data)):
            fsync_path(path)
        manifest = Manifest(
            tokenizer=self._tokenizer,
            dtype=np.dtype(self._dtype).name,
            documents=self.documents,
            tokens=self.tokens,
            max_token_id=self._max_token_id,
            blank_documents_dropped=self.blank_documents,
            text_bytes=self.text_bytes,
            bin=_record(bin_path(self._data), bin_path(self._prefix).name),
            idx=_record(idx_path(self._data), idx_path(self._prefix).name),
            sources=[SourceRecord(name=source.name, size_bytes=source.size_bytes) for source in sources],
        )
        manifest_path(self._prefix).unlink(missing_ok=True)  # the old corpus ends here, before its files are replaced
        fsync_path(self._prefix.parent)
        bin_path(self._data).replace(bin_path(self._prefix))
        idx_path(self._data).replace(idx_path(self._prefix))
        fsync_path(self._prefix.parent)
        write_manifest(manifest, self._prefix)
        return manifest

    @property
    def _data(self) -> Path:
        return self._partial / "data"


def _record(path: Path, name: str) -> FileRecord:
    return FileRecord(name=name, size_bytes=path.stat().st_size, sha256=sha256_file(path))


def _indexed_dataset_builder(path: Path, dtype: type[np.number[Any]]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # megatron-core's import warns of optional packages
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # noqa: PLC0415 (takes seconds)
    return IndexedDatasetBuilder(str(path), dtype=dtype)
