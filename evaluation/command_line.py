"""Argument types that the evaluation commands share."""

from __future__ import annotations

import argparse


def whole_numbers(text: str) -> list[int]:
    """An argparse type: `1,15,16` as a list."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers such as 1,15,16") from None
