"""Sizes with which a benchmark takes a second."""

SMALL = ("--width", "32", "--ffn", "48", "--layers", "3", "--heads", "4", "--kv-heads", "2", "--vocabulary", "61")
QUICK = (*SMALL, "--window", "8", "--threads", "1")
