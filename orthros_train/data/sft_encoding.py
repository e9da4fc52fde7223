"""The conversations of a source as training sees them: base tokens and, for each, the label it predicts.

* A conversation ends with its last output position: what follows, the last token of its last answer included, would
  predict nothing.
* One that is longer than the sequence is dropped, or cut at the side that the configuration says; cut at its start, it
  keeps its BOS. Nothing is dropped or cut without being counted.
* Encoded once, in blocks of `BLOCK_ROWS` rows, and kept on disk under hashes of all that decides the content: an
  interrupted encoding goes on where it was, and the next run starts at once. A block that was lost or damaged is
  encoded again from its rows.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from orthros_train.config.sft import SFTSection, SFTSource
from orthros_train.data.chat_template import ChatTemplate, EncodedConversation, ForgedTokenError
from orthros_train.data.conversations import conversation_of
from orthros_train.data.index_cache import Arrays, cached_arrays
from orthros_train.data.progress import Progress
from orthros_train.data.segments import IGNORED_LABEL
from orthros_train.data.sft_sources import Row, open_source
from orthros_train.errors import InputError

BLOCK_ROWS = 8192
TooLong = Literal["drop", "cut_start", "cut_end"]
Fate = Literal["kept", "cut", "too_long", "no_answer", "forged"]
_CACHE_VERSION = 1
_BLOCK_ARRAYS = ("tokens", "labels", "lengths", "outputs", "counts", "digest")


@dataclass(frozen=True)
class Counts:
    """What became of the rows of a source."""

    kept: int = 0  # those that were cut included
    cut: int = 0
    too_long: int = 0  # dropped
    no_answer: int = 0  # dropped: nothing in them (or in what a cut left) carries loss
    forged: int = 0  # dropped: a message spells out a special token

    def after(self, fate: Fate) -> Counts:
        """One row more."""
        counted = ("kept", "cut") if fate == "cut" else (fate,)
        return replace(self, **{name: getattr(self, name) + 1 for name in counted})

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))

    def describe(self, too_long: TooLong, sequence_length: int) -> str:
        """The counts in words."""
        total = self.kept + self.too_long + self.no_answer + self.forged
        parts = [f"{self.kept:,} of {total:,} conversations"]
        if self.cut:
            parts.append(f"{self.cut:,} cut at their {too_long.removeprefix('cut_')} to {sequence_length} tokens")
        for count, reason in (
            (self.too_long, f"longer than {sequence_length} tokens"),
            (self.no_answer, "without an answer to train on"),
            (self.forged, "spelling out a special token"),
        ):
            if count:
                parts.append(f"{count:,} dropped: {reason}")
        return "; ".join(parts)


@dataclass(frozen=True)
class FittedConversation:
    """Base tokens (n,) and labels (n,), both int64; `IGNORED_LABEL` where there is no output position."""

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]


def fit(
    encoded: EncodedConversation, sequence_length: int, too_long: TooLong, bos_id: int | None
) -> tuple[FittedConversation | None, Fate]:
    """The part of a conversation that training sees, None if there is none, and what became of it."""
    tokens = encoded.ids[:-1]
    labels = np.where(encoded.trained[1:], encoded.ids[1:], IGNORED_LABEL)
    end = _end(labels)
    if end == 0:
        return None, "no_answer"
    tokens, labels = tokens[:end], labels[:end]
    if end <= sequence_length:
        return FittedConversation(tokens, labels), "kept"
    if too_long == "drop":
        return None, "too_long"
    if too_long == "cut_end":
        end = _end(labels[:sequence_length])
        tokens, labels = tokens[:end], labels[:end]
    else:
        has_bos = int(bos_id is not None and tokens[0] == bos_id)
        start = end - (sequence_length - has_bos)
        bos_label = np.full(has_bos, IGNORED_LABEL, dtype=labels.dtype)  # what follows it was cut away
        tokens = np.concatenate((tokens[:has_bos], tokens[start:]))
        labels = np.concatenate((bos_label, labels[start:]))
    return (FittedConversation(tokens, labels), "cut") if _end(labels) else (None, "no_answer")


def _end(labels: NDArray[np.int64]) -> int:
    """One more than the last output position; 0 where there is none."""
    positions = np.flatnonzero(labels != IGNORED_LABEL)
    return int(positions[-1]) + 1 if len(positions) else 0


class _LostBlockError(InputError):
    """A block that was encoded is missing or damaged; its rows have to be read again."""


class EncodedSource:
    """All conversations of one source that have something to train on, in order, memory-mapped.

    Args:
        source: where the rows are.
        section: too_long is read.
        template: renders, masks and encodes.
        sequence_length: T, the most base tokens of a conversation.
        cache_dir: where the encoded blocks are kept; None: beside the source.

    Attributes:
        lengths: (n,) base tokens of each conversation.
        outputs: (n,) output positions of each.
        counts: what became of the rows.
        digest: SHA-256 of all tokens and labels.

    Raises:
        InputError: a row is no conversation or cannot be rendered, or the cache cannot be written.
    """

    def __init__(
        self,
        source: SFTSource,
        section: SFTSection,
        template: ChatTemplate,
        sequence_length: int,
        cache_dir: Path | None,
    ) -> None:
        self._source, self._template = source, template
        self._length, self._too_long = sequence_length, section.too_long
        self._rows = open_source(source)
        self._cache = self._rows.cache_dir if cache_dir is None else cache_dir
        identity = [_CACHE_VERSION, BLOCK_ROWS, self._rows.fingerprint, source.columns, template.fingerprint]
        identity += [sequence_length, section.too_long]
        self._key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]
        summary = cached_arrays(self._cache, self._key, ("blocks",), self._encode_all)
        numbers = range(int(summary["blocks"]))
        try:
            self._blocks = [self._block(number) for number in numbers]
        except _LostBlockError:
            self._encode_all()
            self._blocks = [self._block(number) for number in numbers]
        self.counts = sum((Counts(*map(int, block["counts"])) for block in self._blocks), Counts())
        self.lengths = self._joined("lengths")
        self.outputs = self._joined("outputs")
        self._first = np.cumsum([0, *(len(block["lengths"]) for block in self._blocks)])
        self._starts = [np.cumsum(block["lengths"]) - block["lengths"] for block in self._blocks]
        digests = b"".join(block["digest"].tobytes() for block in self._blocks)
        self.digest = hashlib.sha256(digests).hexdigest()

    def __getitem__(self, index: int) -> FittedConversation:
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        block, local = self._blocks[number], index - int(self._first[number])
        start = int(self._starts[number][local])
        part = slice(start, start + int(self.lengths[index]))
        return FittedConversation(block["tokens"][part].astype(np.int64), block["labels"][part].astype(np.int64))

    def _joined(self, name: str) -> NDArray[np.int64]:
        return np.concatenate([np.empty(0, np.int64), *(block[name] for block in self._blocks)])

    def _block(self, number: int, rows: Sequence[Row] | None = None) -> dict[str, NDArray[Any]]:
        """Block `number`, encoded from its rows if the cache does not hold it whole.

        Raises:
            _LostBlockError: the cache does not hold it, and no rows are given.
        """
        key = f"{self._key}-{number:06d}"

        def build() -> Arrays:
            if rows is None:
                raise _LostBlockError(f"index cache {self._cache / key} was lost as it was read; start again")
            return self._encode(rows)

        return cached_arrays(self._cache, key, _BLOCK_ARRAYS, build)

    def _encode_all(self) -> Arrays:
        """Encode every block that is not in the cache yet; how many there are."""
        blocks = 0
        with Progress(f"encoding {self._source.label}", self._rows.extent) as progress:
            stream = self._shown(self._rows.read(), progress)
            while rows := list(islice(stream, BLOCK_ROWS)):
                self._block(blocks, rows)
                blocks += 1
        return {"blocks": np.array(blocks)}

    @staticmethod
    def _shown(rows: Iterator[Row], progress: Progress) -> Iterator[Row]:
        for number, row in enumerate(rows, start=1):
            yield row
            progress.update(row.consumed, f"{number:,} conversations")

    def _encode(self, rows: Sequence[Row]) -> Mapping[str, NDArray[Any]]:
        kept: list[FittedConversation] = []
        counts = Counts()
        for row in rows:
            conversation, fate = self._fitted(row)
            counts = counts.after(fate)
            if conversation is not None:
                kept.append(conversation)
        empty = np.empty(0, np.int32)
        tokens = np.concatenate([empty, *(one.tokens.astype(np.int32) for one in kept)])
        labels = np.concatenate([empty, *(one.labels.astype(np.int32) for one in kept)])
        digest = hashlib.sha256(tokens.tobytes() + labels.tobytes()).digest()
        return {
            "tokens": tokens,
            "labels": labels,
            "lengths": np.array([len(one.tokens) for one in kept], dtype=np.int64),
            "outputs": np.array([int((one.labels != IGNORED_LABEL).sum()) for one in kept], dtype=np.int64),
            "counts": np.array([getattr(counts, field.name) for field in fields(counts)], dtype=np.int64),
            "digest": np.frombuffer(digest, dtype=np.uint8),
        }

    def _fitted(self, row: Row) -> tuple[FittedConversation | None, Fate]:
        conversation = conversation_of(row.columns(), self._source.columns, row.label)
        try:
            encoded = self._template.encode(conversation, row.label)
        except ForgedTokenError:
            return None, "forged"
        return fit(encoded, self._length, self._too_long, self._template.bos_id)
