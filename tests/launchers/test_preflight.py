"""The preflight finds what it is there for, and names the node."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launchers import preflight
from launchers.preflight import Report, find_problems, find_warnings, look, sample_hash
from orthros_train.config import Config
from orthros_train.training.ranks import start_ranks
from tests.distributed import run_distributed
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


def test_ranks_see_each_other(config: Config) -> None:
    reports = run_distributed(lambda: look(config, start_ranks(60)), 2)
    assert find_problems(reports) == []
    assert [report.rank for report in reports] == [0, 1]
    assert reports[0].receive_gib_per_second > 0
    assert reports[0].all_reduce_gib_per_second > 0
    assert {Path(file).suffix for file in reports[0].data} == {".json", ".idx", ".bin"}
    assert list((Path(config.output_dir) / "slurm").iterdir()) == []  # nothing is left behind


def test_a_folder_that_is_not_shared_is_found(config: Config, tmp_path: Path) -> None:
    def elsewhere() -> Report:
        ranks = start_ranks(60)
        own = config.model_copy(update={"output_dir": str(tmp_path / f"disk{ranks.rank}")})
        return look(own, ranks)

    first, second = run_distributed(elsewhere, 2)
    assert first.folder_problem is None
    assert second.folder_problem is not None
    assert "does not see what rank 0 writes in" in second.folder_problem


def test_a_folder_that_cannot_be_written_is_found(config: Config, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    blocked = config.model_copy(update={"output_dir": str(tmp_path / "file")})
    (report,) = run_distributed(lambda: look(blocked, start_ranks(60)), 1)
    assert "cannot write in" in (report.folder_problem or "")


def test_a_changed_byte_in_a_sample_and_a_cut_file_are_noticed(tmp_path: Path) -> None:
    file = tmp_path / "c.bin"
    file.write_bytes(bytes(preflight.SAMPLE_BYTES * 2))
    sound = sample_hash(file)
    assert sound.startswith(f"{2 * preflight.SAMPLE_BYTES} bytes, ")
    file.write_bytes(bytes(preflight.SAMPLE_BYTES * 2 - 1) + b"x")
    assert sample_hash(file) != sound
    file.write_bytes(bytes(preflight.SAMPLE_BYTES))
    assert sample_hash(file) != sound
    file.unlink()
    assert sample_hash(file) == "unreadable: No such file or directory"
