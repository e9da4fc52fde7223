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
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from orthros_train.errors import InputError
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
    source = engine.ranks.together(lambda: _state_for(engine, checkpoint, manifest))
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


def _state_for(engine: TrainingEngine, checkpoint: Path, manifest: Manifest) -> SavedState:
    """The saved state, found to be that of the engine's parameters."""
    source = SavedState(checkpoint, manifest)
    for name, record in engine.parameters.items():
        found = source.parameters.get(name)
        if found is None or found.shape != record.shape:
            raise InputError(f"{checkpoint} does not hold {name} of shape {list(record.shape)}: it is another model's")
    return source


@dataclass(frozen=True)
class _SavedPiece:
    """What one file holds of a parameter: flat elements from `start` on of its rank's part."""

    start: int
    file: Any
    states: frozenset[str]
    numel: int


class SavedState:
    """The tensors of a checkpoint by parameter name and state.

    Args:
        checkpoint: the step_* folder; its files have been verified.
        manifest: its manifest.

    Raises:
        InputError: the files do not hold what the manifest says.
    """

    def __init__(self, checkpoint: Path, manifest: Manifest) -> None:
        self.parameters = manifest.parameters
        self._tensor_size = manifest.layout.tensor
        self._pieces: dict[tuple[str, int], list[_SavedPiece]] = {}  # by name and rank of the tensor axis
        for record in manifest.files:
            if record.name.startswith(f"{STATE_FOLDER}/"):
                try:
                    self._open(checkpoint / record.name)
                except (SafetensorError, KeyError, TypeError, ValueError) as error:
                    raise InputError(f"{checkpoint / record.name} is no state file ({error})") from error
        for name in self.parameters:
            self._check_complete(checkpoint, name)

    def _open(self, path: Path) -> None:
        file = safe_open(path, framework="pt")
        states: dict[str, set[str]] = {}
        for key in file.keys():  # noqa: SIM118  not a dict
            name, state = key.split("|")
            states.setdefault(name, set()).add(state)
        places = json.loads(file.metadata()["places"])
        for name, start in places["starts"].items():
            numel = file.get_slice(f"{name}|{min(states[name])}").get_shape()[0]
            piece = _SavedPiece(start, file, frozenset(states[name]), numel)
            self._pieces.setdefault((name, places["tensor_rank"]), []).append(piece)

    def _check_complete(self, checkpoint: Path, name: str) -> None:
        """Every part of the parameter is covered, each element once."""
        split = self.parameters[name].split is not None
        for rank in range(self._tensor_size if split else 1):
            pieces = sorted(self._pieces.get((name, rank), []), key=lambda piece: piece.start)
            ends = list(accumulate((piece.numel for piece in pieces), initial=0))
            if ends[-1] != prod(self._part_shape(name)) or ends[:-1] != [piece.start for piece in pieces]:
                raise InputError(f"{checkpoint} holds {name} incompletely: its manifest and its files disagree")
            self._pieces[name, rank] = pieces

    def _part_shape(self, name: str) -> tuple[int, ...]:
        """Shape of what each rank of the tensor axis held of a parameter, padding included."""
        record = self.parameters[name]
        sizes = list(record.shape)
        if record.split is not None:
            sizes[record.split] = -(-sizes[record.split] // self._tensor_size)
        return tuple(sizes)

    def weight(self, name: str) -> Tensor:
        """The full fp32 master weight of a parameter; of a frozen one, the weight itself."""
        return self.tensor(name, MASTER if MASTER in self._pieces[name, 0][0].states else FROZEN)

    def tensor(self, name: str, state: str) -> Tensor:
        """The full `state` (MASTER, a moment, or FROZEN) of a parameter, in the model's own shape."""
        shape, split = self.parameters[name].shape, self.parameters[name].split
        ranks = range(1 if split is None else self._tensor_size)
        parts = [self._part(name, state, rank).view(self._part_shape(name)) for rank in ranks]
        return parts[0] if split is None else torch.cat(parts, dim=split).narrow(split, 0, shape[split])

    def read(self, name: str, state: str, tensor_rank: int, start: int, target: Tensor) -> None:
        """Fill the flat `target` with elements from `start` on of what a rank of the tensor axis held."""
        tensor_rank = 0 if self.parameters[name].split is None else tensor_rank
        end = start + target.numel()
        for piece in self._pieces[name, tensor_rank]:
            first, last = max(start, piece.start), min(end, piece.start + piece.numel)
            if first < last:
                values = piece.file.get_slice(f"{name}|{state}")[first - piece.start : last - piece.start]
                target.narrow(0, first - start, last - first).copy_(values)

    def _part(self, name: str, state: str, tensor_rank: int) -> Tensor:
        """Everything of a parameter that a rank of the tensor axis held, flat."""
        return torch.cat([piece.file.get_tensor(f"{name}|{state}") for piece in self._pieces[name, tensor_rank]])


def merge_parameters(found: Iterable[dict[str, ParameterRecord]]) -> dict[str, ParameterRecord]:
    """What the ranks know of their own parameters, as one dictionary in order of names."""
    merged: dict[str, ParameterRecord] = {}
    for parameters in found:
        merged |= parameters
    return dict(sorted(merged.items()))
