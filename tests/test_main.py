"""`python -m orthros_train` as a user meets it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path

import pytest

from orthros_train import __main__ as entry
from orthros_train.__main__ import main, run
from orthros_train.config import Config
from orthros_train.errors import InputError

ROOT = Path(__file__).parent.parent
DEMO = str(ROOT / "configs" / "demo.yaml")
SHORT = ("train.steps=70", "schedule.warmup_steps=0")
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry, "SECONDS_TO_REPORT", 0.0)
    for variable in LAUNCHER_VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command in its own process; its last stderr line lists what it imported of the heavy libraries."""
    script = (
        "import runpy, sys\n"
        "try:\n    runpy.run_module('orthros_train', run_name='__main__', alter_sys=True)\n"
        "finally:\n    heavy = {'torch', 'transformers', 'deepspeed', 'numpy'} & set(sys.modules)\n"
        "    print('imported:', *sorted(heavy), file=sys.stderr)\n"
    )
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**clean, **environment},
        timeout=60,
        check=False,
    )


def test_help_is_quick_and_imports_nothing_heavy() -> None:
    started = time.monotonic()
    result = command("--help")
    assert time.monotonic() - started < 5  # 0.4 s alone; the bound allows for a busy machine
    assert (result.returncode, result.stderr) == (0, "imported:\n")
    for expected in ("CONFIG.yaml", "key=value", "--dry-run", "examples:", "torchrun", "75"):
        assert expected in result.stdout


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        ([], "the following arguments are required: CONFIG.yaml"),
        (["none.yaml"], "configuration file none.yaml does not exist"),
        ([DEMO, "train.stepz=3"], "did you mean train.steps?"),
        ([DEMO, "--dry-ran"], "unrecognized arguments: --dry-ran"),
        ([DEMO, "--dry-run", "--world-size", "many"], "invalid int value: 'many'"),
        ([DEMO, "--world-size", "2"], "--world-size belongs to --dry-run"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], fragment: str) -> None:
    result = command(*arguments)
    error, imported = result.stderr.splitlines()
    assert error.startswith("error: ")
    assert fragment in error
    assert (result.returncode, result.stdout, imported) == (2, "", "imported:")


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_an_unknown_suite_is_refused_before_torch_is_imported(more: list[str]) -> None:
    result = command(DEMO, "evaluation.suites.names=[comonsense]", *more)
    error, imported = result.stderr.splitlines()
    assert error.startswith("error: evaluation.suites: there is no suite 'comonsense'; did you mean commonsense")
    assert (result.returncode, result.stdout, imported) == (2, "", "imported: numpy")


def test_module_really_runs() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "orthros_train", "none.yaml"], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert (result.returncode, result.stderr) == (2, "error: configuration file none.yaml does not exist\n")


def test_only_the_first_rank_reports() -> None:
    first = command(DEMO, "train.steps=0", RANK="0", WORLD_SIZE="2")
    started = time.monotonic()
    second = command(DEMO, "train.steps=0", RANK="1", WORLD_SIZE="2")
    assert time.monotonic() - started > 3, "torchrun ends the first rank, too, as soon as another one leaves"
    assert first.stderr.startswith("error: override 'train.steps=0'")
    assert (first.returncode, second.returncode) == (2, 2)
    assert second.stderr == "imported:\n"


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK"])
def test_every_launchers_rank_is_understood(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setattr(sys, "argv", ["orthros_train", DEMO, "nonsense=1"])
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    monkeypatch.setenv(variable, "3")
    assert run() == 2
    monkeypatch.setenv(variable, "0")
    with pytest.raises(InputError, match="unknown option nonsense"):
        run()


def test_a_file_missing_on_another_machine_is_reported_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["orthros_train", "none.yaml"])
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    monkeypatch.setenv("RANK", "8")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(InputError, match=r"rank 8: configuration file none\.yaml does not exist"):
        run()
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run() == 2


