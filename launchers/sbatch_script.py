"""The sbatch scripts that launchers/submit.py submits: plain text, made from a few settings.

A training job runs one task a node, torchrun, and lives through its own time limit: SLURM sends USR1 to the batch shell
before the limit, the shell asks the ranks to stop by a file (torchrun would die of the signal), they save a checkpoint,
and the job puts itself back into the queue under its old id.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field

from orthros_train.launch_environment import FIRST_PORT, PORTS

LOG_FOLDER = "slurm"  # inside a run's folder: scripts, logs, and the records of launchers/attempt.py


@dataclass(frozen=True)
class JobSettings:
    """What a training job asks for, and what it runs.

    Attributes:
        config: the YAML file; `overrides` are its key=value arguments.
        run: output_dir; with several seeds, each trains in its own folder below it.
        gpus_per_node: 0 trains on CPUs.
        stop_seconds: how long before the time limit the ranks are asked to stop; also what they get for saving.
        restart_limit: how often the job may go back into the queue.
        venv: a virtual environment to activate.
        container: an Apptainer image that everything but SLURM's own commands runs in.
        binds: folders that the image shows besides the working directory.
        seeds: more than none makes a job array, one task a seed.
        sbatch_options: further options of sbatch, without `#SBATCH`.
        shell_lines: run before anything else, such as `module load`.
    """

    config: str
    run: str
    name: str
    overrides: tuple[str, ...] = ()
    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_task: int | None = None
    memory: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    stop_seconds: int = 300
    restart_limit: int = 20
    preflight: bool = True
    venv: str | None = None
    container: str | None = None
    binds: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    sbatch_options: tuple[str, ...] = field(default=())
    shell_lines: tuple[str, ...] = field(default=())

    @property
    def world_size(self) -> int:
        """Ranks of one training."""
        return self.nodes * self.ranks_per_node

    def log(self, kind: str) -> str:
        """Where a job of this kind writes, in SLURM's patterns."""
        return f"{self.run}/{LOG_FOLDER}/{kind}-{'%A_%a' if self.seeds else '%j'}.log"


def training_script(settings: JobSettings) -> str:
    """The job that trains until train.steps are done."""
    options = [
        f"--nodes={settings.nodes}",
        "--ntasks-per-node=1",
        *_resources(settings, settings.gpus_per_node, settings.cpus_per_task),
        f"--signal=B:USR1@{settings.stop_seconds}",
        "--requeue",
        "--open-mode=append",
    ]
    before = _PREFLIGHT if settings.preflight else ""
    inside = " ".join(_container(settings))
    return "\n".join(
        [
            _head(settings, "train", settings.name, options),
            _TRAINING_COMMENT.format(seconds=settings.stop_seconds, folder=f"{settings.run}/{LOG_FOLDER}"),
            _surroundings(settings),
            _what_to_train(settings),
            _TRAINING.replace("@PREFLIGHT@", before)
            .replace("@IN@", f"{inside} " if inside else "")
            .replace("@PORT@", f"{FIRST_PORT} + SLURM_JOB_ID % {PORTS}"),
        ]
    )


def export_script(settings: JobSettings) -> str:
    """The job that turns the run's newest checkpoint into a Hugging Face folder."""
    command = 'python tools/export_hf.py --checkpoint "$run" --output "$run/model"'
    return _follow_up(settings, "export", command, gpus=0)


def evaluation_script(settings: JobSettings, suite: str, options: Sequence[str] = ()) -> str:
    """The job that evaluates the exported model; `options` are further ones of evaluation.run."""
    gpus = min(settings.gpus_per_node, 1)
    command = ["python -m evaluation.run", '--model "$run/model"', f'--output "$run/evaluation"/{shlex.quote(suite)}']
    command += [shlex.join(["--suite", suite, *(("--device", "cuda") if gpus else ()), *options])]
    return _follow_up(settings, "evaluate", " ".join(command), gpus=gpus)


def _follow_up(settings: JobSettings, kind: str, command: str, gpus: int) -> str:
    options = ["--nodes=1", "--ntasks=1", *_resources(settings, gpus, None)]
    inside = " ".join([*_container(settings), command])
    parts = [_head(settings, kind, f"{settings.name}-{kind}", options), _surroundings(settings), _run(settings)]
    return "\n".join([*parts, inside, ""])


def _resources(settings: JobSettings, gpus: int, cpus: int | None) -> list[str]:
    given = {
        "gpus-per-node": gpus or None,
        "cpus-per-task": cpus,
        "mem": settings.memory,
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "time": settings.time,
    }
    return [f"--{name}={value}" for name, value in given.items() if value is not None]


def _head(settings: JobSettings, kind: str, name: str, options: list[str]) -> str:
    array = [f"--array=0-{len(settings.seeds) - 1}"] if settings.seeds else []
    options = [f"--job-name={name}", *options, f"--output={settings.log(kind)}", *array, *settings.sbatch_options]
    return "\n".join(["#!/bin/bash", *(f"#SBATCH {option}" for option in options), ""])


def _surroundings(settings: JobSettings) -> str:
    """Where the job runs, and in which environment."""
    lines = ['cd "$SLURM_SUBMIT_DIR" || exit', *settings.shell_lines]
    if settings.venv is not None:
        lines.append(f"source {shlex.quote(settings.venv)}/bin/activate || exit")
    lines.append('export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"')
    if settings.container is not None:  # its Python need not have the package installed
        lines.append('export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"')
        lines.append('export APPTAINERENV_PYTHONPATH="$PYTHONPATH"  # wins over what the image sets itself')
    return "\n".join([*lines, ""])


