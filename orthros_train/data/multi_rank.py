"""Preprocessing on many processes of many machines, under mpirun or `srun --mpi=pmix`, over a shared file system.

* A source is cut into parts: PART_BATCHES consecutive batches, by content alone. Each rank encodes its parts into files
  of the folder PREFIX.parts, each complete or absent; rank 0 then feeds them in order to the writer that a single
  process uses, so the corpus is the same byte for byte, on any number of ranks.
* A source of at most 1/ranks of the input is dealt out whole, largest first. A larger one is read by every rank, which
  encodes each n-th part: cutting text costs little beside encoding it.
* Whatever happens, there is no corpus before all parts are there. The same command, on as many ranks as one likes, goes
  on from the parts that it finds; parts of another input are refused.
* Bad input found by one rank stops all at their next batch. A rank that dies takes the others with it (mpirun does so,
  srun with --kill-on-bad-exit=1).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from orthros_train.config import TokenizerSection
from orthros_train.data.corpus_writer import check_writable
from orthros_train.data.documents import BATCH_BYTES, BATCH_DOCUMENTS, Batch
from orthros_train.data.encoding import EncodedBatch, encode_in_order
from orthros_train.data.manifest import Manifest
from orthros_train.data.preprocessing import file_prefix, preprocess, token_dtype
from orthros_train.data.progress import Progress
from orthros_train.data.sources import Source
from orthros_train.data.storage import fsync_path, unfinished_path, write_text_atomically
from orthros_train.data.tokenizers import Tokenizer, load_tokenizer
from orthros_train.errors import InputError
from orthros_train.launch_environment import MPI_SIZES, SRUN_SIZE

T = TypeVar("T")
PART_BATCHES = 32  # of about a MiB of text each: what an interruption costs a rank at most
STOP_TAG = 1
WAIT_SECONDS = 0.01


def mpi_world() -> Any | None:
    """mpi4py's COMM_WORLD if a launcher started several processes, None if this is a single one.

    Raises:
        InputError: the processes do not see each other over MPI.
    """
    started = next((name for name in (*MPI_SIZES, SRUN_SIZE) if os.environ.get(name, "1") not in ("", "1")), None)
    if started is None:
        return None
    try:
        from mpi4py import MPI  # noqa: PLC0415  starts MPI
    except (ImportError, RuntimeError) as error:
        raise InputError(
            f"{started} says {os.environ[started]} processes, but mpi4py cannot be used: {error}"
        ) from error
    if MPI.COMM_WORLD.size == 1:
        raise InputError(
            f"{started} says {os.environ[started]} processes, but over MPI each is alone: start with mpirun of the MPI "
            "that mpi4py was built for, or with srun --mpi=pmix (srun --mpi=list shows what there is)"
        )
    return MPI.COMM_WORLD


def deal(sizes: Sequence[int], ranks: int) -> list[int | None]:
    """Who encodes each source: a rank, or None where all share it. The same for everybody who asks."""
    load = [0] * ranks
    owners: list[int | None] = [None] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        if sizes[index] * ranks <= sum(sizes):
            owner = load.index(min(load))
            owners[index] = owner
            load[owner] += sizes[index]
    return owners


def preprocess_on_ranks(
    world: Any,
    find_sources: Callable[[], list[Source]],
    tokenizer_section: TokenizerSection,
    output_prefix: str | Path,
    *,
    reading: dict[str, str],
    workers: int = 1,
    text_key: str = "text",
    overwrite: bool = False,
) -> Manifest:
    """As `preprocess`, by all ranks of an MPI communicator together; all get the manifest.

    Args:
        world: of mpi4py.
        find_sources: the sources as this rank sees them; all must see the same.
        reading: how documents are found in the sources, so that parts cut otherwise are not taken.
        workers: processes that encode, on each rank.

    Raises:
        InputError: on all ranks, as `preprocess`; and if ranks see different input, or PREFIX.parts is of another.
    """
    team = _Team(world)
    parts = _Parts(Path(f"{output_prefix}.parts"))

    def look() -> tuple[list[Source], Tokenizer, dict[str, str]]:
        sources, tokenizer = find_sources(), load_tokenizer(tokenizer_section)
        return sources, tokenizer, _plan(sources, {**reading, "text key": text_key}, tokenizer.fingerprint)

    sources, tokenizer, plan = team.together(look)
    first_plan = world.bcast(plan)
    dtype = token_dtype(tokenizer.vocab_size)
    owners = deal([source.size_bytes for source in sources], world.size)

    def prepare() -> None:
        if plan != first_plan:
            different = _difference(plan, first_plan)
            raise InputError(f"{socket.gethostname()} sees other input than the first rank: {different}")
        if world.rank == 0:
            check_writable(file_prefix(output_prefix), overwrite)
            parts.open(plan, overwrite)

    def encode() -> None:
        mine = _OwnParts(sources, owners, parts, team)
        total = sum(source.extent for source, owner in zip(sources, owners, strict=True) if owner in (None, world.rank))
        encoded = encode_in_order(mine.batches(), tokenizer_section, text_key, dtype, workers)
        with Progress(f"rank 0 of {world.size} encodes", total if world.rank == 0 else 0) as progress:
            for done in mine.collect(encoded):
                if world.rank == 0:
                    progress.update(done, f"{mine.written:,} parts")

    def merge() -> Manifest | None:
        if world.rank != 0:
            return None
        manifest = preprocess(
            sources,
            tokenizer_section,
            output_prefix,
            text_key=text_key,
            overwrite=overwrite,
            encoded=parts.in_order(sources),
        )
        parts.remove()
        return manifest

    team.together(prepare)
    team.together(encode)
    manifest: Manifest = world.bcast(team.together(merge))
    return manifest


class _Team:
    """Ranks that succeed or fail together."""

    def __init__(self, world: Any) -> None:
        self.world = world
        self._sent: list[Any] = []

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on every rank; if it raises InputError on any, raise that of the lowest such rank on all."""
        result, problem = None, None
        try:
            result = work()
        except InputError as error:
            problem = str(error)
            others = (rank for rank in range(self.world.size) if rank != self.world.rank)
            self._sent = [self.world.isend(None, dest=rank, tag=STOP_TAG) for rank in others]
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            self.world.Abort(1)
        everybody = self.world.Ibarrier()
        while not everybody.Test():  # MPI's own waiting would keep a core busy for as long as the slowest rank takes
            time.sleep(WAIT_SECONDS)
        problems = self.world.allgather(problem)
        first = next((text for text in problems if text is not None), None)
        if first is not None:
            raise InputError(first)
        return result  # type: ignore[return-value]

    def stopped(self) -> bool:
        """Whether another rank has failed."""
        return bool(self.world.iprobe(tag=STOP_TAG))


