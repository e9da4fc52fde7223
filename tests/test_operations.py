"""Every command that docs/operations.md prints can be given as it is printed."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
from pathlib import Path

import pytest

from launchers.preflight import input_paths
from orthros_train import __main__ as training
from orthros_train.config import load_config
from orthros_train.data.manifest import bin_path, idx_path, manifest_path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", TEXT, flags=re.DOTALL | re.MULTILINE)
    for line in block.splitlines()
    if line.strip()
]
STARTERS = {"mpirun", "srun", "torchrun"}
PLAIN = {"pip", "source", "tail", "echo", "scancel"}


def own_command(words: list[str]) -> list[str]:
    """What a command runs of ours, without the launcher in front of it."""
    if words[0] in STARTERS:
        start = next(index for index, word in enumerate(words) if word == "python" or word.endswith(".py"))
        words = words[start:] if words[start] == "python" else ["python", *words[start:]]
    return words


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_parses(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = own_command(shlex.split(command))
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    elif words[0].startswith("launchers/"):
        config = next(word for word in words if word.endswith(".yaml"))
        load_config(config)
        assert subprocess.run([words[0], "--help"], capture_output=True, check=True).stdout
    elif words[:3] == ["python", "-m", "orthros_train"]:
        options = training.build_parser().parse_intermixed_args(words[3:])
        load_config(options.config, options.overrides)
    elif words[:3] == ["python", "-m", "pytest"]:
        assert (ROOT / words[3]).is_dir()
    elif words[0] == "python":
        runpy.run_path(words[1])["build_parser"]().parse_intermixed_args(words[2:])
    else:
        assert words[0] in PLAIN or command == "python3 -m venv .venv"


def made_before(command: str) -> set[str]:
    """Files and prefixes that the commands above `command` write."""
    words = [shlex.split(above) for above in COMMANDS[: COMMANDS.index(command)]]
    options = ("--output", "--output-prefix")
    return {line[index + 1] for line in words for index, word in enumerate(line) if word in options}


def test_the_preflight_finds_the_files_that_the_page_made() -> None:
    (command,) = [line for line in COMMANDS if "launchers/preflight.py" in line]
    config = load_config(next(word for word in shlex.split(command) if word.endswith(".yaml")))
    inputs = {str(path) for path in input_paths(config)}
    made = made_before(command)
    corpora = {str(path(Path(prefix))) for prefix in made for path in (manifest_path, idx_path, bin_path)}
    assert inputs <= made | corpora


def test_pytest_is_installed_before_it_is_run() -> None:
    first = next(index for index, line in enumerate(COMMANDS) if line.startswith("python -m pytest"))
    files = [word for line in COMMANDS[:first] for word in line.split() if word.startswith("requirements")]
    assert any("pytest" in (ROOT / file).read_text(encoding="utf-8") for file in files)


def test_it_covers_every_launcher() -> None:
    for file in (ROOT / "launchers").iterdir():
        if file.suffix in (".sh", ".sbatch") or file.name in ("submit.py", "status.py", "preflight.py", "attempt.py"):
            assert f"launchers/{file.name}" in TEXT


@pytest.mark.parametrize("option", sorted(set(re.findall(r"`([a-z]+\.[a-z_]+)[:`]", TEXT))))
def test_an_option_exists(option: str) -> None:
    section, _, name = option.partition(".")
    values = load_config(ROOT / "configs" / "demo.yaml").model_dump()
    assert name in values.get(section, {}) or option in ("status.json", "preflight.py", "attempt.py", "status.py")
