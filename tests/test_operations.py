"""Every command that docs/operations.md prints can be given as it is printed."""

from __future__ import annotations

import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from deepspeed.launcher import runner as deepspeed
from torch.distributed import run as torchrun

from launchers import supervise
from launchers.preflight import input_paths
from orthros_train import __main__ as training
from orthros_train.config import load_config
from orthros_train.data.manifest import bin_path, idx_path, manifest_path
from orthros_train.errors import InputError

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


def started_by(words: list[str], folder: Path) -> list[str]:
    """What launchers/*.sh would start: the arguments that a stand-in for python records."""
    stand_in, record = folder / "python", folder / "arguments"
    stand_in.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > '{record}'\n", encoding="utf-8")
    stand_in.chmod(0o755)
    subprocess.run(words, env={"PATH": f"{folder}:/usr/bin:/bin"}, check=True, timeout=30)
    script, *arguments = record.read_text(encoding="utf-8").splitlines()
    assert (ROOT / script).samefile(supervise.__file__)
    split = arguments.index("--")
    options = supervise.build_parser().parse_intermixed_args(arguments[:split])
    load_config(options.config, options.overrides)
    return [*arguments[split + 1 :], *shlex.split(options.program), options.config, *options.overrides]


def check_launcher(words: list[str], folder: Path) -> None:
    """Have the launcher itself read its options; srun's are its own."""
    if words[0] == "torchrun":
        assert Path(torchrun.get_args_parser().parse_args(words[1:]).training_script).is_file()
    elif words[0] == "deepspeed":
        assert deepspeed.parse_args(words[1:]).user_script == "orthros_train"
    elif words[0] == "mpirun":
        # of understood options, what mpirun then misses is the file of hosts
        command = [str(Path(sys.executable).with_name("mpirun")), *words[1:]]
        allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, **allow}, capture_output=True, text=True, timeout=30, check=False
        )
        assert "unable to open the hostfile" in done.stdout + done.stderr, done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_parses(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    check_launcher(words, tmp_path)
    words = own_command(words)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    elif words[0].startswith("launchers/"):
        check_launcher(started_by(words, tmp_path), tmp_path)
    elif words[:3] == ["python", "-m", "orthros_train"]:
        options = training.build_parser().parse_intermixed_args(words[3:])
        load_config(options.config, options.overrides)
    elif words[:3] == ["python", "-m", "pytest"]:
        assert (ROOT / words[3]).is_dir()
    elif words[0] == "python":
        runpy.run_path(words[1])["build_parser"]().parse_intermixed_args(words[2:])
    else:
        assert words[0] in PLAIN or command == "python3 -m venv .venv"


@pytest.mark.parametrize(
    "command",
    [
        "launchers/torchrun.sh --rank 8 configs/orthros_130m.yaml",
        "launchers/torchrun.sh --ranks 8 configs/orthros_13m.yaml",
        "launchers/mpirun.sh -n 8 --hostfile hosts --map-on core -- configs/orthros_130m.yaml",
        "launchers/deepspeed.sh --hosts hosts -- configs/orthros_130m.yaml",
    ],
)
def test_a_wrong_launch_is_noticed(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises((InputError, SystemExit, AssertionError)):
        check_launcher(started_by(shlex.split(command), tmp_path), tmp_path)


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
    files = ("status.json", "metrics.jsonl", "preflight.py", "attempt.py", "status.py")
    assert name in values.get(section, {}) or option in files
