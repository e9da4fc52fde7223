"""How fast is preprocessing, beside a plain loop over the same tokenizer?

Makes text of random words, trains a BPE tokenizer on a part of it (or takes --tokenizer), and encodes it three ways: a
plain loop that keeps the ids in memory, tools/preprocess_data.py in one process, and the same under mpirun. Counted are
tokens a second of CPU time of all processes together, which hardly depends on what else the machine does, and of wall
time.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.benchmarking.result import Record, Result
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
class Timing:
    """One way, measured."""

    way: str
    processes: int
    tokens: int
    wall_seconds: float
    cpu_seconds: float

    def record(self) -> Record:
        """For the result."""
        return {
            "case": f"{self.way}, {self.processes} process{'es' * (self.processes > 1)}",
            "tokens": self.tokens,
            "seconds": self.wall_seconds,
            "processor_seconds": self.cpu_seconds,
            "tokens_per_second": self.tokens / self.wall_seconds,
            "tokens_per_processor_second": self.tokens / self.cpu_seconds,
        }


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    parser.add_argument("--output", required=True, type=Path, metavar="FILE.json", help="where the results go")
    parser.add_argument(
        "--tokenizer", metavar="NAME", help="as in tools/preprocess_data.py; default: a BPE trained here"
    )
    parser.add_argument("--megabytes", type=positive_int, default=32, metavar="N", help="of text (default: 32)")
    parser.add_argument("--ranks", type=positive_int, default=2, metavar="N", help="under mpirun (default: 2)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = build_parser().parse_args(arguments)
    result = Result("preprocessing speed", options)
    with tempfile.TemporaryDirectory() as folder:
        text = write_text(Path(folder) / "text.jsonl", options.megabytes)
        tokenizer = options.tokenizer or train_tokenizer(Path(folder), text)
        timings = measure(text, tokenizer, Path(folder), options.ranks)
    result.write([timing.record() for timing in timings])
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


def measure(text: Path, tokenizer: str, folder: Path, ranks: int) -> list[Timing]:
    """All three ways; they must agree on the number of tokens."""
    tool = [
        sys.executable,
        "tools/preprocess_data.py",
        "--input",
        str(text),
        "--tokenizer",
        tokenizer,
        "--output-prefix",
    ]
    mpirun = [str(Path(sys.executable).parent / "mpirun"), "--oversubscribe", "-n", str(ranks)]
    loop = [sys.executable, "-c", PLAIN_LOOP, str(text), tokenizer]
    one, many = folder / "one", folder / "many"
    timings = [
        timed("plain loop", 1, loop, int),
        timed("preprocess_data.py", 1, [*tool, str(one), "--workers", "1"], lambda _: _tokens(one)),
        timed("preprocess_data.py under mpirun", ranks, [*mpirun, *tool, str(many)], lambda _: _tokens(many)),
    ]
    if (
        len({timing.tokens for timing in timings}) != 1
        or one.with_name("one.bin").read_bytes() != many.with_name("many.bin").read_bytes()
    ):
        raise InputError(f"the ways do not agree: {timings}")
    return timings


def timed(way: str, processes: int, command: Sequence[str], tokens: Callable[[str], int]) -> Timing:
    """Run a command and count its CPU time, that of its children included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    printed = run(command)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Timing(way, processes, tokens(printed), wall, cpu)


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
