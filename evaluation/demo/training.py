"""Train one arm of the demo as a user would, and read what the run wrote."""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from evaluation.demo.steps import StepError
from orthros_train.training.metrics import read_metrics


def train(config: Path, run: Path, overrides: Sequence[str], ranks: int) -> str:
    """Run `python -m orthros_train` under torchrun; a run that was interrupted continues from its checkpoint.

    `overrides` name `run` as the output_dir. Returns the command as one would type it.
    Raises StepError when the run does not end as done.
    """
    arguments = [str(config), *overrides]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m", "orthros_train"]
    if _state(run) != "done":
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        outcome = subprocess.run([sys.executable, *launcher, *arguments], env=environment, check=False)
        state = _state(run)
        if outcome.returncode or state != "done":
            raise StepError(f"training in {run} ended as {state}; the lines above say why. Run again to continue it.")
    return shlex.join(["python", *launcher, *arguments])


def read_run(run: Path) -> dict[str, Any]:
    """The figures of a finished run: curves, totals, validation losses, and the commit of every attempt."""
    lines = read_metrics(run / "metrics.jsonl")
    validated = [line for line in lines if line.get("validation_loss") is not None]
    return {
        "steps": lines[-1]["step"],
        "tokens": lines[-1]["tokens_seen"],
        "skipped_steps": lines[-1]["skipped_steps"],
        "loss": [line["loss"] for line in lines],
        "tokens_seen": [line["tokens_seen"] for line in lines],
        "loss_tokens": [line["loss_tokens"] for line in lines],
        "validation": [[line["step"], line["validation_loss"]] for line in validated],
        "training_seconds": sum(line["step_seconds"] for line in lines),
        "tokens_per_second": statistics.median(line["tokens_per_second"] for line in lines),
        "commits": _commits(run),
    }


def _commits(run: Path) -> list[str | None]:
    """The commit of each attempt, first to last: an interrupted run may have been continued at another one."""
    receipt = json.loads((run / "receipt.json").read_text(encoding="utf-8"))
    return [attempt["commit"] for attempt in (*receipt["previous"], receipt)]


def _state(run: Path) -> str:
    path = run / "status.json"
    return str(json.loads(path.read_text(encoding="utf-8")).get("state")) if path.is_file() else "not started"
