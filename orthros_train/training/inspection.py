"""A checkpoint described for people."""

from __future__ import annotations

from pathlib import Path

from orthros_train.command_line import counted
from orthros_train.training.checkpoint_folders import find_checkpoint
from orthros_train.training.manifest import InvalidCheckpointError, Manifest, read_manifest, verify_files

FINGERPRINTS = {
    "data": "what decides the tokens of every sample: corpora or conversations, their weights and order",
    "tokenizer": "the tokenizer's definition",
}


def inspect_checkpoint(path: str | Path, verify: bool = True) -> tuple[str, bool]:
    """A report on a checkpoint, and whether it is whole as far as was looked.

    Args:
        path: a step_* folder, a folder of them, or a run's folder (the newest is taken).
        verify: read every file and compare its hash with the manifest's.

    Raises:
        InputError: there is no checkpoint.
    """
    folder = find_checkpoint(Path(path))
    try:
        manifest = read_manifest(folder)
    except InvalidCheckpointError as error:
        return f"checkpoint   {folder}\nstate        damaged: {error}", False
    problem = verify_files(folder, manifest.files) if verify else None
    state = "not verified" if not verify else "whole: every size and SHA-256 agrees" if problem is None else problem
    return _describe(folder, manifest, state if problem is None else f"damaged: {problem}"), problem is None


def _describe(folder: Path, manifest: Manifest, state: str) -> str:
    progress = manifest.progress
    total = sum(record.bytes for record in manifest.files)
    lines = [
        f"checkpoint   {folder}",
        f"state        {state}",
        f"step         {progress.step} ({counted(progress.updates, 'update')}, {progress.skipped_steps:,} skipped)",
        f"next sample  {progress.sample_position}",
        f"layout       {manifest.layout}",
        f"saved        {manifest.saved_at} with "
        + ", ".join(f"{name} {version}" for name, version in sorted(manifest.versions.items())),
        *(
            f"{name:<12} {fingerprint}  (SHA-256 of {FINGERPRINTS.get(name, 'a definition')})"
            for name, fingerprint in sorted(manifest.fingerprints.items())
        ),
        f"size         {counted(total, 'byte')} in {counted(len(manifest.files), 'file')}",
    ]
    width = max(len(record.name) for record in manifest.files)
    lines += [f"  {record.name:<{width}}  {record.bytes:>14,}  {record.sha256}" for record in manifest.files]
    return "\n".join(lines)
