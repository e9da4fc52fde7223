"""Preprocessing on several ranks: the bytes of one process, whatever is killed, on any number of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest

from orthros_train.config import TokenizerSection
from orthros_train.data import multi_rank
from orthros_train.data.documents import DocumentFormat
from orthros_train.data.multi_rank import deal, mpi_world, preprocess_on_ranks
from orthros_train.data.preprocessing import preprocess
from orthros_train.data.sources import Source, file_sources
from orthros_train.errors import InputError

ROOT = Path(__file__).parents[2]
MPIRUN = (str(Path(sys.executable).parent / "mpirun"), "--oversubscribe", "-n")
CORPUS = {"c.bin", "c.idx", "c.manifest.json"}


@pytest.mark.parametrize(
    ("sizes", "ranks", "owners"),
    [
        ([10], 4, [None]),
        ([10, 10, 10, 10], 2, [0, 1, 0, 1]),
        ([1, 2, 3, 4], 2, [0, 1, 1, 0]),
        ([90, 5, 5], 2, [None, 0, 1]),
        ([], 3, []),
        ([0, 0], 2, [0, 0]),
    ],
)
def test_large_sources_are_shared_and_small_ones_dealt_out(
    sizes: list[int], ranks: int, owners: list[int | None]
) -> None:
    assert deal(sizes, ranks) == owners


class World:
    """The part of mpi4py's communicator that is used, for a single rank of a pretended number."""

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def bcast(self, value: object) -> object:
        return value

    def allgather(self, value: object) -> list[object]:
        return [value]

    def Ibarrier(self) -> types.SimpleNamespace:  # noqa: N802  mpi4py's name
        return types.SimpleNamespace(Test=lambda: True)

    def isend(self, value: object, dest: int, tag: int) -> None:
        pass

    def iprobe(self, tag: int) -> bool:
        return False

    def Abort(self, code: int) -> None:  # noqa: N802  mpi4py's name
        raise SystemExit(code)


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """One large file and two small ones, of several parts each."""
    monkeypatch.setattr(multi_rank, "PART_BATCHES", 1)
    files = []
    for name, count in (("a", 13000), ("b", 5000), ("c", 10)):
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps({"text": f"{name}{n} " * (n % 20)}) + "\n" for n in range(count)))
    return files


def sources(files: list[Path]) -> list[Source]:
    return file_sources(files, DocumentFormat())