class _OwnParts:
    """What one rank has to do: the batches of its parts that are not there yet, and what becomes of them."""

    def __init__(self, sources: Sequence[Source], owners: Sequence[int | None], parts: _Parts, team: _Team) -> None:
        self._sources, self._owners, self._parts, self._team = sources, owners, parts, team
        self._open: deque[tuple[int, int, bool]] = deque()  # of each batch: source, part, whether it is the part's last
        self.written = 0

    def batches(self) -> Iterator[Batch]:
        """The batches to encode, in order."""
        rank, size = self._team.world.rank, self._team.world.size
        for index, (source, owner) in enumerate(zip(self._sources, self._owners, strict=True)):
            if owner not in (None, rank) or self._parts.all_there(index):
                continue
            count = 0
            for number, part in enumerate(_cut(source.read())):
                count = number + 1
                if self._team.stopped():
                    return
                is_ours = owner is not None or (number + index) % size == rank
                if not is_ours or self._parts.file(index, number).exists():
                    continue
                for position, batch in enumerate(part, start=1):
                    self._open.append((index, number, position == len(part)))
                    yield batch
            self._parts.note_count(index, count)

    def collect(self, encoded: Iterator[EncodedBatch]) -> Iterator[int]:
        """Write what comes back from encoding; yields how much of this rank's input is done."""
        gathered: list[EncodedBatch] = []
        before, last_index, consumed = 0, 0, 0
        for batch in encoded:
            index, number, is_last = self._open.popleft()
            if index != last_index:
                before, last_index = before + self._sources[last_index].extent, index
            gathered.append(batch)
            if is_last:
                consumed = gathered[-1].consumed
                self._parts.write(index, number, _joined(gathered))
                gathered.clear()
                self.written += 1
                yield before + consumed


