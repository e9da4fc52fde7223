"""JSON files of a model folder."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NoReturn

from orthros_train.errors import InputError


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises InputError, naming the file, for anything else, NaN and infinity included."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # not UTF-8, or not JSON
        raise InputError(f"{path} is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InputError(f"{path} is not a file of settings: its JSON is nested too deeply") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} holds a JSON {type(content).__name__} where an object is expected")
    return content


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text} is out of range")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object as indented JSON with a final newline."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
