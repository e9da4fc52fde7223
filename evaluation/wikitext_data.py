"""WikiText as three text files with a manifest, and the check that they are still what was prepared."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from orthros_train.data.output_folder import finished_folder
from orthros_train.data.storage import sha256_file
from orthros_train.errors import InputError

REPOSITORY = "Salesforce/wikitext"
REVISION = "b08601e04326c79dfdd32d625aee71d232d685c3"
CONFIG = "wikitext-2-raw-v1"
LICENSE = "CC BY-SA 3.0 and GFDL"
SPLITS = ("train", "validation", "test")
MANIFEST = "manifest.json"


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

    try:
        rows = datasets.load_dataset(REPOSITORY, CONFIG, split=split, revision=REVISION)
    except Exception as error:  # the library and its readers raise many kinds
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise InputError(f"the hub cannot be reached ({reason}); {place_hint(Path('wikitext-parquet'))}") from error
    return list(rows["text"]), f"hub {REPOSITORY}@{REVISION}"


def local_lines(folder: Path) -> Callable[[str], tuple[list[str], str]]:
    """A reader like `hub_lines` for parquet files in `folder`."""

    def read(split: str) -> tuple[list[str], str]:
        import pyarrow  # noqa: PLC0415
        from pyarrow import parquet  # noqa: PLC0415

        path = folder / parquet_name(split)
        if not path.is_file():
            raise InputError(f"{path} is missing; {place_hint(folder)}")
        try:
            column = parquet.read_table(path, columns=["text"]).column("text")
        except (pyarrow.ArrowException, KeyError) as error:
            raise InputError(f"{path} cannot be read as WikiText's parquet ({error}); {place_hint(folder)}") from error
        return column.to_pylist(), f"file with SHA-256 {sha256_file(path)}"

    return read


def prepare(output: Path, read: Callable[[str], tuple[list[str], str]]) -> Path:
    """Write SPLIT.txt for every split and manifest.json into `output`, which must not exist or be empty."""
    manifest: dict[str, Any] = {
        "dataset": REPOSITORY,
        "revision": REVISION,
        "config": CONFIG,
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
    if (manifest.get("dataset"), manifest.get("revision")) != (REPOSITORY, REVISION):
        raise InputError(f"{path} is of {manifest.get('dataset')} at {manifest.get('revision')}, not of {REVISION}")
    contents = {}
    for split in splits:
        file, entry = folder / f"{split}.txt", manifest["files"].get(f"{split}.txt")
        if entry is None or not file.is_file():
            raise InputError(f"{file} is missing; prepare the folder again")
        if sha256_file(file) != entry["sha256"]:
            raise InputError(f"{file} was altered: its SHA-256 is not the manifest's; prepare the folder again")
        contents[split] = file.read_bytes()
    return contents, manifest
