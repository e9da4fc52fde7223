"""Small runs for the cluster: their files, their submission, and what they should have computed."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launchers.run_records import read_attempts
from orthros_train.config import Config, config_to_yaml
from orthros_train.training.inspection import inspect_checkpoint
from orthros_train.training.metrics import read_metrics
from tests.launchers.local_cluster import LocalCluster
from tests.training.small_runs import WORDS, losses, run, small_config, write_corpus

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class ClusterRun:
    """A configuration on disk and the cluster that it runs on."""

    cluster: LocalCluster
    config: Config
    file: Path

    @property
    def folder(self) -> Path:
        """output_dir."""
        return Path(self.config.output_dir)

    def submit(self, *options: str, check: bool = True) -> tuple[list[int], str]:
        """Call launchers/submit.py; the ids of the jobs, and all that it printed."""
        done = self.cluster.run(sys.executable, "launchers/submit.py", str(self.file), *options, check=check)
        return [
            int(job) for job in re.findall(r"^job (\d+)", done.stdout, flags=re.MULTILINE)
        ], done.stdout + done.stderr

    def wait_for_step(self, step: int, seconds: float = 120) -> None:
        """Wait until this step is recorded."""
        file = self.folder / "metrics.jsonl"
        self.cluster.wait_until(
            lambda: file.exists() and len(read_metrics(file)) >= step, seconds, f"step {step}; {self.log()}"
        )

    def log(self) -> str:
        """Everything that the jobs have written."""
        return "\n".join(file.read_text(errors="replace") for file in sorted(self.folder.glob("slurm/*.log")))

    def status(self) -> dict[str, Any]:
        """What launchers/status.py says."""
        return dict(
            json.loads(self.cluster.run(sys.executable, "launchers/status.py", str(self.folder), "--json").stdout)
        )

    def last_outcome(self) -> str | None:
        """How the newest start ended, None while none has begun or it has not ended."""
        attempts = read_attempts(self.folder)
        return attempts[-1].outcome if attempts else None

    def seed(self, seed: int) -> ClusterRun:
        """One training of an array."""
        folder = self.folder / f"seed_{seed}"
        train = self.config.train.model_copy(update={"seed": seed})
        return replace(self, config=self.config.model_copy(update={"output_dir": str(folder), "train": train}))

    def has_valid_checkpoint(self) -> bool:
        """Whether the newest checkpoint is whole."""
        return inspect_checkpoint(str(self.folder), verify=True)[1]


def new_run(cluster: LocalCluster, folder: Path, **options: Any) -> ClusterRun:
    """Write text, corpus and configuration of a run into `folder`."""
    corpus = write_corpus(
        folder, [" ".join(WORDS[(7 * n + 3 * m) % len(WORDS)] for m in range(20)) for n in range(400)]
    )
    config = small_config(folder / "run", corpus, **options)
    file = folder / "config.yaml"
    file.write_text(config_to_yaml(config))
    return ClusterRun(cluster, config, file)


def uninterrupted_losses(config: Config, folder: Path, world_size: int) -> list[float]:
    """The losses of the same run on so many ranks, forked from this process, without a launcher."""
    same = config.model_copy(update={"output_dir": str(folder)})
    assert run(same, world_size, timeout_seconds=300) == 0
    return losses(same)
