"""A small corpus for the training tests, and everything heavy imported before ranks are forked."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

import orthros_train.data.packed_rows
import orthros_train.training.loop  # noqa: F401  likewise
from tests.training.small_runs import WORDS, write_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The prefix of a corpus of 300 short documents, byte tokens."""
    draw = random.Random(0)
    documents = [" ".join(draw.choices(WORDS, k=draw.randint(5, 40))) for _ in range(300)]
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents)
