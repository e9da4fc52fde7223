"""Submit a training to SLURM and walk away: the job saves a checkpoint before its time limit and resumes by itself.

The script that is submitted is plain sbatch; --print shows it and submits nothing. Run this from the root of the
repository on a machine where sbatch works, in the environment that the job shall have.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from evaluation.run import build_parser as evaluation_parser
from evaluation.run import chosen_suites
from launchers import slurm_client
from launchers.attempt import RANK_VARIABLES
from launchers.preflight import files_of, input_paths
from launchers.run_records import Job, add_job, now, read_jobs
from launchers.sbatch_script import LOG_FOLDER, JobSettings, evaluation_script, export_script, training_script
from orthros_train.command_line import CommandParser, count, positive_int, run_command
from orthros_train.config import Config, gradient_accumulation_steps, load_config
from orthros_train.data.storage import write_text_atomically
from orthros_train.errors import InputError
from orthros_train.launch_protocol import STOP_FILE

EXAMPLES = """\
  python launchers/submit.py configs/orthros_1.3b.yaml --nodes 4 --gpus-per-node 8 --time 1-00:00:00 --print
  python launchers/submit.py configs/orthros_1.3b.yaml --nodes 4 --gpus-per-node 8 --partition gpu --account me \\
      --time 1-00:00:00 --cpus-per-task 64 --export --evaluate commonsense
  python launchers/submit.py configs/orthros_130m.yaml --gpus-per-node 8 --seeds 42,43,44 train.steps=2000
  python launchers/submit.py configs/demo.yaml --nodes 2 --ranks-per-node 2 --shell-line 'module load python'

`echo stop > outputs/RUN/stop_requested` stops a training for good, with a checkpoint; scancel ends it at once."""
START_SECONDS = 120  # of a job: meeting, preflight, reading the checkpoint


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    parser.add_argument("config", metavar="CONFIG.yaml", help="the run's configuration")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="replaces an option of the file")
    parser.add_argument("--print", action="store_true", dest="print_only", help="show the scripts, submit nothing")

    size = parser.add_argument_group("size")
    size.add_argument("--nodes", type=positive_int, default=1, metavar="N", help="default: 1")
    size.add_argument("--gpus-per-node", type=count, default=0, metavar="N", help="default: 0, train on CPUs")
    size.add_argument(
        "--ranks-per-node", type=positive_int, metavar="N", help="default: one a GPU, or one where there are none"
    )
    size.add_argument("--cpus-per-task", type=positive_int, metavar="N", help="CPU cores of a node for all its ranks")
    size.add_argument("--memory", metavar="SIZE", help="of a node, e.g. 200G")

    place = parser.add_argument_group("queue")
    place.add_argument("--partition", metavar="NAME")
    place.add_argument("--account", metavar="NAME")
    place.add_argument("--qos", metavar="NAME")
    place.add_argument("--time", metavar="D-HH:MM:SS", help="limit of one start; default: the partition's")
    place.add_argument("--job-name", metavar="NAME", help="default: the name of output_dir")
    place.add_argument(
        "--sbatch-option",
        action="append",
        default=[],
        metavar="OPTION",
        help="e.g. --sbatch-option=--constraint=h100; repeatable",
    )

    life = parser.add_argument_group("restarts")
    life.add_argument(
        "--stop-seconds",
        type=positive_int,
        default=300,
        metavar="N",
        help="before the time limit the ranks are asked to save a checkpoint, which may take so long (default: 300)",
    )
    life.add_argument(
        "--restart-limit", type=count, default=20, metavar="N", help="the job goes back into the queue so often (20)"
    )
    life.add_argument("--no-preflight", action="store_true", help="start training without looking at the nodes first")

    surroundings = parser.add_argument_group("environment of the job")
    surroundings.add_argument(
        "--venv", metavar="DIR", help="virtual environment to activate; default: the active one, if there is one"
    )
    surroundings.add_argument("--container", metavar="IMAGE", help="an Apptainer image to run in, instead of --venv")
    surroundings.add_argument(
        "--shell-line", action="append", default=[], metavar="LINE", help="e.g. 'module load cuda'; repeatable"
    )

    more = parser.add_argument_group("more jobs")
    more.add_argument(
        "--seeds", type=_seeds, default=(), metavar="N,N,…", help="a job array: each seed in output_dir/seed_N"
    )
    more.add_argument("--export", action="store_true", help="afterwards, a Hugging Face folder: output_dir/model")
    more.add_argument(
        "--evaluate",
        metavar="SUITE",
        help="afterwards, evaluation.run on it; implies --export. In quotes with further options: 'recall --limit 9'",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Submit, or print. Raises InputError."""
    options = build_parser().parse_intermixed_args(arguments)
    settings = job_settings(options)
    scripts = {"train": training_script(settings)}
    if options.export or options.evaluate:
        scripts["export"] = export_script(settings)
    if options.evaluate:
        scripts["evaluate"] = evaluation_script(settings, *evaluation_words(options.evaluate))
    if options.print_only:
        print("\n".join(scripts.values()), end="")
        return 0
    check_submission(settings)
    check_outputs(settings, scripts)
    submit_all(settings, scripts)
    return 0


