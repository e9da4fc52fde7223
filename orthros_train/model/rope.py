"""Rotary position embeddings (RoPE) with the scalings of the Llama family.

* The inverse frequencies of linear, dynamic, yarn and llama3 scaling are transformers' own, so they equal the source
  model's by construction; tests compare the rotation with LlamaForCausalLM.
* Nothing is kept in a buffer: a cast of the model to bf16 or float64 leaves the float32 frequencies alone.
* "dynamic" depends on the longest position of the call. Keys that a cache already holds keep the rotation they were
  written with, as in transformers: past `max_position_embeddings`, step-by-step decoding is not the full forward.

Shapes: B batch, N tokens, h heads, d head size.
"""

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from .configuration_orthros import OrthrosConfig


def inverse_frequencies(config: OrthrosConfig, longest: int | None = None) -> tuple[Tensor, float]:
    """Angle per position of each channel pair and the factor on cos and sin.

    Args:
        config: the model's; `rope_parameters` gives type, theta and scaling.
        longest: number of positions in use, read by "dynamic" only.

    Returns:
        float32 (d/2,) inverse frequencies and the attention scaling (1 except for yarn).
    """
    rope, (_, _, d) = config.rope_parameters or {}, config.head_shape
    rope_type = rope["rope_type"]
    if rope_type == "default":
        exponents = torch.arange(0, d, 2, dtype=torch.float32, device="cpu") / d
        return 1.0 / rope["rope_theta"] ** exponents, 1.0
    if rope_type == "dynamic":
        length = torch.tensor(
            longest or config.max_position_embeddings
        )  # a tensor, so that it rounds as transformers does
        return ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"), seq_len=length)
    return ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))


class RotaryEmbedding(nn.Module):
    """Cosines and sines for integer positions."""

    def __init__(self, config: OrthrosConfig) -> None:
        super().__init__()
        self.config = config
        self.is_dynamic = (config.rope_parameters or {})["rope_type"] == "dynamic"
        self._frequencies: dict[tuple[torch.device, int | None], tuple[Tensor, float]] = {}

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """`positions` (B, N) int64 -> cos and sin, each (B, N, 1, d) of `dtype`, computed in float32."""
        inverse, scaling = self._on_device(positions)
        angles = positions[..., None].float() * inverse  # (B, N, d/2)
        angles = torch.cat((angles, angles), dim=-1)[:, :, None]  # (B, N, 1, d)
        return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)

    def _on_device(self, positions: Tensor) -> tuple[Tensor, float]:
        longest = None
        if self.is_dynamic:
            longest = max(int(positions.max()) + 1 if positions.numel() else 0, self.config.max_position_embeddings)
        key = (positions.device, longest)
        if key not in self._frequencies:
            inverse, scaling = inverse_frequencies(self.config, longest)
            self._frequencies = {key: (inverse.to(positions.device), float(scaling))}
        return self._frequencies[key]


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """rope(x): x ⊙ cos + [-x2, x1] ⊙ sin for `heads` (B, N, h, d) with halves x1, x2; cos, sin (B, N, 1, d)."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin
