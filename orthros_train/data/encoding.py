"""Documents to token ids, in parallel and in order.

Every document is followed by the EOD. Ids are checked before they are narrowed to the corpus's type: an id outside the
vocabulary or an EOD inside a document is an error that names the document. Blank documents are dropped and counted.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from orthros_train.config import TokenizerSection
from orthros_train.data.documents import Batch, decode_batch
from orthros_train.data.tokenizers import Tokenizer, load_tokenizer
from orthros_train.errors import InputError

_MAX_DOCUMENT_TOKENS = np.iinfo(np.int32).max


@dataclass(frozen=True)
class EncodedBatch:
    """The tokens of one batch of documents, in order."""

    tokens: NDArray[Any]  # the documents one after the other, each with its EOD
    lengths: NDArray[np.int32]  # (documents,) tokens of each, EOD included
    max_token_id: int  # -1 where there is no token
    blank_documents: int
    text_bytes: int
    consumed: int  # as in Batch


def encode_batch(tokenizer: Tokenizer, batch: Batch, text_key: str, dtype: type[np.number[Any]]) -> EncodedBatch:
    """Encode one batch.

    Raises:
        InputError: as `decode_batch`, and for an id outside the vocabulary or an EOD inside a document.
    """
    parts: list[NDArray[Any]] = []
    max_token_id, blank, text_bytes = -1, 0, 0
    for document in decode_batch(batch, text_key):
        if document.is_blank:
            blank += 1
            continue
        text_bytes += document.size_bytes
        ids = np.array([*tokenizer.encode(document.text), tokenizer.eod_id], dtype=np.int64)
        _check_ids(ids, tokenizer, document.label)
        max_token_id = max(max_token_id, int(ids.max()))
        parts.append(ids.astype(dtype))
    return EncodedBatch(
        tokens=np.concatenate(parts) if parts else np.empty(0, dtype=dtype),
        lengths=np.array([len(part) for part in parts], dtype=np.int32),
        max_token_id=max_token_id,
        blank_documents=blank,
        text_bytes=text_bytes,
        consumed=batch.consumed,
    )


def _check_ids(ids: NDArray[np.int64], tokenizer: Tokenizer, label: str) -> None:
    if len(ids) > _MAX_DOCUMENT_TOKENS:
        raise InputError(f"{label}: {len(ids)} tokens in one document; cut the text with --document-separator")
    if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
        wrong = ids[(ids < 0) | (ids >= tokenizer.vocab_size)][0]
        raise InputError(f"{label}: token id {wrong} is outside the tokenizer's vocabulary of {tokenizer.vocab_size}")
    if np.any(ids[:-1] == tokenizer.eod_id):
        raise InputError(
            f"{label}: the text encodes to the end-of-document id {tokenizer.eod_id}; remove that token from the text"
        )


def encode_in_order(
    batches: Iterable[Batch],
    section: TokenizerSection,
    text_key: str,
    dtype: type[np.number[Any]],
    workers: int,
) -> Iterator[EncodedBatch]:
    """Encode `batches` with `workers` processes (1: in this one); results keep the order of the input.

    At most a few batches a worker are in memory. Workers end with this process, however it ends.
    """
    if workers == 1:
        tokenizer = load_tokenizer(section)
        for batch in batches:
            yield encode_batch(tokenizer, batch, text_key, dtype)
        return
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker, (section, text_key, dtype))
    pending: deque[Future[EncodedBatch]] = deque()
    try:
        for batch in batches:
            with _interrupts_held():
                pending.append(pool.submit(_encode_in_worker, batch))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise InputError("a worker process was killed (out of memory?); try fewer --workers") from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold Ctrl-C back; a process started meanwhile never gets it, since only its parent is to decide."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


_worker: tuple[Tokenizer, str, type[np.number[Any]]]


def _start_worker(section: TokenizerSection, text_key: str, dtype: type[np.number[Any]]) -> None:
    global _worker  # noqa: PLW0603 (a process pool has no other place for a worker's state)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = (load_tokenizer(section), text_key, dtype)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _encode_in_worker(batch: Batch) -> EncodedBatch:
    tokenizer, text_key, dtype = _worker
    return encode_batch(tokenizer, batch, text_key, dtype)
