"""A stop request that reaches one rank, at whatever moment: all ranks save the same step and exit 75."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from orthros_train.config import Config
from orthros_train.data import PretrainingData
from orthros_train.training import checkpoints, loop
from orthros_train.training.manifest import read_manifest
from orthros_train.training.plain_engine import PlainEngine
from orthros_train.training.stopping import REASONS, STOP_FILE, StopRequests, describe
from tests.training.small_runs import assert_same_state, checkpoint_names, metrics, run, small_config, untimed

STOPPED = 75


def status(config: Config) -> dict[str, Any]:
    return json.loads((Path(config.output_dir) / "status.json").read_text())


def then(action: Callable[[], None], function: Callable[..., Any], call: int, rank: int = 1) -> Callable[..., Any]:
    """`function` with `action` before its call number `call` (from 1) on `rank`."""
    calls = [0]

    def wrapped(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and dist.get_rank() == rank:
            action()
        return function(*arguments, **options)

    return wrapped


def send(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.fixture(autouse=True)
def interrupts_are_heard() -> Iterator[None]:
    """Also where the tests run in the background of a shell, which ignores SIGINT for them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


MOMENTS = {
    "training": (loop, "_one_step", 4, signal.SIGTERM, 3),
    "Ctrl-C": (loop, "_one_step", 2, signal.SIGINT, 1),
    "validation": (PlainEngine, "loss_sum", 2, signal.SIGUSR1, 2),
    "the last validation": (PlainEngine, "loss_sum", 10, signal.SIGUSR1, 6),
    "loading": (PretrainingData, "__init__", 1, signal.SIGTERM, 0),
    "saving": (checkpoints, "save_state", 1, signal.SIGTERM, 3),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_signal_to_one_rank(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """And the next attempt ends as if nothing had happened: same losses, validation losses, weights and moments."""
    # Seven samples in batches of one on two ranks: four calls of loss_sum a rank, one sample of padding.
    options = {"evaluation__samples": 7, "evaluation__interval_steps": 2, "train__micro_batch_size": 1}
    options["checkpoint__interval_steps"] = 3
    whole = small_config(tmp_path / "whole", corpus, **options)
    stopped = small_config(tmp_path / "stopped", corpus, **options)
    assert run(whole, 2) == 0

    owner, name, call, number, step = MOMENTS[moment]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, then(send(number), getattr(owner, name), call))
        assert run(stopped, 2) == STOPPED
    reason = f"{signal.Signals(number).name} on rank 1"
    assert status(stopped) == {"state": "stopped", "exit_code": 75, "step": step, "attempt": 1, "reason": reason}
    assert f"step_{step:08d}" in checkpoint_names(stopped)
    assert run(stopped, 2) == 0
    assert status(stopped) == {"state": "done", "exit_code": 0, "step": 6, "attempt": 2, "reason": None}
    assert untimed(stopped) == untimed(whole)
    folders = [Path(config.output_dir) / "checkpoints" / "step_00000006" for config in (stopped, whole)]
    assert_same_state(*folders)


def test_a_rank_that_waits_for_data_still_stops(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = PretrainingData.sample

    def stuck(self: PretrainingData, index: int) -> Any:
        if index >= 16 and dist.get_rank() == 1 and self._key.endswith("/train"):
            threading.Timer(0.3, send(signal.SIGTERM)).start()
            time.sleep(600)
        return original(self, index)

    config = small_config(tmp_path / "run", corpus)
    with monkeypatch.context() as patch:
        patch.setattr(PretrainingData, "sample", stuck)
        assert run(config, 2) == STOPPED
    assert checkpoint_names(config) == ["step_00000002"]


def test_stop_file(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen at the next step, and consumed, so that the next attempt goes on."""
    config = small_config(tmp_path / "run", corpus)
    file = tmp_path / "run" / STOP_FILE
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_one_step", then(file.touch, loop._one_step, 3))
        assert run(config, 2) == STOPPED
    assert status(config)["reason"] == "the file stop_requested"
    assert not file.exists()
    assert run(config, 2) == 0


@pytest.mark.parametrize(
    ("text", "added"),
    [("launcher: SIGTERM to torchrun on node1\n", " (launcher: SIGTERM to torchrun on node1)"), (" \n", ""),
     ("power cut\nat noon", " (power cut at noon)"), ("x" * 5000, f" ({'x' * 200})")],
    ids=["launcher", "blank", "person", "long"],
)  # fmt: skip
def test_what_the_stop_file_says_is_in_the_reason(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, text: str, added: str
) -> None:
    config = small_config(tmp_path / "run", corpus)
    file = tmp_path / "run" / STOP_FILE
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_one_step", then(lambda: file.write_text(text) and None, loop._one_step, 3, rank=0))
        assert run(config, 2) == STOPPED
    assert status(config)["reason"] == f"the file stop_requested{added}"


def test_stop_file_left_over_from_before_is_removed(tmp_path: Path, corpus: Path) -> None:
    config = small_config(tmp_path / "run", corpus)
    (tmp_path / "run").mkdir()
    file = tmp_path / "run" / STOP_FILE
    file.touch()
    os.utime(file, (time.time() - 60, time.time() - 60))
    assert run(config) == 0
    assert not file.exists()


def test_stop_file_written_while_the_run_starts_is_obeyed(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(tmp_path / "run", corpus)

    def request() -> None:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / STOP_FILE).touch()

    monkeypatch.setattr(PretrainingData, "__init__", then(request, PretrainingData.__init__, 1, rank=0))
    assert run(config) == STOPPED
    assert status(config)["step"] == 0


def test_wall_clock_limit(tmp_path: Path, corpus: Path) -> None:
    config = small_config(tmp_path / "run", corpus, train__steps=100_000, train__wall_clock_limit_seconds=2.0)
    started = time.monotonic()
    assert run(config, 2) == STOPPED
    assert time.monotonic() - started < 30
    assert status(config)["reason"] == "the wall-clock limit"
    step = status(config)["step"]
    assert checkpoint_names(config) == [f"step_{step:08d}"]
    assert read_manifest(tmp_path / "run" / "checkpoints" / f"step_{step:08d}").progress.step == step
    assert metrics(config)[-1]["step"] == step


def test_a_run_that_is_stopped_again_and_again_ends_the_same(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = small_config(tmp_path / "whole", corpus)
    stopped = small_config(tmp_path / "stopped", corpus)
    assert run(whole, 2) == 0
    with monkeypatch.context() as patch:
        patch.setattr(loop, "_one_step", then(send(signal.SIGTERM), loop._one_step, 3))
        for attempt, step in enumerate((2, 4), start=1):
            assert run(stopped, 2) == STOPPED
            assert (status(stopped)["attempt"], status(stopped)["step"]) == (attempt, step)
    assert run(stopped, 2) == 0
    assert untimed(stopped) == untimed(whole)
    assert [record["attempt"] for record in metrics(stopped)] == [1, 1, 2, 2, 3, 3]
    receipt = json.loads((tmp_path / "stopped" / "receipt.json").read_text())
    attempts = [
        (r["attempt"], r["first_step"], r["last_step"], r["exit_code"]) for r in [*receipt["previous"], receipt]
    ]
    assert attempts == [(1, 0, 2, 75), (2, 2, 4, 75), (3, 4, 6, 0)]


def test_reasons_in_words() -> None:
    assert describe([0, 0]) is None
    assert describe([0, 2, 1]) == "SIGUSR1 on rank 1"
    assert describe([4, 1]) == "the wall-clock limit"


def test_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = StopRequests(time.monotonic(), None)
    with stop.handling_signals():
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.code() == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_interrupt_ends_at_once() -> None:
    stop = StopRequests(time.monotonic(), None)
    with stop.handling_signals():
        os.kill(os.getpid(), signal.SIGINT)
        assert REASONS[stop.code()] == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_an_ignored_signal_stays_ignored() -> None:
    """A shell's background job is started with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        stop = StopRequests(time.monotonic(), None)
        with stop.handling_signals():
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.code() == 0
    finally:
        signal.signal(signal.SIGINT, before)
