"""A run's folder: whose it is, what state the run is in, and how it came about.

    config.yaml     the resolved configuration
    receipt.json    command, commit, versions, device, seeds, data and tokenizer hashes, start and end of this attempt
    status.json     state (running | stopped | done | failed), exit_code, step, attempt
    metrics.jsonl   one object a step (metrics.py)
    checkpoints/    (checkpoints.py)
    .lock           held while a process trains here, so that a second one is refused

Only rank 0 writes here. Every file is replaced atomically, so a reader never sees half of one. A folder belongs to one
configuration: whatever changes the mathematics of a run needs a folder of its own. What may change is listed in
CHANGEABLE.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from orthros_train.config import Config, config_to_yaml, load_config
from orthros_train.data.storage import file_lock, write_text_atomically
from orthros_train.errors import InputError
from orthros_train.training.metrics import read_metrics
from orthros_train.training.ranks import Ranks

CHANGEABLE = (
    "output_dir",
    "train.steps",
    "train.micro_batch_size",
    "train.activation_checkpointing",
    "train.compile",
    "train.deterministic",
    "train.max_consecutive_skips",
    "train.wall_clock_limit_seconds",
    "model.attention_kernel",
    "tokenizer.path",  # the tokenizer's fingerprint is compared instead
    "data.train",  # so is the data's
    "data.validation",
    "data.sft.train",
    "data.sft.validation",
    "data.sft.chat_template",
    "data.cache_dir",
    "data.prefetch_steps",
    "data.output_positions_multiple",
    "parallel",
    "checkpoint",
    "logging",
    "evaluation",
)
RUN_FILES = ("config.yaml", "status.json", "receipt.json", "metrics.jsonl", "checkpoints")
RECORDED_PACKAGES = ("torch", "deepspeed", "megatron-core", "transformers", "numpy", "tokenizers")


def identity(config: Config) -> dict[str, Any]:
    """The options that define the mathematics of a run, flat: {"optimizer.beta1": 0.9, …}."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if prefix in CHANGEABLE:
            return
        if isinstance(value, dict) and value:
            for key, item in value.items():
                walk(f"{prefix}.{key}" if prefix else key, item)
        else:
            flat[prefix] = value

    walk("", config.model_dump(mode="json"))
    return flat


def refuse_other_run(recorded: Config, config: Config, where: Path) -> None:
    """Raise InputError if `recorded`, the configuration found in `where`, is mathematically another run's."""
    old, new = identity(recorded), identity(config)
    for option in sorted({*old, *new}):
        if old.get(option) != new.get(option):
            raise InputError(
                f"{where} holds another run: its {option} is {old.get(option)!r}, this config's is "
                f"{new.get(option)!r}; choose another output_dir or restore the option"
            )


class FolderBusyError(InputError):
    """Another process trains in the folder; nothing in it may be touched."""


