"""One attention, several kernels: softmax over the visible keys of each query (see `visibility.py` for which).

* `eager`  a dense mask over all keys: the reference.
* `sdpa`   blocks of queries against the span of keys that a block sees: O(M·(w+s)) time for a window, and no (M, S)
           mask ever; one causal call where the mask is plain. Runs everywhere, with gradients.
* `flex`   FlexAttention; on CPU without gradients only, since PyTorch has no backward for it there.
* `flash`  flash-attn's varlen kernel (`flash_runs.py`): CUDA, half precision. A stream with sinks and a call of one
           query a row take sdpa's blocks beside it.
* `auto`   is flash where it can run, else sdpa.

No kernel was timed on a GPU yet: `make bench-gpu KERNEL=...` compares them.

Shapes: B batch, M queries, S keys, H query heads, G KV heads, d head size, c queries of a block.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from .flash_runs import flash, flash_obstacle, reads_runs
from .visibility import Block, Visibility

KERNEL_NAMES = ("eager", "sdpa", "flex", "flash")
KEEPS_SUMS = ("cpu",)  # devices whose backward starts from the forward's softmax sums instead of recomputing a block
CAUSAL_TAIL_ROWS = 1024  # queries of one call: the kernel computes masked pairs, too, half of them in the last columns
FOLDED_BYTES = 64 << 20  # of the keys and values that one call over several blocks spreads out: each key ⌈S/c⌉ times
# What masked calls may use. cuDNN's attention, which PyTorch prefers on an H100, gives NaN gradients of queries
# under a mask at 64, 192, … 704 keys and strongly negative logits (pytorch#196678), and plans each new length anew.
MASKED_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def choose_kernel(requested: str, device: torch.device, dtype: torch.dtype, gradients: bool, head_dim: int) -> str:
    """The requested kernel, or for "auto" flash-attn where it can run and PyTorch's attention elsewhere.

    Raises:
        ValueError: the requested kernel is unknown or cannot run here; the message says why and what can.
    """
    if requested == "auto":
        return "sdpa" if flash_obstacle(device, dtype, head_dim) else "flash"
    if requested not in KERNEL_NAMES:
        raise ValueError(f"attention_kernel={requested!r} is unknown; choose one of auto, {', '.join(KERNEL_NAMES)}")
    obstacle = None
    if requested == "flash":
        obstacle = flash_obstacle(device, dtype, head_dim)
    elif requested == "flex" and device.type == "cpu" and gradients:
        obstacle = "FlexAttention has no backward on CPU"
    if obstacle is not None:
        raise ValueError(f"attention_kernel={requested} cannot run: {obstacle}; use attention_kernel=sdpa or eager")
    return requested


def attend(queries: Tensor, keys: Tensor, values: Tensor, visibility: Visibility, kernel: str) -> Tensor:
    """O[i] = softmax over visible j of Q[i]·K[j]/√d · V[j].

    Args:
        queries: (B, H, M, d).
        keys: (B, G, S, d), H a multiple of G; query head h reads KV head h // (H/G).
        values: (B, G, S, d).
        visibility: which keys each query sees; every query sees at least one.
        kernel: "eager", "sdpa", "flex" or "flash", which is sdpa where flash-attn has no such mask or gains nothing.

    Returns:
        (B, H, M, d) in the values' dtype.
    """
    queries, keys = queries.to(values.dtype), keys.to(values.dtype)  # under autocast, norms and affines widen them
    if queries.shape[2] == 0:
        return queries
    if kernel == "flash" and not reads_runs(visibility):
        kernel = "sdpa"
    return _KERNELS[kernel](queries, keys, values, visibility)


def eager(queries: Tensor, keys: Tensor, values: Tensor, visibility: Visibility) -> Tensor:
    """The equation as written, softmax in at least float32; O(M·S) memory."""
    group = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)  # (B, H, S, d)
    scores = queries @ keys.mT * queries.shape[-1] ** -0.5  # (B, H, M, S)
    visible = visibility.sees(slice(None), torch.arange(keys.shape[2], device=keys.device)[None])[:, None]
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(~visible, float("-inf"))
    return wide.softmax(-1).to(values.dtype) @ values


def sdpa(queries: Tensor, keys: Tensor, values: Tensor, visibility: Visibility) -> Tensor:
    """PyTorch's scaled_dot_product_attention: one causal call where the mask is plain, else block by block."""
    if visibility.is_plain_causal(keys.shape[2]):
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    if torch.is_grad_enabled() and (queries.requires_grad or keys.requires_grad or values.requires_grad):
        return _BlockwiseAttention.apply(queries, keys, values, visibility)
    if queries.shape[2] > 1 and visibility.is_causal_tail(keys.shape[2]):
        if queries.device.type == "cpu":
            return _causal_tail(queries, keys, values)
        if can_use_flash_attention(SDPAParams(queries, keys, values, None, 0.0, False, True)):
            return _lower_right(queries, keys, values)
    return _blockwise(queries, keys, values, visibility)


