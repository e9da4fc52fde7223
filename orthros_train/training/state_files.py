"""The state files of a checkpoint: one a rank, and the full tensors put together from all of them.

    state/rank_00000.safetensors    NAME|STATE -> this rank's piece, flat; NAME is OrthrosForCausalLM's own

A piece's place (start in the part of its rank of the tensor axis, and that rank) stands in the file's metadata; a
parameter's full shape and the dim that the tensor axis splits stand in the checkpoint's manifest. So any layout reads
what any other has written: a range of a parameter comes straight from the pieces that cover it, or, where the tensor
axis has another size, from the full tensor. Nothing is converted on disk, and nothing is unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from orthros_train.training.engine import TrainingEngine
from orthros_train.training.hashed_file import save_tensors
from orthros_train.training.manifest import FileRecord, Manifest, ParameterRecord
from orthros_train.training.state_pieces import (
    FROZEN,
    MASTER,
    make_moments,
    publish_master_weights,
    state_pieces,
)

STATE_FOLDER = "state"


def save_state(engine: TrainingEngine, folder: Path) -> FileRecord:
    """Write this rank's pieces into the checkpoint being made in `folder`. Raises OSError."""
    pieces = [piece for piece in state_pieces(engine) if piece.saved]
    tensors = ((f"{piece.name}|{state}", view) for piece in pieces for state, view in piece.states.items())
    places = {"tensor_rank": engine.mesh.tensor_rank, "starts": {piece.name: piece.start for piece in pieces}}
    name = f"{STATE_FOLDER}/rank_{engine.ranks.rank:05d}.safetensors"
    return save_tensors(dict(tensors), {"places": json.dumps(places)}, folder / name, name)


def load_state(engine: TrainingEngine, checkpoint: Path, manifest: Manifest) -> None:
    """Continue from a verified checkpoint, saved in whatever layout, in a fresh engine; collective.

    The numbers are those of the checkpoint, bit for bit; where the layout is the same, so is everything that follows.
    """
    source = SavedState(checkpoint, manifest)
    if manifest.progress.updates:
        make_moments(engine, manifest.progress.updates)
    same_tensor_axis = manifest.layout.tensor == engine.mesh.tensor_size
    for piece in state_pieces(engine):
        for state, view in piece.states.items():
            if same_tensor_axis:
                source.read(piece.name, state, engine.mesh.tensor_rank, piece.start, view)
            else:
                whole = source.tensor(piece.name, state)
                part = engine.factory.shard(piece.parameter, whole)
                view.copy_(part.reshape(-1).narrow(0, piece.start, piece.numel))
    publish_master_weights(engine)
    engine.ranks.gather_objects(None)  # nobody reads any more


class SavedState:
    """The tensors of a checkpoint by parameter name and state.

    Args:
        checkpoint: the step_* folder; its files have been verified.
        manifest: its manifest.
    """

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        self.parameters = manifest.parameters
        self._tensor_size = manifest.layout.tensor
        self._pieces: dict[tuple[str, int], list[tuple[int, Any]]] = {}  # (name, tensor rank): [(start, opened file)]
        for record in manifest.files:
            if record.name.startswith(f"{STATE_FOLDER}/"):
                file = safe_open(checkpoint / record.name, framework="pt")
                places = json.loads(file.metadata()["places"])
                for name, start in places["starts"].items():
                    self._pieces.setdefault((name, places["tensor_rank"]), []).append((start, file))
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece[0])

    def weight(self, name: str) -> Tensor:
        """The full fp32 master weight of a parameter; of a frozen one, the weight itself."""
        _, file = self._pieces[name, 0][0]
        return self.tensor(name, MASTER if f"{name}|{MASTER}" in file.keys() else FROZEN)  # noqa: SIM118  not a dict

    def tensor(self, name: str, state: str) -> Tensor:
        """The full `state` (MASTER, a moment, or FROZEN) of a parameter, in the model's own shape."""
        parameter = self.parameters[name]
        if parameter.split is None:
            return self._part(name, state, 0).view(parameter.shape)
        part_shape = list(parameter.shape)
        part_shape[parameter.split] = -(-part_shape[parameter.split] // self._tensor_size)
        parts = [self._part(name, state, rank).view(part_shape) for rank in range(self._tensor_size)]
        return torch.cat(parts, dim=parameter.split).narrow(parameter.split, 0, parameter.shape[parameter.split])

    def read(self, name: str, state: str, tensor_rank: int, start: int, target: Tensor) -> None:
        """Fill the flat `target` with elements from `start` on of what a rank of the tensor axis held."""
        tensor_rank = 0 if self.parameters[name].split is None else tensor_rank
        end, filled = start + target.numel(), 0
        for first, file in self._pieces[name, tensor_rank]:
            view = file.get_slice(f"{name}|{state}")
            last = first + view.get_shape()[0]
            if first < end and start < last:
                values = view[max(start, first) - first : min(end, last) - first]
                target.narrow(0, max(start, first) - start, values.numel()).copy_(values)
                filled += values.numel()
        assert filled == target.numel(), f"{name} {state}: {filled} of {target.numel()} elements are in the checkpoint"

    def _part(self, name: str, state: str, tensor_rank: int) -> Tensor:
        """Everything of a parameter that a rank of the tensor axis held, flat."""
        return torch.cat([file.get_tensor(f"{name}|{state}") for _, file in self._pieces[name, tensor_rank]])


def merge_parameters(found: Iterable[dict[str, ParameterRecord]]) -> dict[str, ParameterRecord]:
    """What the ranks know of their own parameters, as one dictionary in order of names."""
    merged: dict[str, ParameterRecord] = {}
    for parameters in found:
        merged |= parameters
    return dict(sorted(merged.items()))
