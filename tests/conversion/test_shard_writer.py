"""Shards of a bounded size under an index that transformers reads, and memory that does not grow with the model."""

from __future__ import annotations

import errno
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open

from orthros_train.conversion import shard_writer
from orthros_train.conversion.shard_writer import PlannedTensor, plan_shards, shard_bytes, write_shards
from orthros_train.errors import InputError
from orthros_train.model_folder.tensor_folder import TensorFolder, TensorInfo


def planned(count: int, elements: int) -> list[PlannedTensor]:
    """Tensors whose elements are their numbers."""
    infos = [TensorInfo(f"t{index}", (elements,), torch.float32) for index in range(count)]
    return [PlannedTensor(info, partial(torch.full, info.shape, float(i))) for i, info in enumerate(infos)]


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    plan = plan_shards(planned(3, 10))
    assert (plan.total_bytes, plan.total_parameters) == (120, 30)
    write_shards(tmp_path, plan, lambda done, name: None)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # transformers refuses a file that does not say so


@pytest.mark.parametrize(("of_folder", "of_file"), [(0o755, 0o644), (0o700, 0o600), (0o775, 0o664)])
def test_who_may_read_the_folder_may_read_the_weights(of_folder: int, of_file: int, tmp_path: Path) -> None:
    tmp_path.chmod(of_folder)
    write_shards(tmp_path, plan_shards(planned(1, 10)), lambda done, name: None)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == of_file


def test_shards_hold_at_most_the_given_size(tmp_path: Path) -> None:
    seen: list[tuple[int, str]] = []
    write_shards(tmp_path, plan_shards(planned(5, 10), max_shard_size=100), lambda *each: seen.append(each))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_parameters": 50, "total_size": 200}
    assert index["weight_map"] == {f"t{i}": f"model-0000{i // 2 + 1}-of-00003.safetensors" for i in range(5)}
    tensors = TensorFolder(tmp_path)
    assert all(bool((tensors.read(f"t{i}") == i).all()) for i in range(5))
    assert seen == [(40 * (i + 1), f"t{i}") for i in range(5)]


def test_tensors_are_made_when_their_shard_is_written(tmp_path: Path) -> None:
    """What the memory bound rests on: no tensor is made before the shard ahead of its own is on the disk."""
    shards_before: list[int] = []

    def make(plan_of: PlannedTensor) -> torch.Tensor:
        shards_before.append(len(list(tmp_path.glob("*.safetensors"))))
        return plan_of.make()

    tensors = [PlannedTensor(each.info, partial(make, each)) for each in planned(6, 10)]
    write_shards(tmp_path, plan_shards(tensors, max_shard_size=80), lambda done, name: None)
    assert shards_before == [0, 0, 1, 1, 2, 2]


def anonymous_bytes() -> int:
    """Memory of this process that no file stands behind."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) * 1024


def test_memory_stays_near_one_shard(tmp_path: Path) -> None:
    MIB = 2**20
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    write_shards(source, plan_shards(planned(24, MIB), max_shard_size="1GB"), lambda done, name: None)
    tensors = TensorFolder(source)  # one file of 96 MiB
    copies = [PlannedTensor(info, partial(tensors.read, name)) for name, info in tensors.infos.items()]
    before, peak = anonymous_bytes(), 0

    def look(done: int, name: str) -> None:
        nonlocal peak
        peak = max(peak, anonymous_bytes())

    write_shards(target, plan_shards(copies, max_shard_size=8 * MIB), look)
    assert len(list(target.glob("*.safetensors"))) == 12
    assert peak - before < 32 * MIB


@pytest.mark.parametrize("size", ["large", "5XB", "", "5", "0GB", "-5GB", "nanGB", "infGB", "0.1B", 0, -1])
def test_a_size_that_is_none(size: str) -> None:
    with pytest.raises(InputError, match=r"shard size .* is not understood"):
        plan_shards(planned(1, 1), max_shard_size=size)


def test_sizes_are_powers_of_1000() -> None:
    assert [shard_bytes(size) for size in ("5GB", "1.5 mb", "7B", 12)] == [5 * 10**9, 1_500_000, 7, 12]


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
    ids=["as safetensors says it", "as the system says it"],
)
def test_a_disk_that_fills_up(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(shard_writer, "save_file", fail)
    with pytest.raises(InputError, match=f"cannot write to {tmp_path.parent}: no space left"):
        write_shards(tmp_path, plan_shards(planned(1, 10)), lambda done, name: None)