def _lower_right(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The last M of S tokens as one call, in the flash kernel that PyTorch has on CUDA; elsewhere with a dense mask."""
    return F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=causal_lower_right(queries.shape[2], keys.shape[2]), enable_gqa=True
    )


def _causal_tail(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The last M of S tokens, each over all tokens up to itself: a chunk after what the cache holds.

    `is_causal` would align such a rectangle top-left, and its mask is as large as itself. With the queries in reverse
    order the mask's entries depend on i + j alone, so that a vector, read at stride 1 both ways, is the whole mask:
    1.6 times as fast as blocks with masks of their own (docs/LOG.md). CPU only: other kernels copy such a mask.
    """
    M, S = queries.shape[2], keys.shape[2]
    out = torch.empty_like(queries)
    for start in range(0, M, CAUSAL_TAIL_ROWS):
        stop = min(start + CAUSAL_TAIL_ROWS, M)
        rows, seen = stop - start, S - M + stop  # the last row of the part sees `seen` keys
        diagonals = queries.new_zeros(seen + rows - 1)  # reversed row i sees key j where i + j < seen
        diagonals[seen:] = float("-inf")
        mask = diagonals.as_strided((rows, seen), (1, 1))
        part = F.scaled_dot_product_attention(
            queries[:, :, start:stop].flip(2), keys[:, :, :seen], values[:, :, :seen], attn_mask=mask, enable_gqa=True
        )
        out[:, :, start:stop] = part.flip(2)
    return out


def _masked_backends(device: torch.device) -> AbstractContextManager[None]:
    """Where masked calls stand: without cuDNN's kernel on a GPU (see MASKED_BACKENDS)."""
    return sdpa_kernel(MASKED_BACKENDS) if device.type == "cuda" else nullcontext()


def _blocks(keys: Tensor, visibility: Visibility) -> Iterator[Block]:
    """The visibility's blocks, of those that are alike as many together as FOLDED_BYTES hold keys and values of."""
    a_key = 2 * keys.shape[0] * keys.shape[1] * keys.shape[3] * keys.element_size()
    for block in visibility.blocks(keys.shape[2], keys.dtype):
        yield from block.parts(max(1, FOLDED_BYTES // (a_key * block.key_count)))


def _blockwise(
    queries: Tensor, keys: Tensor, values: Tensor, visibility: Visibility, sums: list[Tensor] | None = None
) -> Tensor:
    """All blocks; into `sums`, on a CPU, the logarithms of each block's softmax sums."""
    out = torch.empty_like(queries)
    with _masked_backends(queries.device):
        for block in _blocks(keys, visibility):
            together, k, v = _together(queries, keys, block), _take(keys, block), _take(values, block)
            mask = _mask_together(queries, keys, block)
            if sums is None:
                attended = F.scaled_dot_product_attention(together, k, v, attn_mask=mask)
            else:
                attended, block_sums = _cpu_attention(together, k, v, attn_mask=mask)
                sums.append(block_sums)
            out[:, :, block.queries] = _apart(attended, queries, block)
    return out


def _together(of_queries: Tensor, keys: Tensor, block: Block) -> Tensor:
    """A block of (B, H, M, d) as (B·n, G, H/G·c, d), the queries of one KV head as rows over one copy of it.

    So one query a head reads K and V once, no kernel that takes a mask repeats them for `enable_gqa`, and
    training in bfloat16 is faster (docs/LOG.md).
    """
    part = of_queries[:, :, block.queries]
    if block.repeats == 1:
        return part.reshape(*keys.shape[:2], -1, part.shape[3])
    part = part.unflatten(2, (block.repeats, -1))  # (B, H, n, c, d)
    part = part.unflatten(1, (keys.shape[1], -1)).permute(0, 3, 1, 2, 4, 5)  # (B, n, G, H/G, c, d)
    return part.flatten(3, 4).flatten(0, 1)


def _mask_together(queries: Tensor, keys: Tensor, block: Block) -> Tensor | None:
    """The block's mask over the rows of `_together`."""
    group = queries.shape[1] // keys.shape[1]
    return block.mask if block.mask is None or group == 1 else block.mask.repeat(1, 1, group, 1)


def _apart(together: Tensor, queries: Tensor, block: Block) -> Tensor:
    """What `_together` put together, (B·n, G, H/G·c, d), again as (B, H, n·c, d)."""
    if block.repeats == 1:
        return together.reshape(*queries.shape[:2], -1, queries.shape[3])
    part = together.unflatten(2, (-1, block.step)).unflatten(0, (-1, block.repeats))  # (B, n, G, H/G, c, d)
    return part.permute(0, 2, 3, 1, 4, 5).flatten(1, 2).flatten(2, 3)


class _BlockwiseAttention(torch.autograd.Function):
    """Block by block in both directions; the backward adds a block's gradients in place.

    Autograd through slices of K would pad every block's gradient to full length: O(M²) again. Here memory is the
    inputs, the output and one block. A CPU's kernel hands out the softmax's logarithmic sums, from which its backward
    starts; elsewhere the backward recomputes the block.
    """

    @staticmethod
    def forward(ctx: FunctionCtx, queries: Tensor, keys: Tensor, values: Tensor, visibility: Visibility) -> Tensor:
        sums: list[Tensor] | None = [] if queries.device.type in KEEPS_SUMS else None
        out = _blockwise(queries, keys, values, visibility, sums)
        ctx.save_for_backward(queries, keys, values, *(() if sums is None else (out, *sums)))
        ctx.visibility = visibility  # type: ignore[attr-defined]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        queries, keys, values, *forward = ctx.saved_tensors  # type: ignore[attr-defined]
        wide = torch.promote_types(keys.dtype, torch.float32)  # a key sums over several blocks
        grad_queries = torch.empty_like(queries)
        grad_keys, grad_values = torch.zeros_like(keys, dtype=wide), torch.zeros_like(values, dtype=wide)
        with _masked_backends(queries.device):
            for number, block in enumerate(_blocks(keys, ctx.visibility)):  # type: ignore[attr-defined]
                together, mask = _together(queries, keys, block), _mask_together(queries, keys, block)
                grad_together = _together(grad_out, keys, block)
                k, v = _take(keys, block), _take(values, block)
                if forward:
                    out, sums = _together(forward[0], keys, block), forward[1 + number]
                    gradients = _cpu_backward(grad_together, together, k, v, out, sums, 0.0, False, attn_mask=mask)
                else:
                    with torch.enable_grad():
                        together, k, v = (part.detach().requires_grad_() for part in (together, k, v))
                        out = F.scaled_dot_product_attention(together, k, v, attn_mask=mask)
                    gradients = torch.autograd.grad(out, (together, k, v), grad_together)
                grad_queries[:, :, block.queries] = _apart(gradients[0], queries, block)
                _add(grad_keys, block, gradients[1])
                _add(grad_values, block, gradients[2])
        return grad_queries, grad_keys.to(keys.dtype), grad_values.to(values.dtype), None


# What scaled_dot_product_attention calls on a CPU; the public function does not hand out the sums.
_cpu_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _take(stored: Tensor, block: Block) -> Tensor:
    """The block's keys or values: (B, G, S_all, d) -> (B·n, G, S, d), where possible a view."""
    if block.repeats == 1:
        parts = [
            stored[:, :, part] if isinstance(part, slice) else stored.gather(2, _index(part, stored))
            for part in block.keys
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    *sinks, span = block.keys
    assert isinstance(span, slice)
    size, moved = span.stop - span.start, (block.repeats - 1) * block.step
    spans = stored[:, :, span.start : span.stop + moved].unfold(2, size, block.step)  # (B, G, n, d, S), overlapping
    spans = spans.permute(0, 2, 1, 4, 3)  # (B, n, G, S, d)
    fixed = [stored[:, None, :, part].expand(-1, block.repeats, -1, -1, -1) for part in sinks]
    return (torch.cat((*fixed, spans), dim=3) if fixed else spans).flatten(0, 1)


def _add(total: Tensor, block: Block, gradient: Tensor) -> None:
    """The transpose of `_take`: add (B·n, G, S, d) into `total` (B, G, S_all, d)."""
    if block.repeats > 1:
        _add_folded(total, block, gradient.unflatten(0, (-1, block.repeats)))
        return
    start = 0
    for part in block.keys:
        size = part.stop - part.start if isinstance(part, slice) else part.shape[1]
        piece = gradient[:, :, start : start + size].to(total.dtype)
        if isinstance(part, slice):
            total[:, :, part] += piece
        else:
            total.scatter_add_(2, _index(part, piece), piece)
        start += size


def _add_folded(total: Tensor, block: Block, gradient: Tensor) -> None:
    """Add (B, n, G, S, d) of n overlapping spans: c keys of each at a time, which do not overlap."""
    *sinks, span = block.keys
    assert isinstance(span, slice)
    size, c, n = span.stop - span.start, block.step, block.repeats
    for part in sinks:
        total[:, :, part] += gradient[:, :, :, : block.key_count - size].sum(1, dtype=total.dtype)
    gradient = gradient[:, :, :, block.key_count - size :].permute(0, 2, 1, 4, 3)  # (B, G, n, d, S) without sinks
    for start in range(0, size, c):
        piece = gradient[..., start : start + c]  # (B, G, n, d, up to c)
        width, begin = piece.shape[-1], span.start + start
        total[:, :, begin : begin + (n - 1) * c + width].unfold(2, width, c).add_(piece)


def _index(indices: Tensor, stored: Tensor) -> Tensor:
    """Indices (B, S) spread over the heads and channels of `stored` (B, G, …, d): (B, G, S, d)."""
    return indices[:, None, :, None].expand(-1, stored.shape[1], -1, stored.shape[3])


def flex(queries: Tensor, keys: Tensor, values: Tensor, visibility: Visibility) -> Tensor:
    """FlexAttention with the visibility rule as its mask; compiled on first use."""
    B, _, M, _ = queries.shape
    positions, first = visibility.positions.expand(B, M), visibility.first.expand(B, M)
    window, sinks = visibility.window, visibility.sinks

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        p, start = positions[b, i], first[b, i]
        visible = (start <= j) & (j <= p)
        return visible if window is None else visible & ((j > p - window) | (j < start + sinks))

    mask = visibility.prepared.get(keys.shape[2])
    if mask is None:
        # not compiled, it goes through a dense mask: on a CPU that is quicker than compiling
        create = create_block_mask if queries.device.type == "cpu" else _compiled(create_block_mask)
        mask = create(sees, B, None, M, keys.shape[2], device=queries.device)
        visibility.prepared[keys.shape[2]] = mask
    return _compiled(flex_attention)(queries, keys, values, block_mask=mask, enable_gqa=True)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


_KERNELS: dict[str, Callable[[Tensor, Tensor, Tensor, Visibility], Tensor]] = {
    "eager": eager,
    "sdpa": sdpa,
    "flex": flex,
    "flash": flash,
}
