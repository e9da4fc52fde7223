"""Turn raw text into a corpus that training reads: PREFIX.bin, PREFIX.idx and PREFIX.manifest.json.

Every document is encoded and followed by the end-of-document token. The output does not depend on --workers, and an
interrupted run leaves nothing that looks complete.
"""

from __future__ import annotations

import signal
import sys
import time
from types import FrameType

from orthros_train.command_line import CommandParser, counted, int_between, run_command
from orthros_train.data.command_line import add_input_arguments, available_cpus, input_sources, tokenizer_section
from orthros_train.data.multi_rank import mpi_world, preprocess_on_ranks
from orthros_train.data.preprocessing import preprocess
from orthros_train.errors import InputError

MOST_WORKERS = 1024
EXAMPLES = """\
  python tools/preprocess_data.py --input books/ --tokenizer byte --output-prefix data/books
  python tools/preprocess_data.py --input web-*.jsonl.zst --text-key content --tokenizer models/llama \\
      --output-prefix data/web --workers 16
  python tools/preprocess_data.py --input stories.txt --document-separator '<|endoftext|>' \\
      --tokenizer tokenizers/stories.model --output-prefix data/stories
  python tools/preprocess_data.py --dataset Salesforce/wikitext --dataset-config wikitext-103-raw-v1 \\
      --tokenizer tokenizers/bpe --output-prefix data/wikitext
  mpirun -n 64 --hostfile hosts python tools/preprocess_data.py --input web/ --tokenizer models/llama \\
      --output-prefix data/web     # also srun --mpi=pmix; the same bytes, and started again it goes on"""


def build_parser() -> CommandParser:
    parser = CommandParser(__doc__ or "", EXAMPLES)
    add_input_arguments(parser)
    parser.add_argument(
        "--tokenizer", required=True, metavar="NAME", help="byte, a SentencePiece .model file, or a Hugging Face folder"
    )
    parser.add_argument(
        "--tokenizer-type",
        choices=["byte", "sentencepiece", "huggingface"],
        help="default: told from --tokenizer (byte; *.model is sentencepiece; else huggingface)",
    )
    parser.add_argument("--output-prefix", required=True, metavar="PREFIX", help="of the three files; folders are made")
    parser.add_argument(
        "--workers",
        type=int_between(1, MOST_WORKERS),
        metavar="N",
        help="processes (default: one a CPU; under mpirun and srun one a rank)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a corpus that is there")
    return parser


def main() -> int:
    arguments = build_parser().parse_args()
    start = time.monotonic()
    signal.signal(signal.SIGTERM, _interrupt)
    world = mpi_world()
    section = tokenizer_section(arguments.tokenizer, arguments.tokenizer_type)
    try:
        if world is None:
            manifest = preprocess(
                input_sources(arguments),
                section,
                arguments.output_prefix,
                workers=arguments.workers or min(available_cpus(), MOST_WORKERS),
                text_key=arguments.text_key,
                overwrite=arguments.overwrite,
            )
        else:
            manifest = preprocess_on_ranks(
                world,
                lambda: input_sources(arguments),
                section,
                arguments.output_prefix,
                reading={"document separator": arguments.document_separator},
                workers=arguments.workers or 1,
                text_key=arguments.text_key,
                overwrite=arguments.overwrite,
            )
    except KeyboardInterrupt:
        if world is not None:
            print("interrupted: no corpus was written, the same command goes on from here", file=sys.stderr, flush=True)
            world.Abort(130)
        print("interrupted: nothing was written", file=sys.stderr)
        return 130
    except InputError:
        if world is not None and world.rank != 0:
            return 2  # the first rank reports it
        raise
    if world is not None and world.rank != 0:
        return 0
    seconds = time.monotonic() - start
    made = f"{counted(manifest.documents, 'document')} ({manifest.blank_documents_dropped:,} blank ones dropped)"
    size = f"{counted(manifest.tokens, 'token')} of {counted(manifest.text_bytes, 'byte')} of text"
    print(f"wrote {arguments.output_prefix}: {made}, {size}, {seconds:.1f} s")
    return 0


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    run_command(main)
