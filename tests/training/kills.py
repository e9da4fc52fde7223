"""Kill a two-rank run again and again, at random moments, and compare its end with a run that was never killed.

    python -m tests.training.kills --kills 100

A kill is SIGKILL to one rank or to both: some steps into the attempt, at a random moment of its start, or as soon as a
save is seen on disk. What it claims: no checkpoint is ever unreadable, and losses, sample order, weights and moments
end bitwise as if nothing had happened.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orthros_train.config import Config
from orthros_train.training.loop import train
from orthros_train.training.metrics import read_metrics
from tests.distributed import start_ranks, wait_for
from tests.training.small_runs import WORDS, assert_same_state, run, small_config, untimed, write_corpus

RANKS, STEPS_A_KILL, PATIENCE_SECONDS = 2, 3, 120.0


def configurations(folder: Path, corpus: Path, kills: int, **options: Any) -> tuple[Config, Config]:
    """The run that is left alone and the one that is killed; long enough that the last kill finds it running."""
    steps = STEPS_A_KILL * (kills + 1)
    common = {"train__steps": steps, "checkpoint__interval_steps": 1, "evaluation__interval_steps": 5, **options}
    return small_config(folder / "whole", corpus, **common), small_config(folder / "killed", corpus, **common)


def kill_and_restart(config: Config, kills: int, seed: int) -> int:
    """Start the run `kills` times, kill each attempt, and let the last one end; how many kills fell into a save."""
    draw = random.Random(seed)
    in_saves = 0
    for _ in range(kills):
        with tempfile.TemporaryDirectory(prefix="ranks-") as scratch:
            processes = start_ranks(train, RANKS, (config, ["kills"]), Path(scratch), free_port(), False)
            draw.choice((after_some_steps, while_saving, while_starting))(config, draw)
            in_saves += any(checkpoints(config).glob(".saving_*"))
            victims = processes if draw.random() < 0.5 else [draw.choice(processes)]
            for process in victims:
                os.kill(process, signal.SIGKILL)
            codes = wait_for(processes, PATIENCE_SECONDS)  # and, as a launcher does, kill who is left
            assert -signal.SIGKILL in codes, "the run had ended before"
    assert run(config, RANKS) == 0
    return in_saves


def after_some_steps(config: Config, draw: random.Random) -> None:
    """One to STEPS_A_KILL steps on."""
    goal = steps_done(config) + draw.randint(1, STEPS_A_KILL)
    wait_until(lambda: steps_done(config) >= goal)
    time.sleep(draw.uniform(0, 0.05))


def while_saving(config: Config, draw: random.Random) -> None:
    """While a checkpoint is being written."""
    wait_until(lambda: any(checkpoints(config).glob(".saving_*")))
    time.sleep(draw.uniform(0, 0.01))


def while_starting(config: Config, draw: random.Random) -> None:
    """Before the first step, as a rule."""
    time.sleep(draw.uniform(0, 0.5))


def checkpoints(config: Config) -> Path:
    """The folder of checkpoints."""
    return Path(config.output_dir) / "checkpoints"


def steps_done(config: Config) -> int:
    """Of the metrics on disk."""
    return len(read_metrics(Path(config.output_dir) / "metrics.jsonl"))


def wait_until(reached: Callable[[], bool]) -> None:
    """Look every millisecond."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not reached():
        assert time.monotonic() < deadline, "the run makes no progress"
        time.sleep(0.001)


def free_port() -> int:
    """For the ranks to meet at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def assert_ends_as_if_never_killed(folder: Path, corpus: Path, kills: int, seed: int, **options: Any) -> int:
    """The whole experiment; how many kills fell into a save."""
    whole, killed = configurations(folder, corpus, kills, **options)
    assert run(whole, RANKS, timeout_seconds=PATIENCE_SECONDS * 5) == 0
    in_saves = kill_and_restart(killed, kills, seed)
    assert untimed(killed) == untimed(whole)
    last = f"step_{whole.train.steps:08d}"
    assert_same_state(checkpoints(killed) / last, checkpoints(whole) / last)
    assert not list(checkpoints(killed).glob("*.invalid")), "a checkpoint was unreadable"
    return in_saves


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--zero-stage", type=int, default=1, choices=(1, 2, 3))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        draw = random.Random(0)
        corpus = write_corpus(Path(folder), [" ".join(draw.choices(WORDS, k=draw.randint(5, 40))) for _ in range(300)])
        started = time.monotonic()
        in_saves = assert_ends_as_if_never_killed(
            Path(folder), corpus, options.kills, options.seed, parallel__zero_stage=options.zero_stage
        )
    print(
        f"{options.kills} kills, {in_saves} of them inside a save, in {time.monotonic() - started:.0f} s: losses, "
        "weights and moments are bitwise those of a run that was never killed; no checkpoint was unreadable"
    )


if __name__ == "__main__":
    main()
