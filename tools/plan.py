"""List the layouts of a run that fit a number of GPUs, fastest first, with the reason.

Parameters, memory by part, FLOPs and bytes sent are counted as --dry-run counts them; the time of a step is a model
(orthros_train/planning/layout_search.py) that orders layouts and is no forecast. Every assumption is printed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orthros_train.command_line import CommandParser, positive_int, run_command
from orthros_train.config import load_config, orthros_config
from orthros_train.errors import InputError

if TYPE_CHECKING:
    from orthros_train.config import Config
    from orthros_train.model import OrthrosConfig
    from orthros_train.planning.layout_search import Machines, Plan

EXAMPLES = """\
  python tools/plan.py configs/orthros_1.3b.yaml --nodes 2 --gpu H100
  python tools/plan.py configs/llama3.1_8b_conversion.yaml --nodes 4 --gpus-per-node 8 --gpu A100 --memory-gib 40
  python tools/plan.py configs/orthros_1.3b.yaml --gpu H100 train.sequence_length=8192"""
# GPU -> memory in GiB, GB/s that one sends to others of its node over NVLink (one direction); makers' data sheets.
GPUS = {
    "H100": (80.0, 450.0),
    "H200": (141.0, 450.0),
    "B200": (180.0, 900.0),
    "A100": (80.0, 300.0),
    "L40S": (48.0, 32.0),
}


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    parser.add_argument("config", metavar="CONFIG.yaml", help="the run; its own layout is not kept")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="replaces an option of the file")
    parser.add_argument("--nodes", type=positive_int, default=1, metavar="N", help="default: 1")
    parser.add_argument("--gpus-per-node", type=positive_int, default=8, metavar="N", help="default: 8")
    parser.add_argument("--gpu", choices=sorted(GPUS), default="H100", help="default: H100")
    parser.add_argument("--memory-gib", type=_positive, metavar="GIB", help="of a GPU; default: the named one's")
    parser.add_argument("--reserved-gib", type=_positive, default=8.0, metavar="GIB", help="kept free (default: 8)")
    parser.add_argument("--efficiency", type=_positive, default=0.4, metavar="SHARE", help="of the peak (default: 0.4)")
    parser.add_argument(
        "--network-gb", type=_positive, default=50.0, metavar="N", help="GB/s a GPU sends to other nodes (default: 50)"
    )
    parser.add_argument("--show", type=positive_int, default=8, metavar="N", help="layouts (default: 8)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Search and print; 0 if a layout fits, 1 if none does. Raises InputError."""
    options = build_parser().parse_intermixed_args(arguments)
    config = load_config(options.config, options.overrides)
    from orthros_train.planning.dry_run import vocabulary  # noqa: PLC0415  imports torch
    from orthros_train.planning.layout_search import Machines, search  # noqa: PLC0415
    from orthros_train.training.device_peaks import known_peak_flops  # noqa: PLC0415

    peak = known_peak_flops(options.gpu)
    assert peak is not None
    if config.precision != "bf16":
        raise InputError("GPUs are planned for precision: bf16, whose peaks are known; set precision=bf16")
    memory, node_speed = GPUS[options.gpu]
    machines = Machines(
        options.nodes,
        options.gpus_per_node,
        options.memory_gib or memory,
        options.reserved_gib,
        peak,
        options.efficiency,
        node_speed,
        options.network_gb,
    )
    model = orthros_config(config, vocabulary(config))
    fitting, others = search(config, model, machines)
    show(config, model, machines, fitting[: options.show], others[:1] if not fitting else [], options.gpu)
    if fitting:
        print(f"{len(fitting)} layouts fit, {len(others)} do not. The first as options:\n  {as_options(fitting[0])}")
    return 0 if fitting else 1


def show(
    config: Config, model: OrthrosConfig, machines: Machines, fitting: list[Plan], nearest: list[Plan], gpu: str
) -> None:
    """Print the run, the layouts and the assumptions."""
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    from orthros_train.model.flops import training_flops  # noqa: PLC0415
    from orthros_train.model.parameter_count import parameter_count  # noqa: PLC0415
    from orthros_train.planning.dry_run import run_notes  # noqa: PLC0415
    from orthros_train.training.disk_space import checkpoint_bytes  # noqa: PLC0415

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 180)
    parameters, train = parameter_count(model).total, config.train
    _, groups, head = model.head_shape
    flops = train.global_batch_size * training_flops(model, [train.sequence_length]).total
    console.print(
        f"{parameters:,} parameters; {flops:.4g} FLOPs a step of {train.global_batch_size * train.sequence_length:,} "
        f"tokens; a checkpoint takes {checkpoint_bytes(parameters) / 2**30:.1f} GiB; in use, the KV cache of a token "
        f"takes {2 * model.num_hidden_layers * groups * head * 2 / 2**10:.0f} KiB in bf16",
        soft_wrap=True,
    )
    plans = fitting or nearest
    if not fitting:
        console.print(f"nothing fits {machines.world_size} x {gpu}; the one that needs least:")
    names = list(dict.fromkeys(part.name for plan in plans for part in plan.parts))
    table = Table(
        title="GiB a GPU, by part, of the stage that needs most", title_justify="left", box=None, pad_edge=False
    )
    for heading in (
        "tensor",
        "pipeline",
        "ZeRO",
        "micro",
        "recompute",
        *names,
        "total",
        "sent GB",
        "bubble",
        "s a step",
    ):
        table.add_column(heading, justify="right")
    for number, plan in enumerate(plans, start=1):
        sizes = {part.name: part.size_bytes / 2**30 for part in plan.parts}
        table.add_row(
            str(number),
            str(plan.options["parallel.tensor"]),
            str(plan.options["parallel.pipeline"]),
            str(plan.options["parallel.zero_stage"]),
            f"{plan.options['train.micro_batch_size']} x {plan.micro_batches}",
            "yes" if plan.options["train.activation_checkpointing"] else "no",
            *(f"{sizes.get(name, 0):.1f}" for name in names),
            f"{plan.memory_gib:.1f}",
            f"{sum(part.size_bytes for part in plan.sent) / 1e9:.1f}",
            f"{plan.bubble:.0%}",
            f"{plan.step_seconds:.2f}",
        )
    console.print(table)
    for number, plan in enumerate(plans, start=1):
        console.print(f"{number}: {plan.reason}", soft_wrap=True)
    console.print(
        f"assumed: {gpu} with {machines.memory_gib:g} GiB of which {machines.reserved_gib:g} stay free, "
        f"{machines.peak_flops / 1e12:g} TFLOP/s at {machines.efficiency:.0%}; {machines.node_gb_per_second:g} GB/s "
        f"a GPU inside a node, {machines.network_gb_per_second:g} GB/s between nodes; half of the data axis's "
        "traffic hides behind compute, the rest does not; tensor parallelism with parallel.sequence, inside a node; "
        f"KV: keys and values of micro rows of {train.sequence_length:,} tokens, of one layer where it recomputes; a "
        "cache in use has those of all layers",
        soft_wrap=True,
    )
    for note in run_notes(config):
        console.print(f"note: {note}", soft_wrap=True, markup=False)


def as_options(plan: Plan) -> str:
    """The layout as key=value arguments of a run."""
    return " ".join(f"{name}={str(value).lower()}" for name, value in plan.options.items())


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
