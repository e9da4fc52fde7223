"""How fast is preprocessing, beside a plain loop over the same tokenizer?

Makes text of random words, trains a BPE tokenizer on a part of it (or takes --tokenizer), and encodes it three ways: a
plain loop that keeps the ids in memory, tools/preprocess_data.py in one process, and the same under mpirun. Counted are
tokens a second of processor time of all processes together, which hardly depends on what else the machine does, and of
wall time. The first MiB is also encoded on its own; rates are over the rest, so that the seconds which a program needs
to start, shown beside them, do not weigh more the shorter the text. The ways take turns, and medians count.
"""

from __future__ import annotations

import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.benchmarking.result import Record, Result, counted_calls, timed
from orthros_train.command_line import CommandParser, int_between, positive_int, run_command
from orthros_train.errors import InputError

EXAMPLES = """\
  python benchmarks/preprocessing_speed.py --output outputs/benchmarks/preprocessing_speed.json
  python benchmarks/preprocessing_speed.py --output outputs/benchmarks/llama.json --tokenizer models/llama --ranks 4"""
ROOT = Path(__file__).parents[1]
VOCABULARY = 8000
PLAIN_LOOP = """
import json, sys
from orthros_train.data.command_line import tokenizer_section
from orthros_train.data.tokenizers import load_tokenizer
tokenizer = load_tokenizer(tokenizer_section(sys.argv[1], None))
tokens = 0
for line in (line for file in sys.argv[2:] for line in open(file, encoding="utf-8")):
    tokens += len(tokenizer.encode(json.loads(line)["text"])) + 1
print(tokens)
"""


@dataclass(frozen=True)
class Way:
    """A way to encode a text: what to run, in how many processes, and where the number of tokens is then found."""

    name: str
    processes: int
    command: Callable[[Sequence[Path]], Sequence[str]]  # of the text's files
    tokens: Callable[[str], int]  # of what the command prints


