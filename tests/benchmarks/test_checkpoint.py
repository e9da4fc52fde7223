"""Every way saves the state, and what it loads is what it saved."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import checkpoint
from orthros_train.errors import InputError
from tests.distributed import run_distributed

SMALL = ("--heads", "1", "--layers", "2", "--vocabulary", "50", "--repeats", "2")
WAYS = ["ours, save", "torch.save", "safetensors, save", "ours, verify and load", "torch.load", "safetensors, load"]


def test_what_is_loaded_is_what_was_saved(tmp_path: Path) -> None:
    def check() -> dict[str, bool]:
        engine = checkpoint.trained_engine(checkpoint.build_parser().parse_args(["--output", "x", *SMALL]))
        ways = checkpoint.calls(engine, tmp_path)
        saved = {name: view.clone() for name, view in checkpoint.state(engine).items()}
        assert any(name.endswith("|exp_avg") and values.any() for name, values in saved.items())
        for way in WAYS[:3]:
            ways[way]()
        equal = {}
        for way in WAYS[3:]:
            for view in checkpoint.state(engine).values():
                view.zero_()
            ways[way]()
            found = checkpoint.state(engine)
            equal[way] = all(torch.equal(values, found[name]) for name, values in saved.items())
        return equal

    (equal,) = run_distributed(check, 1, process_group=False)
    assert equal == dict.fromkeys(WAYS[3:], True)


def test_the_command(tmp_path: Path) -> None:
    output = tmp_path / "new" / "checkpoint.json"
    (code,) = run_distributed(checkpoint.main, 1, ["--output", str(output), *SMALL], process_group=False)
    assert code == 0
    records: list[dict[str, Any]] = json.loads(output.read_text())["records"]
    assert [record["case"] for record in records] == WAYS
    embedding, layer = 2 * 50 * 64, 4 * 64 * 64 + 3 * 64 * 170 + 2 * 64
    parameters = embedding + 2 * layer + 64 + 3 * 2 * 64  # three affines: base of layer 1, output of both
    for record in records:
        assert record["megabytes"] == pytest.approx(12 * parameters / 1e6)
        assert record["megabytes_per_second"] == pytest.approx(record["megabytes"] / record["seconds"])
    assert [path.name for path in output.parent.iterdir()] == ["checkpoint.json"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--folder .*absent is not a folder"):
        checkpoint.main(["--output", str(tmp_path / "x.json"), "--folder", str(tmp_path / "absent")])
