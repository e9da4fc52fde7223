"""The manifest of a checkpoint: what it is, what belongs to it, and whether it is whole.

manifest.json is written last, inside a folder that is then renamed to its final name, and names every other file with
its size and SHA-256. It carries its own hash, too, so a flipped bit in it is not taken for another step or layout.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from orthros_train.command_line import counted
from orthros_train.data.storage import fsync_path
from orthros_train.errors import InputError

MANIFEST = "manifest.json"
FORMAT = 1
_STEP_FOLDER = re.compile(r"step_(\d{8,})")


class InvalidCheckpointError(Exception):
    """A checkpoint that must not be loaded; the message says why."""


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint, its path relative to the folder."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ParameterRecord:
    """A parameter's full shape and the dim that the tensor axis splits, None for one that is whole on every rank."""

    shape: tuple[int, ...]
    split: int | None


@dataclass(frozen=True)
class Layout:
    """How the state was laid over ranks."""

    world_size: int
    zero_stage: int
    tensor: int
    pipeline: int
    precision: str

    def __str__(self) -> str:
        """As people say it, without the axes that are not used."""
        axes = [f"{name} {size}" for name, size in (("tensor", self.tensor), ("pipeline", self.pipeline)) if size > 1]
        return ", ".join([counted(self.world_size, "rank"), *axes, f"ZeRO-{self.zero_stage}", self.precision])


@dataclass(frozen=True)
class Progress:
    """Where a run stands after `step` steps. The next sample of the global order is `sample_position`."""

    step: int = 0
    sample_position: int = 0
    updates: int = 0  # steps that changed the weights
    skipped_steps: int = 0
    consecutive_skips: int = 0

    def after_step(self, global_batch_size: int, applied: bool) -> Progress:
        """Where the run stands one step later, whether that step changed the weights or was skipped."""
        return Progress(
            step=self.step + 1,
            sample_position=self.sample_position + global_batch_size,
            updates=self.updates + applied,
            skipped_steps=self.skipped_steps + (not applied),
            consecutive_skips=0 if applied else self.consecutive_skips + 1,
        )


@dataclass(frozen=True)
class Manifest:
    """Everything manifest.json says."""

    progress: Progress
    layout: Layout
    config: dict[str, Any]
    fingerprints: dict[str, str]  # of the tokenizer and the data
    versions: dict[str, str]
    saved_at: str
    parameters: dict[str, ParameterRecord] = field(default_factory=dict)  # by name in OrthrosForCausalLM
    files: tuple[FileRecord, ...] = ()

    def write(self, folder: Path) -> None:
        """Write and sync `folder`/manifest.json."""
        body = {"format": FORMAT, **asdict(self)}
        body["manifest_sha256"] = _digest(body)
        with open(folder / MANIFEST, "w", encoding="utf-8") as file:
            json.dump(body, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        fsync_path(folder)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the checkpoint in `folder`; sizes and hashes of its files are not looked at.

    Raises:
        InvalidCheckpointError: none, unreadable, altered, or of another step than the folder's name says.
        InputError: another version wrote it, so that it is whole but not for this one to judge.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise InvalidCheckpointError(f"{MANIFEST} is missing")
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
        expected = body.pop("manifest_sha256")
        version = body.pop("format")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise InvalidCheckpointError(f"{MANIFEST} is unreadable") from None
    if _digest({"format": version, **body}) != expected:
        raise InvalidCheckpointError(f"{MANIFEST} was altered")
    if version != FORMAT:
        raise InputError(
            f"{path} has format {version}, this version reads {FORMAT}; use the one that wrote it, or another folder"
        )
    try:
        manifest = TypeAdapter(Manifest).validate_json(json.dumps(body), strict=True, extra="forbid")
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"]))
        raise InvalidCheckpointError(f"{MANIFEST} lacks an entry or has one that is not understood: {where}") from None
    if any(Path(record.name).is_absolute() or ".." in Path(record.name).parts for record in manifest.files):
        raise InvalidCheckpointError(f"{MANIFEST} names a file outside the checkpoint")
    if min(asdict(manifest.progress).values()) < 0 or min(manifest.layout.tensor, manifest.layout.pipeline) < 1:
        raise InvalidCheckpointError(f"{MANIFEST} has a negative count")
    if not manifest.files:
        raise InvalidCheckpointError(f"{MANIFEST} names no file")
    if step_of(folder) not in (None, manifest.progress.step):
        raise InvalidCheckpointError(f"{MANIFEST} is that of step {manifest.progress.step}")
    return manifest


def verify_files(folder: Path, records: Iterable[FileRecord]) -> str | None:
    """The first thing that is wrong with these files of a checkpoint, or None."""
    for record in records:
        path = folder / record.name
        if not path.is_file():
            return f"{record.name} is missing"
        if path.stat().st_size != record.bytes:
            return f"{record.name} has {path.stat().st_size} bytes instead of {record.bytes}"
        with open(path, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != record.sha256:
                return f"{record.name} is corrupt: its SHA-256 differs from the manifest's"
    return None


def step_folder(step: int) -> str:
    """Name of the checkpoint of `step`: step_00000020."""
    return f"step_{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step that a checkpoint folder's name says, None for any other name."""
    match = _STEP_FOLDER.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
