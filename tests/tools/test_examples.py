"""The examples of the tools' --help parse, and what they write is not for version control."""

from __future__ import annotations

import runpy
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.tools.command import ROOT

TOOLS = ("convert_llama", "export_hf", "generate", "inspect_checkpoint", "preprocess_data", "train_tokenizer")


def examples(tool: str) -> list[list[str]]:
    """The words after the tool's name of each example."""
    text = runpy.run_path(str(ROOT / "tools" / f"{tool}.py"))["EXAMPLES"].replace("\\\n", " ")
    commands = [shlex.split(line.split(" < ")[0], comments=True) for line in text.splitlines()]
    commands = [words[words.index("python") :] for words in commands]  # what stands before it starts several ranks
    assert all(words[1] == f"tools/{tool}.py" for words in commands)
    return [words[2:] for words in commands]


@pytest.mark.parametrize("tool", TOOLS)
def test_examples_parse_and_their_outputs_are_ignored_by_git(tool: str) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    parser = runpy.run_path(str(ROOT / "tools" / f"{tool}.py"))["build_parser"]()
    for words in examples(tool):
        options = parser.parse_args(words)
        output = getattr(options, "output", None) or getattr(options, "output_prefix", None)
        if output is not None:
            ignored = subprocess.run(["git", "check-ignore", "--quiet", Path(output) / "file"], cwd=ROOT, check=False)
            assert ignored.returncode == 0, f"{output} of an example is not in .gitignore"
