"""What a training and its launchers agree on: exit codes, and the file that asks for a stop."""

from pathlib import Path

DONE, FAILED, BAD_INPUT, STOPPED = 0, 1, 2, 75  # STOPPED: with a checkpoint saved, to be started again

STOP_FILE = "stop_requested"  # in the run's folder
LAUNCHER = "launcher: "  # how its text begins where no person wrote it


def is_launchers(file: Path) -> bool:
    """Whether there is a stop file and a launcher wrote it."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").startswith(LAUNCHER)
    except OSError:
        return False
