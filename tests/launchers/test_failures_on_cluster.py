"""What goes wrong on a cluster: a node loses power, a cable is pulled, the time limit comes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orthros_train.training.metrics import read_metrics
from tests.launchers.cluster_runs import new_run, uninterrupted_losses
from tests.launchers.local_cluster import LocalCluster, why_not
from tests.launchers.test_on_cluster import ENDED, SIZE
from tests.training.small_runs import losses


def test_a_node_that_loses_power_is_replaced_by_a_spare_one(tmp_path: Path) -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with LocalCluster(3) as cluster:
        run = new_run(cluster, tmp_path, train__steps=300, checkpoint__interval_steps=20)
        (train,), _ = run.submit(*SIZE, "--no-preflight")
        run.wait_for_step(45)
        assert cluster.job(train, "NodeList") == "node[1-2]"
        cluster.power_off("node2")
        cluster.start_again_now(train, seconds=120)  # SLURM has found the loss and put the job back
        assert cluster.wait_for_state(train, ENDED, 180) == "COMPLETED", run.log()
        assert cluster.job(train, "NodeList") == "node[1,3]"
        assert losses(run.config) == uninterrupted_losses(run.config, tmp_path / "uninterrupted", 4)
        assert {record["attempt"] for record in read_metrics(run.folder / "metrics.jsonl")} == {1, 2}


@pytest.mark.evidence
def test_the_time_limit_is_survived(tmp_path: Path) -> None:
    """SLURM itself sends USR1, a minute before a limit of four."""
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with LocalCluster(2) as cluster:
        run = new_run(cluster, tmp_path, train__steps=100_000, checkpoint__interval_steps=None)
        size = ("--nodes", "2", "--ranks-per-node", "1", "--time", "4", "--stop-seconds", "60")
        (train,), _ = run.submit(*size, "--no-preflight")
        cluster.wait_until(lambda: run.last_outcome() is not None, 300, "the first start has ended")
        assert re.fullmatch(r"stopped at step \d+ by .*USR1.*; goes back into the queue .*", run.last_outcome() or "")
        cluster.start_again_now(train)
        assert run.status()["checkpoint"] > 0
        run.wait_for_step(run.status()["checkpoint"] + 5)
        cluster.run("scancel", str(train))


def test_a_cut_cable_ends_all_ranks_and_names_the_peer(tmp_path: Path) -> None:
    if (reason := why_not(own_networks=True)) is not None:
        pytest.skip(reason)
    with LocalCluster(2, own_networks=True, node_timeout=600) as cluster:  # the ranks notice it first
        run = new_run(cluster, tmp_path, train__steps=100_000, parallel__timeout_seconds=20.0)
        run.submit(*SIZE, "--no-preflight", "--restart-limit", "0")
        run.wait_for_step(5)
        assert len(rank_processes()) == 4
        cluster.cut_link("node2")
        cluster.wait_until(lambda: rank_processes() == [], 60, "the ranks of both nodes have ended")
        status = json.loads((run.folder / "status.json").read_text())
        assert (status["state"], status["exit_code"]) == ("failed", 1)
        assert re.fullmatch(
            r"rank 0 on node1 lost another rank after step \d+ \(no answer from: rank 2 on node2, rank 3 on node2; .*",
            status["reason"],
        ), status["reason"]


def rank_processes() -> list[int]:
    """The ranks of all nodes: their processes are children of this machine."""
    command = ["pgrep", "--full", "python[^ ]* -u launchers/torchrun_rank.py"]
    return [int(pid) for pid in subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()]


@pytest.mark.evidence
def test_a_node_where_python_hangs_is_named(cluster: LocalCluster, tmp_path: Path) -> None:
    """As with a hung mount of its environment; the other node waits 45 s for it."""
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f"PATH={programs}:{Path(sys.executable).parent}:$PATH\n")
    (programs / "python").write_text(
        f'#!/bin/bash\n[ "$SLURMD_NODENAME" != node2 ] || sleep 600\nexec {sys.executable} "$@"\n'
    )
    (programs / "python").chmod(0o755)
    run = new_run(cluster, tmp_path)
    (train,), _ = run.submit(*SIZE, "--venv", str(tmp_path / "venv"))
    assert cluster.wait_for_state(train, ENDED, 90) == "FAILED", run.log()
    assert "the preflight failed" in (run.last_outcome() or "")
    assert re.search(r"^srun: error: node2: task 1: ", run.log(), flags=re.MULTILINE), run.log()
    assert "node1: task" not in run.log()


def test_a_cluster_whose_tests_were_killed_does_not_stand_in_the_way() -> None:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    killed = LocalCluster(2)
    killed.start()
    assert killed._lock is not None
    killed._lock.close()  # as the system does it for a process that is killed
    try:
        with LocalCluster(2) as cluster:
            assert cluster.run("sinfo", "--noheader", "--format=%D").stdout.strip() == "2"
            hosts = Path("/etc/hosts").read_text(encoding="utf-8")
            assert killed.folder.name not in hosts
    finally:
        for process in killed._processes.values():
            process.wait(10)
        shutil.rmtree(killed.folder)
