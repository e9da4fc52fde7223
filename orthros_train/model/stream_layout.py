"""How the two streams lie in one tensor: the second seam, at which sequence parallelism replaces plain order.

Token-wise work runs on the joined residual [X;Y], whatever its layout; attention works on each stream whole. This one
is the plain layout, batch first and X before Y.

Shapes: B batch, T base tokens, M output tokens, N = T + M.
"""

import torch
from torch import Tensor

# Which columns get an output token: all of them, the last n, or the given ones (B, M) with -1 for an unused slot.
OutputColumns = None | int | Tensor


def gather_columns(tokens: Tensor, columns: Tensor) -> Tensor:
    """The tokens (B, T, …) at the columns (B, M) of their row: (B, M, …)."""
    return tokens[torch.arange(tokens.shape[0], device=tokens.device)[:, None], columns]


def computed_columns(columns: Tensor) -> Tensor:
    """Where the slots (B, M) are computed: an unused one where the slot before it is, column 0 in a row without any.

    There, and with one key to read (`stream_plan.py`), it does not widen the span that a block of queries reads.
    """
    return columns.clamp(min=0).cummax(dim=1).values


def take_tokens(tokens: Tensor, columns: OutputColumns) -> Tensor:
    """The tokens (B, T, …) at the output columns: (B, M, …), `computed_columns` where slots are unused."""
    if columns is None:
        return tokens
    if isinstance(columns, int):
        return tokens[:, tokens.shape[1] - columns :]
    return gather_columns(tokens, computed_columns(columns))


class StreamLayout:
    """The plain layout: the residual is (B, T+M, D), and what a column linear gives has the same order."""

    def join(self, base: Tensor, output: Tensor | None) -> Tensor:
        """X (B, T, D) and Y (B, M, D) -> the residual [X;Y]; without Y, X alone."""
        return base if output is None else torch.cat((base, output), dim=1)

    def split(self, residual: Tensor, base_tokens: int) -> tuple[Tensor, Tensor]:
        """The residual -> its parts of X and of Y, each in the residual's layout."""
        return residual[:, :base_tokens], residual[:, base_tokens:]

    def pick(self, base: Tensor, columns: OutputColumns) -> Tensor:
        """X in the residual's layout -> its tokens at the output columns, in the residual's layout."""
        return take_tokens(base, columns)

    def split_projected(self, projected: Tensor, base_tokens: int) -> tuple[Tensor, Tensor]:
        """What a column linear made of the residual -> X (B, T, …) and Y (B, M, …), whole."""
        return projected[:, :base_tokens], projected[:, base_tokens:]

    def join_projected(self, base: Tensor, output: Tensor) -> Tensor:
        """X (B, T, …) and Y (B, M, …) -> what a row linear takes back to the residual."""
        return torch.cat((base, output), dim=1)