class FakeTraining:
    """Stands in for the training loop."""

    def __init__(self, outcome: int | InputError) -> None:
        self.outcome = outcome
        self.calls: list[tuple[Config, Sequence[str]]] = []

    def train(self, config: Config, command: Sequence[str], open_suites: object = None) -> int:
        self.calls.append((config, command))
        self.open_suites = open_suites
        if isinstance(self.outcome, InputError):
            raise self.outcome
        return self.outcome


def install(monkeypatch: pytest.MonkeyPatch, outcome: int | InputError) -> FakeTraining:
    training = FakeTraining(outcome)
    module = types.ModuleType("orthros_train.training.loop")
    module.train = training.train  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "orthros_train.training.loop", module)
    return training


@pytest.mark.parametrize("code", [0, 75])
def test_training_gets_config_and_command_and_gives_the_exit_code(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    training = install(monkeypatch, code)
    assert main([DEMO, *SHORT, "--local_rank=1", "train.seed=3"]) == code
    ((config, recorded),) = training.calls
    assert (config.train.steps, config.train.seed) == (70, 3)
    assert recorded == ["python", "-m", "orthros_train", DEMO, *SHORT, "--local_rank=1", "train.seed=3"]


def test_training_gets_a_way_to_score_suites_where_it_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from evaluation.during_training import open_suites  # noqa: PLC0415

    training = install(monkeypatch, 0)
    main([DEMO])
    assert training.open_suites is None
    main([DEMO, "evaluation.suites.names=[commonsense]"])
    assert training.open_suites is open_suites


@pytest.mark.parametrize("joined", [True, False])
def test_bad_input_found_before_the_ranks_join_is_reported_by_its_rank(
    monkeypatch: pytest.MonkeyPatch, joined: bool
) -> None:
    install(monkeypatch, InputError("this machine shows 2 GPUs"))
    distributed = types.SimpleNamespace(is_initialized=lambda: joined)
    monkeypatch.setitem(sys.modules, "torch.distributed", distributed)  # type: ignore[arg-type]
    monkeypatch.setattr(sys, "argv", ["orthros_train", DEMO])
    monkeypatch.setenv("RANK", "2")
    if joined:
        assert run() == 2
    else:
        with pytest.raises(InputError, match="rank 2: this machine shows 2 GPUs"):
            run()


def test_dry_run_prints_and_starts_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    training = install(monkeypatch, 0)
    assert main([DEMO, "--dry-run", *SHORT, "--world-size", "2"]) == 0
    assert training.calls == []
    shown = capsys.readouterr().out
    assert "steps: 70" in shown
    assert "Memory a rank, 2 ranks" in shown


def test_dry_run_takes_the_world_size_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    main([DEMO, "--dry-run"])
    assert "Memory a rank, 2 ranks" in capsys.readouterr().out
    monkeypatch.delenv("WORLD_SIZE")
    main([DEMO, "--dry-run", "parallel.tensor=2"])
    assert "2 = 2 tensor x 1 data x 1 pipeline" in capsys.readouterr().out
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    main([DEMO, "--dry-run"])
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(InputError, match="WORLD_SIZE is 'two': it must be a whole number"):
        main([DEMO, "--dry-run"])


def test_dry_run_of_a_large_layout_is_quiet() -> None:
    layout = ("parallel.tensor=4", "parallel.pipeline=4", "parallel.zero_stage=1", "parallel.sequence=true")
    result = command(str(ROOT / "configs" / "orthros_1.3b.yaml"), "--dry-run", "--world-size", "512", *layout)
    assert result.stderr.startswith("imported:"), "no library said anything"
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("Configuration")
    assert max(map(len, lines)) <= 140


def test_an_impossible_layout_is_refused_before_anything_heavy_is_imported() -> None:
    result = command(DEMO, "--dry-run", "--world-size", "512", "parallel.tensor=3")
    error, imported = result.stderr.splitlines()
    assert "does not divide by parallel.tensor=3; set parallel.tensor to a common divisor" in error
    assert (result.returncode, result.stdout, imported) == (2, "", "imported:")


@pytest.mark.parametrize("size", ["0", "-1"])
def test_world_size_must_be_positive(size: str) -> None:
    with pytest.raises(InputError, match="must be at least 1"):
        main([DEMO, "--dry-run", "--world-size", size])
