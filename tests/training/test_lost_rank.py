"""A rank that is killed or stuck: the others end in time, with one line instead of gloo's traceback."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from orthros_train.config import Config
from orthros_train.data import PretrainingData
from orthros_train.training import checkpoints, loop
from orthros_train.training.loop import train
from orthros_train.training.lost_ranks import lost_rank
from orthros_train.training.pipeline_engine import PipelineEngine
from orthros_train.training.plain_engine import PlainEngine
from tests import distributed
from tests.distributed import RankFailedError, run_distributed
from tests.training.small_runs import run, small_config
from tests.training.test_stopping import send, then

TIMEOUT = 3.0
MOMENTS: dict[str, tuple[Any, str, int, int, int, str]] = {
    # whose n-th call, the signal that comes before it, to which rank, and after what that is
    "loading": (PretrainingData, "__init__", 1, signal.SIGKILL, 1, "while it started"),
    "between steps": (loop, "_one_step", 3, signal.SIGKILL, 0, "after step 2"),
    "a forward": (PlainEngine, "_loss", 6, signal.SIGKILL, 1, "after step 2"),
    "saving": (checkpoints, "save_state", 1, signal.SIGKILL, 1, "after step 3"),
    "stuck in a forward": (PlainEngine, "_loss", 6, signal.SIGSTOP, 1, "after step 2"),
    "a stage": (PipelineEngine, "step", 3, signal.SIGKILL, 1, "after step 2"),
    "a stuck stage": (PipelineEngine, "step", 3, signal.SIGSTOP, 1, "after step 2"),
    "stuck on the tensor axis": (PlainEngine, "_loss", 9, signal.SIGSTOP, 1, "after step 2"),
}
LAYOUTS = {
    "a stage": {"parallel__pipeline": 2},
    "a stuck stage": {"parallel__pipeline": 2},
    "stuck on the tensor axis": {"parallel__tensor": 2},
}


def attempt(config: Config, folder: Path) -> None:
    """Train; what is left of the ranks tells its exit code and ends."""
    code = train(config, ["test"])
    (folder / f"code{os.environ['RANK']}").write_text(str(code))
    raise SystemExit(code)


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_others_end_with_one_line(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], moment: str
) -> None:
    owner, name, call, number, victim, when = MOMENTS[moment]
    options = {"parallel__timeout_seconds": TIMEOUT, "checkpoint__interval_steps": 3, **LAYOUTS.get(moment, {})}
    config = small_config(tmp_path / "run", corpus, **options)
    monkeypatch.setattr(distributed, "GRACE_SECONDS", 0.5)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, then(send(number), getattr(owner, name), call, victim))
        started = time.monotonic()
        with pytest.raises(RankFailedError):
            run_distributed(attempt, 2, config, tmp_path, process_group=False)
    assert time.monotonic() - started < 20 + TIMEOUT
    survivor = 1 - victim
    assert (tmp_path / f"code{survivor}").read_text() == "1"
    assert not (tmp_path / f"code{victim}").exists()
    errors = capfd.readouterr().err
    assert "Traceback" not in errors
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert re.fullmatch(
        rf"error: rank {survivor} on \S+ lost another rank {when} \(.+\): look at the other ranks' logs .* resumes .*",
        lines[0],
    )
    assert "This is typically" not in lines[0]
    if survivor == 0 and moment != "loading":  # then there is no folder yet
        status = json.loads((tmp_path / "run" / "status.json").read_text())
        assert (status["state"], status["exit_code"], f"error: {status['reason']}") == ("failed", 1, lines[0])
    if moment == "saving":
        assert run(config, 2) == 0


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shapes do not match"),
        RuntimeError("[enforce fail at /a/gloo/gloo/transport/tcp/pair.cc:4] op.preamble.length <= op.nbytes. 4 vs 1"),
        ValueError("[/a/gloo/transport/tcp/pair.cc:1] Connection closed by peer"),
    ],
)
def test_other_errors_keep_their_traceback(error: Exception) -> None:
    assert lost_rank(error, 0, "after step 1") is None


NCCL_ERROR = "NCCL error in: /a/NCCLUtils.cpp:94, {}, NCCL version 2.27.5 {}: what it means. Last error: {}"
OWN_FAULTS = [
    NCCL_ERROR.format("invalid usage", "ncclInvalidUsage", "Duplicate GPU detected : rank 1 and rank 0"),
    NCCL_ERROR.format("invalid argument", "ncclInvalidArgument", "Broadcast : invalid root 4"),
    NCCL_ERROR.format("unhandled cuda error", "ncclUnhandledCudaError", "Cuda failure 2 'out of memory'"),
]
FAULTS_OF_OTHERS = [
    NCCL_ERROR.format("remote process exited or there was a network error", "ncclRemoteError", "socket closed"),
    NCCL_ERROR.format("unhandled system error", "ncclSystemError", "connection refused"),
    "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7) ran for 3000 milliseconds",
]


@pytest.mark.parametrize("text", OWN_FAULTS)
def test_a_rank_s_own_fault_with_nccl_keeps_its_text(text: str) -> None:
    assert lost_rank(dist.DistBackendError(text), 0, "after step 1") is None
    line = lost_rank(dist.DistBackendError(text), 0, "after step 1", lambda: "ended: rank 1 on node7")
    assert line is not None, "it is what this rank saw of the other's end"
    assert f"(ended: rank 1 on node7; {text})" in line


@pytest.mark.parametrize("text", FAULTS_OF_OTHERS)
def test_what_nccl_says_of_another_rank_is_a_lost_rank(text: str) -> None:
    line = lost_rank(dist.DistBackendError(text), 0, "after step 1")
    assert line is not None
    assert text in line


def test_torch_own_errors_of_communication_are_recognized() -> None:
    line = lost_rank(dist.DistBackendError("NCCL communicator was aborted"), 3, "after step 7")
    assert line is not None
    assert line.startswith("rank 3 on ")
    assert "lost another rank after step 7 (NCCL communicator was aborted): look at" in line
