"""The Makefile's benchmarks are commands that exist, with options that they have."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def dry_run(target: str) -> subprocess.CompletedProcess[str]:
    """`make -n TARGET` as from a shell, though the tests themselves run under `make test`."""
    shell = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", "-n", target], cwd=ROOT, env=shell, capture_output=True, text=True, check=False)


def benchmark_commands(target: str) -> list[tuple[str, list[str]]]:
    """Module and arguments of every benchmark that `make TARGET` would run."""
    done = dry_run(target)
    assert done.returncode == 0, done.stderr
    found = []
    for line in done.stdout.replace("\\\n", " ").splitlines():
        match = re.search(r"python (?:benchmarks/(?!record_evidence)(\w+)\.py|-m (evaluation\.ttft)) (.*)", line)
        if match:
            found.append((match[2] or f"benchmarks.{match[1]}", shlex.split(match[3])))
    return found


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize(
    ("target", "count", "some"),
    [
        ("bench", 10, ["benchmarks.prefill", "benchmarks.training_step", "benchmarks.startup"]),
        ("bench-gpu", 6, ["benchmarks.training_step", "evaluation.ttft"]),
        ("evidence-performance", 9, ["benchmarks.prefill", "benchmarks.scoring_speed", "benchmarks.data_loading"]),
        ("evidence-base-stream-memory", 1, ["benchmarks.base_stream_memory"]),
    ],
)
def test_benchmarks_have_their_options(target: str, count: int, some: list[str]) -> None:
    commands = benchmark_commands(target)
    assert len(commands) == count
    assert set(some) <= {module for module, _ in commands}
    outputs = [importlib.import_module(module).build_parser().parse_args(given).output for module, given in commands]
    assert len(set(outputs)) == count  # none overwrites another's
    if target.startswith("evidence"):
        assert {output.parent for output in outputs} == {Path("docs/evidence")}


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("target", ["evidence-performance-nonsense", "evidence-nonsense"])
def test_evidence_of_nothing_is_no_target(target: str) -> None:
    done = dry_run(target)
    assert done.returncode == 2
    assert f"No rule to make target '{target}'" in done.stderr
    assert not done.stdout


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_a_part_of_the_evidence_can_be_made_by_itself() -> None:
    for target, command in (
        ("evidence-performance-decode", "python benchmarks/decode.py --contexts"),
        ("evidence-training", "tests/training -m evidence"),
        ("evidence-readme", "tests/test_readme.py -m evidence"),
    ):
        done = dry_run(target)
        assert done.stdout.count(command) == 1


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_a_compiled_training_step_is_measured_on_a_gpu() -> None:
    steps = [given for module, given in benchmark_commands("bench-gpu") if module == "benchmarks.training_step"]
    assert ["--compile" in given for given in steps] == [False, True, False]
