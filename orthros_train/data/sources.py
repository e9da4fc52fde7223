"""Where documents come from: input files, or a data set of the `datasets` library."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from orthros_train.data.documents import Batch, DocumentFormat, read_dataset, read_file
from orthros_train.data.input_files import InputFile, find_inputs
from orthros_train.errors import InputError

# Text a byte of file, for the estimate of disk space: English web text compresses about so far.
_EXPANSION = {"text": 1, "json": 1, "parquet": 3}
_COMPRESSED_EXPANSION = 4


@dataclass(frozen=True)
class Source:
    """One input.

    Attributes:
        name: for messages and the manifest.
        size_bytes: on disk, or in memory for a data set.
        text_bytes: an estimate of the text in it.
        extent: what `Batch.consumed` reaches at the end.
        read: starts reading from the beginning.
    """

    name: str
    size_bytes: int
    text_bytes: int
    extent: int
    read: Callable[[], Iterator[Batch]]


def read_all(sources: Sequence[Source]) -> Iterator[Batch]:
    """The documents of all sources in order; `consumed` counts over all of them."""
    before = 0
    for source in sources:
        for batch in source.read():
            yield replace(batch, consumed=before + batch.consumed)
        before += source.extent


def file_sources(paths: Sequence[str | Path], format_: DocumentFormat) -> list[Source]:
    """Sources for files and folders, checked before any is read.

    Raises:
        InputError: as `find_inputs`, or no file was named.
    """
    if not paths:
        raise InputError("no input; name files with --input, or a data set with --dataset")
    return [_file_source(file, format_) for file in find_inputs(paths)]


def _file_source(file: InputFile, format_: DocumentFormat) -> Source:
    expansion = _EXPANSION[file.format] * (_COMPRESSED_EXPANSION if file.compression else 1)
    return Source(
        name=str(file.path),
        size_bytes=file.size_bytes,
        text_bytes=file.size_bytes * expansion,
        extent=file.size_bytes,
        read=lambda: read_file(file, format_),
    )


def dataset_source(name: str, configuration: str | None, split: str, text_key: str) -> Source:
    """One split of a data set, by its name on the hub or the path of a local one.

    Raises:
        InputError: it cannot be loaded, or has no such split.
    """
    import datasets  # noqa: PLC0415 (takes a second)

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    label = f"{name}{f'/{configuration}' if configuration else ''}[{split}]"
    try:
        dataset = datasets.load_dataset(name, configuration, split=split)
    except Exception as error:  # the library and its readers raise many kinds
        raise InputError(f"data set {label} cannot be loaded: {type(error).__name__}: {error}") from error
    size = dataset.data.nbytes
    return Source(
        name=label,
        size_bytes=size,
        text_bytes=size,
        extent=len(dataset),
        read=lambda: read_dataset(dataset, label, text_key),
    )
