"""Turn a Llama, Mistral, Qwen2 or Qwen3 folder into an Orthros folder, or an Orthros folder back.

Every weight keeps its bits. The query affines start as the identity, so the result equals its source on texts that fit
the base window; what happens beyond it is what training on top is for. Memory holds about one shard of the output,
which appears only when it is complete.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from orthros_train.command_line import CommandParser, count, counted, positive_int, run_command
from orthros_train.errors import InputError

EXAMPLES = """\
  python tools/convert_llama.py --input models/Llama-3.2-1B --output models/orthros-1b --base-window 512
  python tools/convert_llama.py --input models/Mistral-7B-v0.1 --output models/orthros-7b --base-window 1024 \\
      --base-sinks 4 --widen-output-window
  python tools/convert_llama.py --input models/Qwen2.5-0.5B --output models/qwen-arm --architecture transformer
  python tools/convert_llama.py --to llama --input models/orthros-1b --output models/llama-again"""

TO_ORTHROS_ONLY = ("base_window", "base_sinks", "architecture", "widen_output_window", "allow_pickle")
TO_LLAMA_ONLY = ("drop_affines",)


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    parser.add_argument("--input", required=True, metavar="DIR", help="Hugging Face folder to read")
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to create")
    parser.add_argument("--to", choices=("orthros", "llama"), default="orthros", help="default: orthros")
    parser.add_argument(
        "--max-shard-size", default="5GB", metavar="SIZE", help="of an output file, such as 500MB (default: 5GB)"
    )
    group = parser.add_argument_group("to orthros")
    group.add_argument(
        "--base-window", type=positive_int, metavar="W", help="tokens that a base token sees, itself included"
    )
    group.add_argument(
        "--base-sinks",
        type=count,
        metavar="S",
        help="first tokens of a text that every base token sees (default: 1; pretrained models lean on the first "
        "token, and a window alone would take it away)",
    )
    group.add_argument(
        "--architecture",
        choices=("orthros", "transformer"),
        help="transformer: the source itself under the same code, as the arm to compare with (default: orthros)",
    )
    group.add_argument(
        "--widen-output-window",
        action="store_true",
        default=None,
        help="convert a source with a sliding window; it is equalled only on texts that fit that window",
    )
    group.add_argument(
        "--allow-pickle",
        action="store_true",
        default=None,
        help="read pytorch_model.bin files where there is no safetensors file; nothing but tensors is loaded",
    )
    group = parser.add_argument_group("to llama")
    group.add_argument(
        "--drop-affines",
        action="store_true",
        default=None,
        help="leave out query affines that were trained, which changes the model",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert and report. Raises InputError on bad input."""
    options = build_parser().parse_args(arguments)
    _refuse_idle_options(options)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        return _to_llama(options) if options.to == "llama" else _to_orthros(options)
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return 130


def _to_orthros(options: argparse.Namespace) -> int:
    from orthros_train.conversion.from_llama import OrthrosForm, to_orthros  # noqa: PLC0415  slow; not for --help

    form = OrthrosForm(
        base_window=options.base_window,
        base_sinks=options.base_sinks,
        architecture=options.architecture or "orthros",
        widen_output_window=bool(options.widen_output_window),
    )
    written = to_orthros(
        options.input,
        options.output,
        form,
        allow_pickle=bool(options.allow_pickle),
        max_shard_size=options.max_shard_size,
    )
    if written.source_window is not None:
        print(
            f"note: the source attends in a sliding window, so it is equalled only on texts of at most "
            f"{written.source_window} tokens",
            file=sys.stderr,
        )
    _report(written.folder, written.parameters, written.files)
    return 0


def _to_llama(options: argparse.Namespace) -> int:
    from orthros_train.conversion.to_llama import to_llama  # noqa: PLC0415  slow; not for --help

    written = to_llama(
        options.input, options.output, drop_affines=bool(options.drop_affines), max_shard_size=options.max_shard_size
    )
    if written.dropped_deviation:
        print(
            f"warning: dropped query affines that were up to {written.dropped_deviation:.3g} away from the identity; "
            "the result is another model than its source",
            file=sys.stderr,
        )
    _report(written.folder, written.parameters, written.files)
    return 0


def _report(folder: object, parameters: int, files: int) -> None:
    print(f"wrote {folder}: {counted(parameters, 'parameter')} in {counted(files, 'file')}")


def _refuse_idle_options(options: argparse.Namespace) -> None:
    """Raise InputError for an option that the chosen direction would not read."""
    for name in TO_ORTHROS_ONLY if options.to == "llama" else TO_LLAMA_ONLY:
        if getattr(options, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} has no meaning with --to {options.to}; leave it out")


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
