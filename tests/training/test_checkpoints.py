"""Checkpoints survive kills, full and slow disks, and flipped bits; and only so many are kept."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from orthros_train.config import Config
from orthros_train.training import checkpoints, disk_space, hashed_file, manifest, run_folder
from tests.distributed import RankFailedError
from tests.training.small_runs import (
    assert_same_state,
    checkpoint_names,
    losses,
    metrics,
    run,
    small_config,
)

EVERY_TWO = {"checkpoint__interval_steps": 2, "schedule__decay_steps": 6}


def folder_of(config: Config, step: int) -> Path:
    return Path(config.output_dir) / "checkpoints" / f"step_{step:08d}"


def status(config: Config) -> dict[str, Any]:
    return json.loads((Path(config.output_dir) / "status.json").read_text())


def flip_byte(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def kill_at(function: Callable[..., Any], call: int, rank: int = 0) -> Callable[..., Any]:
    """`function`, but its call number `call` (from 1) on `rank` is the process's last."""
    calls = [0]

    def wrapped(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call and dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **options)

    return wrapped


KILLS = {
    "a state file": (hashed_file.HashedFile, "finish", 2),
    "the manifest": (manifest.Manifest, "write", 2),
    "the renaming": (Path, "rename", 2),
    "latest": (checkpoints, "write_text_atomically", 2),
    "deleting an old one": (shutil, "rmtree", 4),
}


@pytest.mark.parametrize("moment", KILLS)
def test_kill_during_a_save(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    """Killed at any moment of the second save, a run resumes from a valid checkpoint and ends as if never killed."""
    whole = small_config(tmp_path / "whole", corpus, **EVERY_TWO)
    killed = small_config(tmp_path / "killed", corpus, **EVERY_TWO, checkpoint__keep_last=1)
    assert run(whole) == 0
    owner, name, call = KILLS[moment]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, kill_at(getattr(owner, name), call))
        with pytest.raises(RankFailedError, match="-9"):
            run(killed)
    assert status(killed)["state"] == "running"
    assert run(killed) == 0
    assert status(killed) == {"state": "done", "exit_code": 0, "step": 6, "attempt": 2, "reason": None}
    assert losses(killed) == losses(whole)
    assert checkpoint_names(killed) == ["step_00000006"]
    assert_same_state(folder_of(killed, 6), folder_of(whole, 6))


