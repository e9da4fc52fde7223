"""Pipeline stages: the model's layers in a row, cut over the pipeline axis, on DeepSpeed's PipelineModule.

* Between stages travels one floating tensor, the residual [X;Y], and one int64 tensor, the layout: document ids and
  output positions (B, T+M), M = 0 where every position has an output token. Middle stages read no data.
* What every layer of a stage needs (positions, rotations, visibility) is planned once a micro-batch from the layout.
* Parameters keep the model's own names up to a prefix (`canonical_name`), so every layout starts from the same values
  and checkpoints move between layouts.
* Stages are balanced by parameters, embedding and head included: those cost FLOPs and memory like layers do.

Shapes: B batch, T base tokens, M output tokens, D width.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from orthros_train.config.parallel import check_pipeline_size
from orthros_train.model.attention_kernels import choose_kernel
from orthros_train.model.configuration_orthros import OrthrosConfig
from orthros_train.model.layer_factory import LayerFactory
from orthros_train.model.layers import OrthrosLayer
from orthros_train.model.rope import RotaryEmbedding
from orthros_train.model.stream_layout import take_tokens
from orthros_train.model.stream_plan import StreamPlan, plan_streams
from orthros_train.parallel.mesh import Mesh
from orthros_train.parallel.nonfinite import poisoned
from orthros_train.parallel.quiet_deepspeed import (
    LayerSpec,
    PipelineModule,
    PipeModelDataParallelTopology,
    TiedLayerSpec,
    partition_balanced,
)

Carried = tuple[Tensor, Tensor]  # the residual and the layout
TIED = "embed"  # DeepSpeed's key of the embedding that serves as head, too


def pack_layout(document_ids: Tensor | None, output_positions: Tensor | None, shape: torch.Size) -> Tensor:
    """Document ids (B, T) and output positions (B, M) as one int64 tensor (B, T+M); None: zeros, and M = 0."""
    documents = torch.zeros(shape, dtype=torch.int64) if document_ids is None else document_ids
    return documents if output_positions is None else torch.cat((documents, output_positions), dim=1)


class StagePlanner:
    """Plans a micro-batch once for all layers of the stage."""

    def __init__(self, config: OrthrosConfig, sequence_length: int) -> None:
        self.config, self.base_tokens = config, sequence_length
        self._rope = RotaryEmbedding(config)
        self._last: tuple[Tensor, StreamPlan] | None = None

    def output_positions(self, layout: Tensor) -> Tensor | None:
        """(B, M), or None for every position."""
        return layout[:, self.base_tokens :] if layout.shape[1] > self.base_tokens else None

    def plan(self, residual: Tensor, layout: Tensor) -> StreamPlan:
        """The plan of the micro-batch that `layout` belongs to."""
        if self._last is None or self._last[0] is not layout:
            documents = layout[:, : self.base_tokens]
            packed = bool((documents != documents[:, :1]).any())
            kernel = choose_kernel(
                self.config.attention_kernel, residual.device, residual.dtype, True, self.config.head_shape[2]
            )
            plan = plan_streams(
                self.config,
                self._rope,
                kernel,
                batch_size=layout.shape[0],
                base_tokens=self.base_tokens,
                dtype=residual.dtype,
                device=residual.device,
                output_columns=self.output_positions(layout),
                document_ids=documents if packed else None,
            )
            self._last = (layout, plan)
        return self._last[1]


class EmbeddingStage(nn.Module):
    """Token ids and layout -> residual and layout."""

    def __init__(self, config: OrthrosConfig, factory: LayerFactory, planner: StagePlanner) -> None:
        super().__init__()
        self.embed_tokens = factory.embedding(config.vocab_size, config.hidden_size)
        self._streams, self._planner = factory.streams, planner
        self._two_streams = config.architecture == "orthros"

    def forward(self, inputs: Carried) -> Carried:
        """Ids (B, T) and layout (B, T+M)."""
        ids, layout = inputs
        base = self.embed_tokens(ids)  # (B, T, D)
        output = take_tokens(base, self._planner.output_positions(layout)) if self._two_streams else None
        return self._streams.join(base, output), layout


class LayerStage(OrthrosLayer):
    """One layer between residuals that carry their layout along."""

    def __init__(
        self, config: OrthrosConfig, layer_index: int, factory: LayerFactory, planner: StagePlanner, recompute: bool
    ) -> None:
        super().__init__(config, layer_index, factory)
        self._planner = planner
        self.gradient_checkpointing = recompute
        self._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)

    def forward(self, inputs: Carried) -> Carried:  # type: ignore[override]
        """Residual and layout."""
        residual, layout = inputs
        return super().forward(residual, self._planner.plan(residual, layout)), layout


class NormStage(nn.Module):
    """The final norm: residual of the output tokens and layout -> normed output tokens."""

    def __init__(self, config: OrthrosConfig, factory: LayerFactory) -> None:
        super().__init__()
        self.norm = factory.norm(config.hidden_size, on="tokens")

    def forward(self, inputs: Carried) -> Tensor:
        """The layout ends here."""
        return self.norm(inputs[0])


class HeadStage(nn.Module):
    """Hands on the head's weight to the loss, which applies it chunk by chunk."""

    def __init__(self, config: OrthrosConfig, factory: LayerFactory) -> None:
        super().__init__()
        self.lm_head = factory.head(config.hidden_size, config.vocab_size)

    def forward(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """(B, M, D) -> what `with_weight` makes of it."""
        return with_weight(normed, self.lm_head.get_parameter("weight"))


class PipelinedModel(PipelineModule):
    """The stages of this rank.

    Args:
        config: the whole model's.
        factory: builds its layers, for this rank of the tensor axis.
        mesh: all axes.
        sequence_length: T of every micro-batch.
        recompute: activation checkpointing of every layer.

    Raises:
        InputError: more stages than layers.
    """

    def __init__(
        self, config: OrthrosConfig, factory: LayerFactory, mesh: Mesh, sequence_length: int, recompute: bool = False
    ) -> None:
        check_pipeline_size(mesh.pipeline_size, config.num_hidden_layers)
        self.config, self.factory = config, factory
        self._weights = layer_weights(config)
        planner = StagePlanner(config, sequence_length)
        embedding = (EmbeddingStage, config, factory, planner)
        layers = [
            LayerSpec(LayerStage, config, index, factory, planner, recompute)
            for index in range(config.num_hidden_layers)
        ]
        if config.tie_word_embeddings:
            tied = {"tied_weight_attr": ["embed_tokens.weight"]}
            first: Any = TiedLayerSpec(TIED, *embedding, **tied)
            last: Any = TiedLayerSpec(TIED, *embedding, forward_fn=_second_use, **tied)
        else:
            first, last = LayerSpec(*embedding), LayerSpec(HeadStage, config, factory)
        super().__init__(
            [first, *layers, LayerSpec(NormStage, config, factory), last],
            topology=PipeModelDataParallelTopology(
                num_pp=mesh.pipeline_size, num_mp=mesh.tensor_size, num_dp=mesh.data_size
            ),
            loss_fn=self._loss,
        )

    def _loss(self, outputs: tuple[Tensor, Tensor], labels: tuple[Tensor, Tensor]) -> Tensor:
        """Sum of the label losses times a scale: `labels` are (shift labels (B, M), scale (1,))."""
        (normed, weight), (shift_labels, scale) = outputs, labels
        return poisoned(self.factory.loss_sum(normed, weight, shift_labels) * scale.reshape(()))

    def _partition_layers(self, method: str = "") -> None:
        """Cut by `layer_weights`; DeepSpeed's own way builds every layer to count it."""
        self.parts = partition_balanced(weights=self._weights, num_parts=self.num_stages)
        self._set_bounds(start=self.parts[self.stage_id], stop=self.parts[self.stage_id + 1])


def with_weight(normed: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The two outputs of the last stage: (B, M, D) and the head's weight (V, D), an alias of it.

    DeepSpeed makes ready for a backward when the first gradient reaches an output of its module. Used as it is, the
    weight would get its own before that, and in bf16 lose it.
    """
    return normed, weight.view_as(weight)


def _second_use(embedding: EmbeddingStage, normed: Tensor) -> tuple[Tensor, Tensor]:
    """The embedding in the head's place."""
    return with_weight(normed, embedding.get_parameter("embed_tokens.weight"))


def layer_weights(config: OrthrosConfig) -> list[int]:
    """Parameters of each entry: embedding, layers, final norm, and the head, which costs the same when it is tied."""
    H, G, d = config.head_shape
    D, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
    layer = D * (2 * H * d + 2 * G * d) + 3 * D * F
    return [V * D, *[layer] * config.num_hidden_layers, D, V * D]


def canonical_name(name: str) -> str:
    """A parameter's name in OrthrosForCausalLM: "3.mlp.up_proj.weight" -> "model.layers.2.mlp.up_proj.weight"."""
    if name.startswith(f"tied_modules.{TIED}."):
        return "model." + name.removeprefix(f"tied_modules.{TIED}.")
    index, rest = name.split(".", 1)
    if rest.startswith("lm_head."):
        return rest
    if re.match(r"(embed_tokens|norm)\.", rest):
        return f"model.{rest}"
    return f"model.layers.{int(index) - 1}.{rest}"
