"""transformers' progress bars off, as its warnings are in tests/conftest.py."""

from transformers.utils import logging

logging.disable_progress_bar()