def job_settings(options: argparse.Namespace) -> JobSettings:
    """The settings that the command line means.

    Raises:
        InputError: the config is unfit, or does not fit the ranks.
    """
    config = load_config(options.config, options.overrides)
    ranks = options.ranks_per_node or options.gpus_per_node or 1
    if options.gpus_per_node and ranks > options.gpus_per_node:
        raise InputError(
            f"--ranks-per-node {ranks} is more than --gpus-per-node {options.gpus_per_node}: at most one rank a GPU"
        )
    if options.venv and options.container:
        raise InputError("--venv and --container exclude each other: the image brings its own Python")
    named = [override for override in options.overrides if override.startswith("train.seed=")]
    if options.seeds and named:
        raise InputError(f"--seeds and {named[0]} contradict each other: remove one")
    gradient_accumulation_steps(config, options.nodes * ranks)
    check_time(options.time, options.stop_seconds)
    run = config.output_dir.rstrip("/")
    if any(character.isspace() or character == "%" for character in run):
        raise InputError(f"output_dir '{run}' holds a space or %, which SLURM's log path cannot: choose another")
    try:
        load_config(options.config, [*options.overrides, f"output_dir={run}"])  # as the job has it
    except InputError as error:
        raise InputError(f"output_dir '{run}' is a number or the like on a command line: choose another") from error
    return JobSettings(
        config=options.config,
        overrides=tuple(options.overrides),
        run=run,
        name=options.job_name or Path(run).name,
        nodes=options.nodes,
        ranks_per_node=ranks,
        gpus_per_node=options.gpus_per_node,
        cpus_per_task=options.cpus_per_task,
        memory=options.memory,
        partition=options.partition,
        account=options.account,
        qos=options.qos,
        time=options.time,
        stop_seconds=options.stop_seconds,
        restart_limit=options.restart_limit,
        preflight=not options.no_preflight,
        venv=options.venv or (None if options.container else _active_venv()),
        container=options.container,
        binds=tuple(outer_folders(config, Path(options.config))),
        seeds=options.seeds,
        sbatch_options=tuple(options.sbatch_option),
        shell_lines=tuple(options.shell_line),
    )


def outer_folders(config: Config, file: Path) -> list[str]:
    """The folders outside the working directory that a job needs, both as they are named and where links lead.

    Args:
        config: of the run.
        file: where it was read.
    """
    suites = config.evaluation.suites
    reads = [*input_paths(config), file, *map(Path, [*suites.texts, *filter(None, [suites.data_dir])])]
    writes = [Path(place) for place in (config.data.cache_dir, suites.cache_dir) if place is not None]
    named = [Path(config.output_dir), *(path if path.is_dir() else path.parent for path in reads)]
    named += [next(place for place in (path, *path.absolute().parents) if place.exists()) for path in writes]
    linked = [target.resolve().parent for path in reads for target in files_of(path)]
    here = Path.cwd()
    folders = dict.fromkeys(place for path in (*named, *linked) for place in (path.absolute(), path.resolve()))
    outer = [
        folder for folder in folders if not folder.is_relative_to(here) and not folder.is_relative_to(here.resolve())
    ]
    return [str(folder) for folder in outer if not any(other in folder.parents for other in outer)]


