"""lm-eval's command line as it comes with the model type `orthros`: the device where none is named."""

from __future__ import annotations

import sys

import pytest

from evaluation import harness
from evaluation.harness import with_device

RUN = ["--model", "orthros", "--tasks", "sciq", "piqa"]


@pytest.mark.parametrize(("has_gpu", "device"), [(True, "cuda"), (False, "cpu")])
def test_a_device_that_is_there_is_taken(has_gpu: bool, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    given: list[str] = []
    monkeypatch.setattr(harness, "cli_evaluate", lambda: given.extend(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["harness", *RUN])
    harness.main()
    assert given == [*RUN, "--device", device]
    assert with_device(["run", *RUN]) == ["run", *RUN, "--device", device]


@pytest.mark.parametrize(
    "arguments",
    [
        [*RUN, "--device", "cuda:1"],
        [*RUN, "--device=cpu"],
        ["run", "--config", "run.yaml"],
        ["-C", "run.yaml"],
        ["ls", "tasks"],
        ["validate", "--tasks", "sciq"],
        [],
    ],
)
def test_what_names_a_device_or_needs_none_is_left_alone(arguments: list[str]) -> None:
    assert with_device(arguments) == arguments
