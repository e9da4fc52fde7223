"""Does the KV cache compute what the full forward computes?

    python -m evaluation.cache_check --model DIR --output FILE.json

* Reference: one forward over a whole row without a cache, an output token at every position, one row at a time.
* Checked: the same rows as chunked prefill plus one decoding step a token, alone and in ragged batches. The logits
  are compared after the prefill and after every step.
* The cache must grow by one entry a step in every layer, and what it holds already must never change.
* float64 separates a wrong cache from rounding; the model's own dtype is what users run.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.command_line import whole_numbers
from evaluation.files import prepare_output, write_output
from evaluation.model_folder import DTYPES, dtype_name, load_model
from orthros_train.command_line import CommandParser, positive_int, run_command, seed
from orthros_train.errors import InputError

if TYPE_CHECKING:
    import torch

    from orthros_train.model import OrthrosForCausalLM

# Largest |difference| of two logits, as (absolute, relative to max(1, max|logit|)). bf16 keeps 8 bits of a number and
# the two sides add in another order; over many layers the roundings reach a few units of 2**-8.
BOUNDS = {"float64": (1e-8, 0.0), "float32": (0.0, 1e-4), "bfloat16": (0.0, 0.05)}
DESCRIPTION = """Compare prefill + decode with the full forward, in float64 and in the model's own dtype.

Exits 0 when every case is within its bound and the cache grew as it must, 1 when not, 2 on bad input.
"""
EXAMPLES = """\
  python -m evaluation.cache_check --model outputs/demo/models/orthros-42 --output outputs/cache_check.json
  python -m evaluation.cache_check --model models/large --output large.json --window 16 --device cuda"""
DEFAULT_WINDOW = 16  # sets the lengths for a model without a base window
MOST_DECODE_STEPS = 64


@dataclasses.dataclass(frozen=True)
class CacheCase:
    """One comparison: a batch of prompts, prefilled in one way, then decoded step by step."""

    dtype: str
    lengths: tuple[int, ...]  # prompt tokens of each row
    chunk_size: int | None  # of the prefill; None: the whole prompt at once
    decode_steps: int
    max_difference: float
    max_logit: float
    bound: float
    worst_row: int
    worst_step: int  # 0 is the prefill
    cache_errors: tuple[str, ...]  # growth or history that is wrong

    @property
    def passed(self) -> bool:
        """Whether the logits agree (a NaN does not) and the cache grew as it must."""
        return self.max_difference <= self.bound and not self.cache_errors


@dataclasses.dataclass(frozen=True)
class CacheGrowth:
    """KV entries of a prompt decoded alone, as the storage shows them."""

    prompt_length: int
    entries: tuple[tuple[int, ...], ...]  # [layer][step]; step 0 is after the prefill


@dataclasses.dataclass(frozen=True)
class CacheCheckReport:
    """Everything that `check_cache` measured."""

    architecture: str
    base_window: int | None
    base_sinks: int
    num_hidden_layers: int
    cases: tuple[CacheCase, ...]
    growth: tuple[CacheGrowth, ...]  # of each prompt length

    @property
    def passed(self) -> bool:
        """Whether every case passed."""
        return all(case.passed for case in self.cases)

    def max_difference(self, dtype: str) -> float:
        """Largest absolute difference over the cases of `dtype` ("float64", "float32", "bfloat16"); NaN if one is."""
        values = [case.max_difference for case in self.cases if case.dtype == dtype]
        return next((value for value in values if math.isnan(value)), max(values))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready content, with `passed` beside every case."""
        content = dataclasses.asdict(self)
        for record, case in zip(content["cases"], self.cases, strict=True):
            record["passed"] = case.passed
            record["max_difference"] = _number_or_null(case.max_difference)
        largest = {case.dtype: _number_or_null(self.max_difference(case.dtype)) for case in self.cases}
        return {"passed": self.passed, "max_difference": largest, **content}


