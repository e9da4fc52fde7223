"""Trainings on a real SLURM cluster of two nodes: what a user submits and walks away from."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from orthros_train.model import OrthrosConfig
from orthros_train.training.metrics import read_metrics
from tests.launchers.cluster_runs import ROOT, ClusterRun, new_run, uninterrupted_losses
from tests.launchers.local_cluster import LocalCluster
from tests.training.small_runs import MODEL, losses

SIZE = ("--nodes", "2", "--ranks-per-node", "2", "--time", "10", "--stop-seconds", "60")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def test_a_stopped_job_resumes_as_if_nothing_had_been_and_its_model_is_evaluated(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    run = new_run(cluster, tmp_path, train__steps=300, model={**MODEL, "max_position_embeddings": 2048})
    suite = "long --lengths 512 --documents 1"
    (train, export, evaluate), printed = run.submit(*SIZE, "--evaluate", suite)
    assert f"job {train}: train, 2 x 2 ranks\n  log {run.folder}/slurm/train-{train}.log\n" in printed
    run.wait_for_step(5)
    cluster.run("scancel", "--batch", "--signal=USR1", str(train))  # as SLURM does before the time limit
    cluster.wait_for_state(train, ["PENDING"], 90)
    stopped = run.status()
    assert stopped["step"] == stopped["checkpoint"] < 300
    assert set(stopped["jobs"]) == {f"{train} train", f"{export} export", f"{evaluate} evaluate"}
    assert stopped["jobs"][f"{export} export"] == "PENDING (Dependency)"
    _, refusal = run.submit(*SIZE, check=False)
    assert refusal.startswith(f"error: job {train} (PENDING) is there for {run.folder} already")
    assert "goes back into the queue (20 restarts left)" in stopped["last_outcome"]
    cluster.start_again_now(train)

    assert cluster.wait_for_state(train, ENDED, 180) == "COMPLETED", run.log()
    expected = uninterrupted_losses(run.config, tmp_path / "uninterrupted", 4)
    assert losses(run.config) == expected  # bitwise
    assert len(expected) == 300
    assert {record["attempt"] for record in read_metrics(run.folder / "metrics.jsonl")} == {1, 2}
    assert run.status()["state"] == "done"
    assert "preflight: python" in run.log()
    # torchrun's agents log one of their own where they miss each other at its exit, on a busy machine
    ours = [line for line in run.log().splitlines() if "elastic/agent/server/api.py" not in line]
    assert "Traceback" not in "\n".join(ours)

    assert cluster.wait_for_state(export, ENDED, 60) == "COMPLETED", run.log()
    assert OrthrosConfig.from_pretrained(run.folder / "model").architecture == "orthros"
    assert cluster.wait_for_state(evaluate, ENDED, 90) == "COMPLETED", run.log()
    results = json.loads((run.folder / "evaluation" / "long" / "results.json").read_text())
    assert "long-512" in results["orthros"]["suites"]


def test_a_seed_of_an_array_is_restarted_alone(cluster: LocalCluster, tmp_path: Path) -> None:
    run = new_run(cluster, tmp_path, train__steps=100_000, checkpoint__interval_steps=None)
    (array,), _ = run.submit("--ranks-per-node", "1", "--time", "10", "--seeds", "42,43", "--no-preflight")
    first, last = f"{array}_0", f"{array}_1"  # the last one's own id is the whole array's
    assert cluster.job(last, "JobId") == str(array)
    for seed in (42, 43):
        run.seed(seed).wait_for_step(5)
    cluster.run("scancel", "--batch", "--signal=USR1", last)
    cluster.start_again_now(last)
    stopped = run.seed(43).status()["checkpoint"]
    run.seed(43).wait_for_step(stopped + 5)
    assert (cluster.job(first), cluster.job(first, "Restarts")) == ("RUNNING", "0")
    cluster.run("scancel", str(array))
    for seed, task, attempts in ((42, first, {1}), (43, last, {1, 2})):
        assert cluster.wait_for_state(task, ENDED, 60) == "CANCELLED"
        records = read_metrics(run.seed(seed).folder / "metrics.jsonl")
        assert [record["step"] for record in records] == list(range(1, len(records) + 1))
        assert {record["attempt"] for record in records} == attempts


def test_a_preempted_training_makes_room_and_comes_back(cluster: LocalCluster, tmp_path: Path) -> None:
    run = new_run(cluster, tmp_path, train__steps=100_000, checkpoint__interval_steps=None)
    (train,), _ = run.submit("--nodes", "2", "--ranks-per-node", "1", "--time", "10", "--no-preflight")
    run.wait_for_step(5)
    urgent = ("sbatch", "--parsable", "--partition=urgent", "--nodes=2", "--exclusive", f"--output={tmp_path}/log")
    other = int(cluster.run(*urgent, "--wrap=sleep 2").stdout)
    assert cluster.wait_for_state(other, ENDED, 45) == "COMPLETED"  # the grace time is a minute
    assert (cluster.job(train), cluster.job(train, "Restarts")) == ("PENDING", "1")
    assert re.fullmatch(r"stopped at step \d+ by SIGTERM on rank \d; goes back .*", run.last_outcome() or "")
    assert run.has_valid_checkpoint()
    cluster.run("scancel", str(train))


def test_scancel_leaves_a_valid_checkpoint_and_no_job(cluster: LocalCluster, tmp_path: Path) -> None:
    run = new_run(cluster, tmp_path, train__steps=100_000)
    (train,), _ = run.submit(*SIZE, "--no-preflight")
    run.wait_for_step(5)
    cluster.run("scancel", str(train))
    cluster.wait_until(lambda: run.last_outcome() is not None, 60, "the end is recorded")
    assert cluster.wait_for_state(train, ENDED, 30) == "CANCELLED"
    assert run.has_valid_checkpoint()
    assert re.fullmatch(r"stopped \(SIGTERM on rank \d\)", run.status()["state"])  # the first that it reached
    assert "SLURM decides whether it comes back" in run.status()["last_outcome"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("--partition", "nope"),
            "Invalid partition name specified; choose one with --partition; there are: debug (2), urgent (2)",
        ),
        (("--nodes", "4"), "Requested node configuration is not available; ask for less with --nodes, "),
        (("--nodes", "3"), "train.global_batch_size (8) is not a multiple"),
        (("--cpus-per-task", "64"), "Requested node configuration is not available; ask for less with --nodes, "),
        (("--ranks-per-node", "2", "--gpus-per-node", "1"), "--ranks-per-node 2 is more than --gpus-per-node 1"),
    ],
)
def test_what_cannot_run_is_refused_at_once(
    cluster: LocalCluster, tmp_path: Path, options: tuple[str, ...], message: str
) -> None:
    run = new_run(cluster, tmp_path)
    jobs, printed = run.submit(*options, check=False)
    assert jobs == []
    assert printed.startswith("error: ")
    assert message in printed
    assert printed.count("\n") == 1
    assert cluster.run("squeue", "--noheader", "--name=run").stdout == ""


def launched(run: ClusterRun, folder: Path, *command: str) -> list[float]:
    """The losses of the run when `command` starts it."""
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    config = run.config.model_copy(update={"output_dir": str(folder)})
    done = subprocess.run(
        [*command, str(run.file), f"output_dir={folder}"],
        cwd=ROOT,
        env={**run.cluster.environment, **allow, "PATH": scripts},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return losses(config)


def test_mpirun_and_one_task_a_rank_train_the_same(cluster: LocalCluster, tmp_path: Path) -> None:
    run = new_run(cluster, tmp_path, train__steps=10)
    expected = uninterrupted_losses(run.config, tmp_path / "forked", 2)
    srun = ("srun", "--nodes=2", "--ntasks-per-node=1", sys.executable, "-m", "orthros_train")
    assert launched(run, tmp_path / "srun", *srun) == expected
    assert launched(run, tmp_path / "mpirun", "launchers/mpirun.sh", "--oversubscribe", "-n", "2", "--") == expected


def test_srun_preprocesses_on_two_nodes(cluster: LocalCluster, tmp_path: Path) -> None:
    if cluster.run("srun", "--nodes=1", "--mpi=pmix", "true").returncode:
        pytest.skip("this SLURM has no PMIx: Debian's libpmix-dev brings the library that its plugin loads")
    text = tmp_path / "text.jsonl"
    text.write_text("".join(f'{{"text": "some words and the number {n}"}}\n' for n in range(9000)))
    tool = (sys.executable, "tools/preprocess_data.py", "--input", str(text), "--tokenizer", "byte", "--output-prefix")
    srun = ("srun", "--nodes=2", "--ntasks-per-node=1", "--mpi=pmix", "--kill-on-bad-exit=1")
    printed = cluster.run(*srun, *tool, str(tmp_path / "many"), seconds=120).stdout
    assert printed.startswith(f"wrote {tmp_path}/many: 9,000 documents")
    cluster.run(*tool, str(tmp_path / "one"), "--workers", "1", seconds=120)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"many.{suffix}").read_bytes() == (tmp_path / f"one.{suffix}").read_bytes()