class _Parts:
    """The folder PREFIX.parts: plan.json, a file a part, and the number of parts of each source."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def open(self, plan: dict[str, str], overwrite: bool) -> None:
        """Make the folder, or find it with parts of the same plan."""
        file = self._folder / "plan.json"
        try:
            if file.exists() and json.loads(file.read_text(encoding="utf-8")) != plan:
                if not overwrite:
                    there = json.loads(file.read_text(encoding="utf-8"))
                    raise InputError(
                        f"{self._folder} holds parts of another input: {_difference(plan, there)}; remove it, or pass "
                        "--overwrite"
                    )
                shutil.rmtree(self._folder)
            self._folder.mkdir(parents=True, exist_ok=True)
            write_text_atomically(file, json.dumps(plan, indent=2) + "\n")
        except (OSError, ValueError) as error:
            raise InputError(f"{self._folder} cannot be used ({error}); remove it or choose another prefix") from error

    def file(self, source: int, number: int) -> Path:
        """Where a part is."""
        return self._folder / f"{source:05d}-{number:06d}.npz"

    def write(self, source: int, number: int, batch: EncodedBatch) -> None:
        """Write a part so that it is complete or absent."""
        file = self.file(source, number)
        unfinished = unfinished_path(file)
        numbers = [batch.max_token_id, batch.blank_documents, batch.text_bytes, batch.consumed]
        try:
            with open(unfinished, "wb") as stream:
                np.savez(stream, tokens=batch.tokens, lengths=batch.lengths, numbers=np.array(numbers, dtype=np.int64))
                stream.flush()
                os.fsync(stream.fileno())
            unfinished.replace(file)
            fsync_path(self._folder)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise InputError(f"{file} cannot be written: {error.strerror}; free space, then start again") from error

    def read(self, source: int, number: int) -> EncodedBatch:
        """A part."""
        file = self.file(source, number)
        try:
            with np.load(file) as arrays:
                max_token_id, blank, text_bytes, consumed = arrays["numbers"].tolist()
                return EncodedBatch(arrays["tokens"], arrays["lengths"], max_token_id, blank, text_bytes, consumed)
        except Exception as error:  # zipfile and numpy raise many kinds
            raise InputError(f"{file} is damaged ({error}); remove it and start again") from error

    def note_count(self, source: int, count: int) -> None:
        """Record how many parts a source has, once it was read to its end."""
        file = self._count_file(source)
        try:
            write_text_atomically(file, f"{count}\n")
        except OSError as error:
            raise InputError(f"{file} cannot be written ({error.strerror}); free space, then start again") from error

    def count(self, source: int) -> int | None:
        """How many parts a source has; None where nobody has read it to its end."""
        file = self._count_file(source)
        try:
            return int(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise InputError(f"{file} is damaged ({error}); remove it and start again") from error

    def all_there(self, source: int) -> bool:
        """Whether nothing of a source is left to do."""
        count = self.count(source)
        return count is not None and all(self.file(source, number).exists() for number in range(count))

    def in_order(self, sources: Sequence[Source]) -> Iterator[EncodedBatch]:
        """All parts; `consumed` counts over all sources."""
        before = 0
        for index, source in enumerate(sources):
            count = self.count(index)
            if count is None:
                file = self._count_file(index)
                raise InputError(f"{file} is missing, which says how many parts {source.name} has; start again")
            for number in range(count):
                part = self.read(index, number)
                yield EncodedBatch(
                    part.tokens,
                    part.lengths,
                    part.max_token_id,
                    part.blank_documents,
                    part.text_bytes,
                    before + part.consumed,
                )
            before += source.extent

    def _count_file(self, source: int) -> Path:
        return self._folder / f"{source:05d}.count"

    def remove(self) -> None:
        """Remove the folder; the corpus is complete."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _cut(batches: Iterator[Batch]) -> Iterator[list[Batch]]:
    while part := list(itertools.islice(batches, PART_BATCHES)):
        yield part


def _joined(batches: Sequence[EncodedBatch]) -> EncodedBatch:
    return EncodedBatch(
        tokens=np.concatenate([batch.tokens for batch in batches]),
        lengths=np.concatenate([batch.lengths for batch in batches]),
        max_token_id=max(batch.max_token_id for batch in batches),
        blank_documents=sum(batch.blank_documents for batch in batches),
        text_bytes=sum(batch.text_bytes for batch in batches),
        consumed=batches[-1].consumed,
    )


def _plan(sources: Sequence[Source], reading: dict[str, str], tokenizer_fingerprint: str) -> dict[str, str]:
    """What the content of the parts depends on."""
    names = [(source.name, source.size_bytes, _modified(source.name)) for source in sources]
    return {
        "sources": hashlib.sha256(json.dumps(names).encode()).hexdigest(),
        "tokenizer": tokenizer_fingerprint,
        "cut": f"{PART_BATCHES} batches of {BATCH_BYTES} bytes or {BATCH_DOCUMENTS} documents",
        **reading,
    }


def _modified(name: str) -> int:
    path = Path(name)
    return path.stat().st_mtime_ns if path.is_file() else 0


def _difference(plan: dict[str, str], other: dict[str, str]) -> str:
    names = [name for name in sorted({*plan, *other}) if plan.get(name) != other.get(name)]
    return f"the {' and the '.join(names)} differ"
