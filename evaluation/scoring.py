"""Log-likelihoods of continuations, computed as the method allows: cheap contexts, output tokens only where needed.

* Output tokens stand at the positions that predict the continuation, nowhere else.
* What rows share is prefilled once (`scoring_plan.py`); its cache is forked for the rows behind it.
* A long context is read in chunks, with the same result.
* Both arms run this code; the transformer arm saves its own last layer and head at the same positions.

Shapes: B rows, T columns of a call, M output positions, V vocabulary.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from evaluation.model_folder import is_out_of_memory
from evaluation.scoring_plan import Family, Request, Row, plan_families
from orthros_train.errors import InputError
from orthros_train.model import KVCache, OrthrosForCausalLM
from orthros_train.model.kv_cache import bytes_per_token

CHUNK_SIZE = 2048  # columns of one forward over a long context
CPU_TOKENS, CUDA_TOKENS = 2048, 65536  # of one forward where the batch size is automatic
FULL_TOKENS = 96  # columns of all rows from which on a forward is efficient, and padding costs more than a second one
LEAST_FILL = 0.8  # of the columns of a row in an automatic batch of that size: shorter rows go into the next
CPU_CACHED_BYTES, CUDA_CACHED_BYTES = 2 << 30, 16 << 30  # of the caches of one forward's rows, where it is automatic

T = TypeVar("T")


class Scored(NamedTuple):
    """Log-likelihood of a continuation in nats, and whether greedy decoding would produce it."""

    log_likelihood: float
    is_greedy: bool


NOT_SCORED = Scored(math.nan, False)


@dataclass(frozen=True)
class BatchLimit:
    """How much goes into one forward.

    Attributes:
        rows: sequences; None: as many as the others allow.
        tokens: columns of all rows together, padding included; a single row may exceed it.
        cached_tokens: positions that the rows' caches hold together; a single row may exceed it.
    """

    rows: int | None
    tokens: float = math.inf
    cached_tokens: float = math.inf

    @classmethod
    def of(cls, batch_size: int | str, model: OrthrosForCausalLM) -> BatchLimit:
        """From a number of rows, or "auto", which lm-eval may spell "auto:N". Raises InputError for anything else."""
        if str(batch_size).partition(":")[0] == "auto":
            on_gpu = model.device.type == "cuda"
            cached_bytes = CUDA_CACHED_BYTES if on_gpu else CPU_CACHED_BYTES
            return cls(
                None,
                CUDA_TOKENS if on_gpu else CPU_TOKENS,
                cached_bytes // bytes_per_token(model.config, model.dtype),
            )
        try:
            rows = int(batch_size)
        except ValueError:
            rows = 0
        if rows < 1:
            raise InputError(f"batch size {batch_size!r} is neither a number of at least 1 nor auto")
        return cls(rows)

    def fits(self, rows: int, columns: int, cached: int = 0, shortest: int | None = None) -> bool:
        """Whether `rows` sequences of `columns` new and `cached` earlier tokens may go together.

        `shortest` is the length of the shortest of them, where an automatic batch should not pad it too far.
        """
        if rows <= 1:
            return True
        if self.rows is not None:
            return rows <= self.rows
        if shortest is not None and shortest < LEAST_FILL * columns and (rows - 1) * columns >= FULL_TOKENS:
            return False
        return rows * columns <= self.tokens and rows * (columns + cached) <= self.cached_tokens


class Tally:
    """Log-likelihoods of a batch's requests, summed up position by position."""

    def __init__(self) -> None:
        self._sums: defaultdict[int, float] = defaultdict(float)
        self._missed: set[int] = set()

    def add(self, rows: Sequence[Row], first: Sequence[int], used: Sequence[int], logits: Tensor) -> None:
        """Account for `logits` (B, M, V): row b uses used[b] slots, for its scored positions number first[b] on."""
        entries: list[tuple[int, int, int]] = []  # row, slot, target
        owners: list[int] = []
        for b, row in enumerate(rows):
            for request, continuation in row.continuations:
                skipped = row.scored - len(continuation)  # a shorter continuation is scored at the row's end
                for slot in range(max(0, skipped - first[b]), used[b]):
                    entries.append((b, slot, continuation[first[b] + slot - skipped]))
                    owners.append(request)
        if not entries:
            return
        b, slot, target = torch.tensor(entries, device=logits.device).T
        logits = logits if logits.dtype == torch.float64 else logits.float()
        values = logits[b, slot, target] - logits.logsumexp(dim=-1)[b, slot]
        likeliest = logits.argmax(dim=-1)[b, slot] == target
        for owner, value, hit in zip(owners, values.tolist(), likeliest.tolist(), strict=True):
            self._sums[owner] += value
            if not hit:
                self._missed.add(owner)

    def results(self) -> dict[int, Scored]:
        """By request."""
        return {request: Scored(value, request not in self._missed) for request, value in self._sums.items()}


