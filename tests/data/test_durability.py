"""What is renamed into place is on the disk before the rename, and the rename itself before the call returns."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orthros_train.config import TokenizerSection
from orthros_train.data.documents import DocumentFormat
from orthros_train.data.index_cache import cached_arrays
from orthros_train.data.output_folder import finished_folder
from orthros_train.data.preprocessing import preprocess
from orthros_train.data.sources import file_sources
from orthros_train.data.storage import write_text_atomically
from orthros_train.data.tokenizer_training import train_tokenizer

Events = list[tuple[str, Path, Path]]  # "synced", path, path; or "renamed", from, to


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> Events:
    """What reaches the disk for good, in order."""
    seen: Events = []
    fsync = os.fsync

    def synced(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        seen.append(("synced", path, path))
        fsync(descriptor)

    def recorded(rename: Callable[..., None]) -> Callable[..., None]:
        def renamed(source: Any, target: Any, **options: Any) -> None:
            rename(source, target, **options)
            seen.append(("renamed", Path(source).absolute(), Path(target).absolute()))

        return renamed

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", recorded(os.rename))
    monkeypatch.setattr(os, "replace", recorded(os.replace))
    return seen


def make_folder(place: Path) -> None:
    with finished_folder(place / "out", 0) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("x")


def make_corpus(place: Path) -> None:
    (place / "in.txt").write_text("text")
    preprocess(file_sources([place / "in.txt"], DocumentFormat()), TokenizerSection(), place / "out")


def make_tokenizer(place: Path) -> None:
    (place / "in.txt").write_text("a text of some words to train on\n" * 9)
    train_tokenizer(file_sources([place / "in.txt"], DocumentFormat()), "bpe", 270, place / "out")


WRITERS: dict[str, tuple[Callable[[Path], object], set[str]]] = {
    "text": (lambda place: write_text_atomically(place / "out", "x"), {"out"}),
    "folder": (make_folder, {"out"}),
    "corpus": (make_corpus, {"out.bin", "out.idx", "out.manifest.json"}),
    "tokenizer": (make_tokenizer, {"out"}),
    "index": (lambda place: cached_arrays(place, "out", ("a",), lambda: {"a": np.ones(3)}), {"out"}),
}


@pytest.mark.parametrize("writer", WRITERS)
def test_content_is_synced_before_the_rename_and_the_folder_after_it(
    writer: str, events: Events, tmp_path: Path
) -> None:
    write, outputs = WRITERS[writer]
    write(tmp_path)
    renames = {
        target.name: (number, source)
        for number, (kind, source, target) in enumerate(events)
        if kind == "renamed" and target.parent == tmp_path
    }
    assert renames.keys() == outputs
    for name, (number, source) in renames.items():
        before = {path for kind, path, _ in events[:number] if kind == "synced"}
        before |= {target for kind, path, target in events[:number] if kind == "renamed" and path in before}
        content = [source / path.relative_to(tmp_path / name) for path in (tmp_path / name).rglob("*")]
        assert {source, *content} <= before
        assert ("synced", tmp_path, tmp_path) in events[number:]


def test_the_manifest_of_a_corpus_is_renamed_after_its_files_are_there_for_good(events: Events, tmp_path: Path) -> None:
    make_corpus(tmp_path)
    order = [(kind, target.name) for kind, _, target in events if target.name.startswith("out.") or target == tmp_path]
    files_there = order.index(("renamed", "out.idx"))
    assert ("synced", tmp_path.name) in order[files_there : order.index(("renamed", "out.manifest.json"))]


def test_machines_that_write_one_file_do_not_share_an_unfinished_one(
    events: Events, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Process ids of different machines may be equal."""
    for host in ("node1", "node2"):
        monkeypatch.setattr(socket, "gethostname", lambda: host)  # noqa: B023  called before the next
        write_text_atomically(tmp_path / "out", "x")
    assert len({source for kind, source, _ in events if kind == "renamed"}) == 2


def test_a_text_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_text_atomically(tmp_path / "out", "x")
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