def on_ranks(files: list[Path], prefix: Path, overwrite: bool = False, separator: str = "file") -> None:
    preprocess_on_ranks(
        World(),
        lambda: sources(files),
        TokenizerSection(),
        prefix,
        reading={"document separator": separator},
        overwrite=overwrite,
    )


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_an_interrupted_run_goes_on_from_its_parts(
    text: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocess(sources(text), TokenizerSection(), tmp_path / "one" / "c")
    written: list[str] = []
    write = multi_rank._Parts.write

    def dies_after_two(parts: multi_rank._Parts, source: int, number: int, batch: object) -> None:
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(parts.file(source, number).name)
        write(parts, source, number, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(multi_rank._Parts, "write", dies_after_two)
    with pytest.raises(KeyboardInterrupt):
        on_ranks(text, tmp_path / "many" / "c")
    assert sorted(path.name for path in (tmp_path / "many").iterdir()) == ["c.parts"]
    first_two = list(written)

    def counts(parts: multi_rank._Parts, source: int, number: int, batch: object) -> None:
        written.append(parts.file(source, number).name)
        write(parts, source, number, batch)  # type: ignore[arg-type]

    monkeypatch.setattr(multi_rank._Parts, "write", counts)
    on_ranks(text, tmp_path / "many" / "c")
    assert len(set(written)) == len(written) > 4  # no part was encoded twice
    assert written[:2] == first_two
    assert content(tmp_path / "many") == content(tmp_path / "one")
    assert set(content(tmp_path / "many")) == CORPUS


def test_parts_of_another_input_are_refused(text: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(multi_rank._Parts, "in_order", dies)
        with pytest.raises(KeyboardInterrupt):
            on_ranks(text, tmp_path / "c")
    with pytest.raises(InputError, match="holds parts of another input: the document separator differ"):
        on_ranks(text, tmp_path / "c", separator="line")
    text[1].write_text('{"text": "changed"}\n')
    with pytest.raises(InputError, match="holds parts of another input: the sources differ; remove it, or pass"):
        on_ranks(text, tmp_path / "c")
    on_ranks(text, tmp_path / "c", overwrite=True)
    preprocess(sources(text), TokenizerSection(), tmp_path / "one" / "c")
    assert (tmp_path / "c.bin").read_bytes() == (tmp_path / "one" / "c.bin").read_bytes()


def test_a_damaged_part_is_named(text: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_order = multi_rank._Parts.in_order

    def damaged(parts: multi_rank._Parts, files: list[Source]) -> object:
        parts.file(1, 0).write_bytes(b"nothing")
        return in_order(parts, files)

    monkeypatch.setattr(multi_rank._Parts, "in_order", damaged)
    with pytest.raises(InputError, match=r"00001-000000\.npz is damaged .*; remove it and start again"):
        on_ranks(text, tmp_path / "c")
    assert not (tmp_path / "c.manifest.json").exists()


def test_a_count_that_cannot_be_written_or_read_is_named(tmp_path: Path) -> None:
    parts = multi_rank._Parts(tmp_path)
    parts.file(0, 0).with_name("00000.count").mkdir()
    with pytest.raises(InputError, match=r"00000\.count cannot be written \(.+\); free space, then start again"):
        parts.note_count(0, 3)
    with pytest.raises(InputError, match=r"00000\.count is damaged \(.+\); remove it and start again"):
        parts.count(0)
    assert [path.name for path in tmp_path.iterdir()] == ["00000.count"]  # nothing unfinished beside it
    (tmp_path / "00001.count").write_text("")
    with pytest.raises(InputError, match=r"00001\.count is damaged"):
        parts.count(1)


def test_a_source_without_a_count_is_named_and_no_corpus_is_made(
    text: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_order = multi_rank._Parts.in_order

    def lost(parts: multi_rank._Parts, files: list[Source]) -> object:
        parts.file(1, 0).with_name("00001.count").unlink()
        return in_order(parts, files)

    with monkeypatch.context() as patch:
        patch.setattr(multi_rank._Parts, "in_order", lost)
        with pytest.raises(InputError, match=r"00001\.count is missing, .*b\.jsonl has; start again"):
            on_ranks(text, tmp_path / "c")
    assert not CORPUS & set(os.listdir(tmp_path))
    on_ranks(text, tmp_path / "c")
    assert set(os.listdir(tmp_path)) >= CORPUS


def test_processes_that_do_not_see_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    assert mpi_world() is None
    program = "from orthros_train.data.multi_rank import mpi_world; mpi_world()"
    environment = {**os.environ, "SLURM_STEP_NUM_TASKS": "4"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert "SLURM_STEP_NUM_TASKS says 4 processes, but over MPI each is alone: start with mpirun" in done.stderr


# ---- real ranks


def mpirun(ranks: int, files: list[Path], prefix: Path) -> subprocess.Popen[str]:
    """tools/preprocess_data.py on so many ranks."""
    allow = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return subprocess.Popen(
        [
            *(*MPIRUN, str(ranks), sys.executable, "tools/preprocess_data.py", "--input", *map(str, files)),
            *("--tokenizer", "byte", "--output-prefix", str(prefix)),
        ],
        cwd=ROOT,
        env={**os.environ, **allow},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def many_parts(folder: Path, megabytes: int) -> list[Path]:
    """Three files of real parts of 32 MiB: one large, two small."""
    files = []
    for name, size in (("a", megabytes), ("b", megabytes // 8), ("c", megabytes // 8)):
        files.append(folder / f"{name}.jsonl")
        line = json.dumps({"text": f"{name} words and more words " * 400}) + "\n"
        files[-1].write_text(line * (size * 2**20 // len(line)))
    return files


def test_four_ranks_make_the_bytes_of_one_process(tmp_path: Path) -> None:
    files = many_parts(tmp_path, 8)
    process = mpirun(4, files, tmp_path / "four" / "c")
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert stdout.startswith(f"wrote {tmp_path}/four/c: ")
    assert stdout.count("\n") == 1
    preprocess(sources(files), TokenizerSection(), tmp_path / "one" / "c")
    assert content(tmp_path / "four") == content(tmp_path / "one")


def test_bad_input_of_one_rank_is_one_line(tmp_path: Path) -> None:
    files = many_parts(tmp_path, 8)
    with files[0].open("a") as file:
        file.write("{\n")
    process = mpirun(2, files, tmp_path / "two" / "c")
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 2
    assert [line for line in stderr.splitlines() if line.startswith("error: ")] == [
        line for line in stderr.splitlines() if "malformed JSON" in line
    ]
    assert stderr.count("malformed JSON") == 1
    assert not CORPUS & set(os.listdir(tmp_path / "two"))


@pytest.mark.evidence
def test_a_killed_rank_leaves_nothing_that_looks_complete_and_three_ranks_go_on(tmp_path: Path) -> None:
    files = many_parts(tmp_path, 200)
    prefix = tmp_path / "many" / "c"
    process = mpirun(4, files, prefix)
    while not list(prefix.parent.glob("c.parts/*.npz")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    ranks = subprocess.run(["pgrep", "-f", str(prefix)], capture_output=True, text=True, check=True).stdout.split()
    victim = next(int(pid) for pid in ranks if int(pid) != process.pid)
    os.kill(victim, signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert os.listdir(prefix.parent) == ["c.parts"]
    before = {file.name: file.stat().st_mtime_ns for file in prefix.parent.glob("c.parts/*.npz")}
    assert before

    parts_seen: dict[str, int] = {}
    process = mpirun(3, files, prefix)
    while process.poll() is None:
        parts_seen |= {file.name: file.stat().st_mtime_ns for file in prefix.parent.glob("c.parts/*.npz")}
        time.sleep(0.01)
    assert process.returncode == 0, process.communicate()
    assert {name: parts_seen[name] for name in before} == before  # they were taken as they were
    preprocess(sources(files), TokenizerSection(), tmp_path / "one" / "c")
    assert content(prefix.parent) == content(tmp_path / "one")
