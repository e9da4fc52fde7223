"""How much memory a rank needs, by part and before anything is allocated.

* Weights, gradients and optimizer state follow from DeepSpeed's ZeRO stages; a test holds them to the tensors of real
  engines. Not counted is padding: a few elements a group of the optimizer, or a parameter under ZeRO-3; nor, of
  fp32 gradients under ZeRO-2, the rest of the parameters that a border between two ranks' shares cuts, at most two a
  group of the optimizer: both ranks hold them whole.
* Activations are the tensors that autograd keeps for the backward pass, with an attention kernel that keeps no score
  matrix; tests hold the estimate within a tenth of what autograd really keeps, whatever the layout.
* Tensor parallelism shares heads, FFN and vocabulary; what is as wide as the model is whole on each of its ranks, or
  shared by tokens under sequence parallelism.
* Not here: the framework itself, communication buckets, layers that ZeRO-3 gathers for the moment, temporary results
  and fragmentation.

Symbols: T base tokens, M output tokens, D width, F FFN width, H query heads, G KV heads, d head size, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..config import Config, gradient_accumulation_steps
from ..config.parallel import data_parallel_size, padded_vocabulary
from ..model import OrthrosConfig
from ..model.chunked_loss import CHUNK_TOKENS
from ..model.parameter_count import parameter_count
from .stage_plan import Stage

FP32_BYTES = 4
BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Part:
    """One part of a total, and what its size assumes."""

    name: str
    size_bytes: int
    assumption: str


def memory_parts(config: Config, model: OrthrosConfig, stage: Stage, world_size: int) -> list[Part]:
    """The parts of a rank of `stage`, one of `world_size`, while it trains; an output token at every position.

    Raises:
        InputError: the world or the global batch does not divide as the layout needs.
    """
    parts = _state_parts(config, stage, world_size)
    if config.adaptation.distillation.weight > 0:
        parts.append(_teacher_part(config, model))
    parts += _activation_parts(config, model, stage, gradient_accumulation_steps(config, world_size))
    if stage.stages > 1:
        parts.append(_boundary_part(config, model, stage, gradient_accumulation_steps(config, world_size)))
    if stage.is_last:
        parts.append(_loss_part(config, model))
    return parts


def _teacher_part(config: Config, model: OrthrosConfig) -> Part:
    """The model that distillation learns from: the transformer of the same weights, which has no query affines."""
    count = parameter_count(model)
    return Part(
        "teacher",
        BYTES[config.precision] * (count.total - count.query_affines),
        f"{config.precision}, frozen and whole on every rank; as large as the model",
    )


def _loss_part(config: Config, model: OrthrosConfig) -> Part:
    """A chunk's logits while the loss is computed, and what waits for its backward.

    Of each logit in fp32: cross entropy's logarithm of the probability, the loss's gradient by it and by the logit;
    megatron-core's works in place, on a copy that may want padding; under distillation KL's logarithms besides.
    """
    tokens = config.train.micro_batch_size * config.train.sequence_length
    vocabulary, element = vocabulary_share(config, model), BYTES[config.precision]
    chunk = min(tokens, CHUNK_TOKENS)
    heads, wide, taught, whose = 1, 3, 0, ""
    if config.parallel.tensor > 1:
        wide, whose = 2, " of this rank's part of the vocabulary"
    if config.adaptation.distillation.weight > 0:
        heads, wide, whose = 2, 5, " of the model and the teacher"
        taught = tokens * model.hidden_size * element
    return Part(
        "logits",
        chunk * vocabulary * (heads * element + wide * FP32_BYTES) + taught + waiting_bytes(config, model),
        f"{config.precision} logits{whose}, and {wide} fp32 values of each, of {chunk} tokens at a time; the gradients "
        "of the head and its input" + ("; the teacher's input to its head" if taught else ""),
    )


def vocabulary_share(config: Config, model: OrthrosConfig) -> int:
    """Rows of the head on a rank."""
    return padded_vocabulary(model.vocab_size, config.parallel.tensor) // config.parallel.tensor


def waiting_bytes(config: Config, model: OrthrosConfig) -> int:
    """What the loss keeps for its backward: the gradients of the head's weight, in fp32, and of its input."""
    tokens = config.train.micro_batch_size * config.train.sequence_length
    at_the_head = model.hidden_size * BYTES[config.precision] * tokens
    return at_the_head + model.hidden_size * FP32_BYTES * vocabulary_share(config, model)


def residual_shape(config: Config, model: OrthrosConfig) -> tuple[int, int, int]:
    """[X;Y] of one micro-batch on one rank, an output token at every position: batch first, under sequence parallelism
    sequence first."""
    rows, parallel = config.train.micro_batch_size, config.parallel
    tokens = (2 if model.architecture == "orthros" else 1) * config.train.sequence_length
    if parallel.sequence:
        return tokens // parallel.tensor, rows, model.hidden_size
    return rows, tokens, model.hidden_size


def residual_elements(config: Config, model: OrthrosConfig) -> int:
    """Elements of a residual of `residual_shape`."""
    return math.prod(residual_shape(config, model))


def _state_parts(config: Config, stage: Stage, world_size: int) -> list[Part]:
    """Weights, gradients and optimizer state."""
    parallel = config.parallel
    replicas = data_parallel_size(world_size, parallel.tensor, parallel.pipeline)
    of = "replicas" if parallel.tensor * parallel.pipeline > 1 else "ranks"
    share = -(-stage.parameters // replicas)
    element, zero = BYTES[config.precision], parallel.zero_stage
    beside = BYTES["bf16"] if zero == 1 and config.precision == "bf16" else 0  # autograd's own, which DeepSpeed keeps
    views = zero == 2 and config.precision == "fp32"  # DeepSpeed keeps those of whole gradients
    cut = ", and the rest of parameters that its borders cut (not counted)" if views else ""
    return [
        Part(
            "weights",
            element * (share if zero == 3 else stage.parameters),
            f"{config.precision}, " + (f"1/{of} under ZeRO-3" if zero == 3 else f"whole under ZeRO-{zero}"),
        ),
        Part(
            "gradients",
            (FP32_BYTES + beside) * (stage.parameters if zero == 1 else share),
            "accumulated in fp32, "
            + ("whole under ZeRO-1" if zero == 1 else f"1/{of} under ZeRO-{zero}")
            + cut
            + (", and a micro-batch's own in bf16" if beside else ""),
        ),
        Part("master weights", FP32_BYTES * share, f"fp32, 1/{of}"),
        Part("Adam moments", 2 * FP32_BYTES * share, f"two in fp32, 1/{of}"),
    ]


def _activation_parts(config: Config, model: OrthrosConfig, stage: Stage, micro_batches: int) -> list[Part]:
    """What autograd keeps: the base stream's keys and values, as a cache would hold them, and all the rest."""
    train, in_flight = config.train, stage.micro_batches_in_flight(micro_batches)
    kept = "one tensor a layer, and one layer in full" if train.activation_checkpointing else "what backward reads"
    kernel = ", and eager's score matrices besides (not counted)" if model.attention_kernel == "eager" else ""
    flight = "; as many micro-batches in flight as stages from here on, or as a step has" if stage.stages > 1 else ""
    tokens = f"{train.micro_batch_size} x {train.sequence_length} base tokens"
    layers = min(len(stage.layers), 1) if train.activation_checkpointing else in_flight * len(stage.layers)
    keys_and_values = layers * kv_layer_bytes(config, model)
    return [
        Part(
            "activations",
            activation_bytes(config, model, stage, in_flight) - keys_and_values,
            f"{tokens}: {kept}{kernel}{flight}",
        ),
        Part(
            "KV",
            keys_and_values,
            f"keys and values of {tokens}, of {'one layer' if train.activation_checkpointing else 'each layer'}; in "
            "use, a cache of this batch and context takes that of each layer",
        ),
    ]


def kv_layer_bytes(config: Config, model: OrthrosConfig) -> int:
    """Keys and values of one layer on one rank for a micro-batch."""
    _, groups, d = model.head_shape
    tokens = config.train.micro_batch_size * config.train.sequence_length
    return 2 * tokens * groups // config.parallel.tensor * d * BYTES[config.precision]


def _boundary_part(config: Config, model: OrthrosConfig, stage: Stage, micro_batches: int) -> Part:
    """What DeepSpeed's pipeline engine holds beside autograd."""
    sides = 2 - stage.is_first - stage.is_last
    tensors = sides * (stage.micro_batches_in_flight(micro_batches) + 1)
    return Part(
        "boundaries",
        tensors * residual_elements(config, model) * BYTES[config.precision],
        "received and sent residuals of the micro-batches in flight, and one gradient of each",
    )


def activation_bytes(config: Config, model: OrthrosConfig, stage: Stage, in_flight: int = 1) -> int:
    """Bytes that autograd keeps from the stage's input to its output or the head's input, logits excluded.

    An output token at every position. With activation checkpointing only each layer's input is kept, and the layer
    with the most is counted once in full.
    """
    element = BYTES[config.precision]
    tokens = config.train.micro_batch_size * config.train.sequence_length
    shards = config.parallel.tensor if config.parallel.sequence else 1
    holds_last = model.num_hidden_layers - 1 in stage.layers
    counts = {False: len(stage.layers) - holds_last, True: int(holds_last)}  # layers by whether they are the last
    layers = [(count, _layer_bytes(config, model, stage, is_last)) for is_last, count in counts.items() if count]
    final_norm = 0
    if stage.is_last:  # the loss keeps the gradient of its output instead (`waiting_bytes`)
        final_norm = tokens // shards * model.hidden_size * (FP32_BYTES + element)
    if config.train.activation_checkpointing:
        kept = len(stage.layers) * residual_elements(config, model) * element + final_norm
        return in_flight * kept + max((size for _, size in layers), default=0)
    return in_flight * (sum(count * size for count, size in layers) + final_norm)


def _layer_bytes(config: Config, model: OrthrosConfig, stage: Stage, is_last: bool) -> int:
    """One layer with `through` tokens in and `queried` tokens that pass attention and FFN.

    Kept: norm(·) twice; norm(X) as K's and V's input where plain layers had to cut it out of norm([X;Y]); K, V; Q
    before and after its affine, O_x or O_y, and [O_x;O_y]; gate, up, silu(gate) and their product.
    """
    element, tensor = BYTES[config.precision], config.parallel.tensor
    shards = tensor if config.parallel.sequence else 1
    base = config.train.micro_batch_size * config.train.sequence_length
    through = (2 if model.architecture == "orthros" else 1) * base
    queried = base if is_last else through
    D, F = model.hidden_size, model.intermediate_size // tensor
    heads, groups, d = model.head_shape
    H, G = heads // tensor, groups // tensor
    cut = 0
    if not stage.megatron:
        cut += 2 * base * D if through != base else 0
        cut += queried * D if queried != through else 0
    affine = 1 if model.query_affine == "elementwise" else 0
    attention = (3 + affine) * queried * H * d
    norms = _norm_bytes(D, (through + queried) // shards, element)
    if model.qk_norm:  # what comes out is counted as Q and K already
        norms += (queried * H + base * G) * d * (FP32_BYTES + element)
    return norms + kv_layer_bytes(config, model) + element * (cut + attention + 4 * queried * F)


def _norm_bytes(width: int, tokens: int, element: int) -> int:
    """A norm keeps its input in fp32, the normalized values, and its output as the next product's input."""
    return tokens * width * (FP32_BYTES + 2 * element)
