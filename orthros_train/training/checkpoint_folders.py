"""Where the checkpoints of a run are. Needs neither torch nor DeepSpeed."""

from __future__ import annotations

from pathlib import Path

from orthros_train.errors import InputError
from orthros_train.training.manifest import MANIFEST, step_of

HF_FOLDER = "hf"  # inside a checkpoint: config.json and tokenizer, for the export


def checkpoint_folders(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, newest first, whole or not."""
    if not folder.is_dir():
        return []
    steps = {step: path for path in folder.iterdir() if (step := step_of(path)) is not None and path.is_dir()}
    return [steps[step] for step in sorted(steps, reverse=True)]


def find_checkpoint(path: Path) -> Path:
    """The checkpoint meant by a path to it, to the folder of checkpoints, or to the run. Raises InputError if none."""
    if (path / MANIFEST).is_file():
        return path
    for folder in (path, path / "checkpoints"):
        found = checkpoint_folders(folder)
        if found:
            return found[0]
    raise InputError(f"no checkpoint in {path}; give a step_* folder or a run's output_dir")
