"""SLURM's commands, each with a time-out, and their refusals in words.

A dead controller makes the clients wait for minutes; here they get CLIENT_SECONDS.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from orthros_train.errors import InputError

CLIENT_SECONDS = 30
ENDED = (  # not REVOKED: of a federation's clusters, another one has the job
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
)

# What sbatch says -> what to do about it. The first match counts.
_REMEDIES = (
    ("invalid partition", "choose one with --partition; there are: {partitions}"),
    ("invalid account", "choose one with --account; `sacctmgr show associations user=$USER` lists yours"),
    ("invalid qos", "choose one with --qos; `sacctmgr show associations user=$USER format=qos` lists yours"),
    ("node count specification invalid", "lower --nodes; nodes in each partition: {partitions}"),
    ("more processors requested than permitted", "lower --nodes or --cpus-per-task; nodes: {partitions}"),
    ("requested time limit is invalid", "shorten --time; `sinfo -o '%P %l'` lists the limits"),
    ("requested node configuration is not available", "ask for less with --nodes, --gpus-per-node, --cpus-per-task or "
     "--memory; nodes in each partition: {partitions}"),
    ("invalid generic resource", "set --gpus-per-node to what the nodes have; `sinfo -o '%P %G'` lists it"),
    ("unable to contact slurm controller", "try again later, or ask the cluster's operators"),
)  # fmt: skip

# Why a job waits -> what to do where waiting does not help.
_NEVER = {
    "PartitionNodeLimit": ": more nodes than the partition has, it will never start; scancel it and lower --nodes",
    "PartitionTimeLimit": ": longer than the partition allows, it will never start; scancel it and shorten --time",
    "PartitionConfig": ": the partition cannot hold it, it will never start; scancel it and ask for less",
    "DependencyNeverSatisfied": ": the job before it failed, it will never start; scancel it",
    "BeginTime": ": back in the queue, SLURM waits two minutes before a restart",
}


# M, M:S, H:M:S, D-H, D-H:M, D-H:M:S: the fields behind days and before them
_LIMIT = re.compile(r"(?:(\d+)-(\d+)(?::(\d+))?(?::(\d+))?|(?:(\d+):(?=\d+:))?(\d+)(?::(\d+))?)")


def limit_seconds(limit: str) -> int | None:
    """A time limit as sbatch reads it (90, 90:00, 1:30:00, 1-12, 1-12:30:00) in seconds; None for what has none.

    Raises:
        InputError: sbatch would not read it.
    """
    if limit.lower() in ("unlimited", "infinite", "0", "-1"):
        return None
    match = _LIMIT.fullmatch(limit)
    if match is None:
        raise InputError(f"--time {limit}: write minutes, HH:MM:SS or D-HH:MM:SS")
    days, *rest = (int(number or 0) for number in match.groups())
    hours, minutes, seconds = (with_days + alone for with_days, alone in zip(rest[:3], rest[3:], strict=True))
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


class SlurmRefusalError(InputError):
    """SLURM said no."""


def call(*command: str) -> str:
    """What a SLURM command prints.

    Raises:
        SlurmRefusalError: it failed; with its own words.
        InputError: there is no such command, or no answer in CLIENT_SECONDS.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CLIENT_SECONDS, check=False)
    except FileNotFoundError as error:
        raise InputError(f"there is no {command[0]} here: run this where SLURM's commands are installed") from error
    except subprocess.TimeoutExpired as error:
        raise InputError(
            f"SLURM did not answer {command[0]} within {CLIENT_SECONDS} s; is its controller up? (scontrol ping)"
        ) from error
    if done.returncode != 0:
        raise SlurmRefusalError(" ".join((done.stderr or done.stdout).split()) or f"it ended with {done.returncode}")
    return done.stdout


def submit(script: str, options: Sequence[str] = ()) -> int:
    """Give a script file to sbatch; the job's id.

    Raises:
        InputError: SLURM refuses it; with what to change.
    """
    try:
        answer = call("sbatch", "--parsable", *options, script)
    except SlurmRefusalError as refusal:
        raise InputError(f"SLURM refuses the job: {explain(str(refusal))}") from refusal
    return int(answer.split(";")[0])


def explain(refusal: str) -> str:
    """sbatch's refusal in one line with what to change."""
    words = re.sub(r"(sbatch: error: (Batch job submission failed: )?|allocation failure: )", "", refusal).strip()
    for phrase, remedy in _REMEDIES:
        if phrase in words.lower():
            return f"{words}; {remedy.format(partitions=_partitions())}" if "{" in remedy else f"{words}; {remedy}"
    return words


def check(script: str) -> None:
    """Ask SLURM whether a script could ever run; some clusters would let it wait forever instead of refusing it.

    Raises:
        InputError: it could not, for a reason that we know; with what to change.
    """
    try:
        call("sbatch", "--test-only", script)
    except SlurmRefusalError as refusal:
        if any(phrase in str(refusal).lower() for phrase, _ in _REMEDIES):
            raise InputError(f"SLURM refuses the job: {explain(str(refusal))}") from refusal


def job_states(job_ids: Sequence[int]) -> dict[int, str]:
    """The state of each job that SLURM still knows (of an array: of a task that has not ended, if there is one).

    Raises:
        InputError: SLURM does not answer.
    """
    states = {}
    for job_id in job_ids:
        try:
            shown = call("scontrol", "show", "job", "--oneliner", str(job_id))
        except SlurmRefusalError:  # forgotten some minutes after its end
            continue
        found = re.findall(r"\bJobState=(\w+)", shown)
        if found:
            states[job_id] = next((state for state in found if state not in ENDED), found[0])
    return states


def _partitions() -> str:
    try:
        lines = call("sinfo", "--noheader", "--summarize", "--format=%P %D").splitlines()
    except InputError:
        return "unknown (sinfo does not answer)"
    return ", ".join(f"{name.rstrip('*')} ({nodes})" for name, nodes in (line.split() for line in lines))


def waiting_reason(job_id: int) -> str | None:
    """Why a job waits, in SLURM's word, with a remedy where it waits forever; None where that is not known."""
    try:
        shown = call("scontrol", "show", "job", "--oneliner", str(job_id))
    except SlurmRefusalError:
        return None
    found = re.search(r"\bJobState=PENDING Reason=(\S+)", shown)
    if found is None or found.group(1) == "None":
        return None
    return f"{found.group(1)}{_NEVER.get(found.group(1), '')}"