@dataclass(frozen=True)
class Run:
    """What encoding a text took, and how many tokens it gave."""

    tokens: int
    seconds: float  # wall time
    processor_seconds: float  # of all processes


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    parser.add_argument("--output", required=True, type=Path, metavar="FILE.json", help="where the results go")
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="as in tools/preprocess_data.py; default: a BPE trained here"
    )
    parser.add_argument(
        "--megabytes", type=int_between(2, 2**20), default=64, metavar="N", help="of text (default: 64)"
    )
    parser.add_argument("--ranks", type=positive_int, default=2, metavar="N", help="under mpirun (default: 2)")
    parser.add_argument("--repeats", type=positive_int, default=3, metavar="N", help="timed rounds (default: 3)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = build_parser().parse_args(arguments)
    result = Result("preprocessing speed", options)
    with tempfile.TemporaryDirectory() as folder:
        text = write_text(Path(folder), options.megabytes, 4 * options.ranks)
        start = first_mebibyte(text[0])
        tokenizer = options.tokenizer or train_tokenizer(Path(folder), start)
        records = measure(ways(tokenizer, Path(folder), options.ranks), [start], text, options.repeats)
        if not same_corpus(Path(folder) / "one", Path(folder) / "many"):
            raise InputError("one process and several wrote different corpora")
    result.write(records)
    return 0


def write_text(folder: Path, megabytes: int, files: int) -> list[Path]:
    """Files of JSON lines of random pronounceable words, some frequent and many rare, the same each time."""
    source = random.Random(0)
    syllables = [consonant + vowel for consonant in "bcdfghklmnprstvw" for vowel in "aeiou"]
    words = ["".join(source.choices(syllables, k=source.randint(1, 4))) for _ in range(20000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    written = [folder / f"text-{number}.jsonl" for number in range(files)]
    for file in written:
        with file.open("w", encoding="utf-8") as stream:
            while stream.tell() < megabytes * 2**20 / files:
                text = " ".join(source.choices(words, weights, k=source.randint(50, 800)))
                stream.write(json.dumps({"text": text}) + "\n")
    return written


def first_mebibyte(text: Path) -> Path:
    """The first MiB of `text`, to the last whole line, as a file beside it."""
    file = text.with_name("start.jsonl")
    with text.open("rb") as stream:
        file.write_bytes(stream.read(2**20).rpartition(b"\n")[0] + b"\n")
    return file


def train_tokenizer(folder: Path, text: Path) -> str:
    """A BPE tokenizer of VOCABULARY ids, trained on `text`; its folder."""
    output = folder / "bpe"
    options = ["--input", str(text), "--vocab-size", str(VOCABULARY), "--output", str(output)]
    run([sys.executable, "tools/train_tokenizer.py", *options])
    return str(output)


def ways(tokenizer: str, folder: Path, ranks: int) -> list[Way]:
    """All three ways."""
    tool = [sys.executable, "tools/preprocess_data.py", "--overwrite", "--tokenizer", tokenizer]
    mpirun = [str(Path(sys.executable).parent / "mpirun"), "--oversubscribe", "-n", str(ranks)]
    one, many = folder / "one", folder / "many"

    def plain_loop(text: Sequence[Path]) -> list[str]:
        return [sys.executable, "-c", PLAIN_LOOP, tokenizer, *map(str, text)]

    def one_process(text: Sequence[Path]) -> list[str]:
        return [*tool, "--input", *map(str, text), "--output-prefix", str(one), "--workers", "1"]

    def under_mpirun(text: Sequence[Path]) -> list[str]:
        return [*mpirun, *tool, "--input", *map(str, text), "--output-prefix", str(many)]

    return [
        Way("plain loop", 1, plain_loop, int),
        Way("preprocess_data.py", 1, one_process, lambda _: _tokens(one)),
        Way("preprocess_data.py under mpirun", ranks, under_mpirun, lambda _: _tokens(many)),
    ]


def measure(ways: Sequence[Way], start: Sequence[Path], text: Sequence[Path], repeats: int) -> list[Record]:
    """One record a way; `start` is the beginning of `text`.

    Raises:
        InputError: a command failed, or the ways do not agree on the number of tokens.
    """
    runs: dict[str, list[tuple[Run, Run]]] = {way.name: [] for way in ways}
    with counted_calls("preprocessing", repeats * len(ways)) as on_call:
        for _ in range(repeats):
            for way in ways:
                on_call(way.name)
                runs[way.name].append((encode(way, start), encode(way, text)))
    tokens = {name: done[-1][1].tokens for name, done in runs.items()}
    if len(set(tokens.values())) != 1:
        raise InputError(f"the ways do not agree on the number of tokens: {tokens}")
    records = []
    for way in ways:
        done = runs[way.name]
        record = timed(
            f"{way.name}, {way.processes} process{'es' * (way.processes > 1)}", [run.seconds for _, run in done]
        )
        rest = [(whole.tokens - first.tokens, first, whole) for first, whole in done]
        record |= {
            "tokens": tokens[way.name],
            "all_processor_seconds": [whole.processor_seconds for _, whole in done],
            "processor_seconds": statistics.median(whole.processor_seconds for _, whole in done),
            "start_up_processor_seconds": statistics.median(first.processor_seconds for first, _ in done),
            "tokens_per_second": statistics.median(n / (whole.seconds - first.seconds) for n, first, whole in rest),
            "tokens_per_processor_second": statistics.median(
                n / (whole.processor_seconds - first.processor_seconds) for n, first, whole in rest
            ),
        }
        records.append(record)
    for record in records:
        record["processor_speedup"] = record["tokens_per_processor_second"] / records[0]["tokens_per_processor_second"]
    return records


def encode(way: Way, text: Sequence[Path]) -> Run:
    """Encode `text` that way."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    printed = run(way.command(text))
    seconds, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime  # their children included
    return Run(way.tokens(printed), seconds, processor)


def same_corpus(one: Path, other: Path) -> bool:
    """Whether two prefixes hold the same tokens."""
    return one.with_name(f"{one.name}.bin").read_bytes() == other.with_name(f"{other.name}.bin").read_bytes()


def run(command: Sequence[str]) -> str:
    """What a command prints. Raises InputError if it fails."""
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **allow}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise InputError(f"{' '.join(command)} failed: {done.stderr[-500:]}")
    return done.stdout


def _tokens(prefix: Path) -> int:
    manifest = json.loads(prefix.with_name(f"{prefix.name}.manifest.json").read_text(encoding="utf-8"))
    return int(manifest["tokens"])


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