class RunFolder:
    """Rank 0's view of `config.output_dir`."""

    def __init__(self, config: Config) -> None:
        self.path = Path(config.output_dir)
        self.checkpoints = self.path / "checkpoints"
        self.metrics_file = self.path / "metrics.jsonl"
        self.attempt = 1
        self.is_ours = False  # it may be written to: locked, or on a file system without locks
        self.is_locked = False
        self._is_this_run = False
        self._config = config
        self._lock = ExitStack()

    def inspect(self) -> None:
        """Find out whether the folder already holds this very run; writes nothing.

        Raises:
            InputError: it holds another run, something that is no run, or a run that `checkpoint.resume` says not to
                continue.
        """
        try:
            os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return
        except (OSError, ValueError) as error:  # too long, with a NUL, or not to be looked at
            raise InputError(
                f"output_dir {str(self.path)[:60]!r} is no possible path ({error}); choose another"
            ) from error
        if not self.path.is_dir():
            raise InputError(f"output_dir {self.path} is a file; choose a folder")
        present = [name for name in RUN_FILES if (self.path / name).exists()]
        if not present:
            return
        if "config.yaml" not in present:
            raise InputError(f"output_dir {self.path} holds {present[0]} but no config.yaml; choose another output_dir")
        try:
            recorded = load_config(self.path / "config.yaml")
        except InputError as error:
            raise InputError(f"output_dir {self.path} holds no run's config.yaml; choose another ({error})") from error
        refuse_other_run(recorded, self._config, self.path)
        if not self._config.checkpoint.resume:
            raise InputError(
                f"output_dir {self.path} already holds this run and checkpoint.resume is false; "
                "set it to true or choose another output_dir"
            )
        self.attempt = (self.read_status() or {"attempt": 0})["attempt"] + 1
        self.read_receipt()
        read_metrics(self.metrics_file)  # damaged ones are refused before anything is written
        self._is_this_run = True

    def open(self) -> None:
        """Create the folder or take it over for the next attempt, and lock it until `release`.

        Where the file system offers no locks (Lustre without `-o flock`), `is_locked` stays False, and a second process
        would not be refused.

        Raises:
            FolderBusyError: another process holds the lock.
            InputError: it cannot be written to.
        """
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.is_locked = self._lock.enter_context(file_lock(self.path / ".lock", blocking=False))
            with tempfile.TemporaryDirectory(prefix=".saving_", dir=self.checkpoints):
                pass  # where the first save would find out
        except BlockingIOError:
            raise FolderBusyError(
                f"another process is training in {self.path}; wait for it, stop it, or choose another output_dir"
            ) from None
        except OSError as error:
            raise InputError(f"output_dir {self.path} cannot be written ({error}); choose another") from error
        self.is_ours = True
        write_text_atomically(self.path / "config.yaml", config_to_yaml(self._config))

    def claim(self) -> bool:
        """Whether this process may write here: it holds the lock, or the folder is this run's and nobody else does."""
        if not self.is_ours and self._is_this_run:
            try:
                self._lock.enter_context(file_lock(self.path / ".lock", blocking=False))
            except OSError:  # a process trains here, or the folder cannot be written
                return False
            self.is_ours = True
        return self.is_ours

    def release(self) -> None:
        """Let go of the folder. The kernel does so, too, when the process ends."""
        self._lock.close()

    def read_status(self) -> dict[str, Any] | None:
        """status.json, or None where there is none. Raises InputError if it is damaged."""
        return _read_json(self.path / "status.json", attempt=int, step=int)

    def read_receipt(self) -> dict[str, Any] | None:
        """receipt.json, or None where there is none. Raises InputError if it is damaged."""
        return _read_json(self.path / "receipt.json", attempt=int, previous=list)

    def write_status(self, state: str, step: int, exit_code: int | None = None, reason: str | None = None) -> None:
        """Replace status.json. `exit_code` is null while running; `reason` says why a run stopped or failed."""
        status = {"state": state, "exit_code": exit_code, "step": step, "attempt": self.attempt, "reason": reason}
        write_text_atomically(self.path / "status.json", json.dumps(status, indent=2) + "\n")

    def write_receipt(self, receipt: dict[str, Any]) -> None:
        """Replace receipt.json; the receipts of earlier attempts move into its list `previous`."""
        file = self.path / "receipt.json"
        previous: list[dict[str, Any]] = []
        last = self.read_receipt()
        if last is not None:
            previous = last.pop("previous")
            if last["attempt"] != receipt["attempt"]:
                previous.append(last)
        write_text_atomically(file, json.dumps({**receipt, "previous": previous}, indent=2) + "\n")

    def close_receipt(self, **fields: Any) -> None:
        """Fill in how this attempt ended, if its receipt was written."""
        receipt = self.read_receipt()
        if receipt is not None and receipt["attempt"] == self.attempt:
            write_text_atomically(self.path / "receipt.json", json.dumps({**receipt, **fields}, indent=2) + "\n")


def _read_json(file: Path, **required: type) -> dict[str, Any] | None:
    """The object in a file of the run, with entries of the required types; None where there is no file."""
    if not file.exists():
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        sound = isinstance(content, dict) and all(isinstance(content.get(key), kind) for key, kind in required.items())
    except (OSError, ValueError):
        sound = False
    if not sound:
        raise InputError(f"{file} is damaged; restore it from a copy or remove it, the checkpoints are apart")
    return content


def now() -> str:
    """This moment as ISO 8601 in UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def build_receipt(
    config: Config,
    command: Sequence[str],
    ranks: Ranks,
    attempt: int,
    first_step: int,
    fingerprints: dict[str, str],
) -> dict[str, Any]:
    """What receipt.json says at the start of an attempt; `end` is filled in when it is over."""
    return {
        "attempt": attempt,
        "command": list(command),
        "commit": git_commit(),
        "versions": {"python": platform.python_version(), **installed_versions()},
        "host": socket.gethostname(),
        "device": _device_name(ranks.device),
        "world_size": ranks.world_size,
        "threads": torch.get_num_threads(),
        "seeds": {"train.seed": config.train.seed},
        "fingerprints": fingerprints,
        "first_step": first_step,
        "start": now(),
        "end": None,
        "last_step": None,
        "exit_code": None,
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def installed_versions() -> dict[str, str]:
    """Versions of the packages that a result depends on, as far as they are installed."""
    versions = {}
    for name in RECORDED_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def git_commit() -> str | None:
    """Commit of the source tree this package runs from, with `-dirty` if it has changes; None outside git."""
    root = Path(__file__).resolve().parents[2]
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None if answer.returncode == 0 else None
