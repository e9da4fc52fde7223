"""JSON files of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orthros_train.errors import InputError


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises InputError, naming the file, for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise InputError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a JSON {type(content).__name__} where an object is expected")
    return content


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object as indented JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
