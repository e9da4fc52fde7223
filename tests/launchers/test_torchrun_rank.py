"""A rank tells launchers how it ended, and that never hides what it has to say."""

from __future__ import annotations

from pathlib import Path

import pytest

from launchers import torchrun_rank
from launchers.torchrun_rank import CODES_VARIABLE, main, read_codes
from orthros_train.errors import InputError
from orthros_train.launch_protocol import BAD_INPUT, DONE, FAILED, STOPPED


@pytest.mark.parametrize(("code", "ended"), [(DONE, 0), (FAILED, 1), (BAD_INPUT, 2), (STOPPED, 0)])
def test_each_rank_notes_its_code(code: int, ended: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun_rank, "run", lambda: code)
    monkeypatch.setenv(CODES_VARIABLE, str(tmp_path / "codes"))
    assert read_codes(tmp_path / "codes") == set()
    assert main() == ended
    assert main() == ended
    assert (tmp_path / "codes").read_text() == f"{code}\n{code}\n"
    assert read_codes(tmp_path / "codes") == {code}


def test_where_the_code_cannot_be_noted_the_end_stays_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> int:
        raise InputError("there is no corpus")

    monkeypatch.setenv(CODES_VARIABLE, str(tmp_path / "gone" / "codes"))
    monkeypatch.setattr(torchrun_rank, "run", lambda: STOPPED)
    assert main() == 0
    assert "warning: exit code 75 is not noted for the launcher: " in capsys.readouterr().err
    monkeypatch.setattr(torchrun_rank, "run", refuse)
    with pytest.raises(InputError, match="there is no corpus"):
        main()
