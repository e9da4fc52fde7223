"""What launchers/status.py says of runs in every state."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from launchers import slurm_client, status
from launchers.run_records import (
    Attempt,
    Job,
    add_attempt,
    add_job,
    end_attempt,
    last_metrics,
    read_attempts,
    read_jobs,
)
from orthros_train.config import config_to_yaml
from orthros_train.errors import InputError
from orthros_train.training import manifest
from orthros_train.training.manifest import FileRecord, Layout, Manifest, Progress, step_folder
from tests.distributed import run_distributed
from tests.training.small_runs import small_config


def record(step: int) -> dict[str, object]:
    return {"step": step, "tokens_per_second": 100.0 * step, "step_seconds": 2.0}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of which 4 of 6 steps are done."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(config_to_yaml(small_config(folder, tmp_path / "corpus")))
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(record(step)) + "\n" for step in range(1, 5)) + '{"step": 5'
    )
    write_status(folder, "running")
    return folder


def write_status(folder: Path, state: str, reason: str | None = None) -> None:
    values = {"state": state, "exit_code": None, "step": 4, "attempt": 2, "reason": reason}
    (folder / "status.json").write_text(json.dumps(values))


def show(capsys: pytest.CaptureFixture[str], *folders: Path, as_json: bool = True) -> str:
    status.main([*map(str, folders), *(["--json"] if as_json else [])])
    return capsys.readouterr().out


def test_a_running_one(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = json.loads(show(capsys, run))
    assert (shown["state"], shown["step"], shown["steps"], shown["starts"]) == ("running", 4, 6, 2)
    assert (shown["tokens_per_second"], shown["seconds_left"]) == (250.0, 4.0)
    table = show(capsys, run, as_json=False)
    assert "4/6" in table
    assert "0:00:04" in table


@pytest.mark.parametrize(("state", "reason", "shown"), [("done", None, "done"), ("failed", "x", "failed (x)")])
def test_one_that_has_ended(
    run: Path, capsys: pytest.CaptureFixture[str], state: str, reason: str | None, shown: str
) -> None:
    write_status(run, state, reason)
    seen = json.loads(show(capsys, run))
    assert seen["state"] == shown
    assert (seen["seconds_left"] is None) == (state == "done")


def test_running_is_doubted_where_the_job_is_not(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status.shutil, "which", lambda program: program)
    monkeypatch.setattr(slurm_client, "job_states", lambda jobs: dict.fromkeys(jobs, "PENDING"))
    monkeypatch.setattr(slurm_client, "waiting_reason", lambda job: "BeginTime")
    add_job(run, Job(7, "train", "log", "now"))
    add_attempt(run, Attempt(7, 0, "node1", "now", 0, 0))
    end_attempt(run, "stopped at step 4")
    seen = json.loads(show(capsys, run))
    assert seen["state"] == "running, says status.json, but its job is PENDING (BeginTime)"
    assert seen["jobs"] == {"7 train": "PENDING (BeginTime)"}
    assert seen["last_outcome"] == "stopped at step 4"
    assert f"{run}: last start: stopped at step 4" in show(capsys, run, as_json=False)


def test_a_start_without_an_end_does_not_show_the_one_before(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_attempt(run, Attempt(None, 0, "node1", "then", 0, 0))
    end_attempt(run, "goes back into the queue")
    add_attempt(run, Attempt(None, 1, "node1", "2026-11-30T10:00", 0, 0))
    assert f"{run}: last start: since 2026-11-30T10:00, no end recorded" in show(capsys, run, as_json=False)


def test_a_silent_one_is_doubted(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("metrics.jsonl", "status.json"):
        os.utime(run / name, (0, time.time() - 3600))
    assert "running, but no step for 1:00:0" in json.loads(show(capsys, run))["state"]


def test_a_controller_that_does_not_answer_hides_nothing_else(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def silence(jobs: object) -> None:
        raise InputError("SLURM did not answer scontrol within 30 s")

    monkeypatch.setattr(status.shutil, "which", lambda program: program)
    monkeypatch.setattr(slurm_client, "job_states", silence)
    add_job(run, Job(7, "train", "log", "now"))
    seen = json.loads(show(capsys, run))
    assert seen["step"] == 4
    assert seen["jobs"] == {"queue": "unknown: SLURM did not answer scontrol within 30 s"}


def test_a_job_that_waits_for_its_first_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_job(tmp_path, Job(7, "train", "log", "now"))
    seen = json.loads(show(capsys, tmp_path))
    assert (seen["state"], seen["step"], seen["starts"]) == ("not started", 0, 0)


def test_the_seeds_of_an_array_are_runs_of_their_own(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    array = tmp_path / "array"
    array.mkdir()
    for seed in (1, 2):
        (array / f"seed_{seed}").symlink_to(run)
    assert [json.loads(line)["run"] for line in show(capsys, array).splitlines()] == [
        f"{array}/seed_1",
        f"{array}/seed_2",
    ]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main([str(tmp_path)]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"error: {tmp_path} holds neither a run nor submitted jobs")
    assert shown.err.count("\n") == 1


def test_of_several_folders_the_runs_are_shown(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("demo", "broken"):
        (tmp_path / name).mkdir()
    (tmp_path / "broken" / "config.yaml").write_bytes((run / "config.yaml").read_bytes())
    (tmp_path / "broken" / "status.json").write_text("{")
    assert status.main([str(tmp_path / "demo"), str(tmp_path / "broken"), str(run), "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["run"] == str(run)
    first, second = shown.err.splitlines()
    assert first.startswith(f"error: {tmp_path}/demo holds neither a run nor submitted jobs")
    assert "broken/status.json is damaged" in second
    assert status.main([str(tmp_path / "demo")] * 2) == 2


def test_a_checkpoint_of_another_format_does_not_hide_the_run(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (2, 4):
        folder = run / "checkpoints" / step_folder(step)
        folder.mkdir(parents=True)
        layout = Layout(world_size=1, zero_stage=1, tensor=1, pipeline=1, precision="fp32")
        files = (FileRecord("state", 1, "ab"),)
        Manifest(Progress(step=step, updates=step), layout, {}, {}, {}, "now", files=files).write(folder)
    assert json.loads(show(capsys, run))["checkpoint"] == 4
    monkeypatch.setattr(manifest, "FORMAT", manifest.FORMAT + 1)
    Manifest(Progress(step=4, updates=4), layout, {}, {}, {}, "now", files=files).write(folder)
    monkeypatch.undo()
    assert json.loads(show(capsys, run))["checkpoint"] == 2


def test_each_job_ends_its_own_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for job in (7, 8):
        add_attempt(tmp_path, Attempt(job, 0, "node1", "now", 0, 0))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    end_attempt(tmp_path, "seven is over")
    assert [attempt.outcome for attempt in read_attempts(tmp_path)] == ["seven is over", None]
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    with pytest.raises(InputError, match="no start of this job is recorded"):
        end_attempt(tmp_path, "who?")


def test_records_of_jobs_that_start_at_once_are_all_kept(tmp_path: Path) -> None:
    def record(rank: int) -> None:
        for number in range(20):
            add_job(tmp_path, Job(100 * rank + number, "train", "log", "now"))

    run_distributed(lambda: record(int(os.environ["RANK"])), 4, process_group=False)
    assert sorted(job.job_id for job in read_jobs(tmp_path)) == [100 * rank + n for rank in range(4) for n in range(20)]


def test_the_end_of_a_long_file_is_enough(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "padding": "x" * 100}) for step in range(2000)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert [values["step"] for values in last_metrics(tmp_path, 3)] == [1997, 1998, 1999]
