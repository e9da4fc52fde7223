"""How much memory a rank needs, by part and before anything is allocated.

* Weights, gradients and optimizer state follow from DeepSpeed's ZeRO stages, up to padding.
* Activations are the tensors that autograd keeps for the backward pass, with an attention kernel that keeps no score
  matrix; a test holds the estimate within a tenth of what autograd really keeps.
* Not here: the framework itself, communication buckets, layers that ZeRO-3 gathers for the moment, temporary results
  and fragmentation.

Symbols: T base tokens, M output tokens, D width, F FFN width, H query heads, G KV heads, d head size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import Config
from .model import OrthrosConfig
from .model.parameter_count import parameter_count

FP32_BYTES = 4
BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class MemoryPart:
    """One part of a rank's memory and what its size assumes."""

    name: str
    size_bytes: int
    assumption: str


def memory_parts(config: Config, model: OrthrosConfig, world_size: int) -> list[MemoryPart]:
    """The parts of one of `world_size` data-parallel ranks while it trains; an output token at every position."""
    parameters = parameter_count(model).total
    share = -(-parameters // world_size)
    element, stage = BYTES[config.precision], config.parallel.zero_stage
    tokens = config.train.micro_batch_size * config.train.sequence_length
    checkpointing = config.train.activation_checkpointing
    kept = "one tensor a layer, and one layer in full" if checkpointing else "what the backward pass reads"
    kernel = ", and eager's score matrices besides (not counted)" if model.attention_kernel == "eager" else ""
    master = 0 if stage == 3 and config.precision == "fp32" else FP32_BYTES * share
    return [
        MemoryPart(
            "weights",
            element * (share if stage == 3 else parameters),
            f"{config.precision}, " + ("1/ranks under ZeRO-3" if stage == 3 else f"whole under ZeRO-{stage}"),
        ),
        MemoryPart(
            "gradients",
            FP32_BYTES * (parameters if stage == 1 else share),
            "accumulated in fp32, " + ("whole under ZeRO-1" if stage == 1 else f"1/ranks under ZeRO-{stage}"),
        ),
        MemoryPart(
            "master weights",
            master,
            "fp32, 1/ranks" if master else "none: ZeRO-3 updates fp32 weights in place",
        ),
        MemoryPart("Adam moments", 2 * FP32_BYTES * share, "two in fp32, 1/ranks"),
        MemoryPart(
            "activations",
            activation_bytes(model, tokens, tokens, element, checkpointing),
            f"{config.train.micro_batch_size} x {config.train.sequence_length} base tokens: {kept}{kernel}",
        ),
        MemoryPart(
            "logits",
            tokens * model.vocab_size * (element + 2 * FP32_BYTES),
            f"{config.precision} logits, fp32 log-probabilities and their gradient",
        ),
    ]


def activation_bytes(
    model: OrthrosConfig, base_tokens: int, output_tokens: int, element: int, checkpointing: bool
) -> int:
    """Bytes that autograd keeps from the embedding to the head's input, logits excluded.

    Args:
        model: the model's configuration.
        base_tokens: T summed over the micro-batch.
        output_tokens: M summed over the micro-batch.
        element: bytes of an activation, 4 or 2.
        checkpointing: keep only each layer's input, and count the layer with the most once in full.
    """
    two_streams = model.architecture == "orthros"
    through = base_tokens + (output_tokens if two_streams else 0)
    inner = _layer_bytes(model, through, through, base_tokens, element)
    last = _layer_bytes(model, through, output_tokens, base_tokens, element)
    final_norm = _norm_bytes(model.hidden_size, output_tokens, element)
    layers = model.num_hidden_layers
    if checkpointing:
        largest = inner if layers > 1 else last
        return layers * through * model.hidden_size * element + largest + final_norm
    return (layers - 1) * inner + last + final_norm


def _layer_bytes(model: OrthrosConfig, through: int, queried: int, base_tokens: int, element: int) -> int:
    """One layer with `through` tokens in and `queried` tokens that pass attention and FFN.

    Kept: norm(·) twice; norm(X) as K's and V's input where it had to be cut out of norm([X;Y]); K, V; Q before and
    after its affine, O_x or O_y, and [O_x;O_y]; gate, up, silu(gate) and their product.
    """
    D, F = model.hidden_size, model.intermediate_size
    H, G, d = model.head_shape
    cut = 2 * base_tokens * D if through != base_tokens else 0
    cut += queried * D if queried != through else 0
    affine = 1 if model.query_affine == "elementwise" else 0
    attention = 2 * base_tokens * G * d + (3 + affine) * queried * H * d
    norms = _norm_bytes(D, through, element) + _norm_bytes(D, queried, element)
    if model.qk_norm:  # what comes out is counted as Q and K already
        norms += (queried * H + base_tokens * G) * d * (FP32_BYTES + element)
    return norms + element * (cut + attention + 4 * queried * F)


def _norm_bytes(width: int, tokens: int, element: int) -> int:
    """A norm keeps its input in fp32, the normalized values, and its output as the next product's input."""
    return tokens * width * (FP32_BYTES + 2 * element)
