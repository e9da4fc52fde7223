"""Times of several models, measured in turn, so that a slow moment of the machine hits all of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

DECODE_STEPS = 32  # timed after each context length, one warm-up step before them

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from orthros_train.model import OrthrosForCausalLM


def measure_prefill(
    models: Mapping[str, OrthrosForCausalLM], lengths: Sequence[int], repeats: int = 3, seed: int = 0
) -> list[dict[str, Any]]:
    """Seconds of one prompt's prefill (batch 1, random ids, logits of the last token) at each length.

    Returns one record a length and model: the median and all times, taken with the present number of threads, and the
    exact FLOPs.
    """
    from orthros_train.model.flops import prefill_flops  # noqa: PLC0415

    records = []
    for length in lengths:
        ids = random_ids(next(iter(models.values())), length, seed)
        calls = {name: _prefill_call(model, ids) for name, model in models.items()}
        for name, seconds in interleaved(calls, repeats).items():
            flops = prefill_flops(models[name].config, length).total
            records.append({"arm": name, "length": length, **times(seconds), "flops": flops})
    return records


def measure_decode(
    models: Mapping[str, OrthrosForCausalLM], contexts: Sequence[int], steps: int = DECODE_STEPS, seed: int = 0
) -> list[dict[str, Any]]:
    """Seconds of one decoding step (batch 1) after each context length: the median of `steps` steps, arms in turn."""
    from orthros_train.model.flops import decode_flops  # noqa: PLC0415

    records = []
    for context in contexts:
        ids = random_ids(next(iter(models.values())), context, seed)
        calls = {name: _decode_call(model, ids, steps + 1) for name, model in models.items()}
        for name, seconds in interleaved(calls, steps).items():
            flops = decode_flops(models[name].config, context).total
            records.append({"arm": name, "context": context, **times(seconds), "flops": flops})
    return records


def measure_training(
    models: Mapping[str, OrthrosForCausalLM], rows: int, length: int, repeats: int = 5, seed: int = 0
) -> list[dict[str, Any]]:
    """Seconds of forward and backward of `rows` rows of `length` random ids; the models are left unchanged.

    Optimizer, communication and data are not part of it.
    """
    from orthros_train.model.flops import training_flops  # noqa: PLC0415

    ids = random_ids(next(iter(models.values())), rows * length, seed).view(rows, length)
    calls = {name: _training_call(model, ids) for name, model in models.items()}
    records = []
    for name, seconds in interleaved(calls, repeats).items():
        flops = rows * training_flops(models[name].config, [length]).total
        records.append({"arm": name, **times(seconds), "flops": flops})
        models[name].zero_grad(set_to_none=True)
    return records


def times(seconds: Sequence[float]) -> dict[str, Any]:
    """The median, every time, and their spread: from the least to the greatest, as a share of the median."""
    median = statistics.median(seconds)
    return {"seconds": median, "all_seconds": list(seconds), "spread": (max(seconds) - min(seconds)) / median}


def random_ids(model: PreTrainedModel, length: int, seed: int) -> torch.Tensor:
    """One row of ids (1, length) on the model's device."""
    import torch  # noqa: PLC0415

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (1, length), generator=generator).to(model.device)


def _prefill_call(model: OrthrosForCausalLM, ids: torch.Tensor) -> Callable[[], None]:
    return lambda: finish(model.prefill(ids)[0])


def _decode_call(model: OrthrosForCausalLM, ids: torch.Tensor, steps: int) -> Callable[[], None]:
    cache = model.prefill(ids, capacity=ids.shape[1] + steps)[1]
    return lambda: finish(model.decode(ids[:, -1], cache))


def _training_call(model: OrthrosForCausalLM, ids: torch.Tensor) -> Callable[[], None]:
    import torch  # noqa: PLC0415

    def call() -> None:
        with torch.enable_grad():
            loss = model(ids, labels=ids, use_cache=False, return_logits=False).loss
            loss.backward()
        finish(loss)

    return call


def finish(result: torch.Tensor) -> None:
    """Wait for the device: CUDA calls return before the work is done."""
    import torch  # noqa: PLC0415

    if result.is_cuda:
        torch.cuda.synchronize(result.device)


def interleaved(
    calls: Mapping[str, Callable[[], object]], repeats: int, on_call: Callable[[str], None] | None = None
) -> dict[str, list[float]]:
    """Seconds of each call, `repeats` times in turn, after one warm-up call each; gradients are off.

    `on_call` is told the name of each call before it is made, warm-ups included.
    """
    import torch  # noqa: PLC0415

    seconds: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for repeat in range(repeats + 1):
            for name, call in calls.items():
                if on_call is not None:
                    on_call(name)
                start = time.perf_counter()
                call()
                if repeat:
                    seconds[name].append(time.perf_counter() - start)
    return seconds
