"""SLURM's answers, captured from real ones, become one line that says what to change."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from launchers import slurm_client
from orthros_train.errors import InputError

# As slurmctld 22.05 answers; the cluster of the tests has no accounting, so the first two come from clusters that do.
NO_ACCOUNT = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"
NO_QOS = "sbatch: error: Batch job submission failed: Invalid qos specification"
NO_PARTITION = """sbatch: error: invalid partition specified: nope
sbatch: error: Batch job submission failed: Invalid partition name specified"""
NO_NODES = "allocation failure: Requested node configuration is not available"
UNKNOWN = "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy"
SINFO = "debug* 2\nlong 40"
Answer = Callable[..., None]


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answer:
    """Puts programs on the PATH that give captured answers."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def answer(program: str, stdout: str = "", stderr: str = "", code: int = 0, seconds: int = 0) -> None:
        file = tmp_path / program
        file.write_text(
            f"#!/bin/bash\nsleep {seconds}\ncat <<'E'\n{stdout}\nE\ncat >&2 <<'E'\n{stderr}\nE\nexit {code}\n"
        )
        file.chmod(file.stat().st_mode | stat.S_IXUSR)

    answer("sinfo", SINFO)
    return answer


@pytest.mark.parametrize(
    ("refusal", "message"),
    [
        (
            NO_ACCOUNT,
            "Invalid account or account/partition combination specified; choose one with --account; `sacctmgr",
        ),
        (NO_QOS, "Invalid qos specification; choose one with --qos"),
        (NO_PARTITION, r"invalid partition specified: nope Invalid .*--partition; there are: debug \(2\), long \(40\)"),
        (NO_NODES, r"Requested node configuration is not available; ask for less .* debug \(2\), long \(40\)"),
    ],
)
@pytest.mark.parametrize("ask", [slurm_client.check, slurm_client.submit])
def test_a_refusal_says_what_to_change(
    answers: Answer, ask: Callable[[str], object], refusal: str, message: str
) -> None:
    answers("sbatch", stderr=refusal, code=1)
    with pytest.raises(InputError, match=f"SLURM refuses the job: {message}") as error:
        ask("train.sbatch")
    assert "\n" not in str(error.value)
    assert "sbatch: error" not in str(error.value)


def test_a_check_leaves_what_it_does_not_know_to_the_submission(answers: Answer) -> None:
    answers("sbatch", stderr=UNKNOWN, code=1)
    slurm_client.check("train.sbatch")
    with pytest.raises(InputError, match="SLURM refuses the job: Job violates accounting/QOS policy"):
        slurm_client.submit("train.sbatch")


def test_an_id_with_a_cluster_name(answers: Answer) -> None:
    answers("sbatch", stdout="4711;cluster")
    assert slurm_client.submit("train.sbatch") == 4711


def test_a_dead_controller_is_not_waited_for(answers: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    answers("sbatch", seconds=20)
    monkeypatch.setattr(slurm_client, "CLIENT_SECONDS", 0.2)
    with pytest.raises(InputError, match=r"SLURM did not answer sbatch within 0\.2 s; is its controller up"):
        slurm_client.submit("train.sbatch")


def test_a_machine_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(InputError, match="there is no sbatch here: run this where SLURM's commands are installed"):
        slurm_client.submit("train.sbatch")


def test_states(answers: Answer) -> None:
    lines = "JobId=8 ArrayJobId=7 JobState=COMPLETED Reason=None\nJobId=7 ArrayJobId=7 JobState=RUNNING Reason=None"
    answers("scontrol", stdout=lines)
    assert slurm_client.job_states([7]) == {7: "RUNNING"}  # one task of the array still runs
    answers("scontrol", stderr="slurm_load_jobs error: Invalid job id specified", code=1)
    assert slurm_client.job_states([7]) == {}


@pytest.mark.parametrize(
    "state",
    ["BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"],
)
def test_a_job_that_has_ended_leaves_its_run_free(answers: Answer, state: str) -> None:
    answers("scontrol", stdout=f"JobId=7 JobState={state} Reason=None")
    assert slurm_client.job_states([7])[7] in slurm_client.ENDED


@pytest.mark.parametrize(
    "state", ["PENDING", "RUNNING", "SUSPENDED", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "REVOKED"]
)
def test_a_job_that_may_come_back_or_runs_elsewhere_does_not(answers: Answer, state: str) -> None:
    answers("scontrol", stdout=f"JobId=7 JobState={state} Reason=None")
    assert slurm_client.job_states([7])[7] not in slurm_client.ENDED


@pytest.mark.parametrize(
    ("reason", "shown"),
    [
        ("None", None),
        ("Resources", "Resources"),
        ("PartitionTimeLimit", "PartitionTimeLimit: longer than the partition allows, it will never start; scancel it "
         "and shorten --time"),
    ],
)  # fmt: skip
def test_why_a_job_waits(answers: Answer, reason: str, shown: str | None) -> None:
    answers("scontrol", stdout=f"JobId=7 JobState=PENDING Reason={reason} Dependency=(null)")
    assert slurm_client.waiting_reason(7) == shown


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [
        ("90", 5400), ("90:30", 5430), ("1:30:00", 5400), ("1-12", 129_600), ("1-12:30", 131_400), ("0-00:05:00", 300),
        ("2-00:00:01", 172_801), ("UNLIMITED", None),
    ],
)  # fmt: skip
def test_a_time_limit_as_sbatch_reads_it(limit: str, seconds: int | None) -> None:
    assert slurm_client.limit_seconds(limit) == seconds


@pytest.mark.parametrize("limit", ["", "2h", "1:2:3:4", "1-2:3:4:5", "-5"])
def test_no_time_limit(limit: str) -> None:
    with pytest.raises(InputError, match=f"--time {limit}: write minutes, HH:MM:SS or D-HH:MM:SS"):
        slurm_client.limit_seconds(limit)
