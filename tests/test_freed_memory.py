"""Freed memory is kept: taking it again costs no page faults."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from orthros_train.freed_memory import SETTINGS

TAKE_AND_FREE = """
import ctypes, resource
from orthros_train.command_line import run_command

def main():
    library = ctypes.CDLL(None)
    library.malloc.restype = ctypes.c_void_p
    library.malloc.argtypes, library.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]

    def take_and_free():
        block = library.malloc(64 * 2**20)
        ctypes.memset(block, 1, 64 * 2**20)
        library.free(block)

    take_and_free()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        take_and_free()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

run_command(main)
"""
PAGES = 4 * 64 * 2**20 // os.sysconf("SC_PAGE_SIZE")


def faults(**settings: str) -> int:
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    command = [sys.executable, "-c", TAKE_AND_FREE]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment | settings)
    return int(ran.stdout)


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")


def test_a_command_keeps_what_it_frees() -> None:
    assert faults() < PAGES / 100


def test_a_persons_own_setting_is_left_alone() -> None:
    assert faults(MALLOC_MMAP_THRESHOLD_="131072") > PAGES / 2
