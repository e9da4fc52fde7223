"""Continue prompts with an Orthros model.

    python tools/generate.py --model DIR --prompt "To be, or not to be"

The decoding itself is transformers' `generate`; this command reads prompts, checks options and prints text.
A prompt is plain text: what looks like a special token in it is not parsed as one.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from evaluation.model_folder import DTYPES, dtype_name, is_out_of_memory, load_folder_tokenizer, load_model
from orthros_train.command_line import CommandParser, int_between, positive_int, run_command, seed, unicode_text
from orthros_train.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from evaluation.text_stream import StopTextStreamer
    from orthros_train.model import OrthrosForCausalLM

DESCRIPTION = """Continue prompts with an Orthros model; prints each prompt with its continuation.

Without --temperature, --top-k or --top-p decoding is greedy (or a beam search with --num-beams).
"""
EXAMPLES = """\
  python tools/generate.py --model outputs/demo/models/orthros-42 --prompt "To be, or not to be"
  python tools/generate.py --model outputs/demo/models/orthros-42 --prompt "ROMEO." --prompt "JULIET." \\
      --temperature 0.8 --top-p 0.95
  python tools/generate.py --model outputs/demo/models/orthros-42 --prompt "HAMLET." --stop "\\n\\n" --stream
  python tools/generate.py --model outputs/demo/models/orthros-42 --prompt "O " --num-beams 4 --num-return-sequences 2
  python tools/generate.py --model outputs/demo/models/orthros-42 < prompt.txt"""


LEAST_TEMPERATURE = 1e-6  # logits divided by less leave the range of fp32


def build_parser() -> CommandParser:
    """The command line."""
    sequences = int_between(1, 1024)  # of one prompt: rows of the batch that is decoded
    parser = CommandParser(DESCRIPTION, EXAMPLES)
    parser.add_argument("--model", required=True, help="Hugging Face folder of an Orthros model, with its tokenizer")
    parser.add_argument(
        "--prompt",
        action="append",
        type=unicode_text,
        metavar="TEXT",
        help="text to continue; may be given several times; '-' reads one prompt from standard input (the default "
        "when no prompt is given)",
    )
    parser.add_argument("--max-new-tokens", type=positive_int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--temperature", type=float, metavar="X", help="sample at this temperature; 0 is greedy")
    parser.add_argument("--top-k", type=positive_int, metavar="K", help="sample from the K most likely tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="sample from the smallest set of probability P")
    parser.add_argument("--num-beams", type=sequences, default=1, metavar="N", help="beam search; default: 1, none")
    parser.add_argument(
        "--num-return-sequences",
        type=sequences,
        default=1,
        metavar="N",
        help="continuations of each prompt; default: 1",
    )
    parser.add_argument("--seed", type=seed, default=42, metavar="N", help="of the sampling; default: 42")
    parser.add_argument(
        "--stop",
        action="append",
        type=unicode_text,
        default=[],
        metavar="STRING",
        help="end before this string, which may span tokens; may be given several times; \\n and \\t are understood",
    )
    parser.add_argument("--stream", action="store_true", help="print the text while it is made")
    parser.add_argument(
        "--dtype", type=dtype_name, choices=DTYPES, default="auto", help="default: auto, the one the model was saved in"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda; default: cpu")
    return parser


def check_options(options: argparse.Namespace) -> None:
    """Raise InputError for values that cannot work, alone or together."""
    if options.temperature and not LEAST_TEMPERATURE <= options.temperature < math.inf:
        raise InputError(
            f"--temperature must be 0 (greedy) or a finite number of at least {LEAST_TEMPERATURE}, got "
            f"{options.temperature}"
        )
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise InputError(f"--top-p must lie in (0, 1], got {options.top_p}")
    if "" in options.stop:
        raise InputError("--stop needs a string that is not empty")
    count = options.num_return_sequences
    if count > 1 and options.num_beams == 1 and not samples(options):
        raise InputError(
            f"greedy decoding has one continuation, not {count}; give --temperature, or --num-beams {count}"
        )
    if 1 < options.num_beams < count:
        raise InputError(f"--num-beams {options.num_beams} cannot return {count} sequences; ask for as many beams")
    if options.stream and (options.num_beams > 1 or count > 1):
        raise InputError(
            "--stream shows one continuation as it grows; it works with neither beams nor several sequences"
        )


def samples(options: argparse.Namespace) -> bool:
    """Whether tokens are drawn rather than chosen."""
    if options.temperature == 0:
        return False
    return any(value is not None for value in (options.temperature, options.top_k, options.top_p))


def read_prompts(options: argparse.Namespace) -> list[str]:
    """The prompts of the command line, with standard input in place of '-'; raises InputError for an empty one."""
    given: list[str] = options.prompt or ["-"]
    if options.prompt is None and sys.stdin.isatty():
        raise InputError("no prompt: give --prompt TEXT, or pipe the text into standard input")
    if given.count("-") > 1:
        raise InputError("standard input is one prompt; give --prompt - once")
    try:
        prompts = [sys.stdin.read().removesuffix("\n") if text == "-" else text for text in given]
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is not UTF-8 text: {error}") from error
    if not all(prompts):
        raise InputError("a prompt is empty; give at least one character")
    return prompts


def generation_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The options in the names of transformers' `generate`."""
    arguments: dict[str, Any] = {
        "max_new_tokens": options.max_new_tokens,
        "num_beams": options.num_beams,
        "num_return_sequences": options.num_return_sequences,
        "do_sample": samples(options),
    }
    if samples(options):
        arguments["temperature"] = 1.0 if options.temperature is None else options.temperature
        arguments["top_k"] = 0 if options.top_k is None else options.top_k
        arguments["top_p"] = 1.0 if options.top_p is None else options.top_p
    return arguments


def encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], room: int) -> Any:
    """Left-padded ids and mask of a batch of prompts; raises InputError when one is longer than `room` tokens."""
    if room < 1:
        raise InputError("--max-new-tokens alone fills the model's positions; ask for fewer")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    batch = tokenizer(list(prompts), return_tensors="pt", padding=True, padding_side="left", split_special_tokens=True)
    longest = int(batch["attention_mask"].sum(dim=1).max())
    if longest == 0:
        raise InputError("a prompt has no token in this model's vocabulary")
    if longest > room:
        raise InputError(
            f"a prompt of {longest} tokens leaves no room for --max-new-tokens within the model's positions; "
            f"at most {room} prompt tokens fit"
        )
    return batch


def continuations(
    model: OrthrosForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    options: argparse.Namespace,
    streamer: StopTextStreamer | None = None,
) -> list[str]:
    """Text after each prompt, `num_return_sequences` of each in turn, cut before the first stop string."""
    batch = encode(tokenizer, prompts, model.config.max_position_embeddings - options.max_new_tokens)
    stops = [text.replace("\\n", "\n").replace("\\t", "\t") for text in options.stop]
    try:
        output = model.generate(
            **{name: batch[name].to(model.device) for name in ("input_ids", "attention_mask")},
            **generation_arguments(options),
            **({"stop_strings": stops, "tokenizer": tokenizer} if stops else {}),
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            streamer=streamer,
        )
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise InputError(
            f"{model.device} has too little memory for this; ask for fewer prompts, --num-beams or --max-new-tokens"
        ) from error
    width = batch["input_ids"].shape[1]
    texts = tokenizer.batch_decode(output[:, width:], skip_special_tokens=True)
    from evaluation.text_stream import cut_at_stop  # noqa: PLC0415 (imports transformers)

    return [cut_at_stop(text, stops)[0] for text in texts]


def print_streamed(
    model: OrthrosForCausalLM, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], options: argparse.Namespace
) -> None:
    """Print the prompts one after another, each continuation as it grows."""
    from evaluation.text_stream import StopTextStreamer  # noqa: PLC0415 (imports transformers)

    stops = [text.replace("\\n", "\n").replace("\\t", "\t") for text in options.stop]
    for number, prompt in enumerate(prompts, start=1):
        if len(prompts) > 1:
            print(f"=== prompt {number} ===")
        print(prompt, end="", flush=True)
        continuations(model, tokenizer, [prompt], options, StopTextStreamer(tokenizer, stops))
        print()


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = build_parser().parse_args(arguments)
    check_options(options)
    prompts = read_prompts(options)
    tokenizer = load_folder_tokenizer(options.model)
    model = load_model(options.model, dtype=options.dtype, device=options.device)
    import torch  # noqa: PLC0415

    torch.manual_seed(options.seed)
    if options.stream:
        print_streamed(model, tokenizer, prompts, options)
        return 0
    texts = continuations(model, tokenizer, prompts, options)
    count = options.num_return_sequences
    for index, text in enumerate(texts):
        if len(texts) > 1:
            sample = f", sample {index % count + 1}" if count > 1 else ""
            print(f"=== prompt {index // count + 1}{sample} ===")
        print(prompts[index // count] + text)
    return 0


if __name__ == "__main__":
    run_command(main)
