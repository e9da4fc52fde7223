"""WikiText as three text files with a manifest, and the check that they are still what was prepared.

Text from the hub is of the pinned revision. Files that were placed by hand are said to be so wherever they are
reported: the SHA-256 of the revision's files is not known here, so nothing but their place says what they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from evaluation.hub import silence_retries
from orthros_train.data.output_folder import finished_folder
from orthros_train.data.storage import sha256_file
from orthros_train.errors import InputError

REPOSITORY = "Salesforce/wikitext"
REVISION = "b08601e04326c79dfdd32d625aee71d232d685c3"
CONFIG = "wikitext-2-raw-v1"
LICENSE = "CC BY-SA 3.0 and GFDL"
SPLITS = ("train", "validation", "test")
MANIFEST = "manifest.json"
FROM_HUB = "from the hub"
BY_HAND = "placed by hand, not verified against the hub"

Reader = Callable[[str], tuple[list[str], str]]  # of a split: its lines, and where exactly they came from


def parquet_name(split: str) -> str:
    """A split's file inside the repository."""
    return f"{CONFIG}/{split}-00000-of-00001.parquet"


def place_hint(folder: Path) -> str:
    """What to put where by hand."""
    files = ", ".join(str(folder / parquet_name(split)) for split in SPLITS)
    return (
        f"download {parquet_name('*')} of https://huggingface.co/datasets/{REPOSITORY} at revision {REVISION} on "
        f"another machine, place the three files as {files} and pass --from-dir {folder}"
    )


def hub_lines(split: str) -> tuple[list[str], str]:
    """A split's lines from the hub, and where they came from. Raises InputError, saying what to place where."""
    import datasets  # noqa: PLC0415

    silence_retries()
    try:
        rows = datasets.load_dataset(REPOSITORY, CONFIG, split=split, revision=REVISION)
    except Exception as error:  # the library and its readers raise many kinds
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise InputError(f"the hub cannot be reached ({reason}); {place_hint(Path('wikitext-parquet'))}") from error
    return list(rows["text"]), f"hub {REPOSITORY}@{REVISION}"


def local_lines(folder: Path) -> Reader:
    """A reader like `hub_lines` for parquet files in `folder`."""

    def read(split: str) -> tuple[list[str], str]:
        import pyarrow  # noqa: PLC0415
        from pyarrow import parquet  # noqa: PLC0415

        path = folder / parquet_name(split)
        if not path.is_file():
            raise InputError(f"{path} is missing; {place_hint(folder)}")
        try:
            column = parquet.read_table(path, columns=["text"]).column("text")
            if not pyarrow.types.is_string(column.type) and not pyarrow.types.is_large_string(column.type):
                raise pyarrow.ArrowTypeError(f"its column text holds {column.type}, not strings")
            if column.null_count:
                raise pyarrow.ArrowInvalid(f"its column text lacks {column.null_count:,} of {len(column):,} values")
            lines = column.to_pylist()
        except (pyarrow.ArrowException, OSError, KeyError, UnicodeDecodeError) as error:
            problem = " ".join(str(error).split())  # Arrow's messages may have several lines
            raise InputError(
                f"{path} cannot be read as WikiText's parquet ({problem}); {place_hint(folder)}"
            ) from error
        return lines, f"file with SHA-256 {sha256_file(path)}"

    return read


def prepare(output: Path, read: Reader, provenance: str) -> Path:
    """Write SPLIT.txt for every split and manifest.json into `output`, which must not exist or be empty.

    Args:
        output: the folder.
        read: gives the splits.
        provenance: FROM_HUB or BY_HAND; every report repeats it.

    Raises:
        InputError: a split cannot be read or is empty, or the place cannot be written.
    """
    manifest: dict[str, Any] = {
        "dataset": REPOSITORY,
        "revision": REVISION,
        "config": CONFIG,
        "provenance": provenance,
        "license": LICENSE,
        "files": {},
    }
    with finished_folder(output, 2**25) as folder:
        for split in SPLITS:
            lines, origin = read(split)
            text = "".join(lines)
            if not text.strip():
                raise InputError(f"the split {split} of {REPOSITORY} is empty; nothing was written")
            path = folder / f"{split}.txt"
            path.write_text(text, encoding="utf-8")
            size = path.stat().st_size
            manifest["files"][path.name] = {"bytes": size, "sha256": sha256_file(path), "from": origin}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return output


def read_prepared(folder: Path, splits: Iterable[str] = ("train", "test")) -> tuple[dict[str, bytes], dict[str, Any]]:
    """The bytes of splits that `prepare` wrote, and the manifest.

    Raises:
        InputError: no such folder, a missing file, or one that is not what the manifest says.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise InputError(
            f"{folder} holds no {MANIFEST}; make the folder with `python tools/prepare_wikitext.py --output {folder}`"
        )
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error}); prepare the folder again") from error
    _check_manifest(manifest, path)
    contents = {}
    for split in splits:
        file, entry = folder / f"{split}.txt", manifest["files"].get(f"{split}.txt")
        if not isinstance(entry, dict) or not file.is_file():
            raise InputError(f"{file} is missing; prepare the folder again")
        if sha256_file(file) != entry.get("sha256"):
            raise InputError(f"{file} was altered: its SHA-256 is not the manifest's; prepare the folder again")
        contents[split] = file.read_bytes()
    return contents, manifest


def _check_manifest(manifest: Any, path: Path) -> None:
    """Raise InputError unless a manifest is `prepare`'s, of this data set, configuration and revision."""
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise InputError(f"{path} is not a manifest of tools/prepare_wikitext.py; prepare the folder again")
    for key, wanted in (("dataset", REPOSITORY), ("config", CONFIG), ("revision", REVISION)):
        if manifest.get(key) != wanted:
            raise InputError(f"{path} is of {key} {manifest.get(key)}, not of {wanted}; prepare the folder again")
    if manifest.get("provenance") not in (FROM_HUB, BY_HAND):
        raise InputError(f"{path} does not say where its text came from; prepare the folder again")


def label(manifest: dict[str, Any]) -> str:
    """What a prepared folder holds, for reports."""
    name = f"{manifest['dataset']} ({manifest['config']}) at revision {manifest['revision']}"
    return name if manifest["provenance"] == FROM_HUB else f"files as of {name}, {manifest['provenance']}"
