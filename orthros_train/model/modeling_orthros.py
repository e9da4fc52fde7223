"""The Orthros model: pretraining, fine-tuning, prefill, decoding and scoring are one forward.

They differ in where the output tokens stand and in whether a cache goes before them:

    use                  base tokens              output positions               cache
    pretraining          all T                    every position                 none
    fine-tuning          all T                    those that predict an answer   none
    prefill              the prompt               its last position              written
    decoding step        the new token            the new token                  read and extended
    scoring              context + continuation   those that predict it          reusable per context

Shapes: B batch, T base tokens, M output tokens, D width.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel

from .attention import QueryAffine
from .attention_kernels import choose_kernel
from .chunked_loss import TokenLoss
from .configuration_orthros import OrthrosConfig
from .kv_cache import KVCache
from .layer_factory import IGNORE_INDEX, LayerFactory, RMSNorm
from .layers import OrthrosLayer
from .rope import RotaryEmbedding
from .row_alignment import RowAlignment, check_output_positions, shift_labels_for
from .stream_layout import OutputColumns, take_tokens
from .stream_plan import plan_streams

# Tokens that a prefill runs at a time, all rows together
CPU_CHUNK_TOKENS = 1024  # with the FFN's activations of more tokens, weights and they leave the caches
DEVICE_CHUNK_TOKENS = 16384  # elsewhere: activations stay bounded, and there is enough work for any device


@dataclass
class OrthrosOutput(CausalLMOutputWithPast):
    """`loss`, `logits` (B, M, vocab) unless the loss alone was asked for, and `cache`, also under its older name."""

    @property
    def past_key_values(self) -> Cache | None:
        """The cache."""
        return self.cache


class OrthrosPreTrainedModel(PreTrainedModel):
    """What transformers needs to know of both classes below."""

    config: OrthrosConfig
    config_class = OrthrosConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["OrthrosLayer"]  # noqa: RUF012 - transformers' own convention
    _supports_sdpa = True

    def _init_weights(self, module: nn.Module) -> None:
        """Values of what a checkpoint lacks: a Llama's has no affines, which start as the identity."""
        if isinstance(module, nn.Linear | nn.Embedding):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, QueryAffine):
            init.ones_(module.gain)
            init.zeros_(module.shift)


