"""The training tests' corpus, megatron-core imported before ranks are forked, and buckets that small models fill."""

from __future__ import annotations

import megatron.core.tensor_parallel  # noqa: F401
import pytest

from orthros_train.training import engine
from tests.training.conftest import corpus

__all__ = ["corpus"]


@pytest.fixture(autouse=True)
def several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models' gradients, too, are summed during the backward pass where they overlap it."""
    monkeypatch.setattr(engine, "OVERLAP_BUCKET", 2000)
