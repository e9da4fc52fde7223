"""How long does a prompt take: both arms, and transformers' LlamaForCausalLM of the same shape and weights?

Batch 1, logits of the last token, a cache written. Models and lengths take turns, so that a slow moment of the machine
hits all of them; medians count. Beside each time stand the exact FLOPs. Our arms compute in the last layer what
the asked-for logits need; LlamaForCausalLM computes it at every position, and its FLOPs say so.

With --peak-memory each model and length also runs in a process of its own, which tells how far memory grew beyond the
weights, the KV cache included. Exits 1 if that could not be measured of one; the times are written all the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evaluation.benchmarking.models import (
    APART,
    add_model_options,
    arm_and_length,
    arm_configs,
    build_arms,
    enough_memory,
    shape_settings,
)
from evaluation.benchmarking.result import Record, Result, counted_calls, quotients, set_against, timed
from evaluation.command_line import whole_numbers
from orthros_train.command_line import CommandParser, positive_int, run_command
from orthros_train.errors import InputError

if TYPE_CHECKING:
    from orthros_train.model import OrthrosConfig

EXAMPLES = """\
  python benchmarks/prefill.py --output outputs/benchmarks/prefill.json
  python benchmarks/prefill.py --output long.json --arms orthros --lengths 32768,65536,131072 --peak-memory
  python benchmarks/prefill.py --output gpu.json --config configs/orthros_1.3b.yaml --dtype bf16 --device cuda \\
      --lengths 4096,32768,131072 --profile"""
NOTES = (
    "speed-up: over the transformer arm at the same length; FLOP limit: what exact FLOPs allow; share: how much of it",
    "was reached. over peer: time over LlamaForCausalLM's; over shorter: over that of the next shorter length.",
)


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    add_model_options(parser)
    parser.add_argument(
        "--lengths", type=whole_numbers, default=[1024, 4096, 16384, 32768], help="default: 1024,4096,16384,32768"
    )
    parser.add_argument("--chunk-size", type=positive_int, metavar="N", help="of our arms; default: their own")
    parser.add_argument("--repeats", type=positive_int, default=3, help="timed prefills; default: 3")
    parser.add_argument("--peak-memory", action="store_true", help="measure it, too, each case in its own process")
    parser.add_argument("--profile", action="store_true", help="show the largest kernels at the longest length")
    parser.add_argument(
        "--peak-of", type=arm_and_length, metavar="ARM:LENGTH", help="print the MiB that one prefill needs, and end"
    )
    return parser


def flops_of(arm: str, configs: Mapping[str, OrthrosConfig], length: int) -> int:
    """Exact FLOPs of what the arm computes."""
    from orthros_train.model.flops import prefill_flops  # noqa: PLC0415

    if arm == "llama":
        from evaluation.benchmarking.llama import llama_prefill_flops  # noqa: PLC0415

        return llama_prefill_flops(configs["transformer"], length).total
    return prefill_flops(configs[arm], length).total


def prefill_calls(
    configs: Mapping[str, OrthrosConfig], arms: Sequence[str], options: argparse.Namespace
) -> Callable[[int], dict[str, Callable[[], None]]]:
    """From a length to one call an arm that prefills a prompt of it."""
    from evaluation.arm_times import finish, random_ids  # noqa: PLC0415

    models: dict[str, Any] = build_arms(configs, arms, options.dtype, options.device)

    def calls(length: int) -> dict[str, Callable[[], None]]:
        ids = random_ids(next(iter(models.values())), length, seed=0)

        def call(arm: str) -> Callable[[], None]:
            chunk = {} if arm == "llama" else {"chunk_size": options.chunk_size}
            return lambda: finish(models[arm].prefill(ids, **chunk)[0])

        return {arm: call(arm) for arm in models}

    return calls


def measure(options: argparse.Namespace, configs: Mapping[str, OrthrosConfig]) -> tuple[list[Record], dict[str, Any]]:
    """One record a length and arm, and the kernels of each arm if they were asked for."""
    from evaluation.arm_times import interleaved  # noqa: PLC0415
    from evaluation.benchmarking.kernels import largest_kernels  # noqa: PLC0415

    calls = prefill_calls(configs, options.arms, options)
    lengths = sorted(set(options.lengths))
    named = {f"{arm} {length}": call for length in lengths for arm, call in calls(length).items()}
    with counted_calls("prefill", len(named) * (options.repeats + 1)) as on_call:
        seconds = interleaved(named, options.repeats, on_call)
    records: list[Record] = []
    shorter: dict[str, Record] = {}
    for length in lengths:
        here = {}
        for arm in options.arms:
            case = f"{arm} {length}"
            here[arm] = timed(case, seconds[case], flops_of(arm, configs, length), arm=arm, length=length)
            if arm in shorter:
                here[arm]["growth"] = here[arm]["seconds"] / shorter[arm]["seconds"]
                here[arm]["all_growth"] = quotients(here[arm]["all_seconds"], shorter[arm]["all_seconds"])
        set_against(here)
        shorter = here
        records += here.values()
    kernels = (
        {arm: largest_kernels(call, options.device) for arm, call in calls(lengths[-1]).items()}
        if options.profile
        else {}
    )
    return records, kernels


def cache_mib(config: OrthrosConfig, length: int, dtype: str) -> float:
    """MiB of the keys and values of `length` tokens in all layers."""
    from evaluation.benchmarking.peak_memory import MIB  # noqa: PLC0415
    from evaluation.model_folder import torch_dtype  # noqa: PLC0415
    from orthros_train.model.kv_cache import bytes_per_token  # noqa: PLC0415

    return length * bytes_per_token(config, torch_dtype(dtype)) / MIB


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    from evaluation.benchmarking.kernels import print_kernels  # noqa: PLC0415
    from evaluation.benchmarking.peak_memory import add_peaks, memory_growth_mib  # noqa: PLC0415

    given = list(sys.argv[1:] if arguments is None else arguments)
    options = build_parser().parse_args(given)
    if min(options.lengths) < 1:
        raise InputError(f"--lengths must be at least 1, got {min(options.lengths)}")
    configs = arm_configs(options, max(options.lengths))
    if options.peak_of:
        arm, length = options.peak_of
        if arm not in options.arms or length not in options.lengths:
            raise InputError(f"--peak-of {arm}:{length} is none of what --arms and --lengths name")
        call = prefill_calls(configs, [arm], options)(length)[arm]
        print(json.dumps(memory_growth_mib(call, options.device)))
        return 0
    result = Result("prefill", options, APART, shape=shape_settings(configs["orthros"]))
    with enough_memory(options.device):
        records, kernels = measure(options, configs)
    problems = []
    if options.peak_memory:
        problems = add_peaks(
            records, lambda record: [__file__, *given, "--peak-of", f"{record['arm']}:{record['length']}"]
        )
        for record in records:
            cache, peak = cache_mib(configs["transformer"], record["length"], options.dtype), record["peak_growth_mib"]
            record["peak_over_cache"] = None if peak is None else peak / cache
    result.write(records, [*NOTES, *problems], kernels=kernels)
    for arm, found in kernels.items():
        print_kernels(arm, found)
    return 1 if problems else 0


if __name__ == "__main__":
    run_command(main)
