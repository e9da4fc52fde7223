"""`python -m orthros_train CONFIG.yaml [key=value …]`: train, or look at a run before it starts.

Nothing heavy is imported until the configuration has been checked, so `--help` and a typo are answered at once.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .command_line import CommandParser, run_command
from .config import Config, load_config
from .errors import InputError
from .launch_environment import claimed_local_rank, claimed_rank, environment_number

if TYPE_CHECKING:
    from .training.suites import OpenSuites

EXAMPLES = """\
  python -m orthros_train configs/demo.yaml
  python -m orthros_train configs/orthros_130m.yaml --dry-run --world-size 8
  python -m orthros_train configs/orthros_1.3b.yaml --dry-run --world-size 512 parallel.tensor=8 parallel.pipeline=4 \\
      parallel.zero_stage=1
  python -m orthros_train configs/orthros_130m.yaml train.steps=2000 optimizer.learning_rate=1e-3
  torchrun --nproc-per-node 2 -m orthros_train configs/demo.yaml output_dir=outputs/two_ranks
  mpirun -n 2 python -m orthros_train configs/demo.yaml output_dir=outputs/two_ranks

The same command runs under torchrun, deepspeed, mpirun and srun (one task a rank), or with RANK, WORLD_SIZE,
LOCAL_RANK, MASTER_ADDR and MASTER_PORT set; launchers/submit.py makes a SLURM job of it. Started again with the same
output_dir, a run resumes from its newest valid checkpoint.

exit codes:
  0   done
  1   the run failed: status.json in output_dir says why
  2   bad input: one line on stderr says what, where, and the remedy
  75  stopped by a signal, the wall-clock limit or a stop_requested file, with a checkpoint saved: start it again
"""


SECONDS_TO_REPORT = 3.0  # for the first rank: some launchers end all ranks as soon as one has left


def build_parser() -> CommandParser:
    """The command line; separate so that it can be tested without running anything."""
    parser = CommandParser(
        "Train an Orthros model, or its transformer counterpart, as a YAML file says.",
        EXAMPLES,
        prog="python -m orthros_train",
    )
    parser.add_argument("config", metavar="CONFIG.yaml", help="the run's configuration; recipes are in configs/")
    parser.add_argument(
        "overrides",
        metavar="key=value",
        nargs="*",
        help="replaces an option of the file, e.g. train.steps=100, model.base_window=null, data.train[0].weight=2",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved configuration, parameters, tokens a step, FLOPs a token, and memory and "
        "communication of a rank of each pipeline stage; start nothing, write nothing",
    )
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="number of ranks that a dry run plans for (default: WORLD_SIZE of the environment, or parallel.tensor x "
        "parallel.pipeline, the fewest that hold the model)",
    )
    # The deepspeed launcher adds this to every command; LOCAL_RANK of the environment says the same.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's) and return the exit code. Raises InputError."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    options = build_parser().parse_intermixed_args(arguments)
    if options.world_size is not None and not options.dry_run:
        raise InputError("--world-size belongs to --dry-run; the launcher decides how many ranks a run has")
    config = load_config(options.config, options.overrides)
    open_suites = _suites(config)
    if options.dry_run:
        return _dry_run(config, options.world_size)
    from .training.loop import train  # noqa: PLC0415  imports torch and DeepSpeed

    return train(config, ["python", "-m", "orthros_train", *arguments], open_suites)


def _suites(config: Config) -> OpenSuites | None:
    """How the suites that `config` names are scored, None if it names none; an unknown name is refused at once.

    The one place where this package reaches for the one that builds on it.
    """
    if not config.evaluation.suites.names:
        return None
    from evaluation.during_training import find_run_suites, open_suites  # noqa: PLC0415

    find_run_suites(config.evaluation.suites)
    return open_suites


def _dry_run(config: Config, world_size: int | None) -> int:
    from .planning.dry_run import print_dry_run  # noqa: PLC0415  imports torch and rich

    if world_size is None:
        world_size = environment_number("WORLD_SIZE", config.parallel.tensor * config.parallel.pipeline)
    if world_size < 1:
        raise InputError(f"--world-size is {world_size}: it must be at least 1")
    if claimed_rank() == 0:
        print_dry_run(config, world_size)
    return 0


def run() -> int:
    """`main` as one rank of a run: bad input that every rank sees is reported by the first one alone."""
    try:
        return main()
    except InputError as error:
        if claimed_rank() == 0:
            raise
        if _seen_by_all(error):
            time.sleep(SECONDS_TO_REPORT)
            return 2
        raise InputError(f"rank {claimed_rank()}: {error}") from error


def _seen_by_all(error: InputError) -> bool:
    """Whether rank 0 (or this machine's first rank) reports the same."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None:  # training has begun; ranks that have joined agree on bad input, see training/ranks.py
        return bool(distributed.is_initialized())
    on_this_disk_only = isinstance(error.__cause__, OSError)
    return not on_this_disk_only or claimed_local_rank() != 0


if __name__ == "__main__":
    run_command(run)
