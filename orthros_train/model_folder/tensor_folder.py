"""The tensors of a model folder, looked at without loading them and read one by one, whole or in part.

* safetensors, one file or shards under an index. Pickle files only on request, and then with `weights_only=True`.
* Of a part, nothing but its own bytes is copied into memory.
* A tensor that holds a NaN or an infinity is an error at the moment it is read.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from orthros_train.errors import InputError
from orthros_train.model_folder.json_files import read_json_object

Slices = tuple[slice, ...]  # one for each dim, with a start and a stop
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # in safetensors' names


@dataclass(frozen=True)
class TensorInfo:
    """A tensor before it is loaded."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of its data."""
        return prod(self.shape) * self.dtype.itemsize


class _Shard(Protocol):
    """One opened file of weights."""

    def infos(self) -> Iterable[TensorInfo]: ...

    def tensor(self, name: str, part: Slices | None) -> Tensor: ...


class TensorFolder:
    """The tensors of a folder by name.

    Args:
        folder: holds model.safetensors, or model.safetensors.index.json and its shards, or their pickle counterparts.
        allow_pickle: read pytorch_model.bin where there is no safetensors file. False: the error names the option
            --allow-pickle; None: the command has no such option.

    Attributes:
        infos: what the folder holds, in its files' order.

    Raises:
        InputError: no weights, pickle without leave, a missing or damaged file, an index that does not fit its shards,
            or a tensor that is not fp32, bf16 or fp16.
    """

    def __init__(self, folder: Path, allow_pickle: bool | None = None) -> None:
        self.folder = folder
        self.infos: dict[str, TensorInfo] = {}
        self._file_of: dict[str, Path] = {}
        self._open: tuple[Path, _Shard] | None = None
        listed = _weight_files(folder, allow_pickle)
        for path, names in listed.items():
            found = {info.name: info for info in self._shard(path).infos()}
            for name in names if names is not None else ():
                if name not in found:
                    raise InputError(f"the index of {folder} says that {path.name} holds {name}, but it does not")
            for name in found:
                if names is not None and name not in names:
                    raise InputError(f"{path} holds {name}, which the index of {folder} does not list there")
            self.infos |= found
            self._file_of |= dict.fromkeys(found, path)

    def read(self, name: str, part: Slices | None = None) -> Tensor:
        """Load one tensor, or the part of it that lies in `part`.

        Raises:
            InputError: its file is damaged, or what was read holds a NaN or an infinity.
        """
        path = self._file_of[name]
        tensor = self._shard(path).tensor(name, part)
        if tensor.numel() and not all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor)):  # a NaN is both ends
            raise InputError(f"tensor {name} in {path} holds NaN or infinite values; the checkpoint is damaged")
        return tensor

    def _shard(self, path: Path) -> _Shard:
        """The opened file; one is open at a time, so that another's memory is given back."""
        if self._open is None or self._open[0] != path:
            self._open = None
            shard = _SafetensorsShard(path) if path.suffix == ".safetensors" else _PickleShard(path)
            self._open = (path, shard)
        return self._open[1]


def _weight_files(folder: Path, allow_pickle: bool | None) -> dict[Path, set[str] | None]:
    """Each file of weights and the tensors that an index promises in it (None: there is no index)."""
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        single, index = folder / f"{stem}.{suffix}", folder / f"{stem}.{suffix}.index.json"
        if not single.is_file() and not index.is_file():
            continue
        if suffix == "bin" and not allow_pickle:
            leave = ", or pass --allow-pickle to read nothing but tensors from them" if allow_pickle is False else ""
            raise InputError(
                f"{folder} holds its weights as pickle files only, which can run code while they load; get a "
                f"safetensors version{leave}"
            )
        return {single: None} if single.is_file() else _indexed_files(index)
    hint = ""
    if (folder / "adapter_config.json").is_file():
        hint = "; it holds an adapter: merge that into its base model first"
    raise InputError(f"{folder} holds neither model.safetensors nor model.safetensors.index.json{hint}")


def _indexed_files(index: Path) -> dict[Path, set[str] | None]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index} has no weight_map that says which file holds which tensor")
    files: dict[Path, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise InputError(f"{index} places {name} in {file!r}, which is not the name of a file beside it")
        files.setdefault(index.parent / file, set()).add(name)
    for path in sorted(files):
        if not path.is_file():
            raise InputError(f"{path} is missing, but {index.name} names it; copy all shards of the model")
    return {path: files[path] for path in sorted(files)}


class _SafetensorsShard:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = safe_open(path, framework="pt")
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
        except SafetensorError as error:
            with path.open("rb") as file:
                pointer = file.read(24) == b"version https://git-lfs."
            hint = "it is a Git LFS pointer; fetch the file itself (git lfs pull)" if pointer else str(error)
            raise InputError(f"{path} is not a safetensors file: {hint}") from error

    def infos(self) -> Iterable[TensorInfo]:
        for name in self._file.keys():  # noqa: SIM118  not a dict
            view = self._file.get_slice(name)
            dtype = view.get_dtype()
            if dtype not in DTYPES:
                raise InputError(_unsupported(name, self._path, dtype))
            yield TensorInfo(name, tuple(view.get_shape()), DTYPES[dtype])

    def tensor(self, name: str, part: Slices | None) -> Tensor:
        try:
            return self._file.get_tensor(name) if part is None else self._file.get_slice(name)[part]
        except (OSError, SafetensorError) as error:
            raise InputError(f"tensor {name} in {self._path} cannot be read: {error}") from error


class _PickleShard:
    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            try:
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError:  # torch's format before 1.6 cannot be mapped
                content = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise InputError(f"{path} cannot be read as a file of tensors alone: {reason}") from error
        if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
            raise InputError(f"{path} is not a mapping of names to tensors")
        self._tensors: dict[str, Tensor] = content

    def infos(self) -> Iterable[TensorInfo]:
        for name, tensor in self._tensors.items():
            if tensor.dtype not in DTYPES.values():
                raise InputError(_unsupported(name, self._path, str(tensor.dtype)))
            yield TensorInfo(name, tuple(tensor.shape), tensor.dtype)

    def tensor(self, name: str, part: Slices | None) -> Tensor:
        return self._tensors[name] if part is None else self._tensors[name][part]


def _unsupported(name: str, path: Path, dtype: str) -> str:
    return f"tensor {name} in {path} is of dtype {dtype}; fp32, bf16 and fp16 can be read: dequantize the model first"
