"""How a launch script goes on after each way in which a training can end, and what is refused before it starts."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launchers import attempt, run_records
from launchers.attempt import AGAIN, BAD_INPUT, DONE, FAILED, decide, fruitless_starts, main
from launchers.run_records import Attempt, Status, add_attempt, end_attempt, read_attempts
from orthros_train.errors import InputError

ROOT = Path(__file__).parents[2]
DEMO = str(ROOT / "configs" / "demo.yaml")
BEFORE = Attempt(17, 2, "node[1-2]", "2026-01-01", attempt_before=2, checkpoint_before=40)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("SLURM_", "RANK", "WORLD_SIZE", "LOCAL_RANK")):
            monkeypatch.delenv(name)


def status(state: str, exit_code: int | None = None, reason: str | None = None, attempt: int = 3) -> Status:
    return Status(state=state, exit_code=exit_code, step=57, attempt=attempt, reason=reason)


FILE = "the file stop_requested"
USR1 = f"{FILE} (launcher: USR1, before the time limit)"


@pytest.mark.parametrize(
    ("now", "checkpoint", "options", "code", "words"),
    [
        (status("done", 0), 60, {}, DONE, "done: 57 steps"),
        (status("stopped", 75, USR1), 57, {"signalled": True}, AGAIN, "goes back into the queue (18 restarts left)"),
        (status("stopped", 75, FILE), 57, {"signalled": True}, FAILED, "not started again"),
        (status("stopped", 75, f"{FILE} (power cut at noon)"), 57, {"signalled": True}, FAILED, "not started again"),
        (status("stopped", 75, "SIGTERM on rank 0"), 40, {"fruitless": 3}, AGAIN, "goes back"),
        # the file was written by a person: they wanted an end
        (status("stopped", 75, FILE), 57, {}, FAILED, "by the file stop_requested; not started again"),
        (status("stopped", 75, "the wall-clock limit"), 57, {}, AGAIN, "goes back"),
        (status("stopped", 75, "SIGTERM on rank 0"), 57, {"terminated": True}, FAILED, "SLURM decides"),
        (status("stopped", 75, USR1), 57, {"signalled": True, "restarts_left": 0}, FAILED, "limit of restarts"),
        (status("failed", 2, "output_dir holds another run"), 40, {}, BAD_INPUT, "refused: output_dir holds"),
        # a failure is tried again only if it got further than the last time
        (status("failed", 1, "peer lost"), 50, {}, AGAIN, "failed after step 57: peer lost; goes back"),
        (status("failed", 1, "peer lost"), 40, {}, FAILED, "failed after step 57: peer lost; not started"),
        (status("running"), 40, {}, FAILED, "died without a word"),
        (status("running"), 50, {}, AGAIN, "died without a word"),
        # status.json is from an earlier start
        (status("stopped", 75, FILE, attempt=2), 40, {}, FAILED, "the training did not start"),
        (status("done", 0, attempt=2), 40, {}, FAILED, "the training did not start"),
        (None, 0, {}, FAILED, "the training did not start"),
        (None, 0, {"signalled": True}, AGAIN, "asked to stop before the training had started"),
        # preemption tells the ranks, not the batch script; the job would end as failed if it did not go back by itself
        (status("stopped", 75, "SIGTERM on rank 0"), 57, {}, AGAIN, "by SIGTERM on rank 0; goes back"),
        # a first start that is not fit to run is a person's mistake, a later one a node's
        (None, 0, {"preflight_failed": True, "first": True}, FAILED, "the preflight failed: see the log above; not"),
        (None, 0, {"preflight_failed": True}, AGAIN, "the preflight failed: see the log above; goes back"),
        (None, 0, {"preflight_failed": True, "fruitless": 3}, FAILED, "3 starts in a row without a new checkpoint"),
        (None, 0, {"preflight_failed": True, "signalled": True}, AGAIN, "asked to stop before"),
        # ranks found bad input before there was a status.json, or before it was theirs
        (None, 0, {"refused": True}, BAD_INPUT, "refused before the training had started: see the log above"),
        (status("stopped", 75, USR1, attempt=2), 40, {"refused": True}, BAD_INPUT, "refused before the training had"),
        (status("stopped", 75, USR1), 57, {"refused": True, "signalled": True}, AGAIN, "goes back"),
        # nothing is gained by starting again and again
        (status("stopped", 75, USR1), 40, {"signalled": True, "fruitless": 2}, AGAIN, "goes back"),
        (status("stopped", 75, USR1), 40, {"signalled": True, "fruitless": 3}, FAILED, "3 starts in a row without"),
    ],
)  # fmt: skip
def test_decision(now: Status | None, checkpoint: int, options: dict[str, Any], code: int, words: str) -> None:
    switches = dict.fromkeys(("signalled", "terminated", "preflight_failed", "refused"), False)
    arguments: dict[str, Any] = {"restarts_left": 18, "fruitless": 0, **switches, **options}
    before = replace(BEFORE, restart=0) if arguments.pop("first", False) else BEFORE
    decided, outcome = decide(now, before, checkpoint=checkpoint, **arguments)
    assert decided == code, outcome
    assert words in outcome


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "1"}, "RANK, WORLD_SIZE of the environment belong to ranks"),
        ({"SLURM_NTASKS": "4", "SLURM_NNODES": "2"}, "4 tasks on 2 nodes.*--ntasks-per-node=1"),
        ({"SLURM_GPUS_ON_NODE": "1"}, "2 ranks a node but SLURM gave this job 1 GPUs a node"),
        ({"SLURM_NTASKS": "3", "SLURM_NNODES": "3"}, "not a multiple of train.micro_batch_size .* times 6 ranks"),
    ],
)
def test_an_environment_that_contradicts_the_config_is_refused(
    environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message):
        main(["begin", "--ranks-per-node", "2", DEMO, f"output_dir={tmp_path}"])
    assert read_attempts(tmp_path) == []


def write_status(run: Path, **values: object) -> None:
    (run / "status.json").write_text(json.dumps({"exit_code": None, "step": 5, "reason": None, **values}))


def test_from_begin_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {
        "SLURM_JOB_ID": "9",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_RESTART_COUNT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[3-4]")
    write_status(tmp_path, state="stopped", exit_code=75, attempt=1)
    run = [DEMO, f"output_dir={tmp_path}"]
    assert main(["begin", "--restart-limit", "2", *run]) == 0
    assert "node[3-4]: 2 x 1 ranks, restart 1, from the start" in capsys.readouterr().out
    (begun,) = read_attempts(tmp_path)
    assert (begun.job_id, begun.restart, begun.attempt_before, begun.ended) == (9, 1, 1, None)
    write_status(tmp_path, state="stopped", exit_code=75, attempt=2, reason=USR1)
    assert main(["end", "--restart-limit", "2", "--signalled", *run]) == AGAIN
    assert "goes back into the queue (1 restarts left)" in capsys.readouterr().out
    assert "goes back" in (read_attempts(tmp_path)[0].outcome or "")
    assert main(["end", "--restart-limit", "1", "--signalled", *run]) == FAILED


def test_a_job_that_slurm_does_not_take_back_is_recorded_so(tmp_path: Path) -> None:
    run = [DEMO, f"output_dir={tmp_path}"]
    main(["begin", *run])
    write_status(tmp_path, state="stopped", exit_code=75, attempt=1, reason=USR1)
    assert main(["end", "--restart-limit", "2", "--signalled", *run]) == AGAIN
    assert main(["not-requeued", *run]) == FAILED
    assert read_attempts(tmp_path)[0].outcome == (
        f"stopped at step 5 by {USR1}; SLURM did not take the job back into the queue; submit it anew to go on"
    )


@pytest.mark.parametrize(
    ("codes", "ended"),
    [
        ("1\n2\n", BAD_INPUT),
        ("1\n1\n", FAILED),
        ("", FAILED),
        ("2", BAD_INPUT),
        ("\0\0\n2\n", BAD_INPUT),
        (None, FAILED),
    ],
)
def test_bad_input_that_only_ranks_found_is_told_from_their_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codes: str | None, ended: int
) -> None:
    run = [DEMO, f"output_dir={tmp_path}"]
    main(["begin", *run])
    file = tmp_path / "slurm" / "codes"
    monkeypatch.setenv("ORTHROS_RANK_CODES", str(file))
    if codes is not None:
        file.write_text(codes)
    assert main(["end", "--restart-limit", "2", *run]) == ended
    assert not file.exists()


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_records, "write_text_atomically", fail)


def test_a_full_disk_changes_nothing_in_how_a_job_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = [DEMO, f"output_dir={tmp_path}"]
    main(["begin", *run])
    write_status(tmp_path, state="stopped", exit_code=75, attempt=1, reason=USR1)
    capsys.readouterr()
    fill_disk(monkeypatch)
    assert main(["end", "--restart-limit", "2", "--signalled", *run]) == AGAIN
    printed, warned = capsys.readouterr()
    assert f"stopped at step 5 by {USR1}; goes back into the queue (2 restarts left)" in printed
    unrecorded = f"warning: not recorded in {tmp_path}/slurm: No space left on device\n"
    assert warned == unrecorded
    assert main(["not-requeued", *run]) == FAILED
    printed, warned = capsys.readouterr()
    assert "SLURM did not take the job back into the queue; submit it anew to go on" in printed
    assert warned == unrecorded
    (tmp_path / "stop_requested").write_text("enough")
    assert main(["begin", *run]) == FAILED
    printed, warned = capsys.readouterr()
    assert "stopped by the file stop_requested before" in printed
    assert warned == unrecorded


def test_nothing_starts_where_the_start_cannot_be_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_disk(monkeypatch)
    with pytest.raises(InputError, match=r"slurm cannot be written \(No space left on device\): make room"):
        main(["begin", DEMO, f"output_dir={tmp_path}"])
    assert read_attempts(tmp_path) == []


@pytest.mark.parametrize("unwritable", [("stdout",), ("stdout", "stderr")])
def test_a_log_on_a_full_disk_changes_nothing_either(tmp_path: Path, unwritable: tuple[str, ...]) -> None:
    run = [DEMO, f"output_dir={tmp_path}"]
    main(["begin", *run])
    write_status(tmp_path, state="stopped", exit_code=75, attempt=1, reason=USR1)
    (tmp_path / "slurm" / ".records.lock").unlink()
    (tmp_path / "slurm" / ".records.lock").mkdir()  # so that there is a warning, too
    command = [sys.executable, "launchers/attempt.py"]
    with open("/dev/full", "w") as full:
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **dict.fromkeys(unwritable, full)}
        options = ("end", "--restart-limit", "2", "--signalled")
        ended = subprocess.run([*command, *options, *run], cwd=ROOT, **streams, check=False)  # type: ignore[call-overload]
    assert ended.returncode == AGAIN, ended.stderr


@pytest.mark.parametrize(("text", "stopped"), [("", True), ("enough", True), ("launcher: USR1", False)])
def test_a_person_stops_a_job_that_waits_in_the_queue(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, stopped: bool
) -> None:
    (tmp_path / "stop_requested").write_text(text)
    run = [DEMO, f"output_dir={tmp_path}"]
    assert main(["begin", *run]) == (FAILED if stopped else 0)
    assert ("stopped by the file stop_requested before" in capsys.readouterr().out) == stopped
    assert (read_attempts(tmp_path)[0].ended is not None) == stopped
    assert not (tmp_path / "stop_requested").exists()
    assert main(["begin", *run]) == 0  # it counts once


def test_restarts_by_slurm_itself_have_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--restart-limit", "3", DEMO, f"output_dir={tmp_path}"]
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    assert main(["begin", *run]) == 0
    monkeypatch.setenv("SLURM_RESTART_COUNT", "4")
    assert main(["begin", *run]) == FAILED
    assert "this is restart 4, the limit is 3; submit it anew to go on" in capsys.readouterr().out


def test_fruitless_starts() -> None:
    old, new = replace(BEFORE, checkpoint_before=20), BEFORE
    assert fruitless_starts([old, new, new], 40) == 2
    assert fruitless_starts([old, new], 41) == 0
    assert fruitless_starts([old, new], 20) == 2  # the newest checkpoint has been damaged


def test_only_the_starts_of_this_job_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = [DEMO, f"output_dir={tmp_path}"]
    for _ in range(2):
        add_attempt(tmp_path, replace(BEFORE, attempt_before=0, checkpoint_before=0, ended="now"))
    monkeypatch.setenv("SLURM_JOB_ID", "18")  # a person has submitted it anew
    for last in (False, False, True):
        main(["begin", *run])
        assert main(["end", "--restart-limit", "9", "--signalled", *run]) == (FAILED if last else AGAIN)


def test_end_without_begin_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no start of this job is recorded"):
        main(["end", DEMO, f"output_dir={tmp_path}"])


@pytest.mark.parametrize(
    ("state", "refused"), [("RUNNING", True), ("COMPLETING", True), ("NODE_FAIL", False), ("", False)]
)
def test_a_second_launch_is_refused_while_the_first_job_lives(
    state: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "job_states", lambda jobs: dict.fromkeys(jobs, state) if state else {})
    add_attempt(tmp_path, BEFORE)
    arguments = ["begin", DEMO, f"output_dir={tmp_path}"]
    if refused:
        with pytest.raises(InputError, match=rf"job 17 \({state}\) trains in .*scancel 17"):
            main(arguments)
    else:
        assert main(arguments) == 0


def test_where_slurm_cannot_be_asked_the_lock_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # as in a container: no scontrol
    add_attempt(tmp_path, BEFORE)
    assert main(["begin", DEMO, f"output_dir={tmp_path}"]) == 0
    assert "whether job 17 still trains in" in capsys.readouterr().out


def test_a_jobs_own_restart_and_what_has_ended_are_no_second_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempt, "job_states", lambda jobs: pytest.fail(f"asked for {jobs}"))
    add_attempt(tmp_path, BEFORE)
    end_attempt(tmp_path, "stopped")
    add_attempt(tmp_path, BEFORE)  # its node was lost: no end
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    assert main(["begin", DEMO, f"output_dir={tmp_path}"]) == 0
