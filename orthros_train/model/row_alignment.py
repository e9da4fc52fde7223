"""Padding, output positions and labels as users give them, turned into what the model computes on.

The model works on left-aligned rows without padding between tokens (`stream_plan.py`); users pad on either side.

Shapes: B batch, T columns of the call, M output tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .layer_factory import IGNORE_INDEX
from .stream_layout import OutputColumns, gather_columns, take_tokens


def check_output_positions(positions: Tensor, columns: int) -> None:
    """Refuse positions (B, M) that do not increase, lie outside the call, or have -1 before a used slot.

    Checked on CPU only: on a GPU the look at the values would stall the stream.

    Raises:
        ValueError: which rule is broken.
    """
    if positions.dim() != 2:
        raise ValueError(f"output_positions must be (B, M), not {tuple(positions.shape)}")
    if positions.is_cuda or positions.numel() == 0:
        return
    if int(positions.max()) >= columns or int(positions.min()) < -1:
        raise ValueError(f"output_positions must lie in [0, {columns}) of this call's input_ids, or be -1")
    used = positions >= 0
    increasing = (positions[:, 1:] > positions[:, :-1]) & used[:, :-1]
    if not bool((increasing | ~used[:, 1:]).all()):
        raise ValueError("output_positions must increase strictly within a row, with -1 only at its end")


def shift_labels_for(
    labels: Tensor, columns: OutputColumns, document_ids: Tensor | None, attention_mask: Tensor | None
) -> Tensor:
    """The label of each output slot: labels[p + 1] (B, M), -100 where there is none.

    A label that is padding, lies in another segment than p, or belongs to an unused slot is ignored.
    """
    T = labels.shape[1]
    following = labels.new_full(labels.shape, IGNORE_INDEX)
    following[:, :-1] = labels[:, 1:]
    if document_ids is not None:
        following[:, :-1][document_ids[:, 1:] != document_ids[:, :-1]] = IGNORE_INDEX
    if attention_mask is not None:
        real = attention_mask[:, -T:].bool()
        following[:, :-1][~(real[:, 1:] & real[:, :-1])] = IGNORE_INDEX
    picked = take_tokens(following, columns)
    return torch.where(columns >= 0, picked, IGNORE_INDEX) if isinstance(columns, Tensor) else picked


@dataclass(frozen=True)
class RowAlignment:
    """The permutation that brings each row's real tokens to its front, in order.

    Attributes:
        order: (B, T), the user's column of each aligned column.
        place: (B, T), the aligned column of each of the user's.
        counts: (B,), real tokens of each row.
    """

    order: Tensor
    place: Tensor
    counts: Tensor

    @classmethod
    def of(cls, attention_mask: Tensor | None, batch_size: int, columns: int) -> "RowAlignment | None":
        """From a mask (B, at least T) whose last T columns are this call's; None if nothing is padding."""
        if attention_mask is None:
            return None
        if attention_mask.dim() != 2 or attention_mask.shape[0] != batch_size or attention_mask.shape[1] < columns:
            raise ValueError(
                f"attention_mask must be ({batch_size}, {columns} or more), one entry a column of the input, "
                f"not {tuple(attention_mask.shape)}"
            )
        padding = attention_mask[:, -columns:] == 0
        if not bool(padding.any()):
            return None
        order = padding.long().argsort(dim=1, stable=True)
        return cls(order, order.argsort(dim=1), columns - padding.sum(1))

    def align(self, values: Tensor | None) -> Tensor | None:
        """(B or 1, T, …) in the user's columns -> (B, T, …) left-aligned."""
        if values is None:
            return None
        return gather_columns(values.expand(self.order.shape[0], *values.shape[1:]), self.order)

    def output_columns(self, columns: OutputColumns) -> tuple[OutputColumns, Callable[[Tensor], Tensor]]:
        """Aligned output columns, in increasing order, and the function that undoes that order on (B, M, …).

        Raises:
            ValueError: a column of a tensor is padding, which has no logits. Checked on CPU only, as positions are.
        """
        if columns is None:
            return None, lambda outputs: gather_columns(outputs, self.place)
        if isinstance(columns, Tensor):
            place = self.place.gather(1, columns.clamp(min=0))
            on_padding = (place >= self.counts[:, None]) & (columns >= 0)
            if not columns.is_cuda and bool(on_padding.any()):
                raise ValueError("output_positions must not lie on padding (attention_mask 0); mark unused slots by -1")
            return torch.where(columns >= 0, place, -1), lambda outputs: outputs  # real tokens keep their order
        ordered, permutation = self.place[:, -columns:].sort(dim=1)
        return ordered, lambda outputs: gather_columns(outputs, permutation.argsort(dim=1))