def _run(settings: JobSettings) -> str:
    """The shell variables `seed` (of an array) and `run`."""
    run = shlex.quote(settings.run)
    if not settings.seeds:
        return f"run={run}\n"
    seeds = " ".join(map(str, settings.seeds))
    return f'seeds=({seeds})\nseed="${{seeds[SLURM_ARRAY_TASK_ID]}}"\nrun={run}/seed_"$seed"\n'


def _what_to_train(settings: JobSettings) -> str:
    arguments = [shlex.quote(argument) for argument in (settings.config, *settings.overrides)]
    if settings.seeds:
        arguments.append('"train.seed=$seed"')
    arguments.append('"output_dir=$run"')  # whatever the file says by the time of a restart
    lines = [
        _run(settings) + f"config=({' '.join(arguments)})",
        f"ranks_per_node={settings.ranks_per_node}",
        f"stop_seconds={settings.stop_seconds}  # for saving a checkpoint",
        f"restart_limit={settings.restart_limit}",
    ]
    if settings.cpus_per_task is not None:
        lines.append('export SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"  # srun does not take it from the job')
    return "\n".join([*lines, ""])


def _container(settings: JobSettings) -> list[str]:
    if settings.container is None:
        return []
    binds = [word for folder in settings.binds for word in ("--bind", shlex.quote(folder))]
    gpus = ["--nv"] if settings.gpus_per_node else []
    return ["apptainer", "exec", *gpus, "--bind", '"$PWD"', *binds, shlex.quote(settings.container)]


_TRAINING_COMMENT = """\
# Trains until train.steps are done. {seconds} s before the time limit SLURM sends USR1; the ranks then save a
# checkpoint and the job goes back into the queue, from where it resumes. Submit it from the root of the repository;
# SLURM does not make the folder of the log: mkdir -p {folder}
"""

_PREFLIGHT = """\
check_nodes() {  # first torch alone: torchrun would wait for a node where it does not load, srun names it
    local stop_seconds=15  # from the end of the first torchrun to the end of all
    srun --wait=45 @IN@python -c "import torch, launchers.preflight" &&
        launch preflight --rdzv-conf=join_timeout=45,read_timeout=30 launchers/preflight.py "${config[@]}"
}
SLURM_TIMELIMIT=2 attend check_nodes || preflight=failed  # minutes, for each of the two
"""

_TRAINING = """\
export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"  # no C++ stacks where torchrun's meeting point goes first
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((@PORT@))
# Of an array, this task alone: the bare id of one of them is the whole array's.
job="${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
# To tell bad input that only ranks find, for which torchrun ends as for everything, from a crash.
export ORTHROS_RANK_CODES="$run/slurm/codes-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}"

launch() {  # torchrun, once a node: launch NAME [OPTIONS] SCRIPT ARGUMENTS
    srun --wait="$stop_seconds" @IN@torchrun \\
        --nnodes="$SLURM_NNODES" --nproc-per-node="$ranks_per_node" \\
        --rdzv-backend=c10d --rdzv-endpoint="$head_node:$port" \\
        --rdzv-id="$1-$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \\
        --shutdown-timeout="$stop_seconds" "${@:2}"
}

attend() {  # run a command in the background, where signals are heard at once, and end as it ends
    child=
    "$@" &
    child=$!
    [ -z "$signalled" ] || ask_to_stop  # the signal came before there was a child
    while kill -0 "$child" 2> /dev/null; do wait "$child"; done  # a signal ends `wait` early
    wait "$child"
}

record() { @IN@python launchers/attempt.py "$@" "${config[@]}"; }

ask_to_stop() {  # again and again: a file from before the ranks started does not count
    signalled=yes
    [ -n "$child" ] && [ -z "$asker" ] || return  # `attend` calls it again: here, its $! would be the asker
    echo "$(date '+%F %T') USR1: asking the ranks to stop"
    (
        trap exit TERM  # never between making the file and writing it
        while :; do
            [ -e "$run/stop_requested" ] || echo "launcher: USR1, before the time limit" > "$run/stop_requested"
            sleep 2
        done
    ) 2> /dev/null &
    asker=$!
}
signalled= terminated= preflight= child= asker=
trap ask_to_stop USR1
trap 'terminated=yes' TERM  # scancel, preemption or the time limit: SLURM decides what happens next

record begin --ranks-per-node "$ranks_per_node" --restart-limit "$restart_limit" || exit
@PREFLIGHT@
if [ -z "$signalled$terminated$preflight" ]; then
    attend launch training launchers/torchrun_rank.py "${config[@]}"  # python -m orthros_train
fi

trap '' USR1
{ kill $(jobs -p); wait; } 2> /dev/null  # whoever still asks the ranks to stop
record end --restart-limit "$restart_limit" \\
    ${preflight:+--preflight-failed} ${signalled:+--signalled} ${terminated:+--terminated}
outcome=$?
[ "$outcome" -eq 75 ] || exit "$outcome"
for pause in 10 20 30 30 0; do
    timeout 30 scontrol requeue "$job" && exit "$outcome"
    sleep "$pause"
done
record not-requeued
exit
"""