class Scorer:
    """Scores requests with one model.

    Args:
        model: either arm, in evaluation mode.
        batch_size: rows of one forward, or "auto".
        share: compute what rows have in common once.
        chunk_size: columns of one forward over a long context.
    """

    def __init__(
        self,
        model: OrthrosForCausalLM,
        batch_size: int | str = "auto",
        share: bool = True,
        chunk_size: int = CHUNK_SIZE,
    ) -> None:
        self._model, self._share, self._chunk_size = model, share, chunk_size
        self._limit = BatchLimit.of(batch_size, model)

    @torch.no_grad()
    def score(
        self,
        requests: Sequence[Request],
        progress: Callable[[int], None] | None = None,
        give_up: Callable[[], bool] = lambda: False,
    ) -> list[Scored]:
        """Log-likelihood of each request's continuation.

        Args:
            requests: contexts and continuations.
            progress: called with the number of requests done.
            give_up: asked before each batch; once it is true, the rest is left out, and NOT_SCORED stands for it.

        Raises:
            InputError: out of memory, at a fixed batch size or with a single sequence.
            ValueError: an empty context or continuation.
        """
        results: dict[int, Scored] = {}
        for batch in self._batches(plan_families(requests, self._share)):
            if give_up():
                break
            results.update(self._run(batch))
            if progress is not None:
                progress(len(results))
        return [results.get(index, NOT_SCORED) for index in range(len(requests))]

    def _batches(self, families: Sequence[Family]) -> Iterator[list[Family]]:
        """Families that go together: those with a stem and single rows apart, longest first."""
        for shared in (True, False):
            batch: list[Family] = []
            for family in sorted((f for f in families if bool(f.stem) is shared), key=lambda f: -(f.stem or f.longest)):
                columns = max(each.stem or each.longest for each in (*batch, family))
                here = family.stem or family.longest
                if batch and not self._limit.fits(len(batch) + 1, min(columns, self._chunk_size), columns, here):
                    yield batch
                    batch = []
                batch.append(family)
            if batch:
                yield batch

    def _run(self, batch: Sequence[Family]) -> dict[int, Scored]:
        """Score a batch; an automatic one goes on in halves where memory runs out."""
        try:
            return self._in_halves(batch, self._score_batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            at_once = 1 if self._limit.rows is None else min(self._limit.rows, sum(len(f.rows) for f in batch))
            raise InputError(
                f"out of memory with {at_once} sequence(s) of up to {max(f.longest for f in batch)} tokens; use "
                "a smaller --batch-size, --dtype bf16, or a smaller --max-length"
            ) from error

    def _in_halves(self, items: Sequence[T], score: Callable[[Sequence[T]], dict[int, Scored]]) -> dict[int, Scored]:
        """`score` of all items together or, where an automatic batch of them does not fit into memory, in halves."""
        try:
            return score(items)
        except Exception as error:
            if not is_out_of_memory(error) or self._limit.rows is not None or len(items) == 1:
                raise
        middle = len(items) // 2  # outside the handler, whose traceback holds on to the memory
        return self._in_halves(items[:middle], score) | self._in_halves(items[middle:], score)

    def _score_batch(self, batch: Sequence[Family]) -> dict[int, Scored]:
        if not batch[0].stem:
            return self._score_rows([family.rows[0] for family in batch], [0] * len(batch), None)
        return self._score_shared(batch)

    def _score_shared(self, batch: Sequence[Family]) -> dict[int, Scored]:
        """Prefill the stems side by side, then score the rows behind them, rows of like length together."""
        stems = [family.rows[0].tokens[: family.stem] for family in batch]
        longest_branch = max(family.longest - family.stem for family in batch)
        cache = KVCache(self._model.config, capacity=max(map(len, stems)) + longest_branch)
        for _ in self._advance(stems, list(map(len, stems)), cache):
            pass  # no output token: a stem only writes the cache

        def score(branches: Sequence[tuple[int, Row]]) -> dict[int, Scored]:
            rows, read = [row for _, row in branches], [batch[index].stem for index, _ in branches]
            if len(batch) == len(branches) == 1:  # one sequence: write behind its stem, then take that off again
                found = self._score_rows(rows, read, cache)
                cache.crop(read[0] - len(rows[0].tokens))
                return found
            owners = torch.tensor([index for index, _ in branches], device=self._model.device)
            return self._score_rows(rows, read, fork(cache, owners))

        results: dict[int, Scored] = {}
        behind = [(index, row) for index, family in enumerate(batch) for row in family.rows]
        behind.sort(key=lambda pair: batch[pair[0]].stem - len(pair[1].tokens))
        lengths = [len(row.tokens) - batch[index].stem for index, row in behind]
        start = 0
        while start < len(behind):
            stop = start + 1
            while stop < len(behind) and self._limit.fits(
                stop - start + 1, lengths[start], len(stems[0]), lengths[stop]
            ):
                stop += 1
            results |= self._in_halves(behind[start:stop], score)
            start = stop
        return results

    def _score_rows(self, rows: Sequence[Row], read: Sequence[int], cache: KVCache | None) -> dict[int, Scored]:
        """Score rows whose first read[b] tokens are in the cache."""
        tally = Tally()
        pieces = [row.tokens[start:] for row, start in zip(rows, read, strict=True)]
        unscored = [row.context - start for row, start in zip(rows, read, strict=True)]
        if cache is None and max(map(len, pieces)) > self._chunk_size:
            cache = KVCache(self._model.config, capacity=max(map(len, pieces)))
        for start, used, logits in self._advance(pieces, unscored, cache):
            tally.add(rows, [max(0, start - each) for each in unscored], used, logits)
        return tally.results()

    def _advance(
        self, pieces: Sequence[Sequence[int]], unscored: Sequence[int], cache: KVCache | None
    ) -> Iterator[tuple[int, list[int], Tensor]]:
        """Run ragged rows in chunks of columns. Where one has output positions, yields its first column and

        the slots that each row uses, and logits (B, M, V): slot j of row b is the j-th of the chunk's columns at or
        behind unscored[b] that belong to the row.
        """
        lengths = torch.tensor([len(piece) for piece in pieces])
        width = int(lengths.max())
        ids = torch.tensor([[*piece, *([0] * (width - len(piece)))] for piece in pieces])
        step = width if cache is None else self._chunk_size
        for start in range(0, width, step):
            stop = min(start + step, width)
            columns = torch.arange(start, stop)
            real = columns < lengths[:, None]  # (B, T)
            wanted = real & (columns >= torch.tensor(unscored)[:, None])
            M = int(wanted.sum(dim=1).max())
            order = (~wanted).long().argsort(dim=1, stable=True)[:, :M]  # wanted columns first, in order
            positions = torch.where(wanted.gather(1, order), order, -1)  # (B, M)
            device = self._model.device
            output = self._model(
                ids[:, start:stop].to(device),
                output_positions=positions.to(device),
                attention_mask=None if bool(real.all()) else real.long().to(device),
                cache=cache,
                use_cache=cache is not None,
            )
            if M:
                yield start, wanted.sum(dim=1).tolist(), output.logits


def fork(cache: KVCache, rows: Tensor) -> KVCache:
    """A cache that holds the named rows (B,) of `cache`, each as often as named; `cache` stays as it is."""
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    twin.batch_select_indices(rows)
    return twin
