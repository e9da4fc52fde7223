"""Does the base stream's attention stay linear in T, in memory and in time, forward and backward?

Each length runs in a process of its own: inputs, one warm-up on a short row, then forward + backward of the sliding
window on random queries, keys and values (B = 1). Two independent looks at memory, both without trusting the kernel:

* the largest tensor that any PyTorch operation returned, in elements (a T×T mask or score matrix would have T²);
* how far the process grew at most beyond its inputs.

Exits 1 when a T×T tensor was seen, when the process grew by T² bytes or more (a boolean mask), or when time or memory
grew faster than linearly (times --tolerance) from the shortest to the longest length.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.benchmarking.peak_memory import MIB, in_own_process
from evaluation.benchmarking.result import Result, timed
from evaluation.command_line import non_negative_number, whole_numbers
from orthros_train.command_line import CommandParser, run_command
from orthros_train.errors import InputError

if TYPE_CHECKING:
    import argparse

EXAMPLES = """\
  python benchmarks/base_stream_memory.py --output outputs/benchmarks/base_stream_memory.json
  python benchmarks/base_stream_memory.py --output outputs/benchmarks/sinks.json --sinks 4 --lengths 4096,8192"""


def measure(length: int, options: argparse.Namespace) -> dict[str, Any]:
    """Memory and time of forward + backward at one length, in this process."""
    import torch  # noqa: PLC0415
    from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC0415

    from evaluation.arm_times import interleaved  # noqa: PLC0415
    from evaluation.benchmarking.peak_memory import memory_growth_mib  # noqa: PLC0415
    from orthros_train.model.attention_kernels import attend  # noqa: PLC0415
    from orthros_train.model.visibility import Visibility  # noqa: PLC0415

    class LargestTensor(TorchDispatchMode):
        """Notes the largest result of any operation, backward included."""

        elements = 0

        def __torch_dispatch__(
            self, operation: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: Mapping[str, Any] | None = None
        ) -> Any:
            result = operation(*arguments, **(keywords or {}))
            for part in result if isinstance(result, tuple | list) else (result,):
                if isinstance(part, torch.Tensor):
                    self.elements = max(self.elements, part.numel())
            return result

    device = torch.device(options.device)
    torch.set_num_threads(options.threads)

    def inputs(tokens: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        shape = (1, options.heads, tokens, options.head_dim)
        return [torch.randn(shape, device=device, requires_grad=True) for _ in range(3)]

    def run(parts: Sequence[torch.Tensor]) -> None:
        tokens = parts[0].shape[2]
        positions = torch.arange(tokens, device=device)[None]
        seen = Visibility(positions, torch.zeros_like(positions), options.window, options.sinks, contiguous_from=0)
        with torch.enable_grad():
            attend(parts[0], parts[1], parts[2], seen, "sdpa").sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize()

    run(inputs(2 * options.window))
    parts = inputs(length)
    growth = memory_growth_mib(lambda: run(parts), options.device)
    seconds = interleaved({"run": lambda: run(parts)}, options.repeats)["run"]
    with LargestTensor() as watch:
        run(parts)
    return timed(
        f"T={length}",
        seconds,
        length=length,
        peak_growth_mib=growth,
        largest_tensor_elements=watch.elements,
        input_elements=parts[0].numel(),
        square_elements=length * length,
    )


def judge(records: Sequence[Mapping[str, Any]], tolerance: float) -> list[str]:
    """What is wrong with the measurements: T×T tensors, or growth beyond linear times `tolerance`."""
    faults = []
    for record in records:
        if record["largest_tensor_elements"] >= record["square_elements"]:
            faults.append(
                f"T={record['length']}: a tensor of {record['largest_tensor_elements']:,} elements, T² or more"
            )
        if record["peak_growth_mib"] * MIB >= record["square_elements"]:
            faults.append(
                f"T={record['length']}: the process grew by {record['peak_growth_mib']:.0f} MiB, T² bytes or more"
            )
    first, last = records[0], records[-1]
    linear = last["length"] / first["length"]
    for name, unit in (("seconds", "time"), ("peak_growth_mib", "memory")):
        growth = last[name] / first[name]
        if growth > linear * tolerance:
            faults.append(
                f"{unit} grew {growth:.2f}× from T={first['length']} to {last['length']}, linear is {linear:g}×"
            )
    return faults


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--lengths", type=whole_numbers, default=[8192, 16384, 32768], help="default: 8192,16384,32768")
    parser.add_argument("--window", type=int, default=256, help="base window w; default: 256")
    parser.add_argument("--sinks", type=int, default=0, help="base sinks; default: 0")
    parser.add_argument("--heads", type=int, default=4, help="default: 4")
    parser.add_argument("--head-dim", type=int, default=64, help="default: 64")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; default: 1")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs, of which the median counts; default: 3")
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default: cpu")
    parser.add_argument(
        "--tolerance", type=non_negative_number, default=1.25, help="allowed factor over linear; default: 1.25"
    )
    parser.add_argument("--one-length", type=int, help="measure this length in this process and print JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = build_parser().parse_args(given)
    if options.one_length:
        print(json.dumps(measure(options.one_length, options)))
        return 0
    if min(options.lengths) < 1 or options.window < 1 or options.repeats < 1 or options.threads < 1:
        raise InputError("--lengths, --window, --repeats and --threads must be at least 1")
    result = Result("base stream", options, apart=["one_length", "tolerance"])
    records = [
        in_own_process([__file__, *given, "--one-length", str(length)], f"T={length}")
        for length in sorted(options.lengths)
    ]
    faults = judge(records, options.tolerance)
    result.write(records, [f"FAIL: {fault}" for fault in faults], passed=not faults, faults=faults)
    return 1 if faults else 0


if __name__ == "__main__":
    run_command(main)