def evaluation_words(text: str) -> tuple[str, list[str]]:
    """--evaluate as the suite and further options of evaluation.run.

    Raises:
        InputError: evaluation.run would refuse them, after days of training.
    """
    suite, *more = shlex.split(text) or [""]
    chosen_suites(evaluation_parser().parse_args(["--suite", suite, "--output", "-", *more]))
    return suite, more


def check_time(limit: str | None, stop_seconds: int) -> None:
    """Raise InputError where SLURM would ask for the stop before training has begun."""
    seconds = None if limit is None else slurm_client.limit_seconds(limit)
    if seconds is not None and seconds < stop_seconds + START_SECONDS:
        raise InputError(
            f"--time {limit} leaves no time to train: the job is stopped {stop_seconds} s before its end "
            f"(--stop-seconds), and starting takes up to {START_SECONDS} s; raise --time or lower --stop-seconds"
        )


def check_outputs(settings: JobSettings, kinds: Collection[str]) -> None:
    """Raise InputError where the export would find a model there already, after days of training."""
    for run in runs(settings):
        model = run / "model"
        if "export" in kinds and model.is_dir() and any(model.iterdir()):
            raise InputError(
                f"{model} is there already, from an earlier export: move it away, or submit without --export"
            )


def runs(settings: JobSettings) -> list[Path]:
    """The folders that are trained in."""
    return [Path(settings.run) / f"seed_{seed}" for seed in settings.seeds] or [Path(settings.run)]


def check_submission(settings: JobSettings) -> None:
    """Refuse what would fail in the queue.

    Raises:
        InputError: not the repository's root, a shell that belongs to a rank, or another job for this run.
    """
    if not Path("launchers/attempt.py").is_file():
        raise InputError("launchers/attempt.py is not below this folder: submit from the root of the repository")
    inherited = [name for name in RANK_VARIABLES if name in os.environ]
    if inherited:
        raise InputError(f"{', '.join(inherited)} are set, and the job would inherit them: unset them first")
    _refuse_second_submission(settings)


def _refuse_second_submission(settings: JobSettings) -> None:
    jobs = [job.job_id for job in read_jobs(Path(settings.run)) if job.kind == "train"]
    for job_id, state in slurm_client.job_states(jobs).items():
        if state not in slurm_client.ENDED:
            raise InputError(
                f"job {job_id} ({state}) is there for {settings.run} already: it goes on by itself; end it with "
                f"`scancel {job_id}`, or choose another output_dir"
            )


def submit_all(settings: JobSettings, scripts: dict[str, str]) -> None:
    """Submit the scripts, each after the one before has succeeded, and say their ids and logs."""
    folder = Path(settings.run) / LOG_FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"output_dir {settings.run} cannot be written ({error}); choose another") from error
    for run in runs(settings):
        (run / STOP_FILE).unlink(missing_ok=True)  # whoever submits it again wants it to go on
    before: int | None = None
    files = {kind: folder / f"{kind}.sbatch" for kind in scripts}
    for kind, script in scripts.items():
        write_text_atomically(files[kind], script)
        slurm_client.check(str(files[kind]))
    for kind, file in files.items():
        dependency = []
        if before is not None:
            relation = "aftercorr" if settings.seeds else "afterok"
            dependency = [f"--dependency={relation}:{before}", "--kill-on-invalid-dep=yes"]
        job_id = slurm_client.submit(str(file), dependency)
        log = settings.log(kind).replace("%A", str(job_id)).replace("%j", str(job_id))
        add_job(Path(settings.run), Job(job_id, kind, log, now()))
        size = f"{settings.nodes} x {settings.ranks_per_node} ranks" if kind == "train" else f"after job {before}"
        seeds = f", seeds {','.join(map(str, settings.seeds))}" if settings.seeds else ""
        print(f"job {job_id}: {kind}, {size}{seeds}\n  log {log.replace('%a', '*')}")
        before = job_id
    print(f"look at it with: python launchers/status.py {shlex.quote(settings.run)}")


def _active_venv() -> str | None:
    if sys.prefix == sys.base_prefix:
        return None
    venv = Path(sys.prefix)
    return str(venv.relative_to(Path.cwd())) if venv.is_relative_to(Path.cwd()) else str(venv)


def _seeds(text: str) -> tuple[int, ...]:
    seeds = tuple(int(part) for part in text.split(","))
    if len(set(seeds)) != len(seeds):
        raise argparse.ArgumentTypeError("a seed is there twice")
    return seeds


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))
