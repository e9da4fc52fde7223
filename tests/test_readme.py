"""Every command that the README prints can be run as it is printed."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from evaluation import cache_check
from orthros_train import __main__ as training
from orthros_train.config import load_config

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SELF_CONTAINED = ("make ", "source ")  # set up an environment of their own


def blocks(language: str) -> list[str]:
    """The fenced code blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """The shell commands, one a line."""
    return [line for block in blocks("sh") for line in block.splitlines() if line.strip()]


def test_the_order_of_the_chapters() -> None:
    chapters = re.findall(r"^## (.*)$", README, flags=re.MULTILINE)
    assert chapters[:4] == ["Two commands", "Train your own", "Resume", "Generate"]
    assert README.index("docs/orthros.svg") < README.index("## Two commands")


@pytest.mark.parametrize("command", commands())
def test_a_command_parses(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        assert re.search(rf"^{words[1]}:", makefile, flags=re.MULTILINE)
    elif "orthros_train" in words:
        options = training.build_parser().parse_intermixed_args(words[words.index("orthros_train") + 1 :])
        load_config(options.config, options.overrides)
    elif "evaluation.cache_check" in words:
        cache_check.build_parser().parse_args(words[words.index("evaluation.cache_check") + 1 :])
    elif words[0] == "python":
        tool = runpy.run_path(words[1])
        tool["build_parser"]().parse_args(words[2:])
    else:
        assert command == "source .venv/bin/activate"


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!https?:)([^)#]+)\)", README))))
def test_a_link_leads_somewhere(link: str) -> None:
    assert (ROOT / link).exists()


@pytest.mark.evidence
def test_the_commands_run_one_after_another(tmp_path: Path) -> None:
    """In a copy of the tree, with text in the place where `make demo` leaves it."""
    for entry in ("orthros_train", "evaluation", "tools", "configs"):
        (tmp_path / entry).symlink_to(ROOT / entry)
    text = tmp_path / "outputs" / "demo" / "data" / "train.jsonl"
    text.parent.mkdir(parents=True)
    plays = ({"text": f"Act {n}. " + f"Enter the player number {n}, and speak. " * 400} for n in range(300))
    text.write_text("\n".join(map(json.dumps, plays)) + "\n", encoding="utf-8")
    lines = [line for line in commands() if not line.startswith(SELF_CONTAINED)]
    script = "set -euxo pipefail\n" + "\n".join(lines) + "\npython - <<'END'\n" + "".join(blocks("python")) + "END\n"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    outcome = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    assert outcome.returncode == 0, outcome.stdout[-2000:] + outcome.stderr[-4000:]
    assert outcome.stdout.count("MACBETH.") >= 2
    status = json.loads((tmp_path / "outputs" / "mine" / "status.json").read_text())
    assert (status["state"], status["step"]) == ("done", 90)
