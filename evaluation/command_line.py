"""Argument types that the evaluation commands share."""

from __future__ import annotations

import argparse
import math

from orthros_train.command_line import seed


def whole_numbers(text: str) -> list[int]:
    """An argparse type: `1,15,16` as a list."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 1,15,16") from None


def distinct_seeds(text: str) -> list[int]:
    """An argparse type: `42,43,44` as seeds, no two alike."""
    seeds = [seed(part) for part in text.split(",")]
    if len(set(seeds)) < len(seeds):
        raise argparse.ArgumentTypeError(f"{text!r} names a seed twice, which would count one run as several")
    return seeds


def positive_number(text: str) -> float:
    """An argparse type: a finite number above 0."""
    value = _number(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError("must be a finite number above 0")
    return value


def non_negative_number(text: str) -> float:
    """An argparse type: a finite number, 0 or above."""
    value = _number(text)
    if not (value >= 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError("must be a finite number that is not negative")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
