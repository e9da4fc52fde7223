"""What a benchmark hands out: a JSON file that `benchmarks/compare.py` reads, and the same figures as a table.

The file holds `benchmark`, `settings`, `machine`, `load_average` (before and after) and `records`, one a case. What a
record may measure is listed in COLUMNS; `all_NAME` beside a figure are the single measurements that it sums up.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from evaluation.arm_times import times
from evaluation.files import prepare_output, write_output
from evaluation.machine import describe_machine, load_average
from orthros_train.errors import InputError

Record = dict[str, Any]
TABLE_WIDTH = 150  # columns where there is no terminal

# Figures of records in the order of the table: heading and format. A table has the columns that its records fill.
COLUMNS: dict[str, tuple[str, str]] = {
    "seconds": ("median s", "{:.4g}"),
    "spread": ("spread", "{:.1%}"),
    "processor_seconds": ("processor s", "{:.4g}"),
    "start_up_processor_seconds": ("start-up processor s", "{:.3g}"),
    "flops": ("FLOPs", "{:.4g}"),
    "flops_per_second": ("FLOP/s", "{:.3g}"),
    "mfu_exact": ("mfu_exact", "{:.3f}"),
    "speedup": ("speed-up", "{:.3f}"),
    "processor_speedup": ("by processor", "{:.3f}"),
    "flop_ratio": ("FLOP limit", "{:.3f}"),
    "share": ("share", "{:.3f}"),
    "over_peer": ("over peer", "{:.3f}"),
    "step_flops": ("FLOPs of the step", "{:.4g}"),
    "step_seconds": ("s of the step", "{:.4g}"),
    "share_of_step": ("share of the step", "{:.2%}"),
    "growth": ("over shorter", "{:.3f}"),
    "tokens_per_second": ("tokens/s", "{:,.1f}"),
    "tokens_per_processor_second": ("tokens/processor s", "{:,.0f}"),
    "documents_per_second": ("documents/s", "{:.3g}"),
    "megabytes_per_second": ("MB/s", "{:,.0f}"),
    "peak_growth_mib": ("peak MiB", "{:,.1f}"),
    "peak_over_cache": ("peak / KV cache", "{:.2f}"),
    "largest_tensor_elements": ("largest tensor", "{:,}"),
    "square_elements": ("T²", "{:,}"),
}


class Result:
    """A benchmark's run. Make it before the work: it checks that the output can be written, and notes the load.

    Args:
        benchmark: its name.
        options: the parsed command line, `output` among it.
        apart: names of options that do not decide what is measured, besides `output` and `repeats`.
        settings: what decides it besides the other options.

    Raises:
        InputError: the output cannot become a file.
    """

    def __init__(self, benchmark: str, options: argparse.Namespace, apart: Iterable[str] = (), **settings: Any) -> None:
        prepare_output(options.output)
        self._benchmark, self._output = benchmark, Path(options.output)
        left_out = {"output", "repeats", *apart}
        self._settings = {name: _plain(value) for name, value in vars(options).items() if name not in left_out}
        self._settings |= settings
        self._machine = {**describe_machine(), "device": _device_name(getattr(options, "device", "cpu"))}
        self._before = load_average()

    def write(self, records: Sequence[Record], notes: Sequence[str] = (), **more: Any) -> None:
        """Write the file and print the table with `notes` below it; `more` goes into the file alone."""
        content = {
            "benchmark": self._benchmark,
            "settings": self._settings,
            "machine": self._machine,
            "load_average": {"before": self._before, "after": load_average()},
            "records": records,
            **more,
        }
        write_output(self._output, json.dumps(content, indent=1) + "\n")
        filled = [name for name in COLUMNS if any(record.get(name) is not None for record in records)]
        rows = [[record["case"], *(_cell(record.get(name), COLUMNS[name][1]) for name in filled)] for record in records]
        print_table(self._benchmark, ["", *(COLUMNS[name][0] for name in filled)], rows, notes)


def timed(case: str, seconds: Sequence[float], flops: int | None = None, **more: Any) -> Record:
    """The record of a case whose single times are `seconds`."""
    record: Record = {"case": case, **more, **times(seconds)}
    if flops is not None:
        record |= {"flops": flops, "flops_per_second": flops / record["seconds"]}
    return record


def set_against(records: Mapping[str, Record]) -> None:
    """Set the records of one shape, by arm, against two of them where they are there.

    The transformer arm: the speed-up over it, the one that exact FLOPs allow, and the share of it that was reached.
    LlamaForCausalLM: the time over its time. `all_NAME` are the ratios of each round, whose calls were made in turn, so
    that what slows the machine for longer than a round divides out.
    """
    base, peer = records.get("transformer"), records.get("llama")
    for record in records.values():
        if base is not None:
            record["speedup"] = base["seconds"] / record["seconds"]
            record["all_speedup"] = quotients(base["all_seconds"], record["all_seconds"])
            record["flop_ratio"] = base["flops"] / record["flops"]
            record["share"] = record["speedup"] / record["flop_ratio"]
            record["all_share"] = [speedup / record["flop_ratio"] for speedup in record["all_speedup"]]
        if peer is not None:
            record["over_peer"] = record["seconds"] / peer["seconds"]
            record["all_over_peer"] = quotients(record["all_seconds"], peer["all_seconds"])


def quotients(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Time over time, round by round."""
    return [a / b for a, b in zip(over, under, strict=True)]


