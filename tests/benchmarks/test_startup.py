"""Every command is found, and none imports torch or matplotlib before it has read its arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import startup
from orthros_train.errors import InputError

FIND_HEAVY_IMPORT = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    heavy = {"torch", "transformers", "deepspeed"} & set(sys.modules)
    if heavy:
        sys.exit(f"{name} imports {', '.join(sorted(heavy))}")
"""


def test_the_commands() -> None:
    found = startup.commands()
    names = [
        "-m orthros_train",
        "-m evaluation.ttft",
        "tools/plan.py",
        "launchers/torchrun.sh",
        "benchmarks/compare.py",
    ]
    assert set(names) <= set(found)
    assert "-m evaluation.associative_recall" not in found  # a suite of evaluation.run, no command
    assert found["-m orthros_train"] == [sys.executable, "-m", "orthros_train"]
    assert found["launchers/torchrun.sh"] == ["bash", "launchers/torchrun.sh"]


def test_no_command_imports_torch_before_it_is_asked_to_work() -> None:
    names = [call[-1] for call in startup.commands().values() if call[0] == sys.executable]
    modules = [name.removesuffix(".py").replace("/", ".") for name in names if name != "orthros_train"]
    command = [sys.executable, "-c", FIND_HEAVY_IMPORT, "orthros_train.__main__", *modules]
    found = subprocess.run(command, cwd=startup.ROOT, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (0, "")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "new" / "startup.json"
    arguments = ["--output", str(output), "--only", "tools/export_hf.py", "--repeats", "2", "--limit", "0"]
    assert startup.main(arguments) == 0
    (record,) = json.loads(output.read_text())["records"]
    assert record["case"] == "tools/export_hf.py --help"
    assert len(record["all_seconds"]) == len(record["all_processor_seconds"]) == 2
    assert record["seconds"] > 0
    assert "over 0 s: tools/export_hf.py --help" in capsys.readouterr().out


def test_the_import_is_set_beside_its_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer, ours = startup.IMPORTS
    monkeypatch.setattr(startup, "IMPORTS", {peer: "pass", ours: "import time; time.sleep(0.3)"})
    output = tmp_path / "startup.json"
    assert startup.main(["--output", str(output), "--only", "import:", "--repeats", "1"]) == 0
    records = {record["case"]: record for record in json.loads(output.read_text())["records"]}
    assert records[peer]["over_peer"] == 1
    assert records[ours]["over_peer"] > 1


def test_a_command_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "commands", lambda: {"x": [sys.executable, "-c", "raise SystemExit('no help here')"]})
    with pytest.raises(InputError, match="ended with exit code 1: no help here"):
        startup.main(["--output", str(tmp_path / "x.json"), "--only", "x --help", "--repeats", "1"])
    with pytest.raises(InputError, match="--only 'nothing' is part of no case"):
        startup.main(["--output", str(tmp_path / "x.json"), "--only", "nothing"])


@pytest.mark.parametrize("limit", ["nan", "inf", "-1", "fast"])
def test_a_limit_that_nothing_exceeds_is_none(limit: str) -> None:
    with pytest.raises(InputError, match=r"must be a finite number that is not negative|'fast' is not a number"):
        startup.build_parser().parse_args(["--output", "x", "--limit", limit])


@pytest.mark.evidence
def test_every_command_answers(tmp_path: Path) -> None:
    assert startup.main(["--output", str(tmp_path / "x.json"), "--only=--help", "--repeats", "1"]) == 0
