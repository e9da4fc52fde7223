"""Whether a validation source may hold conversations that are trained on.

* Sources on disk overlap where they read a file in common, whether by name, through a folder or through a link.
* Splits of one data set overlap unless their names differ or their slices are surely apart: `train[:95%]` and
  `train[95%:]`. Percentages and row numbers cannot be compared without the data set, nor can counts from both ends.
* A data set whose configuration is not named may be any of its configurations; two that are named are taken to be
  apart.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple

from orthros_train.config.sft import SFTSource
from orthros_train.data.sft_sources import source_files

_SLICED = re.compile(r"(?P<name>[\w.]+)(\[((?P<start>-?[\d_]+)(?P<p1>%)?)?:((?P<stop>-?[\d_]+)(?P<p2>%)?)?\])?$")
_EVERYTHING = "all"  # the library's name for all splits together


class _Slice(NamedTuple):
    """Part of a split as its name says it: rows, or percent, from `start` up to `stop`; below 0: from the end."""

    split: str
    start: float
    stop: float
    unit: str


def why_overlapping(held_out: SFTSource, trained: SFTSource) -> str | None:
    """What to do about a source that may hold conversations of another; None: it surely holds none.

    Raises:
        InputError: a file is missing or unfit.
    """
    if held_out.dataset is None or trained.dataset is None or not _same_dataset(held_out, trained):
        return "give each file to one of them" if _files(held_out) & _files(trained) else None
    same_configuration = held_out.configuration == trained.configuration
    both_named = held_out.configuration is not None and trained.configuration is not None
    if (both_named and not same_configuration) or not _splits_meet(held_out.split, trained.split):
        return None
    if not same_configuration:
        return "name the configuration of both"
    return "name splits that are apart, such as train[:95%] and train[95%:]"


def _same_dataset(one: SFTSource, other: SFTSource) -> bool:
    first, second = Path(str(one.dataset)), Path(str(other.dataset))
    return first == second or (first.exists() and first.resolve() == second.resolve())


def _files(source: SFTSource) -> set[Path]:
    """What the source reads, or may read, of this machine's files."""
    if source.path is not None:
        return {file.resolve() for file in source_files(Path(source.path))}
    return {file.resolve() for file in Path(str(source.dataset)).rglob("*") if file.is_file()}


def _splits_meet(first: str, second: str) -> bool:
    return any(_meet(one, other) for one in map(_slice, first.split("+")) for other in map(_slice, second.split("+")))


def _meet(one: _Slice, other: _Slice) -> bool:
    if one.split != other.split:
        return _EVERYTHING in (one.split, other.split)
    return one.unit != other.unit or not (_before(one, other) or _before(other, one))


def _before(one: _Slice, other: _Slice) -> bool:
    """Whether `one` surely ends where `other` starts, or before."""
    return one.stop == other.start or 0 <= one.stop <= other.start


def _slice(text: str) -> _Slice:
    found = _SLICED.match(text.strip())
    if found is None:  # another way to say a part, such as a rounding: which one is not known
        return _Slice(re.split(r"[\[(]", text.strip())[0], 0, math.inf, "?")
    start = int(found["start"]) if found["start"] else 0
    stop = int(found["stop"]) if found["stop"] else math.inf
    return _Slice(found["name"], start, stop, "%" if found["p1"] or found["p2"] else "rows")
