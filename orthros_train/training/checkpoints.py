"""Checkpoints: saved whole or not at all, found again, and kept in a bounded number.

    checkpoints/step_00000020/    state/ (a file a rank, state_files.py), hf/ (config.json, tokenizer), manifest.json
    checkpoints/latest            the newest one's name, for people and scripts; resuming looks at the folders
    checkpoints/.saving_*         a save in progress, or what a killed one left: removed by the next start or save
    checkpoints/.deleting_*       a folder on its way out

* A save writes under a temporary name, syncs every file, writes and syncs the manifest, renames the folder, then
  renames `latest` into place. A kill at any moment leaves the older checkpoints untouched and blocks no later save.
* Ranks wait for each other's disks on a group with a day's time-out, never inside a collective of the training group.
* Resuming takes the newest checkpoint whose every byte is as the manifest says. Newer, damaged ones are set aside as
  `step_*.invalid` with a warning. If there are checkpoints but none is valid, that is an error, and nothing is touched.
* No random numbers are drawn while training, and batches are a function of the step: the step is the whole data state.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from orthros_train.data.storage import fsync_path, write_text_atomically
from orthros_train.errors import InputError
from orthros_train.training.checkpoint_folders import HF_FOLDER, checkpoint_folders
from orthros_train.training.engine import TrainingEngine
from orthros_train.training.failures import TrainingFailureError
from orthros_train.training.hashed_file import record_existing
from orthros_train.training.manifest import (
    FileRecord,
    InvalidCheckpointError,
    Manifest,
    read_manifest,
    step_folder,
    verify_files,
)
from orthros_train.training.ranks import Ranks
from orthros_train.training.state_files import STATE_FOLDER, merge_parameters, save_state

SAVING, DELETING, INVALID = ".saving_", ".deleting_", ".invalid"


class SaveError(TrainingFailureError):
    """A checkpoint could not be written; the older ones are untouched."""


def save_checkpoint(
    engine: TrainingEngine,
    folder: Path,
    manifest: Manifest,
    write_hf_files: Callable[[Path], None],
    keep_last: int,
) -> tuple[Path, str | None]:
    """Save the engine's state as checkpoint `manifest.progress.step` in `folder` and drop the oldest; collective.

    `write_hf_files` fills a folder with what an export needs besides weights (rank 0). Returns the checkpoint's path,
    and why an old one could not be removed, if that failed: the next save tries again.

    Raises:
        SaveError: a rank could not write; raised on all ranks, with the unfinished save removed.
    """
    ranks = engine.ranks
    final = folder / step_folder(manifest.progress.step)
    temporary = folder / f"{SAVING}{final.name}"

    def prepare() -> None:
        with _disk_problems(final):
            shutil.rmtree(temporary, ignore_errors=True)
            (temporary / HF_FOLDER).mkdir(parents=True)
            (temporary / STATE_FOLDER).mkdir()
            write_hf_files(temporary / HF_FOLDER)

    def write() -> FileRecord:
        with _disk_problems(final):
            return save_state(engine, temporary)

    def publish() -> str | None:
        with _disk_problems(final):
            _publish(complete, temporary, final)
        try:
            _delete_oldest(folder, keep_last)
        except OSError as error:
            return f"an old checkpoint could not be removed ({error})"
        return None

    try:
        ranks.on_main(prepare, (SaveError,))
        records, parameters = zip(
            *ranks.gather_objects((ranks.together(write, (SaveError,)), engine.parameters)), strict=True
        )
        complete = replace(manifest, files=records, parameters=merge_parameters(parameters))
        leftover = ranks.on_main(publish, (SaveError,))
    except SaveError:
        if ranks.is_main:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final, leftover


@contextmanager
def _disk_problems(target: Path) -> Iterator[None]:
    """Turn what a full or failing disk raises into SaveError."""
    try:
        yield
    except OSError as error:
        raise SaveError(f"{target} could not be saved ({error}); older checkpoints are untouched") from error


def _publish(manifest: Manifest, temporary: Path, final: Path) -> None:
    """Complete the manifest and give the folder its name, in an order that no kill can turn into a false checkpoint."""
    hf_files = sorted(path for path in (temporary / HF_FOLDER).rglob("*") if path.is_file())
    records = tuple(record_existing(temporary, path) for path in hf_files)
    for part in (temporary / HF_FOLDER, temporary / STATE_FOLDER):
        fsync_path(part)
    replace(manifest, files=(*manifest.files, *records)).write(temporary)
    if final.exists():
        _delete(final)
    temporary.rename(final)
    fsync_path(final.parent)
    write_text_atomically(final.parent / "latest", f"{final.name}\n")


def _delete_oldest(folder: Path, keep_last: int) -> None:
    for path in checkpoint_folders(folder)[keep_last:]:
        _delete(path)


def _delete(path: Path) -> None:
    """Remove a checkpoint; what a kill leaves of it no longer has a checkpoint's name."""
    doomed = path.with_name(f"{DELETING}{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    shutil.rmtree(doomed)


@dataclass(frozen=True)
class Choice:
    """The checkpoint to continue from and the damaged newer ones, each with what is wrong with it."""

    path: Path
    manifest: Manifest
    damaged: tuple[tuple[Path, str], ...]


def choose_checkpoint(folder: Path, ranks: Ranks) -> Choice | None:
    """The newest valid checkpoint in `folder`, or None if there is none at all; collective, changes nothing.

    The ranks share the hashing between them.

    Raises:
        InputError: there are checkpoints, but all are damaged.
    """
    candidates = ranks.on_main(lambda: checkpoint_folders(folder))
    damaged: list[tuple[Path, str]] = []
    for path in candidates:
        manifest, problem = _read_and_verify(path, ranks)
        if manifest is not None:
            return Choice(path, manifest, tuple(damaged))
        damaged.append((path, problem))
    if damaged:
        details = "; ".join(f"{path.name}: {problem}" for path, problem in damaged)
        raise InputError(
            f"no checkpoint in {folder} is valid ({details}); restore one from a copy, or choose another output_dir"
        )
    return None


def _read_and_verify(path: Path, ranks: Ranks) -> tuple[Manifest | None, str]:
    def look() -> tuple[Manifest | None, str | None]:
        try:
            manifest = read_manifest(path)
            return manifest, verify_files(path, manifest.files[ranks.rank :: ranks.world_size])
        except InvalidCheckpointError as error:
            return None, str(error)
        except OSError as error:  # of the disk, not of the checkpoint: an older one is no answer
            raise InputError(f"{path} cannot be read ({error}); look at the disk and start again") from error

    manifest, problem = ranks.together(look)
    problems = [found for found in ranks.gather_objects(problem) if found is not None]
    return (None, problems[0]) if problems else (manifest, "")


def clean_up(folder: Path, damaged: tuple[tuple[Path, str], ...]) -> None:
    """Remove what killed saves left behind, and set damaged checkpoints aside under a name that is never loaded.

    Raises:
        InputError: a damaged one cannot be moved.
    """
    for path in folder.iterdir():
        if path.name.startswith((SAVING, DELETING)):
            shutil.rmtree(path, ignore_errors=True)
    for path, _ in damaged:
        aside = path.with_name(f"{path.name}{INVALID}")
        shutil.rmtree(aside, ignore_errors=True)
        try:
            path.rename(aside)
        except OSError as error:
            raise InputError(f"the damaged {path} cannot be set aside ({error}); move it away") from error
