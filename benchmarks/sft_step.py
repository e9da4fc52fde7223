"""What does a fine-tuning step cost beside pretraining, and beside the transformer arm?

Forward + backward of one packed row of conversations, whose answers are a given share of the tokens, on random weights.
Both arms, each with output tokens at the answers (`sft`) and everywhere (`pt`); the transformer skips its last layer's
work at positions whose logits nobody asked for, as ours does. The four take turns, so that a busy machine slows all of
them alike; medians count. Beside the times stand the exact FLOPs, as ratios to Orthros pretraining.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.files import prepare_output, write_output
from orthros_train.command_line import CommandParser, positive_int, run_command
from orthros_train.errors import InputError

if TYPE_CHECKING:
    import argparse

    import torch

EXAMPLES = """\
  python benchmarks/sft_step.py --output outputs/benchmarks/sft_step.json
  python benchmarks/sft_step.py --output outputs/benchmarks/half.json --answer-share 0.5 --length 1024"""

VOCABULARY = 4096
BASE = "orthros pt"  # what the ratios are to


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--length", type=positive_int, default=2048, help="T, base tokens of the row; default: 2048")
    parser.add_argument("--conversations", type=positive_int, default=4, help="in the row; default: 4")
    parser.add_argument("--answer-share", type=float, default=0.1, help="answer tokens of all tokens; default: 0.1")
    parser.add_argument("--window", type=positive_int, default=256, help="base window w; default: 256")
    parser.add_argument("--width", type=positive_int, default=256, help="D, in heads of 64; default: 256")
    parser.add_argument("--layers", type=positive_int, default=4, help="default: 4")
    parser.add_argument("--threads", type=positive_int, default=1, help="CPU threads; default: 1")
    parser.add_argument("--repeats", type=positive_int, default=5, help="timed rounds; default: 5")
    return parser


def row(options: argparse.Namespace) -> dict[str, torch.Tensor]:
    """A row (1, T): conversations of equal length, the answer at each one's end; labels only there."""
    import torch  # noqa: PLC0415

    torch.manual_seed(0)
    columns = torch.arange(options.length)
    share = options.length // options.conversations
    document = (columns // share).clamp(max=options.conversations - 1)
    answers = max(1, round(share * options.answer_share))
    labels = torch.randint(0, VOCABULARY, (options.length,))
    labels[columns - document * share < share - answers] = -100
    return {
        "input_ids": torch.randint(0, VOCABULARY, (1, options.length)),
        "document_ids": document[None],
        "shift_labels": labels[None],
    }


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Seconds and FLOPs of each arm and use."""
    import torch  # noqa: PLC0415

    from orthros_train.model import OrthrosConfig, OrthrosForCausalLM  # noqa: PLC0415
    from orthros_train.model.flops import training_flops  # noqa: PLC0415
    from orthros_train.training.batches import segment_lengths  # noqa: PLC0415

    torch.set_num_threads(options.threads)
    everywhere = row(options)
    columns = (everywhere["shift_labels"][0] != -100).nonzero()[:, 0]
    answers = {**everywhere, "output_positions": columns[None], "shift_labels": everywhere["shift_labels"][:, columns]}
    cases: list[tuple[str, Any, dict[str, torch.Tensor]]] = []
    records: list[dict[str, Any]] = []
    for arm, window in (("orthros", options.window), ("transformer", None)):
        config = OrthrosConfig(
            architecture=arm,
            base_window=window,
            vocab_size=VOCABULARY,
            hidden_size=options.width,
            intermediate_size=8 * options.width // 3,
            num_hidden_layers=options.layers,
            num_attention_heads=options.width // 64,
        )
        model = OrthrosForCausalLM(config)
        model.reset_parameters(0)
        for use, batch in (("sft", answers), ("pt", everywhere)):
            cases.append((f"{arm} {use}", model, batch))
            positions = columns.tolist() if use == "sft" else None
            flops = training_flops(config, segment_lengths(batch), positions).total
            records.append({"case": f"{arm} {use}", "flops": flops, "all_seconds": []})
    for turn in range(options.repeats + 1):
        for record, (_, model, batch) in zip(records, cases, strict=True):
            start = time.perf_counter()
            model(**batch, use_cache=False).loss.backward()
            model.zero_grad()
            if turn:  # the first round warms up
                record["all_seconds"].append(time.perf_counter() - start)
    for record in records:
        record["seconds"] = statistics.median(record["all_seconds"])
    base = next(record for record in records if record["case"] == BASE)
    for record in records:
        record["time_ratio"] = record["seconds"] / base["seconds"]
        record["flop_ratio"] = record["flops"] / base["flops"]
    return records


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = build_parser().parse_args(sys.argv[1:] if arguments is None else list(arguments))
    if not 0 < options.answer_share <= 1:
        raise InputError(f"--answer-share is {options.answer_share}: give a share above 0 and at most 1")
    if options.width % 64 or options.conversations > options.length:
        raise InputError("--width must be a multiple of 64, and --conversations at most --length")
    prepare_output(options.output)
    records = measure(options)
    from evaluation.machine import describe_machine  # noqa: PLC0415

    settings = {name: value for name, value in vars(options).items() if name != "output"}
    content = {**settings, "machine": describe_machine(), "records": records}
    write_output(options.output, json.dumps(content, indent=1) + "\n")
    _print_table(records, settings)
    return 0


def _print_table(records: Sequence[dict[str, Any]], settings: dict[str, Any]) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(title="Forward + backward: " + ", ".join(f"{name} {value}" for name, value in settings.items()))
    for name in ("", "median s", f"time / {BASE}", "GFLOPs", f"FLOPs / {BASE}"):
        table.add_column(name, justify="right", no_wrap=True)
    for record in records:
        figures = (record["seconds"], record["time_ratio"], record["flops"] / 1e9, record["flop_ratio"])
        table.add_row(record["case"], *(f"{figure:.3f}" for figure in figures))
    Console().print(table)


if __name__ == "__main__":
    run_command(main)
