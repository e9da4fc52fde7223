"""How one rank's bad loss becomes every rank's decision."""

from __future__ import annotations

import torch
from torch import Tensor


def poisoned(loss: Tensor) -> Tensor:
    """`loss` (scalar), times NaN where it is not finite.

    A bad loss so becomes a bad gradient, reaches all ranks in the reduction, and the one check that ZeRO makes before
    it touches weights or moments (is the global gradient norm finite?) decides for all ranks together.
    """
    return loss * torch.where(torch.isfinite(loss.detach()), 1.0, torch.nan)
