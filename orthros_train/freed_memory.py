"""What becomes of freed memory: the C library of Linux gives large blocks back to the system at once.

A step of training frees and takes the same activations, gradients and logits again and again. Given back, each page of
them costs a fault and a zeroing the next time, which took a sixth of a training step on a CPU (docs/LOG.md).
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGEST = 2**31 - 1  # mallopt takes an int
_LARGEST_OF_OLD_GLIBC = 32 * 2**20  # it refuses a greater threshold for mmap
# A person who has set one of these knows better.
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Let this process keep what it frees for its next use; where malloc is not glibc's nothing happens."""
    if sys.platform != "linux" or any(os.environ.get(name) for name in SETTINGS):
        return
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt"):  # musl
        return
    # setting either ends glibc's own adjustment of both, so the second goes only with the first
    if library.mallopt(_MMAP_THRESHOLD, _LARGEST) or library.mallopt(_MMAP_THRESHOLD, _LARGEST_OF_OLD_GLIBC):
        library.mallopt(_TRIM_THRESHOLD, _LARGEST)
