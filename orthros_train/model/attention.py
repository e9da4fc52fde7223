"""Attention of the two token streams, which share every projection and one set of keys and values.

    K = rope(norm(X) W_K, t)             V = norm(X) W_V              from X only
    Q_x = rope(A_x(norm(X) W_Q), t)      Q_y = rope(A_y(norm(Y) W_Q), p)
    O_x[t] = softmax over s in (t-w, t] of Q_x[t]·K[s]/√d · V[s]      w counts the token itself
    O_y[i] = softmax over s in [0, p_i] of Q_y[i]·K[s]/√d · V[s]

* The last layer's base stream is needed for K and V alone: its queries, and all that would follow from them, are not
  computed, and its base affine does not exist.
* The transformer arm is the base stream with logits from X; its last layer queries only where logits are asked for.

Shapes: B batch, T base tokens, M output tokens, N queried tokens, D width, H query heads, G KV heads, d head size.
"""

import torch
from torch import Tensor, nn

from .attention_kernels import attend
from .configuration_orthros import OrthrosConfig
from .kv_cache import KVCache
from .layer_factory import LayerFactory
from .rope import rotate
from .stream_plan import QueryPlan, StreamPlan


class QueryAffine(nn.Module):
    """A(q) = gain ⊙ q + shift, per head and channel, identity at the start; applied before RoPE."""

    def __init__(self, config: OrthrosConfig, factory: LayerFactory) -> None:
        super().__init__()
        H, _, d = config.head_shape
        self.gain = factory.head_vector(H, d, 1.0)
        self.shift = factory.head_vector(H, d, 0.0)

    def forward(self, queries: Tensor) -> Tensor:
        """(B, N, H, d) -> (B, N, H, d)."""
        heads_and_channels = queries.shape[-2:]
        return torch.addcmul(self.shift.view(heads_and_channels), self.gain.view(heads_and_channels), queries)


class TwoStreamAttention(nn.Module):
    """Base stream: sliding window over K, V. Output stream: the whole history of the same K, V."""

    def __init__(self, config: OrthrosConfig, layer_index: int, factory: LayerFactory) -> None:
        super().__init__()
        (H, G, d), D = config.head_shape, config.hidden_size
        self.layer_index = layer_index
        self.is_last = layer_index == config.num_hidden_layers - 1
        self.two_streams = config.architecture == "orthros"
        self.streams = factory.streams
        self.query_heads, self.kv_heads, self.head_dim = factory.local_heads(H), factory.local_heads(G), d
        self.q_proj = factory.column(D, H * d, bias=config.attention_bias)
        self.k_proj = factory.column(D, G * d, bias=config.attention_bias)
        self.v_proj = factory.column(D, G * d, bias=config.attention_bias)
        self.o_proj = factory.row(H * d, D, bias=bool(config.attention_output_bias))
        self.q_norm = factory.norm(d, on="heads") if config.qk_norm else nn.Identity()
        self.k_norm = factory.norm(d, on="heads") if config.qk_norm else nn.Identity()
        affine = config.query_affine == "elementwise"
        self.base_query = QueryAffine(config, factory) if affine and not self.is_last else nn.Identity()
        self.output_query = QueryAffine(config, factory) if affine else nn.Identity()

    def queried_tokens(self, tokens: Tensor, plan: StreamPlan) -> Tensor:
        """The tokens of [X;Y] that this layer hands on: all of them, or in the last layer those that give logits."""
        if not self.is_last:
            return tokens
        base, output = self.streams.split(tokens, plan.base_tokens)
        return output if self.two_streams else self.streams.pick(base, plan.output_columns)

    def forward(self, normed: Tensor, plan: StreamPlan, cache: KVCache | None) -> Tensor:
        """`normed` = norm([X;Y]) (B, T+M, D) -> [O_x;O_y] W_O (B, N, D) for the N queried tokens."""
        base, _ = self.streams.split(normed, plan.base_tokens)
        keys = rotate(self.k_norm(self._heads(self.k_proj(base), self.kv_heads)), *plan.base.rope)  # (B, T, G, d)
        values = self._heads(self.v_proj(base), self.kv_heads)  # (B, T, G, d)
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)  # (B, G, T, d)
        if cache is not None:
            keys, values = cache.update(keys, values, self.layer_index)  # (B, G, S, d), S = longest length

        tokens = self.queried_tokens(normed, plan)
        queries = self.q_norm(self._heads(self.q_proj(tokens), self.query_heads))  # (B, N, H, d)
        if self.is_last:
            attended = self.attend_heads(self.output_query(queries), keys, values, plan.output, plan.kernel)
        elif not self.two_streams:
            attended = self.attend_heads(self.base_query(queries), keys, values, plan.base, plan.kernel)
        else:
            x, y = self.streams.split_projected(queries, plan.base_tokens)  # (B, T, H, d), (B, M, H, d)
            attended = self.streams.join_projected(
                self.attend_heads(self.base_query(x), keys, values, plan.base, plan.kernel),
                self.attend_heads(self.output_query(y), keys, values, plan.output, plan.kernel),
            )
        return self.o_proj(attended)  # (B, N, H·d) -> (B, N, D)

    def attend_heads(self, queries: Tensor, keys: Tensor, values: Tensor, plan: QueryPlan, kernel: str) -> Tensor:
        """Queries (B, N, H, d) over keys, values (B, G, S, d) -> (B, N, H·d)."""
        queries = rotate(queries, *plan.rope).transpose(1, 2)  # (B, H, N, d)
        return attend(queries, keys, values, plan.visibility, kernel).transpose(1, 2).flatten(2)

    def _heads(self, projected: Tensor, heads: int) -> Tensor:
        """(B, N, heads·d) -> (B, N, heads, d)."""
        return projected.unflatten(-1, (heads, self.head_dim))
