"""The corpus of the training tests, and megatron-core imported before ranks are forked."""

from __future__ import annotations

import megatron.core.tensor_parallel  # noqa: F401

from tests.training.conftest import corpus

__all__ = ["corpus"]
