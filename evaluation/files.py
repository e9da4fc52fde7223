"""Output files of the evaluation commands: the place is checked before the work, the file is complete or absent."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from orthros_train.data.storage import write_text_atomically
from orthros_train.errors import InputError


def plain_json(value: dict[str, Any]) -> dict[str, Any]:
    """What JSON can hold of `value`: Infinity and NaN, which are no JSON, as strings that float() reads."""
    plain: dict[str, Any] = json.loads(json.dumps(value, default=str), parse_constant=str)
    return plain


def prepare_output(path: Path) -> None:
    """Make the folder of an output file; raises InputError before any work is done if `path` cannot become a file."""
    _make_folder(path)
    _try_writing(path.parent)


def require_places(paths: Iterable[Path]) -> None:
    """Raise InputError if one of `paths` cannot become a file; unlike prepare_output, makes no folders."""
    for folder, group in itertools.groupby(paths, key=lambda path: path.parent):
        if not folder.exists():
            continue
        if not folder.is_dir():
            raise InputError(f"{folder} is a file, where a folder is needed; remove it, or give another --output")
        for path in group:
            if path.is_dir():
                raise InputError(
                    f"{path} is a folder, where a file is to be written; remove it, or give another --output"
                )
        _try_writing(folder)


def _try_writing(folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(f"cannot write into the folder {folder}: {error.strerror or error}") from error


def write_output(path: Path, text: str) -> None:
    """Write `text` to `path`, folders included; raises InputError when the place cannot be written."""
    _make_folder(path)
    try:
        write_text_atomically(path, text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def _make_folder(path: Path) -> None:
    if path.is_dir():
        raise InputError(f"{path} is a folder; give the name of a file to write")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot make the folder {path.parent}: {error.strerror or error}") from error
