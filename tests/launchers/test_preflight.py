"""The preflight finds what it is there for, and names the node."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from launchers import deadline, preflight
from launchers.deadline import Deadline
from launchers.preflight import Report, find_problems, find_warnings, input_paths, sample_hash, show
from orthros_train.command_line import run_command
from orthros_train.config import Config, config_to_yaml
from orthros_train.errors import InputError
from orthros_train.training.ranks import start_ranks
from tests import distributed
from tests.distributed import RankFailedError, run_distributed
from tests.training.small_runs import small_config, write_corpus

REPORT = Report(
    rank=0,
    host="node1",
    versions="python 3.11.7, torch 2.13.0, commit abc",
    device="H100",
    devices=2,
    free_gib=100.0,
    clock=1000.0,
    folder_problem=None,
    data={"c.bin": "9 bytes, aaaa"},
    receive_gib_per_second=10.0,
    all_reduce_gib_per_second=8.0,
)
REPORTS = [replace(REPORT, rank=rank, host=f"node{rank // 2 + 1}") for rank in range(4)]


def test_four_sound_ranks_have_no_problem() -> None:
    assert find_problems(REPORTS) == []
    assert find_warnings(REPORTS) == []


@pytest.mark.parametrize(
    ("rank", "change", "problem"),
    [
        (2, {"versions": "python 3.11.7, torch 2.12.0, commit abc"},
         "node2 has other versions than node1: torch 2.12.0 instead of torch 2.13.0"),
        (2, {"device": "A100"}, "node2 has A100, node1 has H100"),
        (2, {"devices": 1}, "node2 shows 1 GPUs for 2 ranks"),
        (2, {"free_gib": 0.5}, "node2: 0.50 GiB free in the run's folder; make room"),
        (2, {"clock": 990.0}, "node2: its clock differs by -10.0 s from node1's; set it by NTP"),
        (3, {"folder_problem": "cannot write in x: Read-only file system"},
         "node2, rank 3: cannot write in x: Read-only file system"),
        (2, {"data": {"c.bin": "8 bytes, bbbb"}}, "node2: c.bin: 8 bytes, bbbb, node1 sees 9 bytes, aaaa"),
        (2, {"data": {"c.bin": "unreadable: No such file"}}, "node2: c.bin: unreadable: No such file"),
    ],
)  # fmt: skip
def test_a_problem_names_its_node(rank: int, change: dict[str, object], problem: str) -> None:
    reports = list(REPORTS)
    reports[rank] = replace(reports[rank], **change)  # type: ignore[arg-type]
    assert find_problems(reports) == [problem]


def test_files_that_only_one_node_has_are_found() -> None:
    more = {**REPORT.data, "d/extra.json": "1 bytes, cccc"}
    assert find_problems([REPORTS[0], replace(REPORTS[2], data=more)]) == [
        "node2: d/extra.json: 1 bytes, cccc, node1 sees no such file"
    ]
    assert find_problems([replace(REPORTS[0], data=more), REPORTS[2]]) == [
        "node2: d/extra.json: no such file, node1 sees 1 bytes, cccc"
    ]


def test_a_run_without_files_is_not_said_to_see_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    for data, word in ((REPORT.data, "same"), ({}, "none"), ({"c": "unreadable: x"}, "differs")):
        show([replace(REPORT, data=data)], [])
        assert re.search(rf"shared +{word} ", capsys.readouterr().out)


def test_a_slow_link_is_a_warning_that_names_both_ends() -> None:
    reports = [*REPORTS[:2], replace(REPORTS[2], receive_gib_per_second=1.0), REPORTS[3]]
    assert find_problems(reports) == []
    assert find_warnings(reports) == ["node2, rank 2: receives 1.00 GiB/s from rank 1 on node1, the median is 10.00"]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return small_config(tmp_path / "run", write_corpus(tmp_path, ["some words"] * 20))


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "SEEN_SECONDS", 0.5)


def look(config: Config) -> Report:
    return preflight.look(config, start_ranks(60), Deadline(60, "starting"))


def hang() -> None:
    time.sleep(600)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def lose_cuda() -> None:
    os.environ["SLURM_GPUS_ON_NODE"] = "2"
    torch.cuda.is_available = lambda: False


def then(action: Callable[[], None], function: Callable[..., Any], rank: int) -> Callable[..., Any]:
    """`function`, before which `rank` does something else."""

    def wrapped(*arguments: Any, **options: Any) -> Any:
        if os.environ["RANK"] == str(rank):
            action()
        return function(*arguments, **options)

    return wrapped


HERE = re.escape(socket.gethostname())
LOST = "the ranks do not meet or lose each other"
BROKEN: dict[str, tuple[str, Callable[[], None], int, str]] = {
    # where, what, on which rank, and a line that is printed
    "a rank does not come": (
        "load_config", freeze, 1, rf"{HERE}, rank 0: not done after 4 s: meeting the other ranks, others have not come"
    ),
    "a node whose GPUs torch does not see": (
        "load_config", lose_cuda, 1, rf"{HERE}: SLURM gave 2 GPUs of this node, but torch \S+ .+"
    ),
    "a rank says itself that it does not come": (
        "load_config", hang, 1, rf"{HERE}, rank 1: not done after 4 s: reading \S+c\.yaml"
    ),
    "a hung mount": (
        "sample_hash", hang, 1, rf"{HERE}, rank 1: not done after 4 s: reading \S+corpus\.manifest\.json"
    ),
    "a rank that cannot even be killed": (
        "sample_hash", freeze, 1,
        rf"{HERE}, rank 0: not done after 4 s: waiting for others \(busy or stuck: rank 1 on {HERE}\)",
    ),
    "rank 0 hangs": (
        "check_folder", hang, 0, rf"{HERE}, rank 0: not done after 4 s: looking at the run's folder \S+run"
    ),
    "a rank dies": ("sample_hash", die, 1, rf"{HERE}: {LOST}, .+ \(ended: rank 1 on {HERE}; .*\)"),
    "rank 0 dies": ("measure_bandwidth", die, 0, rf"{HERE}: {LOST}, .+ \(ended: rank 0 on {HERE}; .*\)"),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_rank_that_hangs_or_dies_ends_it_in_time_with_its_name(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    place, action, rank, line = BROKEN[case]
    monkeypatch.setattr(preflight, place, then(action, getattr(preflight, place), rank))
    errors = errors_of_a_broken_preflight(config, tmp_path, monkeypatch, capfd)
    assert any(re.fullmatch(f"error: {line}", error) for error in errors), errors
    assert all(error.startswith(f"error: {socket.gethostname()}") for error in errors), errors


@pytest.mark.parametrize(
    ("built", "remedy"),
    [
        (True, "does not see them: look at the driver there (nvidia-smi) and at CUDA_VISIBLE_DEVICES"),
        (False, "was built without CUDA: install a build with it"),
    ],
)
def test_gpus_that_torch_does_not_see_are_no_training_on_cpus(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, built: bool, remedy: str
) -> None:
    (tmp_path / "c.yaml").write_text(config_to_yaml(config))
    monkeypatch.setattr(preflight.sys, "argv", ["preflight.py", str(tmp_path / "c.yaml")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: built)
    monkeypatch.setattr(Deadline, "meet", lambda self: pytest.fail("others would wait for this node"))
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "8")
    with pytest.raises(InputError) as error:
        preflight.run()
    assert str(error.value) == (
        f"{socket.gethostname()}: SLURM gave 8 GPUs of this node, but torch {torch.__version__} {remedy}"
    )


@pytest.mark.parametrize(("given", "seen"), [("0", False), (None, False), ("2", True), (None, True)])
def test_gpus_that_torch_sees_or_slurm_did_not_give_are_no_problem(
    monkeypatch: pytest.MonkeyPatch, given: str | None, seen: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
    monkeypatch.delenv("SLURM_GPUS_ON_NODE", raising=False)
    if given is not None:
        monkeypatch.setenv("SLURM_GPUS_ON_NODE", given)
    preflight.refuse_missing_gpus()


def test_a_network_that_hangs_blames_nobody(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda tensor: hang())
    doing = "measuring the bandwidth together: all ranks answer and none ends"
    errors = errors_of_a_broken_preflight(config, tmp_path, monkeypatch, capfd, ranks_a_node=2)
    assert errors == [f"error: {socket.gethostname()}, rank 0: not done after 4 s: {doing}"]


def errors_of_a_broken_preflight(
    config: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    ranks_a_node: int = 1,
) -> list[str]:
    """What two ranks print when it fails, which takes less than 12 s."""
    (tmp_path / "c.yaml").write_text(config_to_yaml(config))
    monkeypatch.setattr(preflight, "DEADLINE_SECONDS", 4.0)
    monkeypatch.setattr(preflight.sys, "argv", ["preflight.py", str(tmp_path / "c.yaml")])
    monkeypatch.setattr(distributed, "GRACE_SECONDS", 2.0)
    monkeypatch.setattr(deadline, "GRACE_SECONDS", 0.5)

    def rank() -> None:
        os.environ["LOCAL_RANK"] = str(int(os.environ["RANK"]) % ranks_a_node)
        os._exit(code_of(preflight.run))

    started = time.monotonic()
    with pytest.raises(RankFailedError):
        run_distributed(rank, 2, process_group=False, timeout_seconds=40)
    assert time.monotonic() - started < 12
    printed = capfd.readouterr().err
    assert "Traceback" not in printed
    return [line for line in printed.splitlines() if line.startswith("error: ")]  # torch's own lines are none of ours


@pytest.mark.evidence
def test_a_sound_preflight_ends_well_under_torchrun(config: Config, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(config_to_yaml(config))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command = [*torchrun, "launchers/preflight.py", str(tmp_path / "c.yaml")]
    root = Path(__file__).parents[2]
    for _ in range(3):  # at exit, threads that still held a process group aborted four of five
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        assert "all-reduce over 4 ranks" in done.stdout
        assert "terminate called" not in done.stderr


def code_of(command: Callable[[], int]) -> int:
    """The exit code of a command."""
    try:
        run_command(command)
    except SystemExit as end:
        sys.stderr.flush()
        return int(str(end.code))


def test_what_fine_tuning_reads_is_looked_at(config: Config, tmp_path: Path) -> None:
    for name in ("chats.jsonl", "eval.jsonl", "chat.jinja", "set/a.arrow", "model/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    values = config.model_dump(mode="json")
    values["task"] = "sft"
    values["data"]["train"] = []
    values["data"]["sft"] = {
        "train": [{"path": str(tmp_path / "chats.jsonl")}, {"dataset": str(tmp_path / "set")}, {"dataset": "a/hub"}],
        "validation": [{"path": str(tmp_path / "eval.jsonl")}],
        "chat_template": str(tmp_path / "chat.jinja"),
    }
    tuning = Config.model_validate(values).model_copy(update={"init_from": str(tmp_path / "model")})
    tokenizer = config.tokenizer.model_copy(update={"path": str(tmp_path / "t.model")})
    names = ["chats.jsonl", "set", "eval.jsonl", "chat.jinja", "t.model", "model"]
    paths = input_paths(tuning.model_copy(update={"tokenizer": tokenizer}))
    assert paths == [tmp_path / name for name in names]
    (seen,) = run_distributed(fingerprints, 1, tuning)
    assert str(tmp_path / "model" / "config.json") in seen
    assert str(tmp_path / "set" / "a.arrow") in seen


def fingerprints(config: Config) -> dict[str, str]:
    """Of ranks that are each the first of a node."""
    os.environ["LOCAL_RANK"] = "0"
    return preflight.data_fingerprints(config, start_ranks(60), Deadline(60, "starting"))


def test_all_files_together_have_a_budget_of_samples(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / f"{number}.bin" for number in range(12)]
    for file in files:
        file.write_bytes(bytes(9))
    monkeypatch.setattr(preflight, "SAMPLES", 10)
    monkeypatch.setattr(preflight, "FILE_SAMPLES", 4)
    monkeypatch.setattr(preflight, "sample_hash", lambda file, samples: str(samples))
    for count, samples in ((1, 4), (2, 4), (3, 3), (5, 2), (10, 1), (11, 0)):
        monkeypatch.setattr(preflight, "input_paths", lambda config, count=count: files[:count])
        assert run_distributed(fingerprints, 1, config) == [dict.fromkeys(map(str, files[:count]), str(samples))]


def test_a_file_that_one_node_lacks_changes_nothing_for_the_others(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        (tmp_path / name).write_bytes(os.urandom(3 * preflight.SAMPLE_BYTES))
    monkeypatch.setattr(preflight, "SAMPLES", 6)
    monkeypatch.setattr(
        preflight, "input_paths", lambda config: [tmp_path / name for name in "abc"[: 3 - int(os.environ["RANK"])]]
    )
    first, second = run_distributed(fingerprints, 2, config)
    assert list(first) == [str(tmp_path / name) for name in "abc"]
    assert second == {file: seen for file, seen in first.items() if not file.endswith("c")}


def test_ranks_see_each_other(config: Config) -> None:
    reports = run_distributed(lambda: look(config), 2)
    assert find_problems(reports) == []
    assert [report.rank for report in reports] == [0, 1]
    assert reports[0].receive_gib_per_second > 0
    assert reports[0].all_reduce_gib_per_second > 0
    assert {Path(file).suffix for file in reports[0].data} == {".json", ".idx", ".bin"}
    assert reports[1].data == {}  # one rank a node reads
    assert list((Path(config.output_dir) / "slurm").iterdir()) == []  # nothing is left behind


def test_a_folder_that_is_not_shared_is_found(config: Config, tmp_path: Path) -> None:
    def elsewhere() -> Report:
        ranks = start_ranks(60)
        own = config.model_copy(update={"output_dir": str(tmp_path / f"disk{ranks.rank}")})
        return preflight.look(own, ranks, Deadline(60, "starting"))

    first, second = run_distributed(elsewhere, 2)
    assert first.folder_problem is None
    assert second.folder_problem is not None
    assert "does not see what rank 0 writes in" in second.folder_problem


def test_a_folder_that_cannot_be_written_is_found(config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    blocked = config.model_copy(update={"output_dir": str(tmp_path / "file")})
    (report,) = run_distributed(lambda: look(blocked), 1)
    assert "cannot write in" in (report.folder_problem or "")


def test_a_changed_byte_in_a_sample_and_a_cut_file_are_noticed(tmp_path: Path) -> None:
    file = tmp_path / "c.bin"
    file.write_bytes(bytes(preflight.SAMPLE_BYTES * 2))
    sound = sample_hash(file, 64)
    assert sound.startswith(f"{2 * preflight.SAMPLE_BYTES} bytes, ")
    file.write_bytes(bytes(preflight.SAMPLE_BYTES * 2 - 1) + b"x")
    assert sample_hash(file, 64) != sound
    file.write_bytes(bytes(preflight.SAMPLE_BYTES))
    assert sample_hash(file, 64) != sound
    file.unlink()
    assert sample_hash(file, 64) == "unreadable: No such file or directory"