@contextmanager
def counted_calls(label: str, total: int) -> Iterator[Callable[[str], None]]:
    """Progress over `total` calls; what it yields is told the name of each call before it is made."""
    from orthros_train.data.progress import Progress  # noqa: PLC0415

    done = count()
    with Progress(label, total) as progress:
        yield lambda name: progress.update(next(done), name)


def print_table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]], notes: Sequence[str] = ()) -> None:
    """A table on standard output: the first column is text, the others are numbers."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(title=title, title_justify="left")
    for index, name in enumerate(head):
        table.add_column(name, justify="right" if index else "left", no_wrap=not index)
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH, highlight=False)
    console.print(table)
    for note in notes:
        console.print(note, markup=False)


def _cell(value: Any, form: str) -> str:
    return "" if value is None else form.format(value)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _device_name(device: str) -> str:
    if not device.startswith("cuda"):
        return device
    import torch  # noqa: PLC0415

    return torch.cuda.get_device_name(device)


def read_results(path: Path) -> Mapping[str, Any]:
    """A file that `Result.write` wrote.

    Raises:
        InputError: there is no such file, or it is another thing, or a record has no name or a figure is no number.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as a benchmark's result: {error}") from error
    needed = {"benchmark": str, "settings": dict, "machine": dict, "records": list}
    if not isinstance(content, dict) or not all(isinstance(content.get(name), kind) for name, kind in needed.items()):
        raise InputError(f"{path} is no result of a benchmark: it lacks one of {', '.join(needed)}")
    for number, record in enumerate(content["records"], start=1):
        fault = _fault_of(record)
        if fault:
            raise InputError(f"{path} is no result of a benchmark: record {number} {fault}")
    return content


def _fault_of(record: Any) -> str | None:
    """What is wrong with a record that was read."""
    if not isinstance(record, dict):
        return "is no object"
    if not isinstance(record.get("case"), str):
        return "has no name, its `case`"
    for figure in COLUMNS:
        value, single = record.get(figure), record.get(f"all_{figure}")
        if value is not None and not _is_number(value):
            return f"({record['case']}) has {figure} {value!r}, which is no finite number"
        if single is not None and not (isinstance(single, list) and all(map(_is_number, single))):
            return f"({record['case']}) has all_{figure} {single!r}, which is no list of finite numbers"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
