"""Runs of a few seconds through the real loop, and ways to look at what they left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from orthros_train.config import Config, TokenizerSection
from orthros_train.data.documents import DocumentFormat
from orthros_train.data.preprocessing import preprocess
from orthros_train.data.sources import file_sources
from orthros_train.training.loop import train
from orthros_train.training.metrics import read_metrics
from tests.distributed import run_distributed

WORDS = tuple("the of and to in a is that it was for on are as with his they be at one have this from by".split())  # noqa: SIM905
MODEL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "base_window": 8,
    "max_position_embeddings": 64,
}
TIMING = (
    "tokens_per_second",
    "step_seconds",
    "data_wait_seconds",
    "forward_seconds_min",
    "forward_seconds_median",
    "forward_seconds_max",
    "slowest_rank",
    "slowest_host",
    "memory_peak_gib",
    "attempt",
)
DEFAULTS: dict[str, Any] = {
    "precision": "fp32",
    "model": MODEL,
    "data": {"split": [0.9, 0.1, 0.0]},
    "train": {"steps": 6, "micro_batch_size": 2, "global_batch_size": 8, "sequence_length": 32},
    "optimizer": {"learning_rate": 0.01},
    "schedule": {"warmup_steps": 2},
    "logging": {"tensorboard": False},
    "evaluation": {"samples": 3},
}


def write_corpus(folder: Path, documents: Sequence[str]) -> Path:
    """Preprocess one document a line; the corpus's prefix."""
    text = folder / "text.txt"
    text.write_text("\n".join(documents) + "\n", encoding="utf-8")
    sources = file_sources([text], DocumentFormat("text", "line"))
    preprocess(sources, TokenizerSection(), folder / "corpus")
    return folder / "corpus"


def small_config(folder: Path, corpus: Path, **options: Any) -> Config:
    """DEFAULTS with options spelled section__name=value."""
    values: dict[str, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in DEFAULTS.items()}
    values["output_dir"] = str(folder)
    values["data"]["train"] = [{"prefix": str(corpus)}]
    for option, value in options.items():
        section, _, name = option.partition("__")
        if name:
            values.setdefault(section, {})[name] = value
        else:
            values[section] = value
    return Config.model_validate(values)


def run(config: Config, world_size: int = 1, timeout_seconds: float = 60) -> int:
    """Train in fresh processes, as under a launcher; the exit code, the same on all ranks."""
    codes = run_distributed(train, world_size, config, ["test"], timeout_seconds=timeout_seconds, process_group=False)
    assert len(set(codes)) == 1, codes
    return codes[0]


def losses(config: Config) -> list[float]:
    """The loss of every step in metrics.jsonl."""
    return [record["loss"] for record in metrics(config)]


def metrics(config: Config) -> list[dict[str, Any]]:
    """The records of metrics.jsonl."""
    return read_metrics(Path(config.output_dir) / "metrics.jsonl")


def untimed(config: Config) -> list[dict[str, Any]]:
    """The records without what differs from run to run."""
    return [{key: value for key, value in record.items() if key not in TIMING} for record in metrics(config)]


def checkpoint_names(config: Config) -> list[str]:
    """Everything in the run's checkpoint folder but `latest`, hidden names included."""
    return sorted(path.name for path in (Path(config.output_dir) / "checkpoints").iterdir() if path.name != "latest")


def state_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor in the state files of a checkpoint, weights and moments, by where it stands."""
    files = sorted(checkpoint.glob("state/*.safetensors"))
    return {f"{file.name}/{key}": tensor for file in files for key, tensor in load_file(file).items()}


def assert_same_state(first: Path, second: Path) -> None:
    """Weights and moments of two checkpoints of one layout are bitwise equal."""
    one, two = state_tensors(first), state_tensors(second)
    assert one.keys() == two.keys()
    assert any("exp_avg" in where for where in one)
    different = [where for where in one if not torch.equal(one[where], two[where])]
    assert not different, different
