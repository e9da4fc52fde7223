"""The token-wise parts of a layer and the layer itself.

Shapes: B batch, T base tokens, M output tokens, D width, F FFN width.
Through a layer both streams travel as one tensor [X;Y] (B, T+M, D), so every token-wise product is one GEMM.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import TwoStreamAttention
from .configuration_orthros import OrthrosConfig
from .kv_cache import KVCache
from .layer_factory import LayerFactory
from .stream_plan import StreamPlan


class SwiGLU(nn.Module):
    """FFN(x) = W_down (silu(W_gate x) ⊙ W_up x)."""

    def __init__(self, config: OrthrosConfig, factory: LayerFactory) -> None:
        super().__init__()
        self.gate_proj = factory.column(config.hidden_size, config.intermediate_size)
        self.up_proj = factory.column(config.hidden_size, config.intermediate_size)
        self.down_proj = factory.row(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        """(B, N, D) -> (B, N, D)."""
        gate, up = F.silu(self.gate_proj(x)), self.up_proj(x)  # (B, N, F)
        gated = gate * up if torch.is_grad_enabled() else gate.mul_(up)  # a prefill is bound by memory here
        return self.down_proj(gated)  # (B, N, F) -> (B, N, D)


class OrthrosLayer(GradientCheckpointingLayer):
    """Z = [X;Y] + [O_x;O_y] W_O;  [X;Y] <- Z + FFN(norm(Z)). The last layer returns only what gives logits."""

    def __init__(self, config: OrthrosConfig, layer_index: int, factory: LayerFactory) -> None:
        super().__init__()
        self.input_layernorm = factory.norm(config.hidden_size, on="tokens")
        self.self_attn = TwoStreamAttention(config, layer_index, factory)
        self.post_attention_layernorm = factory.norm(config.hidden_size, on="tokens")
        self.mlp = SwiGLU(config, factory)

    def forward(self, residual: Tensor, plan: StreamPlan, cache: KVCache | None = None) -> Tensor:
        """`residual` [X;Y] (B, T+M, D) -> (B, T+M, D), or (B, M, D) from the last layer."""
        attended = self.self_attn(self.input_layernorm(residual), plan, cache)
        residual = self.self_attn.queried_tokens(residual, plan) + attended
        return residual + self.mlp(self.post_attention_layernorm(residual))
