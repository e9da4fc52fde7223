"""Raw text to a corpus: reads the sources, encodes them in parallel, writes PREFIX.bin/.idx/.manifest.json."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from orthros_train.config import TokenizerSection
from orthros_train.data.corpus_writer import CorpusWriter
from orthros_train.data.encoding import EncodedBatch, encode_in_order
from orthros_train.data.manifest import Manifest, TokenizerRecord
from orthros_train.data.progress import Progress
from orthros_train.data.sources import Source, read_all
from orthros_train.data.tokenizers import load_tokenizer
from orthros_train.errors import InputError


def token_dtype(vocab_size: int) -> type[np.number[Any]]:
    """The id type of a corpus, as megatron-core's `DType.optimal_dtype` (whose import takes seconds)."""
    return np.uint16 if vocab_size < 65500 else np.int32


def preprocess(
    sources: list[Source],
    tokenizer_section: TokenizerSection,
    output_prefix: str | Path,
    *,
    workers: int = 1,
    text_key: str = "text",
    overwrite: bool = False,
    encoded: Iterator[EncodedBatch] | None = None,
) -> Manifest:
    """Make a corpus. The files are the same, byte for byte, for any number of workers.

    Args:
        sources: where the documents come from, in this order.
        tokenizer_section: which tokenizer encodes them.
        output_prefix: PREFIX of the three files that are made.
        workers: processes that encode; 1 means this one.
        text_key: the field of JSON lines that holds the text.
        overwrite: replace a corpus that is there.
        encoded: the documents of the sources, encoded elsewhere (multi_rank.py); None: encode them here.

    Raises:
        InputError: bad input, an existing output, or too little disk space; nothing that looks complete is left.
    """
    prefix = file_prefix(output_prefix)
    tokenizer = load_tokenizer(tokenizer_section)
    record = TokenizerRecord(
        type=tokenizer.type,
        fingerprint=tokenizer.fingerprint,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
    )
    dtype = token_dtype(tokenizer.vocab_size)
    if encoded is None:
        encoded = encode_in_order(read_all(sources), tokenizer_section, text_key, dtype, workers)
    try:
        with CorpusWriter(prefix, record, dtype, overwrite=overwrite) as writer:
            _write(encoded, writer, sources, prefix)
            return writer.finish(sources)
    except OSError as error:  # disk full, no permission, …
        raise InputError(
            f"corpus {prefix} cannot be made: {error}; free space or choose another --output-prefix"
        ) from error


def file_prefix(output_prefix: str | Path) -> Path:
    """The prefix as a path. Raises InputError for one that names a folder instead of the beginning of file names."""
    prefix = Path(output_prefix)
    if str(output_prefix).endswith("/") or prefix.name in ("", "..") or prefix.is_dir():
        raise InputError(
            f"--output-prefix {output_prefix} names a folder, but PREFIX.bin, PREFIX.idx and PREFIX.manifest.json are "
            f"made of it; add a name, for example {prefix / 'corpus'}"
        )
    return prefix


def _write(encoded: Iterator[EncodedBatch], writer: CorpusWriter, sources: list[Source], prefix: Path) -> None:
    start = time.monotonic()
    with Progress("preprocess", sum(source.extent for source in sources)) as progress:
        for batch in encoded:
            if batch.text_bytes and not writer.tokens:
                bytes_per_text_byte = batch.tokens.nbytes / batch.text_bytes
                _require_space(prefix, sum(source.text_bytes for source in sources) * bytes_per_text_byte)
            writer.add(batch)
            rate = writer.tokens / (time.monotonic() - start)
            progress.update(
                batch.consumed, f"{writer.documents:,} documents, {writer.tokens:,} tokens, {rate:,.0f} tokens/s"
            )


def _require_space(prefix: Path, needed_bytes: float) -> None:
    """Refuse to start what the disk cannot hold; the first batch tells how many tokens the text makes."""
    free = shutil.disk_usage(prefix.parent).free
    if needed_bytes > free:
        raise InputError(
            f"too little disk space for {prefix}: about {needed_bytes / 2**20:,.1f} MiB needed, {free / 2**20:,.1f} "
            "MiB free; free some or choose another --output-prefix"
        )
