"""Look at all nodes before a training starts: one table, and a failure that names the node.

Every rank runs this under the launcher that the training will use, so meeting each other is the first check. Then:
versions, devices, free disk, the run's folder seen and writable from every rank, clocks, the files that the run reads
as every node sees them (sizes and samples of their bytes), point-to-point and all-reduce bandwidth. A minute at most
from when the launcher has started the ranks: one that hangs until then is named. Exit code 2 on a failure.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from launchers.deadline import Deadline
from launchers.sbatch_script import LOG_FOLDER
from orthros_train.command_line import CommandParser, run_command
from orthros_train.config import Config, load_config
from orthros_train.data.manifest import bin_path, idx_path, manifest_path
from orthros_train.errors import InputError
from orthros_train.launch_environment import claimed_local_rank, environment_number

if TYPE_CHECKING:
    from orthros_train.training.ranks import Ranks

EXAMPLES = """\
  srun torchrun --nnodes 2 --nproc-per-node 8 … launchers/preflight.py configs/orthros_1.3b.yaml
  torchrun --nproc-per-node 2 launchers/preflight.py configs/demo.yaml"""
DEADLINE_SECONDS = 50.0  # of everything; starting Python comes before
CLOCK_SECONDS = 5.0  # more than that between two nodes' clocks is a failure
LEAST_FREE_GIB = 1.0
SLOW_LINK = 0.25  # of the median bandwidth, is worth a warning
SAMPLES, FILE_SAMPLES, SAMPLE_BYTES = 1024, 64, 1 << 16  # of all data files together, at most of one; of one sample
REPEATS = 3
SEEN_SECONDS = 3.0


@dataclass(frozen=True)
class Report:
    """What one rank found. Ranks of one node differ in what is theirs alone."""

    rank: int
    host: str
    versions: str
    device: str
    devices: int  # that this rank sees
    free_gib: float
    clock: float  # seconds since the epoch, right after a barrier
    folder_problem: str | None
    data: dict[str, str]  # file that the run reads -> size and sample hash, or what is wrong; of one rank a node
    receive_gib_per_second: float  # from the rank before it
    all_reduce_gib_per_second: float  # bus bandwidth


def build_parser() -> CommandParser:
    """The command line."""
    parser = CommandParser(__doc__ or "", EXAMPLES)
    parser.add_argument("config", metavar="CONFIG.yaml", help="the run's configuration")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="replaces an option of the file")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Check; 0 if all is well, 2 if not. Raises InputError on bad input."""
    options = build_parser().parse_intermixed_args(arguments)
    deadline = Deadline(DEADLINE_SECONDS, f"reading {options.config}")
    with deadline.enforced():
        config = load_config(options.config, options.overrides)
        deadline.moment = "importing torch"
        from orthros_train.training.lost_ranks import lost_detail  # noqa: PLC0415 (imports torch: may hang)

        deadline.moment = "looking for GPUs"
        refuse_missing_gpus()
        try:
            ranks = deadline.meet()
            report = look(config, ranks, deadline)
            deadline.wait_for_all(ranks)
            reports = ranks.gather_objects(report)
            problems = find_problems(reports)
            if ranks.is_main:
                show(reports, find_warnings(reports))
                for problem in problems:
                    print(f"preflight: {problem}", file=sys.stderr)
            deadline.wait_for_all(ranks)  # nobody leaves before it is shown
        except RuntimeError as error:
            detail = lost_detail(error, deadline.missing)
            if detail is None:
                raise
            raise InputError(f"the ranks do not meet or lose each other, {deadline.moment} ({detail})") from error
    return 2 if problems else 0


def refuse_missing_gpus() -> None:
    """Raise InputError where torch sees none of the GPUs that SLURM gave: this node's ranks would take CPUs, and wait
    over gloo for others that wait for them over NCCL."""
    import torch  # noqa: PLC0415

    given = environment_number("SLURM_GPUS_ON_NODE", 0)
    if not given or torch.cuda.is_available():
        return
    if torch.backends.cuda.is_built():
        reason = "does not see them: look at the driver there (nvidia-smi) and at CUDA_VISIBLE_DEVICES"
    else:
        reason = "was built without CUDA: install a build with it"
    raise InputError(f"SLURM gave {given} GPUs of this node, but torch {torch.__version__} {reason}")


def look(config: Config, ranks: Ranks, deadline: Deadline) -> Report:
    """Everything that this rank can find out; collective."""
    import torch  # noqa: PLC0415

    from orthros_train.training.run_folder import git_commit, installed_versions  # noqa: PLC0415

    run = Path(config.output_dir)
    deadline.moment = f"looking at the run's folder {run}"
    folder_problem = check_folder(run, ranks, deadline)
    deadline.wait_for_all(ranks)
    clock = time.time()
    deadline.moment = "measuring the bandwidth"
    receive, all_reduce = measure_bandwidth(ranks, deadline)
    data = data_fingerprints(config, ranks, deadline)
    deadline.moment = "looking at versions and free disk"
    cuda = ranks.device.type == "cuda"
    versions = {"python": platform.python_version(), **installed_versions(), "commit": (git_commit() or "none")[:12]}
    place = next(path for path in (run, *run.absolute().parents) if path.exists())
    return Report(
        rank=ranks.rank,
        host=socket.gethostname(),
        versions=", ".join(f"{name} {version}" for name, version in versions.items()),
        device=torch.cuda.get_device_name(ranks.device) if cuda else "cpu",
        devices=torch.cuda.device_count(),
        free_gib=shutil.disk_usage(place).free / 2**30,
        clock=clock,
        folder_problem=folder_problem,
        data=data,
        receive_gib_per_second=receive,
        all_reduce_gib_per_second=all_reduce,
    )


