"""An output folder is complete or absent, whatever happens on the way."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from orthros_train.data import output_folder
from orthros_train.data.output_folder import finished_folder
from orthros_train.errors import InputError


def test_the_folder_appears_at_the_end(tmp_path: Path) -> None:
    output = tmp_path / "new" / "model"
    with finished_folder(output, 0) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("x")
        assert not output.exists()
    assert (output / "sub" / "file").read_text() == "x"
    assert [path.name for path in output.parent.iterdir()] == ["model"]


def test_an_empty_folder_may_stand_there(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with finished_folder(tmp_path / "model", 0) as folder:
        (folder / "file").touch()
    assert (tmp_path / "model" / "file").exists()


@pytest.mark.parametrize("kind", ["file", "full folder"])
def test_what_is_there_stays(kind: str, tmp_path: Path) -> None:
    output = tmp_path / "model"
    if kind == "file":
        output.write_text("mine")
    else:
        output.mkdir()
        (output / "file").write_text("mine")
    with pytest.raises(InputError, match="exists and is not empty"), finished_folder(output, 0):
        pass
    assert (output if kind == "file" else output / "file").read_text() == "mine"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), InputError("bad"), OSError(errno.ENOSPC, "No space left")])
def test_a_failure_leaves_nothing(error: BaseException, tmp_path: Path) -> None:
    def fail() -> None:
        with finished_folder(tmp_path / "model", 0) as folder:
            (folder / "file").touch()
            raise error

    with pytest.raises(InputError if isinstance(error, OSError) else type(error)) as raised:
        fail()
    assert list(tmp_path.iterdir()) == []
    if isinstance(error, OSError):
        assert str(raised.value) == f"cannot write {tmp_path / 'model'}: No space left"


def test_a_full_disk_is_found_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_folder.shutil, "disk_usage", lambda place: SimpleNamespace(free=2**30))
    with finished_folder(tmp_path / "model", 2**29):
        pass
    with pytest.raises(InputError, match=r"no space left for other: 1\.00 GiB free, 1\.06 GiB needed"):  # noqa: SIM117
        with finished_folder(tmp_path / "other", 2**30):
            pass


def test_a_place_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write .*: Not a directory"):  # noqa: SIM117
        with finished_folder(tmp_path / "file" / "model", 0):
            pass


def test_two_processes_do_not_mix(tmp_path: Path) -> None:
    with finished_folder(tmp_path / "model", 0) as folder:
        (folder / "file").touch()
        with pytest.raises(InputError, match="another process is writing"), finished_folder(tmp_path / "model", 0):
            pass
        assert (folder / "file").exists()
    assert (tmp_path / "model" / "file").exists()


def test_what_a_killed_process_left_is_swept_away(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path\n"
        "from orthros_train.data.output_folder import finished_folder\n"
        "with finished_folder(Path(sys.argv[1]), 0) as folder:\n"
        "    (folder / 'old').touch(); print('ready', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "model")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.kill(process.pid, signal.SIGKILL)
    assert not (tmp_path / "model").exists()
    assert (tmp_path / ".model.unfinished" / "old").exists()
    with finished_folder(tmp_path / "model", 0) as folder:
        (folder / "new").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["new"]
