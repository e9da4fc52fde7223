"""How fast are a training checkpoint's save and load, beside torch.save and safetensors with the same bytes?

One rank, AdamW's state after one step. Ours writes, hashes and syncs every file and renames the folder into place; a
load verifies every hash before it fills the engine's tensors. The others write one file and sync it; their load copies
the tensors into place, too, and verifies nothing. All go to the same disk and take turns; medians count. What was just
written is read back from the page cache.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evaluation.benchmarking.result import Record, Result, counted_calls, timed
from orthros_train.command_line import CommandParser, positive_int, run_command
from orthros_train.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from orthros_train.training.engine import TrainingEngine

EXAMPLES = """\
  python benchmarks/checkpoint.py --output outputs/benchmarks/checkpoint.json
  python benchmarks/checkpoint.py --output big.json --folder /scratch --heads 16 --layers 24"""
MEGABYTE = 10**6
HEAD_DIM, TOKENS = 64, 16


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--folder", type=Path, help="on the disk to measure; default: that of --output")
    parser.add_argument("--heads", type=positive_int, default=8, help="of 64 channels; default: 8, 512 wide")
    parser.add_argument("--layers", type=positive_int, default=4, help="default: 4")
    parser.add_argument("--vocabulary", type=positive_int, default=32000, help="default: 32000")
    parser.add_argument("--threads", type=positive_int, default=1, help="CPU threads; default: 1")
    parser.add_argument("--repeats", type=positive_int, default=3, help="timed rounds; default: 3")
    return parser


def trained_engine(options: argparse.Namespace) -> TrainingEngine:
    """An engine of one rank after one step, so that it has moments."""
    import torch  # noqa: PLC0415

    from orthros_train.config import Config, orthros_config  # noqa: PLC0415
    from orthros_train.model import OrthrosForCausalLM  # noqa: PLC0415
    from orthros_train.parallel.mesh import Mesh  # noqa: PLC0415
    from orthros_train.training.engines import build_engine  # noqa: PLC0415
    from orthros_train.training.ranks import start_ranks  # noqa: PLC0415

    torch.set_num_threads(options.threads)
    config = Config.model_validate(
        {
            "output_dir": "unused",
            "precision": "fp32",
            "model": {
                "hidden_size": HEAD_DIM * options.heads,
                "intermediate_size": 8 * HEAD_DIM * options.heads // 3,
                "num_hidden_layers": options.layers,
                "num_attention_heads": options.heads,
                "base_window": 8,
            },
            "train": {"steps": 1, "micro_batch_size": 1, "global_batch_size": 1, "sequence_length": TOKENS},
        }
    )
    model = OrthrosForCausalLM(orthros_config(config, options.vocabulary))
    engine = build_engine(model, config, start_ranks(60), Mesh(), 1)
    ids = torch.arange(TOKENS)[None] % options.vocabulary
    engine.step([{"input_ids": ids, "shift_labels": ids}], TOKENS, 1e-3)
    return engine


def calls(engine: TrainingEngine, folder: Path) -> dict[str, Callable[[], None]]:
    """Save and load in each format, each load after its save."""
    import torch  # noqa: PLC0415
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    from orthros_train.training.checkpoints import choose_checkpoint, save_checkpoint  # noqa: PLC0415
    from orthros_train.training.manifest import Layout, Manifest, Progress  # noqa: PLC0415
    from orthros_train.training.run_folder import now  # noqa: PLC0415
    from orthros_train.training.state_files import load_state  # noqa: PLC0415

    ours, pickled, tensors = folder / "checkpoints", folder / "state.pt", folder / "state.safetensors"
    ours.mkdir()
    copies = {
        name: view.detach().cpu().clone() for name, view in state(engine).items()
    }  # a view drags its storage along
    manifest = Manifest(Progress(step=1, updates=1), Layout(1, engine.zero_stage, 1, 1, "fp32"), {}, {}, {}, now())

    def save() -> None:
        save_checkpoint(engine, ours, manifest, lambda _: None, keep_last=1)

    def load() -> None:
        choice = choose_checkpoint(ours, engine.ranks)
        assert choice is not None
        load_state(engine, choice.path, choice.manifest)

    def torch_save() -> None:
        torch.save(copies, pickled)
        sync(pickled)

    def save_safetensors() -> None:
        save_file(copies, tensors)
        sync(tensors)

    return {
        "ours, save": save,
        "torch.save": torch_save,
        "safetensors, save": save_safetensors,
        "ours, verify and load": load,
        "torch.load": lambda: fill(engine, torch.load(pickled, weights_only=True)),
        "safetensors, load": lambda: fill(engine, load_file(tensors)),
    }


def state(engine: TrainingEngine) -> dict[str, Tensor]:
    """Every state of every parameter, by NAME|STATE: views of the live tensors."""
    from orthros_train.training.state_pieces import state_pieces  # noqa: PLC0415

    return {f"{piece.name}|{kind}": view for piece in state_pieces(engine) for kind, view in piece.states.items()}


def fill(engine: TrainingEngine, tensors: dict[str, Tensor]) -> None:
    """Copy loaded tensors into the live ones."""
    for name, view in state(engine).items():
        view.copy_(tensors[name])


def sync(path: Path) -> None:
    """Have a file on the disk, as ours is."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def measure(options: argparse.Namespace, folder: Path) -> list[Record]:
    """One record a way to save and a way to load."""
    from evaluation.arm_times import interleaved  # noqa: PLC0415

    engine = trained_engine(options)
    ways = calls(engine, folder)
    megabytes = sum(view.nbytes for view in state(engine).values()) / MEGABYTE
    with counted_calls("checkpoint", len(ways) * (options.repeats + 1)) as on_call:
        found = interleaved(ways, options.repeats, on_call)
    records = []
    for way, seconds in found.items():
        record = timed(way, seconds, megabytes=megabytes)
        records.append({**record, "megabytes_per_second": megabytes / record["seconds"]})
    return records


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = build_parser().parse_args(sys.argv[1:] if arguments is None else list(arguments))
    if options.folder is not None and not options.folder.is_dir():
        raise InputError(f"--folder {options.folder} is not a folder")
    result = Result("checkpoint", options, apart=["folder"])
    with tempfile.TemporaryDirectory(dir=options.folder or options.output.parent, prefix=".checkpoint_") as folder:
        records = measure(options, Path(folder))
    result.write(records, [f"{records[0]['megabytes']:,.0f} MB of master weights and moments"])
    return 0


if __name__ == "__main__":
    run_command(main)
