"""What a rank sends in one optimizer step, by kind and before anything is sent.

* Counted are the bytes that a rank sends in a ring: of a tensor of n bytes, a group of R ranks' all-reduce has each
  send 2 (R-1)/R n, an all-gather or a reduce-scatter (R-1)/R n (n is the whole); a message to a neighbor is n.
* A test holds the tensor axis to what a really built stage calls, another the data axis to DeepSpeed's engine.
* Not here: norms of the gradient, agreements of the ranks, what happens once at the start, checkpoints.

Symbols: T base tokens, M output tokens, D width.
"""

from __future__ import annotations

from ..config import Config, gradient_accumulation_steps
from ..config.parallel import data_parallel_size, padded_vocabulary
from ..model import OrthrosConfig
from .memory_estimate import BYTES, FP32_BYTES, Part, residual_elements
from .stage_plan import Stage

LIVE_PARAMETERS = 10**9  # DeepSpeed's stage3_max_live_parameters: up to here ZeRO-3 gathers once a micro-batch


def traffic(config: Config, model: OrthrosConfig, stage: Stage, world_size: int) -> list[Part]:
    """What a rank of `stage`, one of `world_size`, sends in one optimizer step; an output token at every position.

    Raises:
        InputError: the world or the global batch does not divide as the layout needs.
    """
    parallel = config.parallel
    micro_batches = gradient_accumulation_steps(config, world_size)
    replicas = data_parallel_size(world_size, parallel.tensor, parallel.pipeline)
    kinds = []
    if parallel.tensor > 1:
        how = "gathers and reduce-scatters" if parallel.sequence else "all-reduces"
        again = ", forward twice (checkpointing)" if config.train.activation_checkpointing else ""
        kinds.append(
            Part(
                "tensor",
                micro_batches * tensor_bytes(config, model, stage),
                f"{how} of activations and their gradients, {micro_batches} micro-batches{again}",
            )
        )
    if parallel.pipeline > 1:
        kinds.append(
            Part(
                "pipeline",
                micro_batches * boundary_bytes(config, model, stage),
                f"{micro_batches} micro-batches: residual and layout to the next stage, gradient to the previous",
            )
        )
        if model.tie_word_embeddings and (stage.is_first or stage.is_last):
            rows = padded_vocabulary(model.vocab_size, parallel.tensor) // parallel.tensor
            kinds.append(
                Part("tied embedding", FP32_BYTES * rows * model.hidden_size, "fp32 gradient, first and last stage")
            )
    if replicas > 1:
        kinds.append(_data_traffic(config, stage, replicas, micro_batches))
    return kinds


def bubble_share(stages: int, micro_batches: int) -> float:
    """The share of a step in which a stage waits for others, if all take equally long: (s-1)/(m+s-1)."""
    return (stages - 1) / (micro_batches + stages - 1)


def boundary_bytes(config: Config, model: OrthrosConfig, stage: Stage) -> int:
    """Sent to the neighbors for one micro-batch."""
    residual = residual_elements(config, model) * BYTES[config.precision]
    layout = config.train.micro_batch_size * config.train.sequence_length * 8  # int64; M = 0 at every position
    return (0 if stage.is_last else residual + layout) + (0 if stage.is_first else residual)


def tensor_bytes(config: Config, model: OrthrosConfig, stage: Stage) -> int:
    """Sent on the tensor axis for one micro-batch, forward and backward."""
    tensor, sequence = config.parallel.tensor, config.parallel.sequence
    element, D = BYTES[config.precision], model.hidden_size
    base = config.train.micro_batch_size * config.train.sequence_length
    through = (2 if model.architecture == "orthros" else 1) * base
    rounds = 0  # elements of whole tensors, times 1 for a gather or a reduce-scatter and 2 for an all-reduce
    for index in stage.layers:
        queried = base if index == model.num_hidden_layers - 1 else through
        rounds += _layer_rounds(base * D, queried * D, sequence, config.train.activation_checkpointing)
        rounds += _replicated_weight_rounds(config, model)
    if stage.is_first:
        rounds += 2 * base * D + (through * D if sequence else 0)
    if stage.is_last:
        rounds += 2 * base * D  # the head's input: gathered and reduce-scattered, or its gradient all-reduced
        rounds += 2 * D if sequence else 0  # the final norm
    sent = rounds * element + (2 * 3 * base * FP32_BYTES if stage.is_last else 0)  # maximum, sum, label's logit
    return sent * (tensor - 1) // tensor


def _layer_rounds(base: int, queried: int, sequence: bool, checkpointing: bool) -> int:
    """One layer, which has inputs of q, k, v, gate and up, and outputs of o and down.

    All-reduces: outputs forward, the inputs' gradients backward. Sequence parallelism: gathers of inputs and
    reduce-scatters of outputs forward; backward gathers of inputs, for the weights' gradients, and of the outputs'
    gradients, and reduce-scatters of the inputs' gradients. Recomputing ends before down's output is reduced.
    """
    inputs, outputs = 3 * queried + 2 * base, 2 * queried
    if sequence:
        forward, recomputed, backward = inputs + outputs, inputs + queried, 2 * inputs + outputs
    else:
        forward, recomputed, backward = 2 * outputs, 2 * queried, 2 * inputs
    return forward + backward + (recomputed if checkpointing else 0)


def _replicated_weight_rounds(config: Config, model: OrthrosConfig) -> int:
    """All-reduced gradients of the whole weights that work on shared activations, in one layer."""
    of_tokens = 2 * model.hidden_size + (model.hidden_size if model.attention_output_bias else 0)
    of_heads = 2 * model.head_shape[2] if model.qk_norm else 0
    return 2 * (of_heads + (of_tokens if config.parallel.sequence else 0))


def _data_traffic(config: Config, stage: Stage, replicas: int, micro_batches: int) -> Part:
    """Gradients to all replicas, and weights back from those that updated them."""
    parameters, element, zero = stage.parameters, BYTES[config.precision], config.parallel.zero_stage
    gradients = FP32_BYTES * parameters
    if zero == 3:
        gathers = 1 if parameters <= LIVE_PARAMETERS else 2
        rounds = micro_batches * (gathers * element * parameters + gradients)
        how = "weights gathered " + ("once" if gathers == 1 else "for forward and for backward")
        how += f", fp32 gradients reduce-scattered, each of {micro_batches} micro-batches"
    else:
        reductions = micro_batches if zero == 2 else 1
        rounds = 2 * reductions * gradients + element * parameters
        how = f"fp32 gradients all-reduced {'each micro-batch' if zero == 2 else 'once'}, weights gathered once"
    return Part("data", rounds * (replicas - 1) // replicas, how)