def check_folder(run: Path, ranks: Ranks, deadline: Deadline) -> str | None:
    """Whether this rank sees what rank 0 writes in the run's folder, and rank 0 what it writes; collective."""
    folder = run / LOG_FOLDER
    own = folder / f"preflight-{ranks.rank}"

    def write() -> str | None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            own.write_text(socket.gethostname(), encoding="utf-8")
        except OSError as error:
            return f"cannot write in {folder}: {error.strerror}"
        return None

    problem = write()
    deadline.wait_for_all(ranks)
    (seen,) = _seen([folder / "preflight-0"])
    everyone = range(ranks.world_size) if ranks.is_main else ()
    written = _seen([folder / f"preflight-{rank}" for rank in everyone])
    deadline.wait_for_all(ranks)
    written = ranks.share(written)
    if problem is None:
        own.unlink(missing_ok=True)
    if problem is None and not seen:
        problem = f"does not see what rank 0 writes in {folder}: is it a shared file system?"
    if problem is None and not written[ranks.rank]:
        problem = f"what it writes in {folder} does not reach rank 0: is it a shared file system?"
    return problem


def _seen(files: Sequence[Path]) -> list[bool]:
    """Which of the files are there, after a while: network file systems may show a new one late."""
    end = time.monotonic() + SEEN_SECONDS
    while not all(file.exists() for file in files) and time.monotonic() < end:
        time.sleep(0.1)
    return [file.exists() for file in files]