def test_one_rank_killed_during_a_save(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank ends, too, instead of waiting for ever; the next attempt saves the same step again."""
    config = small_config(tmp_path / "run", corpus, **EVERY_TWO)
    with monkeypatch.context() as patch:
        patch.setattr(hashed_file.HashedFile, "finish", kill_at(hashed_file.HashedFile.finish, 2, rank=1))
        with pytest.raises(RankFailedError, match="rank 1 ended with -9"):
            run(config, 2)
    assert checkpoint_names(config) == [".saving_step_00000004", "step_00000002"]
    assert run(config, 2) == 0
    assert checkpoint_names(config) == ["step_00000004", "step_00000006"]
    assert [record["step"] for record in metrics(config)] == [1, 2, 3, 4, 5, 6]


def damage_missing_shard(folder: Path) -> None:
    next(folder.glob("state/*")).unlink()


def damage_flipped_byte(folder: Path) -> None:
    flip_byte(next(folder.glob("state/*")))


def damage_flipped_manifest_byte(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"updates": 6', '"updates": 7'))


def damage_truncated(folder: Path) -> None:
    file = next(folder.glob("state/*"))
    file.write_bytes(file.read_bytes()[:-1])


def damage_no_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


@pytest.mark.parametrize(
    "damage",
    [damage_missing_shard, damage_flipped_byte, damage_flipped_manifest_byte, damage_truncated, damage_no_manifest],
)
def test_damaged_checkpoint_falls_back_to_the_older_one(
    tmp_path: Path, corpus: Path, capfd: pytest.CaptureFixture[str], damage: Callable[[Path], None]
) -> None:
    """With a warning; the damaged one is set aside, and the run ends as if nothing had happened."""
    config = small_config(tmp_path / "run", corpus, **EVERY_TWO)
    assert run(config) == 0
    before = losses(config)
    damage(folder_of(config, 6))
    capfd.readouterr()
    assert run(config) == 0
    output = capfd.readouterr().out
    assert "warning: checkpoint step_00000006 is damaged" in output
    assert "resuming from" in output
    assert losses(config) == before
    assert checkpoint_names(config) == ["step_00000004", "step_00000006", "step_00000006.invalid"]


def test_no_valid_checkpoint_is_an_error_that_touches_nothing(tmp_path: Path, corpus: Path) -> None:
    config = small_config(tmp_path / "run", corpus, **EVERY_TWO, checkpoint__keep_last=1)
    assert run(config, 2) == 0
    flip_byte(next(folder_of(config, 6).glob("state/rank_00001*")))
    before = {path: path.read_bytes() for path in Path(config.output_dir).rglob("*") if path.is_file()}
    with pytest.raises(RankFailedError, match=r"InputError: no checkpoint in .* is valid .*corrupt"):
        run(config, 2)
    assert status(config)["exit_code"] == 2
    after = {path: path.read_bytes() for path in Path(config.output_dir).rglob("*") if path.is_file()}
    changed = {path.name for path in {*before, *after} if before.get(path) != after.get(path)}
    assert changed == {"status.json"}
    assert (status(config)["step"], status(config)["attempt"]) == (6, 2)


def test_keep_last_and_latest(tmp_path: Path, corpus: Path) -> None:
    config = small_config(tmp_path / "run", corpus, checkpoint__interval_steps=1, checkpoint__keep_last=3)
    assert run(config) == 0
    assert checkpoint_names(config) == ["step_00000004", "step_00000005", "step_00000006"]
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step_00000006\n"


def test_manifest_says_what_a_checkpoint_is(tmp_path: Path, corpus: Path) -> None:
    config = small_config(tmp_path / "run", corpus, parallel__zero_stage=3)
    assert run(config, 2) == 0
    folder = folder_of(config, 6)
    saved = manifest.read_manifest(folder)
    assert saved.progress == manifest.Progress(step=6, sample_position=48, updates=6)
    assert saved.layout == manifest.Layout(world_size=2, zero_stage=3, tensor=1, pipeline=1, precision="fp32")
    assert saved.config == config.model_dump(mode="json")
    assert saved.fingerprints.keys() == {"tokenizer", "data"}
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {record.name for record in saved.files} == files - {"manifest.json"}
    assert {"hf/config.json", "hf/tokenizer.json", "state/rank_00001.safetensors"} <= files
    assert manifest.verify_files(folder, saved.files) is None


def test_a_save_slower_than_the_collective_time_out_survives(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = hashed_file.HashedFile.finish

    def slow(self: hashed_file.HashedFile, name: str) -> Any:
        if dist.get_rank() == 1:
            time.sleep(3)
        return original(self, name)

    monkeypatch.setattr(hashed_file.HashedFile, "finish", slow)
    config = small_config(tmp_path / "run", corpus, train__steps=2, parallel__timeout_seconds=1.5)
    started = time.monotonic()
    assert run(config, 2) == 0
    assert time.monotonic() - started > 3
    assert checkpoint_names(config) == ["step_00000002"]


def test_a_full_disk_at_a_save_is_one_clear_error(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The failed save leaves nothing, the older checkpoint stays, and the next attempt goes on from it."""
    config = small_config(tmp_path / "run", corpus, **EVERY_TWO)
    written = [0]
    original = hashed_file.HashedFile.__init__

    class FullDisk(io.FileIO):
        def write(self, data: Any) -> int:
            written[0] += len(data)
            if written[0] > 300_000 and dist.get_rank() == 1:
                raise OSError(28, "No space left on device")
            return super().write(data)

    def on_full_disk(self: hashed_file.HashedFile, path: Path) -> None:
        original(self, path)
        self._file.close()
        self._file = io.BufferedWriter(FullDisk(path, "w"))

    with monkeypatch.context() as patch:
        patch.setattr(hashed_file.HashedFile, "__init__", on_full_disk)
        assert run(config, 2) == 1
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert "could not be saved" in errors[0]
    assert "No space left on device" in errors[0]
    saved = checkpoint_names(config)
    assert saved
    assert all(name.startswith("step_") for name in saved)
    assert (status(config)["state"], status(config)["exit_code"]) == ("failed", 1)
    assert run(config, 2) == 0


def test_too_little_disk_space_is_an_error_before_anything_is_written(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda path: usage._replace(free=2**20))
    config = small_config(tmp_path / "run", corpus)
    with pytest.raises(RankFailedError, match=r"InputError: .* needs about .* GiB free: make room"):
        run(config, 2)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("zero_stage", "precision"), [(1, "fp32"), (3, "bf16")])
