"""Twelve kills at random moments leave no trace; the longer experiment is `python -m tests.training.kills`."""

from __future__ import annotations

from pathlib import Path

from tests.training.kills import assert_ends_as_if_never_killed


def test_twelve_kills(tmp_path: Path, corpus: Path) -> None:
    in_saves = assert_ends_as_if_never_killed(tmp_path, corpus, kills=12, seed=1)
    assert in_saves > 0
