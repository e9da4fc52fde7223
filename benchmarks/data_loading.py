"""What share of a training step's time does making its batch take?

A corpus of random documents, read as a run of the given configuration reads it, by one of --replicas ranks and without
preparing batches ahead: what a run would wait for if none of it overlapped with the step. The step's time is its exact
FLOPs (of the segments that were read, forward and backward) at --mfu of the peak of --gpu, once for each arm: the
faster the step, the larger the share. The corpus lies in the page cache; one that does not adds the disk's time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from evaluation.benchmarking.models import recipe_config
from evaluation.benchmarking.result import Record, Result, counted_calls, timed
from orthros_train.command_line import CommandParser, positive_int, run_command
from orthros_train.errors import InputError

if TYPE_CHECKING:
    from orthros_train.config import Config

EXAMPLES = """\
  python benchmarks/data_loading.py --output outputs/benchmarks/data_loading.json
  python benchmarks/data_loading.py --output a100.json --config configs/orthros_340m.yaml --gpu A100 --replicas 64"""


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    recipe = Path("configs/orthros_1.3b.yaml")
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--config", type=Path, default=recipe, metavar="YAML", help=f"default: {recipe}")
    parser.add_argument("--replicas", type=positive_int, default=8, help="ranks that share a batch; default: 8")
    parser.add_argument("--gpu", default="H200", help="whose step it is; default: H200")
    parser.add_argument("--mfu", type=float, default=0.45, help="of its bf16 peak that the step reaches; default: 0.45")
    parser.add_argument("--document-tokens", type=positive_int, default=600, help="mean of a document; default: 600")
    parser.add_argument("--corpus-tokens", type=positive_int, default=2**24, help="default: 16,777,216")
    parser.add_argument("--threads", type=positive_int, default=1, help="CPU threads; default: 1")
    parser.add_argument("--repeats", type=positive_int, default=20, help="timed steps; default: 20")
    return parser


def write_corpus(prefix: Path, tokens: int, document_tokens: int) -> None:
    """A corpus of random bytes in documents of exponentially distributed lengths, of at least `tokens` tokens."""
    import numpy as np  # noqa: PLC0415

    from orthros_train.data.corpus_writer import CorpusWriter  # noqa: PLC0415
    from orthros_train.data.encoding import EncodedBatch  # noqa: PLC0415
    from orthros_train.data.manifest import TokenizerRecord  # noqa: PLC0415
    from orthros_train.data.tokenizers import ByteTokenizer  # noqa: PLC0415

    bytes_ = ByteTokenizer()
    record = TokenizerRecord(
        type="byte", fingerprint=bytes_.fingerprint, vocab_size=bytes_.vocab_size, eod_id=bytes_.eod_id
    )
    draw = np.random.default_rng(0)
    with CorpusWriter(prefix, record, np.uint16, overwrite=False) as writer:
        while writer.tokens < tokens:
            lengths = draw.exponential(document_tokens, size=1000).astype(np.int32) + 2
            ids = draw.integers(256, size=int(lengths.sum()), dtype=np.uint16)
            ids[np.cumsum(lengths) - 1] = bytes_.eod_id
            writer.add(EncodedBatch(ids, lengths, bytes_.eod_id, 0, len(ids), len(ids)))
        writer.finish([])


def read_config(path: Path, prefix: Path) -> Config:
    """The configuration with the corpus in the place of its own, and no batches ahead."""
    from orthros_train.config import Config  # noqa: PLC0415
    from orthros_train.config.loading import load_yaml  # noqa: PLC0415

    own = ["tokenizer={type: byte}", f"data.train=[{{prefix: {prefix}}}]", "data.validation=null"]
    return load_yaml(Config, path, [*own, "data.prefetch_steps=0"])


def measure(options: argparse.Namespace, config: Config, peak_flops: float) -> list[Record]:
    """One record an arm: seconds of a replica's share of a batch, beside the seconds of the step that it is for."""
    import torch  # noqa: PLC0415

    from evaluation.arm_times import interleaved  # noqa: PLC0415
    from orthros_train.data import PretrainingData  # noqa: PLC0415
    from orthros_train.data.tokenizers import load_tokenizer  # noqa: PLC0415
    from orthros_train.model.flops import training_flops  # noqa: PLC0415
    from orthros_train.parallel.mesh import Mesh  # noqa: PLC0415
    from orthros_train.planning.dry_run import other_arm  # noqa: PLC0415
    from orthros_train.training.batches import BatchLoader  # noqa: PLC0415

    torch.set_num_threads(options.threads)
    data = PretrainingData(config, load_tokenizer(config.tokenizer), "train")
    loader = BatchLoader(data, config, Mesh(data_size=options.replicas), first_step=0)
    segments: list[list[int]] = []

    def take() -> None:
        batch, _ = loader.take(lambda: False)
        assert batch is not None
        segments.append(batch.segment_lengths)

    with counted_calls("data loading", options.repeats + 1) as on_call:
        seconds = interleaved({"batch": take}, options.repeats, on_call)["batch"]
    loader.close()
    own = recipe_config(options.config)
    arms = {each.architecture: each for each in (own, other_arm(own))}
    records = []
    for arm in ("transformer", "orthros"):
        flops = [training_flops(arms[arm], lengths).total for lengths in segments[1:]]  # less the warm-up
        record: Record = timed(f"a step of the {arm}", seconds)
        record["step_flops"] = round(statistics.mean(flops))
        record["step_seconds"] = record["step_flops"] / (peak_flops * options.mfu)
        record["share_of_step"] = record["seconds"] / record["step_seconds"]
        records.append(record)
    return records


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = build_parser().parse_args(sys.argv[1:] if arguments is None else list(arguments))
    if not 0 < options.mfu <= 1:
        raise InputError(f"--mfu is {options.mfu}: give a share above 0 and at most 1")
    from orthros_train.training.device_peaks import BF16_DENSE_TFLOPS, known_peak_flops  # noqa: PLC0415

    peak = known_peak_flops(options.gpu)
    if peak is None:
        known = ", ".join(name for name, _ in BF16_DENSE_TFLOPS)
        raise InputError(f"--gpu {options.gpu}: its peak is not known; choose one of {known}")
    result = Result("data loading", options)
    with tempfile.TemporaryDirectory() as folder:
        prefix = Path(folder) / "corpus"
        config = read_config(options.config, prefix)
        if config.train.global_batch_size % (options.replicas * config.train.micro_batch_size):
            raise InputError(
                f"--replicas {options.replicas} times train.micro_batch_size {config.train.micro_batch_size} does not "
                f"divide train.global_batch_size {config.train.global_batch_size}"
            )
        write_corpus(prefix, options.corpus_tokens, options.document_tokens)
        records = measure(options, config, peak)
    rows = config.train.global_batch_size // options.replicas
    result.write(
        records,
        [
            f"{rows} rows of {config.train.sequence_length:,} tokens; the step's seconds are FLOPs at "
            f"{options.mfu:.0%} of the bf16 peak of one {options.gpu} a replica, not measured"
        ],
    )
    return 0


if __name__ == "__main__":
    run_command(main)
