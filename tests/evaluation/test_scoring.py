"""Scores equal one plain forward a request, whatever is shared, batched or cut into chunks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from evaluation import scoring
from evaluation.scoring import BatchLimit, Scorer, fork
from evaluation.scoring_plan import Request
from orthros_train.errors import InputError
from orthros_train.model import KVCache, OrthrosForCausalLM
from orthros_train.model.kv_cache import bytes_per_token
from tests.evaluation.tiny_models import tiny_orthros

# batch size, whether to share, chunk size: a chunk cuts stems and rows, a batch mixes stems of several lengths
WAYS: tuple[tuple[int | str, bool, int], ...] = (
    (1, True, 64),
    (3, True, 2048),
    (8, True, 23),
    ("auto", True, 23),
    (8, False, 23),
    ("auto", False, 2048),
)


def requests() -> list[Request]:
    """Questions with several choices, one document with questions, one-token choices, single rows."""
    rng = random.Random(1)

    def text(low: int, high: int) -> list[int]:
        return [rng.randrange(256) for _ in range(rng.randrange(low, high))]

    found: list[Request] = []
    for _ in range(4):
        context = text(1, 40)
        found += [(context, text(1, 12)) for _ in range(rng.randrange(1, 5))]
    document = text(50, 60)
    for _ in range(2):
        context = document + text(3, 20)
        found += [(context, text(1, 12)) for _ in range(3)] + [(context, [k]) for k in (1, 2)]
    rng.shuffle(found)
    return found


def plain(model: OrthrosForCausalLM, request: Request) -> tuple[float, bool]:
    context, continuation = list(request[0]), list(request[1])
    with torch.no_grad():
        logits = model(torch.tensor([context + continuation]), use_cache=False).logits[0]
    logits = logits[len(context) - 1 : -1].log_softmax(dim=-1)
    target = torch.tensor(continuation)
    return float(logits.gather(1, target[:, None]).sum()), bool((logits.argmax(dim=-1) == target).all())


@pytest.mark.parametrize("options", [{}, {"base_sinks": 2}, {"architecture": "transformer"}], ids=str)
def test_every_way_of_scoring_gives_the_plain_forwards_scores(options: dict[str, Any]) -> None:
    model, asked = tiny_orthros(**options), requests()
    greedy = torch.tensor([list(asked[0][0])])
    with torch.no_grad():
        asked.append((asked[0][0], [int(model(greedy, use_cache=False).logits[0, -1].argmax())]))
    expected = [plain(model, request) for request in asked]
    assert expected[-1][1]
    for batch_size, share, chunk_size in WAYS:
        found = Scorer(model, batch_size, share, chunk_size).score(asked)
        worst = max(abs(a - b) for (a, _), (b, _) in zip(found, expected, strict=True))
        assert worst < 1e-9, (batch_size, share, chunk_size)
        assert [each.is_greedy for each in found] == [each for _, each in expected]


def test_sharing_reads_fewer_tokens_and_outputs_stand_at_continuations_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, context = tiny_orthros(), list(range(100, 160))
    asked: list[Request] = [(context, [1, 2, 3]), (context, [4, 5])]
    read, predicted = [], []
    forward = OrthrosForCausalLM.forward

    def counted(self: OrthrosForCausalLM, input_ids: torch.Tensor, **keywords: Any) -> Any:
        mask = keywords["attention_mask"]
        read.append(input_ids.numel() if mask is None else int(mask.sum()))
        predicted.append(int((keywords["output_positions"] >= 0).sum()))
        return forward(self, input_ids, **keywords)

    monkeypatch.setattr(OrthrosForCausalLM, "forward", counted)
    Scorer(model, 8).score(asked)
    assert (read, predicted) == ([59, 3 + 2], [0, 3 + 2])
    read.clear()
    predicted.clear()
    Scorer(model, 8, share=False).score(asked)
    assert (sum(read), sum(predicted)) == (62 + 61, 3 + 2)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("most_rows", [1, 4])
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("no room"), RuntimeError("DefaultCPUAllocator: can't allocate memory")], ids=str
)
def test_an_automatic_batch_that_does_not_fit_is_halved(
    monkeypatch: pytest.MonkeyPatch, share: bool, most_rows: int, error: Exception
) -> None:
    """Families side by side as well as the rows behind one stem."""
    model, context = tiny_orthros(), list(range(100, 130))
    asked = [*requests(), *((context, [k, k + 1]) for k in range(12))]
    expected = Scorer(model, 1).score(asked)
    widths = []
    forward = OrthrosForCausalLM.forward

    def small_memory(self: OrthrosForCausalLM, input_ids: torch.Tensor, **keywords: Any) -> Any:
        widths.append(input_ids.shape[0])
        if input_ids.shape[0] > most_rows:
            raise error
        return forward(self, input_ids, **keywords)

    monkeypatch.setattr(OrthrosForCausalLM, "forward", small_memory)
    found = Scorer(model, "auto", share).score(asked)
    assert max(widths) > most_rows
    assert max(abs(a[0] - b[0]) for a, b in zip(found, expected, strict=True)) < 1e-9
    with pytest.raises(InputError, match="out of memory with 8 sequence"):
        Scorer(model, 8, share).score(asked)
    most_rows = 0
    with pytest.raises(InputError, match="out of memory with 1 sequence"):
        Scorer(model, "auto", share).score(asked)


def test_the_caches_of_an_automatic_batch_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    model, context = tiny_orthros(), list(range(100, 160))
    asked = [(context, [k, k + 1]) for k in range(12)]
    a_row = (len(context) + 2) * bytes_per_token(model.config, model.dtype)
    monkeypatch.setattr(scoring, "CPU_CACHED_BYTES", 3 * a_row)
    widths = []
    forward = OrthrosForCausalLM.forward

    def watched(self: OrthrosForCausalLM, input_ids: torch.Tensor, **keywords: Any) -> Any:
        widths.append(input_ids.shape[0])
        return forward(self, input_ids, **keywords)

    monkeypatch.setattr(OrthrosForCausalLM, "forward", watched)
    Scorer(model, "auto").score(asked)
    assert max(widths) == 3


def test_progress_counts_requests_up_to_all() -> None:
    seen: list[int] = []
    asked = requests()
    Scorer(tiny_orthros(), 4).score(asked, seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == len(asked)


@pytest.mark.parametrize("size", ["many", 0, -1])
def test_a_batch_size_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(InputError, match="neither a number of at least 1 nor auto"):
        BatchLimit.of(size, tiny_orthros())


def test_a_fork_leaves_its_cache_alone() -> None:
    model = tiny_orthros()
    cache = KVCache(model.config)
    with torch.no_grad():
        model(torch.arange(12).view(2, 6), cache=cache)
        before = [cache.keys(layer).clone() for layer in range(3)]
        twin = fork(cache, torch.tensor([1, 1, 0]))
        model(torch.arange(9).view(3, 3), cache=twin)
    assert cache.lengths is not None
    assert cache.lengths.tolist() == [6, 6]
    assert twin.lengths is not None
    assert twin.lengths.tolist() == [9, 9, 9]
    assert all(torch.equal(cache.keys(layer), kept) for layer, kept in enumerate(before))
    assert torch.equal(twin.keys(0)[:, :, :6], before[0][[1, 1, 0]])