def test_estimated_size_is_the_size_on_disk(tmp_path: Path, corpus: Path, zero_stage: int, precision: str) -> None:
    from orthros_train.config import orthros_config  # noqa: PLC0415
    from orthros_train.model.parameter_count import parameter_count  # noqa: PLC0415

    model = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = small_config(
        tmp_path / "run", corpus, model=model, train__steps=2, precision=precision, parallel__zero_stage=zero_stage
    )
    assert run(config, 2) == 0
    actual = sum(path.stat().st_size for path in folder_of(config, 2).rglob("*") if path.is_file())
    estimate = disk_space.checkpoint_bytes(parameter_count(orthros_config(config, 259)).total)
    assert actual <= estimate <= 1.2 * actual


@pytest.mark.parametrize(
    ("interval", "steps", "first", "expected"),
    [(None, 10, 0, 1), (2, 10, 0, 5), (3, 10, 0, 4), (3, 10, 6, 2), (3, 9, 9, 0)],
)
def test_saves_to_come(
    tmp_path: Path, corpus: Path, interval: int | None, steps: int, first: int, expected: int
) -> None:
    config = small_config(tmp_path, corpus, train__steps=steps, checkpoint__interval_steps=interval)
    assert disk_space.saves_to_come(config, first) == expected


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """What was saved is saved."""

    def refuse(path: Path) -> None:
        raise PermissionError(1, "Operation not permitted", str(path))

    config = small_config(tmp_path / "run", corpus, **EVERY_TWO, checkpoint__keep_last=1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_delete", refuse)
        assert run(config) == 0
    assert "warning: an old checkpoint could not be removed" in capfd.readouterr().out
    assert checkpoint_names(config) == ["step_00000002", "step_00000004", "step_00000006"]


def test_a_folder_of_checkpoints_that_cannot_be_written_is_found_at_the_start(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = run_folder.tempfile.TemporaryDirectory

    def refuse(**options: Any) -> Any:
        if options.get("dir") == tmp_path / "run" / "checkpoints":
            raise PermissionError(13, "Permission denied", str(options["dir"]))
        return original(**options)

    monkeypatch.setattr(run_folder.tempfile, "TemporaryDirectory", refuse)
    config = small_config(tmp_path / "run", corpus)
    with pytest.raises(RankFailedError, match=r"cannot be written .*Permission denied"):
        run(config)


def test_a_disk_that_cannot_be_read_is_no_damaged_checkpoint(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going back to an older checkpoint would throw steps away."""
    config = small_config(tmp_path / "run", corpus, **EVERY_TWO)
    assert run(config) == 0

    def stale(*arguments: Any) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(checkpoints, "verify_files", stale)
    with pytest.raises(RankFailedError, match=r"InputError: .*cannot be read .*Stale file handle.*start again"):
        run(config)
    assert checkpoint_names(config) == ["step_00000004", "step_00000006"]


def drop_a_state_file(body: dict[str, Any]) -> None:
    body["files"] = [record for record in body["files"] if not record["name"].startswith("state/")]


def drop_a_parameter(body: dict[str, Any]) -> None:
    del body["parameters"]["model.norm.weight"]


def claim_a_tensor_axis(body: dict[str, Any]) -> None:
    body["layout"]["tensor"] = 3
    body["parameters"]["lm_head.weight"]["split"] = 0


def reshape_a_parameter(body: dict[str, Any]) -> None:
    body["parameters"]["model.norm.weight"]["shape"] = [33]


@pytest.mark.parametrize("change", [drop_a_state_file, drop_a_parameter, claim_a_tensor_axis, reshape_a_parameter])
def test_a_manifest_that_disagrees_with_its_files_is_one_line(
    tmp_path: Path, corpus: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    """Its own hash is right: not damage, but another program's work."""
    config = small_config(tmp_path / "run", corpus)
    assert run(config) == 0
    file = folder_of(config, 6) / "manifest.json"
    body = json.loads(file.read_text())
    del body["manifest_sha256"]
    change(body)
    file.write_text(json.dumps({**body, "manifest_sha256": manifest._digest(body)}))
    longer = small_config(tmp_path / "run", corpus, train__steps=8)
    with pytest.raises(RankFailedError, match=r"InputError: .*(incompletely|does not hold)"):
        run(longer)


@pytest.mark.parametrize("name", ["../../secret", "/etc/hostname"])
def test_a_manifest_cannot_name_files_elsewhere(tmp_path: Path, corpus: Path, name: str) -> None:
    config = small_config(tmp_path / "run", corpus)
    assert run(config) == 0
    found = manifest.read_manifest(folder_of(config, 6))
    record = dataclasses.replace(found.files[0], name=name)
    dataclasses.replace(found, files=(*found.files, record)).write(folder_of(config, 6))
    with pytest.raises(manifest.InvalidCheckpointError, match="outside the checkpoint"):
        manifest.read_manifest(folder_of(config, 6))
