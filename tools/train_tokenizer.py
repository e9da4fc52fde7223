"""Train a tokenizer on raw text: byte-level BPE (a Hugging Face folder) or a SentencePiece model.

The output appears only when it is complete. Give it to tools/preprocess_data.py --tokenizer, and to a run as
tokenizer.type (huggingface or sentencepiece) and tokenizer.path.
"""

from __future__ import annotations

import signal
from pathlib import Path

from orthros_train.command_line import CommandParser, int_between, positive_int, run_command
from orthros_train.data.command_line import add_input_arguments, input_sources
from orthros_train.data.tokenizer_training import train_tokenizer

MOST_IDS = 2**22  # the trainers reserve memory for all at once
EXAMPLES = """\
  python tools/train_tokenizer.py --input books/ --vocab-size 32000 --output tokenizers/bpe
  python tools/train_tokenizer.py --input web-*.jsonl.zst --algorithm sentencepiece-unigram --vocab-size 32000 \\
      --max-text-mib 2048 --output tokenizers/web.model"""


def build_parser() -> CommandParser:
    parser = CommandParser(__doc__ or "", EXAMPLES)
    add_input_arguments(parser)
    parser.add_argument(
        "--algorithm",
        choices=["bpe", "sentencepiece-bpe", "sentencepiece-unigram"],
        default="bpe",
        help="bpe: byte-level, as a Hugging Face folder; sentencepiece-*: a .model file (default: bpe)",
    )
    parser.add_argument(
        "--vocab-size", type=int_between(1, MOST_IDS), required=True, metavar="N", help="ids, special tokens included"
    )
    parser.add_argument("--output", type=Path, required=True, metavar="PATH", help="a folder, or a file PATH.model")
    parser.add_argument(
        "--max-text-mib", type=positive_int, metavar="N", help="train on the first N MiB of text (default: all)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a tokenizer that is there")
    return parser


def main() -> int:
    arguments = build_parser().parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the training libraries do not return to Python to be interrupted
    size = train_tokenizer(
        input_sources(arguments),
        arguments.algorithm,
        arguments.vocab_size,
        arguments.output,
        text_key=arguments.text_key,
        max_text_bytes=None if arguments.max_text_mib is None else arguments.max_text_mib << 20,
        overwrite=arguments.overwrite,
    )
    fewer = "" if size == arguments.vocab_size else f" (not {arguments.vocab_size}: the text holds no more pairs)"
    print(f"wrote {arguments.output}: {size} ids{fewer}")
    return 0


if __name__ == "__main__":
    run_command(main)
