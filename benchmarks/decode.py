"""How fast is one decoding step after a long context: both arms, and transformers' LlamaForCausalLM?

All read the same random keys and values, put into the caches without a prefill, and the same weights: our arms' KVCache
and transformers' DynamicCache, which is copied whole at every step. The models take turns at each context and batch;
medians count. A step lengthens the context by one token. Beside each time stand the exact FLOPs, but a step at batch 1
mostly waits for weights and cache to be read, which are the same for both arms.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from evaluation.benchmarking.models import (
    APART,
    add_model_options,
    arm_configs,
    build_arms,
    enough_memory,
    shape_settings,
)
from evaluation.benchmarking.result import Record, Result, counted_calls, set_against, timed
from evaluation.command_line import whole_numbers
from orthros_train.command_line import CommandParser, positive_int, run_command
from orthros_train.errors import InputError

if TYPE_CHECKING:
    import torch

    from orthros_train.model import KVCache, OrthrosConfig

EXAMPLES = """\
  python benchmarks/decode.py --output outputs/benchmarks/decode.json
  python benchmarks/decode.py --output batch.json --contexts 1024,8192 --batches 1,8 --arms transformer,orthros
  python benchmarks/decode.py --output gpu.json --config configs/orthros_1.3b.yaml --dtype bf16 --device cuda \\
      --contexts 32768 --profile"""
NOTES = (
    "speed-up: over the transformer arm at the same context and batch; FLOP limit: what exact FLOPs allow; share: how",
    "much of it was reached; over peer: time over LlamaForCausalLM's, whose DynamicCache is copied whole at each step.",
)


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    add_model_options(parser)
    parser.add_argument(
        "--contexts", type=whole_numbers, default=[2048, 8192, 32768], help="cached tokens; default: 2048,8192,32768"
    )
    parser.add_argument("--batches", type=whole_numbers, default=[1, 4], help="rows; default: 1,4")
    parser.add_argument("--steps", type=positive_int, default=32, help="timed steps; default: 32")
    parser.add_argument("--profile", action="store_true", help="show the largest kernels of the last case of each arm")
    return parser


def filled_cache(config: OrthrosConfig, keys: torch.Tensor, values: torch.Tensor, room: int) -> KVCache:
    """A cache that holds the same `keys` and `values` (B, G, S, d) in every layer, with room for `room` more tokens."""
    from orthros_train.model import KVCache  # noqa: PLC0415

    rows, _, length, _ = keys.shape
    cache = KVCache(config, capacity=length + room)
    cache.begin(rows, length, None, keys.device)
    for layer in range(config.num_hidden_layers):
        cache.update(keys, values, layer)
    cache.commit()
    return cache


def step_calls(
    models: Mapping[str, Any], context: int, rows: int, options: argparse.Namespace
) -> dict[str, Callable[[], None]]:
    """One call an arm that decodes one token a row after `context` tokens."""
    import torch  # noqa: PLC0415

    from evaluation.arm_times import finish  # noqa: PLC0415
    from evaluation.benchmarking.llama import filled_llama_cache  # noqa: PLC0415

    model = next(iter(models.values()))
    torch.manual_seed(0)
    shape = (rows, model.config.num_key_value_heads, context, model.config.head_dim)
    keys, values = (torch.randn(shape, dtype=model.dtype, device=model.device) for _ in range(2))
    token = torch.ones(rows, dtype=torch.int64, device=model.device)

    def call(arm: str) -> Callable[[], None]:
        cache: Any
        if arm == "llama":
            cache = filled_llama_cache(models[arm].config, keys, values)
        else:
            cache = filled_cache(models[arm].config, keys, values, room=options.steps + 3)
        return lambda: finish(models[arm].decode(token, cache))

    return {arm: call(arm) for arm in models}


def measure(options: argparse.Namespace, configs: Mapping[str, OrthrosConfig]) -> tuple[list[Record], dict[str, Any]]:
    """One record a context, batch and arm, and the kernels of each arm if they were asked for."""
    from evaluation.arm_times import interleaved  # noqa: PLC0415
    from evaluation.benchmarking.kernels import largest_kernels  # noqa: PLC0415
    from orthros_train.model.flops import decode_flops  # noqa: PLC0415

    models = build_arms(configs, options.arms, options.dtype, options.device)
    cases = [(context, rows) for context in sorted(set(options.contexts)) for rows in sorted(set(options.batches))]
    records: list[Record] = []
    calls: dict[str, Callable[[], None]] = {}
    with counted_calls("decode", len(cases) * len(models) * (options.steps + 1)) as on_call:
        for context, rows in cases:
            calls = {}  # the caches before these go first
            calls = step_calls(models, context, rows, options)
            named = {f"{arm} {context} x {rows}": call for arm, call in calls.items()}
            here = {}
            for arm, (case, seconds) in zip(calls, interleaved(named, options.steps, on_call).items(), strict=True):
                flops = rows * decode_flops(configs[arm.replace("llama", "transformer")], context).total
                here[arm] = timed(case, seconds, flops, arm=arm, context=context, batch=rows)
                here[arm]["tokens_per_second"] = rows / here[arm]["seconds"]
            set_against(here)
            records += here.values()
    kernels = {arm: largest_kernels(call, options.device) for arm, call in calls.items()} if options.profile else {}
    return records, kernels


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    from evaluation.benchmarking.kernels import print_kernels  # noqa: PLC0415

    options = build_parser().parse_args(sys.argv[1:] if arguments is None else list(arguments))
    for name in ("contexts", "batches"):
        if min(getattr(options, name)) < 1:
            raise InputError(f"--{name} must be at least 1, got {min(getattr(options, name))}")
    configs = arm_configs(options, max(options.contexts) + options.steps + 3)
    result = Result("decode", options, APART, shape=shape_settings(configs["orthros"]))
    with enough_memory(options.device):
        records, kernels = measure(options, configs)
    result.write(records, NOTES, kernels=kernels)
    for arm, found in kernels.items():
        print_kernels(arm, found)
    return 0


if __name__ == "__main__":
    run_command(main)
