"""transformers' progress bars off, as its warnings are in tests/conftest.py, and the corpus of the training tests."""

from transformers.utils import logging

from tests.training.conftest import corpus

logging.disable_progress_bar()

__all__ = ["corpus"]
