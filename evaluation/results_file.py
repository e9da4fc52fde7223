"""results.json of an evaluation, read back: what a comparison needs of it is there, or one line says what is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError, model_validator

from orthros_train.errors import InputError


class _Suite(BaseModel):
    title: str
    tasks: list[tuple[str, str | None]]
    has_mean: bool
    paper: str | None


class _Task(BaseModel):
    metric: str
    shots: int
    version: str
    data: dict[str, Any]


class _Document(BaseModel):
    doc_hash: str
    value: float | tuple[float, float]


class _Record(BaseModel):
    task: _Task
    results: dict[str, Any]
    documents: list[_Document]
    truncated: int
    not_finite: int = 0
    higher_is_better: bool

    @model_validator(mode="after")
    def _has_its_headline(self) -> _Record:
        float(self.results.get(self.task.metric, "is not there"))  # a ValueError is a finding
        return self


class _Ours(BaseModel):
    suites: dict[str, _Suite]
    records: dict[str, _Record]
    left_out: dict[str, str] = {}


def read_results(folder: Path) -> dict[str, Any]:
    """results.json of an evaluation; raises InputError where there is none that this project wrote."""
    path = folder / "results.json" if folder.is_dir() else folder
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(
            f"{path} cannot be read ({error.strerror}); name the output folder of an evaluation"
        ) from error
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}") from error
    ours = content.get("orthros") if isinstance(content, dict) else None
    if not isinstance(ours, dict) or not all(isinstance(ours.get(part), dict) for part in ("suites", "records")):
        raise InputError(f"{path} was not written by python -m evaluation.run; its documents' scores are not there")
    try:
        _Ours.model_validate(ours)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, ("orthros", *first["loc"])))
        raise InputError(
            f"{path} is not as python -m evaluation.run writes it: {place}: {first['msg']}; evaluate again"
        ) from error
    found: dict[str, Any] = content
    return found