class OrthrosModel(OrthrosPreTrainedModel):
    """Embedding, layers and final norm, on left-aligned rows (`stream_plan.py`)."""

    def __init__(self, config: OrthrosConfig, factory: LayerFactory | None = None) -> None:
        super().__init__(config)
        factory = factory or LayerFactory(config)
        self.streams = factory.streams
        self.embed_tokens = factory.embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(OrthrosLayer(config, index, factory) for index in range(config.num_hidden_layers))
        self.norm = factory.norm(config.hidden_size, on="tokens")
        self.rotary_emb = RotaryEmbedding(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        output_columns: OutputColumns = None,
        counts: Tensor | None = None,
        document_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: KVCache | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor:
        """norm_f(Y^L): the final vector of each output token.

        Args:
            input_ids: (B, T) int64, left-aligned rows.
            output_columns: None for an output token at every column, n for the last n, or columns (B, M) with -1 for
                unused slots.
            counts: (B,) real tokens of each row; None: all T.
            document_ids: (B, T) int64, a segment ends where the value changes; not together with a cache.
            position_ids: (B, T) int64 RoPE positions; None: counted from the segment's start.
            cache: read, and extended by the T base tokens.
            inputs_embeds: (B, T, D) instead of input_ids.

        Returns:
            (B, M, D) in the model's dtype.
        """
        base = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds  # X (B, T, D)
        if cache is not None:
            cache.begin(base.shape[0], base.shape[1], counts, base.device)
        plan = plan_streams(
            self.config,
            self.rotary_emb,
            self._kernel(base),
            batch_size=base.shape[0],
            base_tokens=base.shape[1],
            dtype=base.dtype,
            device=base.device,
            output_columns=output_columns,
            counts=counts,
            document_ids=document_ids,
            position_ids=position_ids,
            cache=cache,
        )
        two_streams = self.config.architecture == "orthros"
        residual = self.streams.join(base, take_tokens(base, output_columns) if two_streams else None)  # [X;Y]
        for layer in self.layers:
            residual = layer(residual, plan, cache=cache)
        if cache is not None:
            cache.commit()
        return self.norm(residual)  # (B, M, D)

    def _kernel(self, base: Tensor) -> str:
        requested = self.config.attention_kernel
        if requested == "auto" and self.config._attn_implementation == "eager":
            requested = "eager"
        gradients = torch.is_grad_enabled() and (base.requires_grad or self.training)
        return choose_kernel(requested, base.device, base.dtype, gradients, self.config.head_shape[2])


class OrthrosForCausalLM(OrthrosPreTrainedModel, GenerationMixin):
    """The language model: logits at the output positions, prefill and decoding over a KVCache, `generate`.

    Args:
        config: the model's.
        factory: builds its layers; None: plain PyTorch.
    """

    accepts_loss_kwargs = True  # transformers' Trainer then divides the loss by the labels of all accumulated batches
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - transformers' own convention

    def __init__(self, config: OrthrosConfig, factory: LayerFactory | None = None) -> None:
        super().__init__(config)
        self.factory = factory or LayerFactory(config)
        self.model = OrthrosModel(config, self.factory)
        self.lm_head = self.factory.head(config.hidden_size, config.vocab_size)
        self.post_init()

    @torch.no_grad()
    def reset_parameters(self, seed: int) -> None:
        """Draw every parameter from a generator seeded by (seed, its name), so that equal names start equal.

        Matrices are normal with `initializer_range`, norms and gains 1, biases and shifts 0. Two models that share a
        parameter's name and shape share its values, whatever else they contain: both arms start from the same weights.
        """
        for name, parameter in self.named_parameters():
            self.factory.reset_parameter(name, parameter, seed)

    def forward(
        self,
        input_ids: Tensor | None = None,
        output_positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        cache: KVCache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        inputs_embeds: Tensor | None = None,
        return_dict: bool | None = None,
        shift_labels: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        past_key_values: KVCache | None = None,
        return_logits: bool = True,
        token_loss: TokenLoss | None = None,
    ) -> OrthrosOutput | tuple[Any, ...]:
        """Logits at the output positions, and their loss where labels are given.

        Args:
            input_ids: (B, T) int64.
            output_positions: (B, M) int64 columns of this call's input_ids, strictly increasing in a row, -1 only at
                its end, whose logits are finite and without meaning: no loss, no gradient. None: every column; the
                same then goes for logits of padding.
            document_ids: (B, T) int64; a segment ends where the value changes.
            attention_mask: (B, at least T), 0 marks padding on the left or right; the last T columns are this call's.
            position_ids: (B or 1, T) int64 RoPE positions; None: counted within the segment, padding left out.
            labels: (B, T) int64, unshifted: output i is scored on labels[p_i + 1] unless that is -100, padding, or in
                another segment.
            cache: a KVCache, read and extended. `past_key_values` is the same argument.
            use_cache: return a KVCache. None: config.use_cache, but not while gradients are on or documents are packed.
            logits_to_keep: n > 0 asks for the last n columns instead of output_positions.
            inputs_embeds: (B, T, D) instead of input_ids.
            return_dict: False returns a tuple.
            shift_labels: (B, M) int64, the label of each output slot, instead of labels.
            num_items_in_batch: divide the summed loss by this number; None: by the number of valid labels.
            return_logits: False asks for the loss alone, as training does: it is then computed in chunks of tokens
                (`chunked_loss.py`), and logits are None.
            token_loss: of each token, instead of cross entropy; with return_logits=False.

        Returns:
            loss (scalar, at least float32) or None, logits (B, M, vocab) or None, cache.

        Raises:
            ValueError: arguments that contradict each other.
        """
        if use_cache is None:
            use_cache = self.config.use_cache and document_ids is None and not torch.is_grad_enabled()
        cache = self._cache_argument(cache, past_key_values, use_cache)
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if (input_ids is None) == (inputs_embeds is None) or tokens is None or tokens.shape[1] == 0:
            raise ValueError("give either input_ids or inputs_embeds, with at least one token")
        if document_ids is not None and cache is not None:
            raise ValueError("packed documents have no cache; pass use_cache=False or leave document_ids out")
        if output_positions is not None and logits_to_keep:
            raise ValueError("give either output_positions or logits_to_keep")
        if logits_to_keep < 0:
            raise ValueError(f"logits_to_keep={logits_to_keep} must not be negative")
        if labels is not None and shift_labels is not None:
            raise ValueError("give either labels or shift_labels")
        if not return_logits and labels is None and shift_labels is None:
            raise ValueError("return_logits=False asks for the loss alone; give labels or shift_labels")
        if return_logits and token_loss is not None:
            raise ValueError("token_loss is computed without logits; pass return_logits=False")
        if output_positions is not None:
            check_output_positions(output_positions, tokens.shape[1])

        columns: OutputColumns = min(logits_to_keep, tokens.shape[1]) or output_positions
        alignment = RowAlignment.of(attention_mask, tokens.shape[0], tokens.shape[1])
        if alignment is None:
            hidden = self.model(input_ids, columns, None, document_ids, position_ids, cache, inputs_embeds)
        else:
            ids, embeds, documents, positions = map(
                alignment.align, (input_ids, inputs_embeds, document_ids, position_ids)
            )
            aligned, restore = alignment.output_columns(columns)
            hidden = restore(self.model(ids, aligned, alignment.counts, documents, positions, cache, embeds))
        if labels is not None:
            shift_labels = shift_labels_for(labels, columns, document_ids, attention_mask)
        logits = self.lm_head(hidden) if return_logits else None  # (B, M, vocab)
        items = num_items_in_batch
        loss = None if shift_labels is None else self._loss(hidden, logits, shift_labels, items, token_loss)
        output = OrthrosOutput(loss=loss, logits=logits, cache=cache)
        return output if return_dict is None or return_dict else output.to_tuple()

    @torch.no_grad()
    def prefill(
        self,
        input_ids: Tensor,
        lengths: Tensor | None = None,
        chunk_size: int | None = None,
        capacity: int | None = None,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, KVCache]:
        """Write the cache of prompts and score what follows them.

        Args:
            input_ids: (B, T) int64 prompts, or what follows the tokens of `cache`, padded on the right.
            lengths: (B,) int64, tokens of each prompt, at least 1; None: all T.
            chunk_size: run this many columns at a time, with the same result: peak memory above the weights is the
                cache and what a chunk needs. T runs all at once. None: columns of `CPU_CHUNK_TOKENS` tokens on a CPU,
                which is faster than all at once, and of `DEVICE_CHUNK_TOKENS` elsewhere, but all at once there
                without a window: PyTorch's causal kernels take no chunk behind a cache.
            capacity: positions to allocate, the prompt's and those to decode; None: the prompt's and room for some
                hundred more. A cache grows by itself, but has to be copied for that.
            cache: read, and extended by the T tokens, such as a prefix that several prompts share; None: a new one.

        Returns:
            logits (B, vocab) of each row's last token, which score the first continuation token, and the cache.

        Raises:
            ValueError: an empty prompt or chunk, or a capacity for a cache that has its own.
            TypeError: another class of cache.
        """
        B, T = input_ids.shape
        if T == 0 or (lengths is not None and not bool(((lengths >= 1) & (lengths <= T)).all())):
            raise ValueError(f"every prompt needs at least one and at most {T} tokens")
        if chunk_size is not None and chunk_size < 1:
            raise ValueError(f"chunk_size={chunk_size} must be at least 1")
        if cache is not None and capacity is not None:
            raise ValueError("capacity is that of a new cache; give it to KVCache, or leave cache out")
        if chunk_size is None:
            chunk_size = self._chunk_columns(B, T, input_ids.device)
        cache = self._cache_argument(cache, None, use_cache=False)
        cache = KVCache(self.config, capacity=capacity or 0) if cache is None else cache
        cache.reserve(T)
        with cache.all_or_nothing():
            return self._prefill_chunks(input_ids, lengths, chunk_size, cache), cache

    def _prefill_chunks(self, input_ids: Tensor, lengths: Tensor | None, chunk_size: int, cache: KVCache) -> Tensor:
        """Logits (B, vocab) of each row's last token."""
        B, T = input_ids.shape
        last = torch.full((B,), T, device=input_ids.device) if lengths is None else lengths.to(input_ids.device)
        logits: Tensor | None = None
        for start in range(0, T, chunk_size):
            chunk = input_ids[:, start : start + chunk_size]
            here = last - 1 - start  # column of each row's last token in this chunk
            ends = (here >= 0) & (here < chunk.shape[1])
            columns: OutputColumns = torch.where(ends, here, -1)[:, None]
            if lengths is None:
                columns = 1 if start + chunk.shape[1] == T else 0
            elif not bool(ends.any()):
                columns = 0
            counts = None if lengths is None else (last - start).clamp(0, chunk.shape[1])
            hidden = self.model(chunk, columns, counts, cache=cache)
            if hidden.shape[1]:
                chunk_logits = self.factory.whole_vocabulary(self.lm_head(hidden[:, 0]))  # (B, vocab)
                logits = chunk_logits if logits is None else torch.where(ends[:, None], chunk_logits, logits)
        assert logits is not None
        return logits

    def _chunk_columns(self, rows: int, columns: int, device: torch.device) -> int:
        """Columns of a prefill's chunk where the caller names none."""
        if device.type != "cpu" and self.config.base_window is None:
            return columns
        return max(1, (CPU_CHUNK_TOKENS if device.type == "cpu" else DEVICE_CHUNK_TOKENS) // rows)

    @torch.no_grad()
    def decode(self, token_ids: Tensor, cache: KVCache) -> Tensor:
        """Append one token a row: `token_ids` (B,) int64 -> logits (B, vocab) of what follows; extends the cache."""
        return self.factory.whole_vocabulary(self.lm_head(self.model(token_ids[:, None], cache=cache)[:, 0]))

    def _loss(
        self,
        hidden: Tensor,
        logits: Tensor | None,
        shift_labels: Tensor,
        items: int | Tensor | None,
        token_loss: TokenLoss | None,
    ) -> Tensor:
        if logits is None:
            # A call of the module: ZeRO-3 gathers its weight around it
            total = self.lm_head(hidden, shift_labels, token_loss)
        else:
            total = self.factory.cross_entropy(logits, shift_labels).sum()
        if items is None:
            items = (shift_labels != IGNORE_INDEX).sum().clamp(min=1)
        return total / items

    def _cache_argument(
        self, cache: KVCache | None, past_key_values: KVCache | None, use_cache: bool
    ) -> KVCache | None:
        if cache is not None and past_key_values is not None:
            raise ValueError("cache and past_key_values are the same argument; give one")
        cache = past_key_values if cache is None else cache
        if cache is not None and not isinstance(cache, KVCache):
            raise TypeError(f"Orthros reads and writes a KVCache, not a {type(cache).__name__}; pass KVCache(config)")
        return KVCache(self.config) if cache is None and use_cache else cache

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        inputs_embeds: Tensor | None = None,
        tokenizer: Any = None,
        assistant_tokenizer: Any = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """transformers' own, less the tokenizers that `generate` hands on for its stopping criteria."""
        return super().prepare_inputs_for_generation(input_ids, inputs_embeds=inputs_embeds, **kwargs)

    def _prepare_cache_for_generation(  # type: ignore[override]
        self,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> None:
        """Give `generate` a KVCache instead of transformers' default, sized for the whole generation."""
        if generation_config.cache_implementation not in (None, "dynamic"):
            raise ValueError("Orthros has one cache, KVCache; leave cache_implementation out")
        if generation_config.use_cache and model_kwargs.get("cache") is None:
            model_kwargs["cache"] = KVCache(self.config, capacity=max_cache_length)
        elif model_kwargs.get("cache") is not None:
            model_kwargs["cache"]._is_user_defined = True