def _number_or_null(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON knows neither NaN nor infinity


def default_lengths(window: int | None, longest: int) -> list[int]:
    """Prompt lengths around the window's edges, those that fit into `longest` tokens.

    1, w-1, w and w+1 cross the first edge, 2w+1 and 3w+2 lie in later query blocks.
    """
    w = window or DEFAULT_WINDOW
    return sorted({n for n in (1, w - 1, w, w + 1, 2 * w + 1, 3 * w + 2) if 1 <= n <= longest})


def default_chunk_sizes(window: int | None) -> list[int | None]:
    """The whole prompt at once, small chunks, and chunks that end on and beside the window's edge."""
    w = window or DEFAULT_WINDOW
    return [None, *sorted({3, w, w + 1})]


def check_cache(
    model: OrthrosForCausalLM,
    *,
    lengths: Sequence[int] | None = None,
    chunk_sizes: Sequence[int | None] | None = None,
    decode_steps: int | None = None,
    dtypes: Sequence[str] | None = None,
    seed: int = 0,
) -> CacheCheckReport:
    """Compare prefill + decode with the full forward on random token ids.

    Every length is checked alone (whole prompt), and all lengths together as one ragged batch under every chunk size.

    Args:
        model: checked as it is; copies of it are made in the other dtypes.
        lengths: prompt lengths in tokens; None: `default_lengths` of the model's window.
        chunk_sizes: prefill chunk sizes in tokens, None for the whole prompt; None: `default_chunk_sizes`.
        decode_steps: tokens decoded after each prompt; None: window + 2, at most 64.
        dtypes: names of torch dtypes; None: float64 and the model's own.
        seed: of the token ids.

    Raises:
        InputError: a length, chunk size, number of steps or dtype cannot be checked on this model.
    """
    window, limit = model.config.base_window, model.config.max_position_embeddings
    steps = min((window or DEFAULT_WINDOW) + 2, MOST_DECODE_STEPS, limit - 1) if decode_steps is None else decode_steps
    lengths = default_lengths(window, limit - steps) if lengths is None else list(lengths)
    chunk_sizes = default_chunk_sizes(window) if chunk_sizes is None else list(chunk_sizes)
    dtypes = list(dict.fromkeys(("float64", _dtype_name(model.dtype)))) if dtypes is None else list(dtypes)
    _refuse_unusable(lengths, chunk_sizes, steps, dtypes, limit)

    cases: list[CacheCase] = []
    growth: dict[int, CacheGrowth] = {}
    for dtype in dtypes:
        checked = _in_dtype(model, dtype)
        rows = _Rows(checked, lengths, steps, seed)
        for length in lengths:
            case, growth[length] = _check_case(checked, rows, [length], None, dtype)
            cases.append(case)
        for chunk_size in chunk_sizes:
            cases.append(_check_case(checked, rows, lengths, chunk_size, dtype)[0])
    config = model.config
    return CacheCheckReport(
        architecture=config.architecture,
        base_window=window,
        base_sinks=config.base_sinks,
        num_hidden_layers=config.num_hidden_layers,
        cases=tuple(cases),
        growth=tuple(growth.values()),
    )


def _refuse_unusable(
    lengths: Sequence[int], chunk_sizes: Sequence[int | None], steps: int, dtypes: Sequence[str], limit: int
) -> None:
    if not lengths or min(lengths) < 1:
        raise InputError(f"prompt lengths must be one or more numbers of at least 1, got {list(lengths)}")
    if any(size is not None and size < 1 for size in chunk_sizes):
        raise InputError(
            f"chunk sizes must be at least 1 (0 on the command line: whole prompt), got {list(chunk_sizes)}"
        )
    if steps < 1:
        raise InputError(f"at least one decoding step is needed, got {steps}")
    if max(lengths) + steps > limit:
        raise InputError(
            f"a prompt of {max(lengths)} tokens and {steps} decoding steps exceed the model's {limit} positions; "
            "ask for shorter lengths or fewer steps"
        )
    for dtype in dtypes:
        if dtype not in BOUNDS:
            raise InputError(f"no bound is known for dtype {dtype}; known: {', '.join(BOUNDS)}")


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _in_dtype(model: OrthrosForCausalLM, dtype: str) -> OrthrosForCausalLM:
    """`model` itself where it has that dtype already, else a copy (so that buffers of the original keep their bits)."""
    import torch  # noqa: PLC0415

    if _dtype_name(model.dtype) == dtype:
        return model.eval()
    return copy.deepcopy(model).to(getattr(torch, dtype)).eval()


class _Rows:
    """Random rows, one for each prompt length, and the full forward's logits of the tokens to be compared."""

    def __init__(self, model: OrthrosForCausalLM, lengths: Sequence[int], steps: int, seed: int) -> None:
        import torch  # noqa: PLC0415

        self.steps = steps
        self.ids: dict[int, torch.Tensor] = {}  # prompt length -> (length + steps,)
        self.logits: dict[int, torch.Tensor] = {}  # prompt length -> (steps + 1, vocab), entry s is that of step s
        for length in lengths:
            generator = torch.Generator().manual_seed(seed * 1_000_003 + length)
            ids = torch.randint(model.config.vocab_size, (length + steps,), generator=generator).to(model.device)
            with torch.inference_mode():
                logits = model(ids[None], use_cache=False).logits[0]  # (length + steps, vocab)
            self.ids[length] = ids
            self.logits[length] = logits[length - 1 :].clone()


def _check_case(
    model: OrthrosForCausalLM, rows: _Rows, lengths: Sequence[int], chunk_size: int | None, dtype: str
) -> tuple[CacheCase, CacheGrowth]:
    """Prefill one (ragged) batch and decode it token by token, comparing logits and cache after every step."""
    import torch  # noqa: PLC0415

    device = model.device
    batch = torch.zeros(len(lengths), max(lengths), dtype=torch.long, device=device)  # (B, T), padded right
    for row, length in enumerate(lengths):
        batch[row, :length] = rows.ids[length][:length]
    differences = torch.zeros(rows.steps + 1, len(lengths), dtype=torch.float64)
    watch = _CacheWatch(model.config.num_hidden_layers, lengths)
    with torch.inference_mode():
        logits, cache = model.prefill(batch, torch.tensor(lengths, device=device), chunk_size=chunk_size)
        for step in range(rows.steps + 1):
            if step:
                tokens = torch.stack([rows.ids[n][n + step - 1] for n in lengths])  # (B,)
                logits = model.decode(tokens, cache)
            expected = torch.stack([rows.logits[n][step] for n in lengths])  # (B, vocab)
            differences[step] = (logits.double() - expected.double()).abs().amax(dim=-1).cpu()
            watch.look(cache, step)
    largest_logit = max(float(rows.logits[n].abs().max()) for n in lengths)
    absolute, relative = BOUNDS[dtype]
    broken = differences.isnan()
    worst = int((broken.long() if broken.any() else differences).argmax())
    case = CacheCase(
        dtype=dtype,
        lengths=tuple(lengths),
        chunk_size=chunk_size,
        decode_steps=rows.steps,
        max_difference=float(differences.flatten()[worst]),
        max_logit=largest_logit,
        bound=absolute + relative * max(1.0, largest_logit),
        worst_row=worst % len(lengths),
        worst_step=worst // len(lengths),
        cache_errors=tuple(watch.errors),
    )
    return case, CacheGrowth(max(lengths), tuple(tuple(layer) for layer in watch.entries))


class _CacheWatch:
    """Follows a cache through decoding: its size in every layer, and that nothing in it changes afterwards."""

    def __init__(self, layers: int, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.entries: list[list[int]] = [[] for _ in range(layers)]
        self.errors: list[str] = []
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def look(self, cache: Any, step: int) -> None:
        """Compare the cache with what it was one step ago; the first fault of a kind in a layer is noted."""
        expected = [length + step for length in self.lengths]
        if cache.lengths.tolist() != expected:
            self._note(f"row lengths are {cache.lengths.tolist()} after step {step}, expected {expected}")
        now = []
        for layer, entries in enumerate(self.entries):
            keys, values = cache.keys(layer).clone(), cache.values(layer).clone()  # (B, G, longest, d)
            entries.append(keys.shape[2])
            if not keys.shape[2] == values.shape[2] == max(expected):
                self._note(
                    f"layer {layer} holds {keys.shape[2]} keys and {values.shape[2]} values "
                    f"after step {step}, expected {max(expected)}"
                )
            elif step and not self._kept(self._before[layer], (keys, values), step):
                self._note(f"layer {layer} changed earlier entries at step {step}")
            now.append((keys, values))
        self._before = now

    def _kept(
        self, before: tuple[torch.Tensor, torch.Tensor], after: tuple[torch.Tensor, torch.Tensor], step: int
    ) -> bool:
        return all(
            old[row, :, : length + step - 1].equal(new[row, :, : length + step - 1])
            for old, new in zip(before, after, strict=True)
            for row, length in enumerate(self.lengths)
        )

    def _note(self, error: str) -> None:
        if len(self.errors) < 8:
            self.errors.append(error)


def print_report(report: CacheCheckReport, title: str) -> None:
    """One table of every case, with the growth of the cache below it."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    grown = max(report.growth, key=lambda growth: growth.prompt_length).entries
    steady = all(later - earlier == 1 for layer in grown for earlier, later in itertools.pairwise(layer))
    rate = "one a step in every layer" if steady else "NOT one a step in every layer"
    table = Table(
        title=title,
        caption=f"KV entries of the longest prompt: {grown[0][0]} after the prefill, {grown[0][-1]} after "
        f"{len(grown[0]) - 1} steps, {rate} ({len(grown)})",
    )
    for name in ("dtype", "prompt", "chunk", "steps", "largest |Δ|", "bound", ""):
        table.add_column(
            name, no_wrap=True, justify="right" if name in {"chunk", "steps", "largest |Δ|", "bound"} else "left"
        )
    for case in report.cases:
        table.add_row(
            case.dtype,
            str(case.lengths[0]) if len(case.lengths) == 1 else f"{len(case.lengths)} ragged rows",
            "whole" if case.chunk_size is None else str(case.chunk_size),
            str(case.decode_steps),
            f"{case.max_difference:.2e}",
            f"{case.bound:.1e}",
            "pass" if case.passed else "FAIL",
        )
    console = Console()
    console.print(table)
    for case in report.cases:
        for error in case.cache_errors:
            console.print(f"cache of prompts {list(case.lengths)}: {error}", markup=False)


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(DESCRIPTION, EXAMPLES)
    parser.add_argument("--model", required=True, help="Hugging Face folder of an Orthros model")
    parser.add_argument("--output", required=True, help="JSON file to write")
    parser.add_argument("--lengths", type=whole_numbers, help="prompt lengths (default: 1,w-1,w,w+1,2w+1,3w+2)")
    parser.add_argument(
        "--chunk-sizes", type=whole_numbers, help="prefill chunks, 0: whole prompt (default: 0,3,w,w+1)"
    )
    parser.add_argument("--decode-steps", type=positive_int, help="tokens after each prompt (default: w+2, at most 64)")
    parser.add_argument(
        "--window",
        type=positive_int,
        help="check with this base window instead of the model's: shorter lengths, a faster check",
    )
    parser.add_argument(
        "--dtype", type=dtype_name, choices=DTYPES, default="auto", help="dtype beside float64 (default: the model's)"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    parser.add_argument("--seed", type=seed, default=0, help="seed of the token ids (default: 0)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = build_parser().parse_args(arguments)
    prepare_output(Path(options.output))
    overrides = {} if options.window is None else {"base_window": options.window}
    model = load_model(options.model, dtype=options.dtype, device=options.device, overrides=overrides)
    chunk_sizes = None if options.chunk_sizes is None else [size or None for size in options.chunk_sizes]
    report = check_cache(
        model,
        lengths=options.lengths,
        chunk_sizes=chunk_sizes,
        decode_steps=options.decode_steps,
        seed=options.seed,
    )
    content = {"model": options.model, "seed": options.seed, "device": options.device, **report.to_dict()}
    write_output(Path(options.output), json.dumps(content, indent=1) + "\n")
    print_report(report, f"Cache check of {options.model}")
    return 0 if report.passed else 1


if __name__ == "__main__":
    run_command(main)
