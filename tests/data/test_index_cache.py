"""The index cache: one builder where locks work, the same content where they do not, nothing half-written."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from orthros_train.data.index_cache import cached_arrays
from orthros_train.errors import InputError
from tests.distributed import run_distributed

NAMES = ("a", "b")


def build() -> dict[str, np.ndarray]:
    return {"a": np.arange(5, dtype=np.int32), "b": np.ones((2, 2))}


def build_slowly(log: Path) -> dict[str, np.ndarray]:
    with log.open("a") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(0.3)
    return build()


def open_and_sum(folder: Path, log: Path) -> float:
    arrays = cached_arrays(folder, "key", NAMES, lambda: build_slowly(log))
    return float(arrays["a"].sum() + arrays["b"].sum())


def test_an_entry_is_built_once_and_mapped(tmp_path: Path) -> None:
    first = cached_arrays(tmp_path / "cache", "key", NAMES, build)
    second = cached_arrays(tmp_path / "cache", "key", NAMES, lambda: pytest.fail("built twice"))
    assert isinstance(second["a"], np.memmap)
    assert first["a"].tolist() == second["a"].tolist() == [0, 1, 2, 3, 4]


def test_concurrent_ranks_build_once(tmp_path: Path) -> None:
    sums = run_distributed(open_and_sum, 4, tmp_path / "cache", tmp_path / "log", process_group=False)
    assert sums == [14.0] * 4
    assert len((tmp_path / "log").read_text().split()) == 1


def test_without_locks_all_build_and_the_content_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_lock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_lock)
    sums = run_distributed(open_and_sum, 3, tmp_path / "cache", tmp_path / "log", process_group=False)
    assert sums == [14.0] * 3
    assert len((tmp_path / "log").read_text().split()) == 3
    assert [path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()] == ["key"]


def test_what_a_killed_builder_left_is_removed_and_built_again(tmp_path: Path) -> None:
    def killed() -> dict[str, np.ndarray]:
        os.kill(os.getpid(), 9)
        return build()

    child = os.fork()
    if child == 0:
        cached_arrays(tmp_path, "key", NAMES, killed)
    os.waitpid(child, 0)
    (tmp_path / ".key.partial-host-1").mkdir()
    assert not (tmp_path / "key").exists()
    assert cached_arrays(tmp_path, "key", NAMES, build)["a"].sum() == 10
    assert sorted(path.name for path in tmp_path.iterdir()) == [".key.lock", "key"]


def test_a_failing_build_leaves_nothing(tmp_path: Path) -> None:
    def fails() -> dict[str, np.ndarray]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        cached_arrays(tmp_path, "key", NAMES, fails)
    assert not (tmp_path / "key").exists()


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "torn": lambda entry: (entry / "a.npy").write_bytes(b"torn"),
    "a flipped byte": lambda entry: flip_last_byte(entry / "b.npy"),
    "a missing array": lambda entry: (entry / "a.npy").unlink(),
    "missing hashes": lambda entry: (entry / "sha256.json").unlink(),
    "no hashes": lambda entry: (entry / "sha256.json").write_text("[]"),
    "a file": lambda entry: (shutil.rmtree(entry), entry.touch()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_built_again(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cached_arrays(tmp_path, "key", NAMES, build)
    assert capsys.readouterr().err == ""
    DAMAGES[damage](tmp_path / "key")
    arrays = cached_arrays(tmp_path, "key", NAMES, build)
    assert all(np.array_equal(arrays[name], build()[name]) for name in NAMES)
    assert capsys.readouterr().err == f"index cache {tmp_path / 'key'} is damaged: replaced\n"
    cached_arrays(tmp_path, "key", NAMES, lambda: pytest.fail("built again"))


def test_concurrent_ranks_replace_a_damaged_entry_once(tmp_path: Path) -> None:
    cached_arrays(tmp_path / "cache", "key", NAMES, build)
    flip_last_byte(tmp_path / "cache" / "key" / "a.npy")
    sums = run_distributed(open_and_sum, 4, tmp_path / "cache", tmp_path / "log", process_group=False)
    assert sums == [14.0] * 4
    assert len((tmp_path / "log").read_text().split()) == 1


def test_an_unwritable_folder_names_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot be written .*; set data.cache_dir"):
        cached_arrays(tmp_path / "file" / "cache", "key", NAMES, build)
