"""A real SLURM cluster of several nodes on this machine, for the time of a test.

munged, slurmctld and one slurmd a node run without systemd. A node is a set of namespaces: its own host name (torchrun
finds the rendezvous host by name), its own processes (killing the first one is a power loss), and, where asked for, its
own network, whose cable can be pulled. Needs root and Debian's slurmctld, slurmd, slurm-client and munge.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "unshare", "nsenter")
BRIDGE, ADDRESSES = "orthros0", "10.78.0"
CONTROL_PORT, NODE_PORT = 16917, 17100
LOCK = "/tmp/orthros-test-cluster.lock"
HOSTS_MARK = "# test cluster"
OF_A_CLUSTER = re.compile(rb"(?:^|\0)SLURM_CONF=/tmp/slurm-[^/\0]+/slurm\.conf\0")  # in a process's environment

SLURM_CONF = """\
ClusterName=test
SlurmctldHost={host}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={port}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
TmpFS={folder}/tmp.%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
GresTypes=gpu
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
SlurmctldTimeout=10
SlurmdTimeout={node_timeout}
KillWait={kill_wait}
MessageTimeout=10
BatchStartTimeout=10
MinJobAge=3600
ReturnToService=2
PropagateResourceLimits=NONE
MailProg=/bin/true
{nodes}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=debug Nodes=ALL Default=YES MaxTime=60 DefaultTime=30 GraceTime=60
PartitionName=urgent Nodes=ALL MaxTime=60 DefaultTime=30 PriorityTier=9 PreemptMode=OFF
"""

NODE = """
hostname "$1"
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /sys/fs/cgroup
slurmd -D -N "$1" -f "$SLURM_CONF" & slurmd=$!
trap 'kill "$slurmd"' TERM
while kill -0 "$slurmd" 2> /dev/null; do wait "$slurmd"; done
"""


class ClusterError(RuntimeError):
    """The cluster did not do what it should; with the ends of its logs."""


def why_not(*, own_networks: bool = False) -> str | None:
    """Why there can be no cluster here, None if there can be."""
    if os.geteuid() != 0:
        return "a SLURM cluster on this machine needs root"
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        return f"a SLURM cluster on this machine needs {', '.join(missing)}: make cluster-packages"
    probes = [["unshare", "--uts", "--ipc", "--pid", "--mount", "--fork", "--mount-proc", "true"]]
    if own_networks:
        if shutil.which("ip") is None:
            return "networks of their own need the program ip"
        probes.append(["unshare", "--net", "ip", "link", "add", "probe0", "type", "bridge"])
    for probe in probes:
        done = subprocess.run(probe, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"namespaces are not permitted here: {' '.join(probe)}: {done.stderr.strip()}"
    return None


class LocalCluster:
    """Start with `start`, or use it as a context manager. Jobs in the partition `urgent` preempt those in `debug`.

    Args:
        nodes: node1, node2, …
        gpus: GPUs a node that SLURM believes in; no device is behind them.
        own_networks: each node in a network of its own.
        node_timeout: seconds without an answer after which a node counts as lost.
        kill_wait: seconds between SIGTERM and SIGKILL.
    """

    def __init__(
        self, nodes: int = 2, *, gpus: int = 0, own_networks: bool = False, node_timeout: int = 10, kill_wait: int = 30
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # short: it holds a socket
        self.folder.chmod(0o755)
        self.nodes = [f"node{number}" for number in range(1, nodes + 1)]
        self._hosts_mark = f"{HOSTS_MARK} {self.folder.name}"
        self._gpus, self._own_networks = gpus, own_networks
        self._node_timeout, self._kill_wait = node_timeout, kill_wait
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._lock: TextIO | None = None
        self.environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> LocalCluster:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    # ---- life

    def start(self) -> None:
        """Start everything and wait until all nodes are idle."""
        self._lock = open(LOCK, "w")  # noqa: SIM115  one cluster at a time: ports, addresses and names are the same
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._end_abandoned()
        self._write_configuration()
        self._connect()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        self._run(
            *("munged", f"--key-file={key}", f"--socket={self.folder}/munge.socket", "--num-threads=2"),
            *(f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log"),
            f"--seed-file={self.folder}/munge.seed",
        )
        self._run("slurmctld", "-c", "-i", "-f", str(self.folder / "slurm.conf"))
        for node in self.nodes:
            self.power_on(node)
        self.wait_until(lambda: self.node_states() == ["idle"] * len(self.nodes), 30, "all nodes are idle")

    def stop(self) -> None:
        """Cancel the jobs, stop all daemons and remove every trace."""
        if (self.folder / "slurmctld.pid").exists():
            self.run("scancel", "--user=root", check=False)
        for node in list(self._processes):
            self.power_off(node)
        for daemon in ("slurmctld", "munged"):
            _stop_daemon(self.folder / f"{daemon}.pid")
        self._disconnect(self._hosts_mark)
        shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    def power_on(self, node: str) -> None:
        """Start a node."""
        inside = ["nsenter", f"--net=/run/netns/{node}"] if self._own_networks else []
        spaces = ["unshare", "--uts", "--ipc", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]
        with open(self.folder / f"{node}.out", "ab") as log:
            self._processes[node] = subprocess.Popen(
                [*inside, *spaces, "bash", "-c", NODE, "node", node],
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def power_off(self, node: str) -> None:
        """Kill everything that runs on a node at once."""
        process = self._processes.pop(node)
        process.kill()  # the first process of its namespace follows, and with that all others
        process.wait()

    def cut_link(self, node: str) -> None:
        """Pull a node's network cable."""
        self._run("ip", "link", "set", f"cable-{node}", "down")

    # ---- use

    def run(self, *command: str, check: bool = True, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        """A command that finds this cluster."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=seconds, check=False
        )
        if check and done.returncode != 0:
            raise ClusterError(f"{' '.join(command)}: {done.stdout}{done.stderr}")
        return done

    def node_states(self) -> list[str]:
        """What SLURM says of each node."""
        return self.run("sinfo", "-h", "-N", "-p", "debug", "-o", "%T", check=False).stdout.split()

    def job(self, job_id: int | str, field: str = "JobState") -> str:
        """A field of a job; of an array's task: 7_1."""
        shown = self.run("scontrol", "show", "job", "--oneliner", str(job_id)).stdout
        found = re.search(rf"\b{field}=(\S*)", shown)
        if found is None:
            raise ClusterError(f"no {field} in {shown}")
        return found.group(1)

    def wait_for_state(self, job_id: int | str, states: Sequence[str], seconds: float) -> str:
        """Wait until a job is in one of the states; which."""
        self.wait_until(lambda: self.job(job_id) in states, seconds, f"job {job_id} is {' or '.join(states)}")
        return self.job(job_id)

    def start_again_now(self, job_id: int | str, seconds: float = 60) -> None:
        """Let a job that goes back into the queue start at once instead of after SLURM's two minutes."""

        self.wait_for_state(job_id, ["PENDING"], seconds)
        time.sleep(5)  # its nodes still clear up; a start at once would find them half way
        self.run("scontrol", "update", f"JobId={job_id}", "StartTime=now")

        def started() -> bool:
            return self.job(job_id, "Restarts") != "0" and self.job(job_id) != "PENDING"

        self.wait_until(started, seconds, f"job {job_id} starts again")

    def wait_until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Poll until `condition` holds; ClusterError after `seconds`."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                raise ClusterError(f"not within {seconds} s: {what}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        """The ends of all logs."""
        files = sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")])
        return "\n".join(f"== {file.name}\n{file.read_text(errors='replace')[-1500:]}" for file in files)

    # ---- inside

    def _run(self, *command: str) -> None:
        done = subprocess.run(
            command, env=self.environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise ClusterError(f"{' '.join(command)}: {done.stdout}{done.stderr}")

    def _address(self, number: int) -> str:
        return f"{ADDRESSES}.{10 + number}" if self._own_networks else f"127.0.78.{10 + number}"

    def _write_configuration(self) -> None:
        for name in ("state", *(f"{kind}.{node}" for node in self.nodes for kind in ("spool", "tmp"))):
            (self.folder / name).mkdir()
        generic = f" Gres=gpu:{self._gpus}" if self._gpus else ""
        nodes = [
            f"NodeName={node} NodeHostname={node} NodeAddr={self._address(number)} Port={NODE_PORT + number} "
            f"CPUs=4 RealMemory=8000{generic}"
            for number, node in enumerate(self.nodes, start=1)
        ]
        text = SLURM_CONF.format(
            host=socket.gethostname(),
            address=f"{ADDRESSES}.1" if self._own_networks else "127.0.0.1",
            folder=self.folder,
            port=CONTROL_PORT,
            node_timeout=self._node_timeout,
            kill_wait=self._kill_wait,
            nodes="\n".join(nodes),
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # unused, but looked for without this
        devices = [self.folder / f"gpu{number}" for number in range(self._gpus)]
        for device in devices:
            os.mknod(device, 0o20666, os.makedev(1, 3))
        lines = [f"NodeName={node} Name=gpu File={device}" for node in self.nodes for device in devices]
        (self.folder / "gres.conf").write_text("\n".join(lines) + "\n")

    def _connect(self) -> None:
        if self._own_networks:
            self._run("ip", "link", "add", BRIDGE, "type", "bridge")
            self._run("ip", "address", "add", f"{ADDRESSES}.1/24", "dev", BRIDGE)
            self._run("ip", "link", "set", BRIDGE, "up")
            for number, node in enumerate(self.nodes, start=1):
                self._run("ip", "netns", "add", node)
                self._run("ip", "link", "add", f"cable-{node}", "type", "veth", "peer", "name", "eth0", "netns", node)
                self._run("ip", "link", "set", f"cable-{node}", "master", BRIDGE, "up")
                self._run("ip", "-n", node, "address", "add", f"{self._address(number)}/24", "dev", "eth0")
                for device in ("eth0", "lo"):
                    self._run("ip", "-n", node, "link", "set", device, "up")
        names = [
            f"{self._address(number)} {node} {self._hosts_mark}\n" for number, node in enumerate(self.nodes, start=1)
        ]
        with open("/etc/hosts", "a", encoding="utf-8") as hosts:
            hosts.writelines(names)

    def _disconnect(self, mark: str) -> None:
        with open("/etc/hosts", "r+", encoding="utf-8") as hosts:  # in place: it may be a bind mount
            kept = [line for line in hosts if mark not in line]
            hosts.seek(0)
            hosts.writelines(kept)
            hosts.truncate()
        networks = sorted(Path("/run/netns").glob("node[0-9]*"))
        for command in (["ip", "link", "delete", BRIDGE], *(["ip", "netns", "delete", node.name] for node in networks)):
            if networks:
                subprocess.run(command, capture_output=True, check=False)

    def _end_abandoned(self) -> None:
        """End what a cluster has left whose tests were killed: while the lock is held there is no other one."""
        end = time.monotonic() + 10
        while (left := _processes_of_clusters()) and time.monotonic() < end:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        self._disconnect(HOSTS_MARK)


def _processes_of_clusters() -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if OF_A_CLUSTER.search((process / "environ").read_bytes()):
                found.append(int(process.name))
    return found


def _stop_daemon(pid_file: Path) -> None:
    """End a daemon that we started, which is not our child."""
    if not pid_file.exists():
        return
    pid = int(pid_file.read_text())
    for number, seconds in ((signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0)):
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return
        end = time.monotonic() + seconds
        while _alive(pid) and time.monotonic() < end:
            time.sleep(0.05)
        if not _alive(pid):
            return


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] != "Z"
    except FileNotFoundError:
        return False
