"""How fast is preprocessing, beside a plain loop over the same tokenizer?

Makes text of random words, trains a BPE tokenizer on a part of it (or takes --tokenizer), and encodes it three ways: a
plain loop that keeps the ids in memory, tools/preprocess_data.py in one process, and the same under mpirun. Counted are
tokens a second of CPU time of all processes together, which hardly depends on what else the machine does, and of wall
time; the ways take turns, and medians count.
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
from orthros_train.command_line import CommandParser, positive_int, run_command
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
tokenizer = load_tokenizer(tokenizer_section(sys.argv[2], None))
tokens = 0
for line in open(sys.argv[1], encoding="utf-8"):
    tokens += len(tokenizer.encode(json.loads(line)["text"])) + 1
print(tokens)
"""


@dataclass(frozen=True)
class Way:
    """A way to encode the text: what to run, in how many processes, and where the number of tokens is then found."""

    name: str
    processes: int
    command: Sequence[str]
    tokens: Callable[[str], int]  # of what the command prints


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    parser.add_argument("--output", required=True, type=Path, metavar="FILE.json", help="where the results go")
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="as in tools/preprocess_data.py; default: a BPE trained here"
    )
    parser.add_argument("--megabytes", type=positive_int, default=32, metavar="N", help="of text (default: 32)")
    parser.add_argument("--ranks", type=positive_int, default=2, metavar="N", help="under mpirun (default: 2)")
    parser.add_argument("--repeats", type=positive_int, default=3, metavar="N", help="timed rounds (default: 3)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = build_parser().parse_args(arguments)
    result = Result("preprocessing speed", options)
    with tempfile.TemporaryDirectory() as folder:
        text = write_text(Path(folder) / "text.jsonl", options.megabytes)
        tokenizer = options.tokenizer or train_tokenizer(Path(folder), text)
        records = measure(ways(text, tokenizer, Path(folder), options.ranks), options.repeats)
        if not same_corpus(Path(folder) / "one", Path(folder) / "many"):
            raise InputError("one process and several wrote different corpora")
    result.write(records)
    return 0


def write_text(file: Path, megabytes: int) -> Path:
    """JSON lines of random pronounceable words, some frequent and many rare, the same each time."""
    source = random.Random(0)
    syllables = [consonant + vowel for consonant in "bcdfghklmnprstvw" for vowel in "aeiou"]
    words = ["".join(source.choices(syllables, k=source.randint(1, 4))) for _ in range(20000)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    with file.open("w", encoding="utf-8") as stream:
        while stream.tell() < megabytes * 2**20:
            stream.write(
                json.dumps({"text": " ".join(source.choices(words, weights, k=source.randint(50, 800)))}) + "\n"
            )
    return file


def train_tokenizer(folder: Path, text: Path) -> str:
    """A BPE tokenizer of VOCABULARY ids, trained on the first MiB; its folder."""
    sample = folder / "sample.jsonl"
    sample.write_bytes(text.read_bytes()[: 2**20].rpartition(b"\n")[0] + b"\n")
    output = folder / "bpe"
    command = [
        "tools/train_tokenizer.py",
        "--input",
        str(sample),
        "--vocab-size",
        str(VOCABULARY),
        "--output",
        str(output),
    ]
    run([sys.executable, *command])
    return str(output)


def ways(text: Path, tokenizer: str, folder: Path, ranks: int) -> list[Way]:
    """All three ways."""
    tool = [
        *(sys.executable, "tools/preprocess_data.py", "--overwrite"),
        *("--input", str(text), "--tokenizer", tokenizer, "--output-prefix"),
    ]
    mpirun = [str(Path(sys.executable).parent / "mpirun"), "--oversubscribe", "-n", str(ranks)]
    loop = [sys.executable, "-c", PLAIN_LOOP, str(text), tokenizer]
    one, many = folder / "one", folder / "many"
    return [
        Way("plain loop", 1, loop, int),
        Way("preprocess_data.py", 1, [*tool, str(one), "--workers", "1"], lambda _: _tokens(one)),
        Way("preprocess_data.py under mpirun", ranks, [*mpirun, *tool, str(many)], lambda _: _tokens(many)),
    ]


def measure(ways: Sequence[Way], repeats: int) -> list[Record]:
    """One record a way.

    Raises:
        InputError: a command failed, or the ways do not agree on the number of tokens.
    """
    seconds: dict[str, list[float]] = {way.name: [] for way in ways}
    processor: dict[str, list[float]] = {way.name: [] for way in ways}
    tokens: dict[str, int] = {}
    with counted_calls("preprocessing", repeats * len(ways)) as on_call:
        for _ in range(repeats):
            for way in ways:
                on_call(way.name)
                before = resource.getrusage(resource.RUSAGE_CHILDREN)
                start = time.perf_counter()
                printed = run(way.command)
                seconds[way.name].append(time.perf_counter() - start)
                after = resource.getrusage(resource.RUSAGE_CHILDREN)
                used = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime  # children included
                processor[way.name].append(used)
                tokens[way.name] = way.tokens(printed)
    if len(set(tokens.values())) != 1:
        raise InputError(f"the ways do not agree on the number of tokens: {tokens}")
    records = []
    for way in ways:
        record = timed(f"{way.name}, {way.processes} process{'es' * (way.processes > 1)}", seconds[way.name])
        record |= {"tokens": tokens[way.name], "all_processor_seconds": processor[way.name]}
        record["processor_seconds"] = statistics.median(processor[way.name])
        record["tokens_per_second"] = record["tokens"] / record["seconds"]
        record["tokens_per_processor_second"] = record["tokens"] / record["processor_seconds"]
        records.append(record)
    return records


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
