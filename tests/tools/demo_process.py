"""A demo's command inside the tests' process; its trainings and tools are forks of it or run in it, imported once."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from evaluation.demo import tools, training
from orthros_train.config import load_config
from orthros_train.training.loop import train
from tests.distributed import run_distributed
from tests.tools.command import ROOT


def demo_in_this_process(name: str, monkeypatch: pytest.MonkeyPatch, silent_output: str = "") -> dict[str, Any]:
    """The module tools/NAME.py; `silent_output` is what a tool that is not shown is taken to have printed."""

    def train_here(config: Path, run: Path, overrides: list[str], ranks: int) -> str:
        codes = run_distributed(train, ranks, load_config(config, overrides), ["test"], process_group=False)
        assert codes == [0] * ranks
        return f"trained {run.name}"

    def tool_here(script: str, *arguments: str, show: bool = True) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [script, *arguments])
            with pytest.raises(SystemExit) as end:
                runpy.run_path(str(ROOT / script), run_name="__main__")
        assert end.value.code == 0
        return "" if show else silent_output

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(training, "train", train_here)
    monkeypatch.setattr(tools, "run_tool", tool_here)
    return runpy.run_path(str(ROOT / "tools" / f"{name}.py"))