def measure_bandwidth(ranks: Ranks, deadline: Deadline) -> tuple[float, float]:
    """(GiB/s received from the rank before in a ring, bus bandwidth of all-reduce); collective.

    Bus bandwidth: 2·(n-1)/n·bytes/seconds, what every link must carry for a ring of n ranks.
    """
    if ranks.world_size == 1:
        return float("inf"), float("inf")
    import torch  # noqa: PLC0415
    import torch.distributed as dist  # noqa: PLC0415

    cuda = ranks.device.type == "cuda"
    count = (1 << 26 if cuda else 1 << 20) // 4  # 64 MiB, or 1 MiB over gloo
    tensor, received = (torch.ones(count, device=ranks.device) for _ in range(2))
    following, before = (ranks.rank + 1) % ranks.world_size, (ranks.rank - 1) % ranks.world_size

    def ring() -> None:
        operations = [dist.P2POp(dist.isend, tensor, following), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    gib = tensor.nbytes / 2**30
    share = 2 * (ranks.world_size - 1) / ranks.world_size
    receive = gib / _seconds(ring, ranks, deadline)
    return receive, share * gib / _seconds(lambda: dist.all_reduce(tensor), ranks, deadline)


def _seconds(work: Callable[[], object], ranks: Ranks, deadline: Deadline) -> float:
    """Shortest time of a few repetitions, after one to warm up."""
    import torch  # noqa: PLC0415

    times = []
    for _ in range(REPEATS + 1):
        deadline.wait_for_all(ranks)
        start = time.perf_counter()
        with deadline.waiting():
            work()
            if ranks.device.type == "cuda":
                torch.cuda.synchronize(ranks.device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def data_fingerprints(config: Config, ranks: Ranks, deadline: Deadline) -> dict[str, str]:
    """Size and a hash over samples of each file that the run reads, as this node sees it, or what is wrong with it;
    collective. One rank a node reads. All files together have SAMPLES: with more files than that, sizes alone count."""
    files: list[Path] = []
    for path in input_paths(config) if claimed_local_rank() == 0 else ():
        deadline.moment = f"reading {path}"
        files += files_of(path)
    deadline.wait_for_all(ranks)
    most = int(ranks.gather([len(files)]).max())  # so that all nodes take the same samples
    found = {}
    for file in files:
        deadline.moment = f"reading {file}"
        found[str(file)] = sample_hash(file, min(SAMPLES // most, FILE_SAMPLES))
    return found


def files_of(path: Path) -> list[Path]:
    """The files of a folder at any depth; of a file, or of what is not there, itself."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def input_paths(config: Config) -> list[Path]:
    """Files and folders that the run reads: corpora, conversations, tokenizer, models; not the hub's data sets."""
    sft = config.data.sft
    corpora = [Path(source.prefix) for source in [*config.data.train, *(config.data.validation or [])]]
    paths = [path(prefix) for prefix in corpora for path in (manifest_path, idx_path, bin_path)]
    for source in [*sft.train, *(sft.validation or [])]:
        if source.path is not None:
            paths.append(Path(source.path))
        elif source.dataset is not None and Path(source.dataset).exists():
            paths.append(Path(source.dataset))
    others = (sft.chat_template, config.tokenizer.path, config.init_from, config.adaptation.distillation.teacher)
    paths += [Path(path) for path in others if path is not None]
    return list(dict.fromkeys(paths))


def sample_hash(file: Path, samples: int) -> str:
    """`SIZE bytes, HASH` of a file: SHA-256 over its size and evenly spaced samples; or why it cannot be read."""
    try:
        with open(file, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            digest = hashlib.sha256(str(size).encode())
            for index in range(samples):
                stream.seek(index * max(size - SAMPLE_BYTES, 0) // max(samples - 1, 1))
                digest.update(stream.read(SAMPLE_BYTES))
    except OSError as error:
        return f"unreadable: {error.strerror}"
    return f"{size} bytes, {digest.hexdigest()[:16]}"


def find_problems(reports: Sequence[Report]) -> list[str]:
    """What must not be: one line each, with the node's name."""
    first = reports[0]
    problems = [
        f"{report.host}, rank {report.rank}: {report.folder_problem}" for report in reports if report.folder_problem
    ]
    for report in _one_a_host(reports):
        here = [other for other in reports if other.host == report.host]
        if report.versions != first.versions:
            problems.append(f"{report.host} has other versions than {first.host}: {_difference(report, first)}")
        if report.device != first.device:
            problems.append(f"{report.host} has {report.device}, {first.host} has {first.device}")
        if report.devices and report.devices < len(here):
            problems.append(f"{report.host} shows {report.devices} GPUs for {len(here)} ranks")
        if report.free_gib < LEAST_FREE_GIB:
            problems.append(f"{report.host}: {report.free_gib:.2f} GiB free in the run's folder; make room")
        behind = report.clock - first.clock
        if abs(behind) > CLOCK_SECONDS:
            problems.append(f"{report.host}: its clock differs by {behind:+.1f} s from {first.host}'s; set it by NTP")
        problems += _data_problems(report, first)
    return problems


def _data_problems(report: Report, first: Report) -> list[str]:
    problems = []
    for file in dict.fromkeys([*first.data, *report.data]):
        found, seen = (node.data.get(file, "no such file") for node in (report, first))
        if found.startswith("unreadable"):
            problems.append(f"{report.host}: {file}: {found}")
        elif found != seen:
            problems.append(f"{report.host}: {file}: {found}, {first.host} sees {seen}")
    return problems


def find_warnings(reports: Sequence[Report]) -> list[str]:
    """What slows a training down without breaking it."""
    usual = statistics.median(report.receive_gib_per_second for report in reports)
    return [
        f"{report.host}, rank {report.rank}: receives {report.receive_gib_per_second:.2f} GiB/s from rank "
        f"{(report.rank - 1) % len(reports)} on {reports[report.rank - 1].host}, the median is {usual:.2f}"
        for report in reports
        if report.receive_gib_per_second < SLOW_LINK * usual
    ]


def _one_a_host(reports: Sequence[Report]) -> list[Report]:
    return list({report.host: report for report in reversed(reports)}.values())[::-1]


def _difference(report: Report, first: Report) -> str:
    ours, theirs = report.versions.split(", "), first.versions.split(", ")
    return ", ".join(f"{one} instead of {other}" for one, other in zip(ours, theirs, strict=False) if one != other)


def show(reports: Sequence[Report], warnings: Sequence[str]) -> None:
    """Print one line a node."""
    console = Console(highlight=False, width=140, soft_wrap=True)
    console.print(f"preflight: {reports[0].versions}")
    table = Table(box=None, pad_edge=False)
    for heading in ("node", "ranks", "device", "free GiB", "clock s", "folder", "data", "receives GiB/s"):
        table.add_column(heading)
    for report in _one_a_host(reports):
        here = [other for other in reports if other.host == report.host]
        data = "differs" if _data_problems(report, reports[0]) else "same" if report.data else "none"
        table.add_row(
            report.host,
            f"{here[0].rank}-{here[-1].rank}" if len(here) > 1 else str(report.rank),
            f"{report.devices} x {report.device}" if report.devices else report.device,
            f"{report.free_gib:,.0f}",
            f"{report.clock - reports[0].clock:+.2f}",
            "differs" if any(other.folder_problem for other in here) else "shared",
            data,
            f"{min(other.receive_gib_per_second for other in here):.2f}",
        )
    console.print(table)
    slowest = min(report.all_reduce_gib_per_second for report in reports)
    console.print(f"all-reduce over {len(reports)} ranks: {slowest:.2f} GiB/s a link")
    for warning in warnings:
        console.print(f"warning: {warning}", markup=False)


def run() -> int:
    """`main`, with the node's name in what it refuses."""
    try:
        return main(sys.argv[1:])
    except InputError as error:
        raise InputError(f"{socket.gethostname()}: {error}") from error


if __name__ == "__main__":
    run_command(run)
