"""Turn a training checkpoint into a Hugging Face folder: config.json, safetensors weights, tokenizer.

The weights are the fp32 master weights of the run, cast to --dtype. The output folder appears only when it is complete.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from orthros_train.command_line import CommandParser, run_command

EXAMPLES = """\
  python tools/export_hf.py --checkpoint outputs/run --output models/run
  python tools/export_hf.py --checkpoint outputs/run/checkpoints/step_00000020 --output models/step20 --dtype bf16"""


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="a step_* folder, or a run's folder: then its newest checkpoint is taken",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="the folder to create")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), default="fp32", help="of the weights (default: fp32, as trained)"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Export and report where. Raises InputError on bad input."""
    options = build_parser().parse_args(arguments)
    from orthros_train.conversion.from_checkpoint import export_hf  # noqa: PLC0415  slow to import, and not needed for --help

    print(f"wrote {export_hf(options.checkpoint, options.output, options.dtype)}")
    return 0


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
