"""Looking into a folder of weights: shards, indices, pickle files, and each way in which they can be broken."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from orthros_train.errors import InputError
from orthros_train.model_folder.tensor_folder import TensorFolder, TensorInfo

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.ones(4, dtype=torch.bfloat16),
    "c": torch.zeros(2, 2, dtype=torch.float16),
}
INDEX = "model.safetensors.index.json"


def write_shards(folder: Path) -> None:
    save_file({"a": TENSORS["a"]}, folder / "one.safetensors")
    save_file({"b": TENSORS["b"], "c": TENSORS["c"]}, folder / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def write_single(folder: Path) -> None:
    save_file(TENSORS, folder / "model.safetensors")


def write_pickle(folder: Path, **options: Any) -> None:
    torch.save(TENSORS, folder / "pytorch_model.bin", **options)


def write_old_pickle(folder: Path) -> None:
    write_pickle(folder, _use_new_zipfile_serialization=False)


def write_pickle_shards(folder: Path) -> None:
    torch.save({"a": TENSORS["a"]}, folder / "one.bin")
    torch.save({"b": TENSORS["b"], "c": TENSORS["c"]}, folder / "two.bin")
    weight_map = {"a": "one.bin", "b": "two.bin", "c": "two.bin"}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("write", [write_single, write_shards, write_pickle, write_old_pickle, write_pickle_shards])
def test_every_layout_holds_the_same(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path)
    tensors = TensorFolder(tmp_path, allow_pickle=True)
    assert set(tensors.infos.values()) == {
        TensorInfo(name, tuple(tensor.shape), tensor.dtype) for name, tensor in TENSORS.items()
    }
    assert tensors.infos["a"].nbytes == 24
    for name in ("c", "a", "b", "a"):
        assert torch.equal(tensors.read(name), TENSORS[name])
    for part in ((slice(0, 1), slice(1, 3)), (slice(0, 2), slice(2, 3)), (slice(2, 2), slice(0, 3))):
        assert torch.equal(tensors.read("a", part), TENSORS["a"][part])
    assert torch.equal(tensors.read("b", (slice(1, 3),)), TENSORS["b"][1:3])


@pytest.mark.parametrize("write", [write_pickle, write_pickle_shards])
def test_pickle_needs_leave(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(InputError, match="pass --allow-pickle to read nothing but tensors"):
        TensorFolder(tmp_path, allow_pickle=False)
    with pytest.raises(InputError, match=r"get a safetensors version$"):
        TensorFolder(tmp_path)


class Payload:
    """What a hostile file would hold: a call, made while it loads."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.target,)


@pytest.mark.parametrize(
    "save", [torch.save, lambda content, path: path.write_bytes(pickle.dumps(content, protocol=2))]
)
def test_a_pickle_runs_no_code(save: Callable[[Any, Path], None], tmp_path: Path) -> None:
    save({"a": Payload(tmp_path / "run")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(InputError, match="cannot be read as a file of tensors alone"):
        TensorFolder(tmp_path, allow_pickle=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("content", [b"", b"x", b"\x80\x02", b"PK\x03\x04"])
def test_what_is_no_pickle(content: bytes, tmp_path: Path) -> None:
    """Some of torch's errors say nothing at all."""
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(InputError, match=r"pytorch_model.bin cannot be read as a file of tensors alone: \S.*$"):
        TensorFolder(tmp_path, allow_pickle=True)


def test_safetensors_go_before_pickle(tmp_path: Path) -> None:
    write_single(tmp_path)
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert TensorFolder(tmp_path, allow_pickle=True).infos.keys() == TENSORS.keys()


def spoil_index(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        write_shards(folder)
        content = json.loads((folder / INDEX).read_text())
        change(content["weight_map"])
        (folder / INDEX).write_text(json.dumps(content))

    return spoil


def remove_shard(folder: Path) -> None:
    write_shards(folder)
    (folder / "two.safetensors").unlink()


def cut_file(folder: Path) -> None:
    write_single(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def write_pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: None, "holds neither model.safetensors nor model.safetensors.index.json"),
        (lambda folder: (folder / "adapter_config.json").touch(), "merge that into its base model first"),
        (remove_shard, "two.safetensors is missing, but model.safetensors.index.json names it"),
        (spoil_index(lambda names: names.update(d="one.safetensors")), "says that one.safetensors holds d, but it"),
        (spoil_index(lambda names: names.pop("b")), "two.safetensors holds b, which the index of"),
        (spoil_index(lambda names: names.update(b="one.safetensors")), "says that one.safetensors holds b, but it"),
        (spoil_index(lambda names: names.update(b="../two.safetensors")), "places b in '../two.safetensors'"),
        (spoil_index(lambda names: names.clear()), "has no weight_map"),
        (lambda folder: (folder / INDEX).write_text("{"), "index.json is not valid JSON"),
        (cut_file, "model.safetensors is not a safetensors file"),
        (write_pointer, "it is a Git LFS pointer"),
        (lambda folder: save_file({"a": torch.zeros(2, dtype=torch.int8)}, folder / "model.safetensors"), "dtype I8"),
        (lambda folder: torch.save([1], folder / "pytorch_model.bin"), "is not a mapping of names to tensors"),
        (lambda folder: torch.save({"a": torch.zeros(2).int()}, folder / "pytorch_model.bin"), "dtype torch.int32"),
    ],
)
def test_damage_is_named(spoil: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    spoil(tmp_path)
    with pytest.raises(InputError) as error:
        TensorFolder(tmp_path, allow_pickle=True)
    assert message in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_number_that_is_none_is_found(value: float, dtype: torch.dtype, tmp_path: Path) -> None:
    for position in (0, 19):
        tensor = torch.zeros(4, 5, dtype=dtype)
        tensor.view(-1)[position] = value
        save_file({"sound": torch.zeros(20), "broken": tensor}, tmp_path / "model.safetensors")
        tensors = TensorFolder(tmp_path)
        tensors.read("sound")
        with pytest.raises(InputError, match=r"tensor broken in .* holds NaN or infinite values"):
            tensors.read("broken")


def test_reading_gives_back_what_the_library_reads(tmp_path: Path) -> None:
    write_single(tmp_path)
    tensors = TensorFolder(tmp_path)
    assert all(torch.equal(tensors.read(k), v) for k, v in load_file(tmp_path / "model.safetensors").items())
