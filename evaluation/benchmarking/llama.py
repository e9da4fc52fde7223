"""transformers' LlamaForCausalLM, called as our arms are, and what it computes in exact FLOPs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache, DynamicCache

from orthros_train.conversion.to_llama import llama_config
from orthros_train.errors import InputError
from orthros_train.model import OrthrosConfig
from orthros_train.model.flops import Flops, forward_flops, prefill_flops


class PeerForCausalLM(LlamaForCausalLM):
    """LlamaForCausalLM with the two calls that an OrthrosForCausalLM has besides `forward`.

    transformers picks the loss by the end of the class's name.
    """

    @torch.no_grad()
    def prefill(self, input_ids: Tensor) -> tuple[Tensor, Cache]:
        """`input_ids` (B, T) -> logits (B, vocab) of the last token, and the cache."""
        output = self(input_ids, use_cache=True, logits_to_keep=1)
        return output.logits[:, 0], output.cache

    @torch.no_grad()
    def decode(self, token_ids: Tensor, cache: Cache) -> Tensor:
        """`token_ids` (B,) -> logits (B, vocab) of what follows; extends the cache."""
        return self(token_ids[:, None], cache=cache, use_cache=True).logits[:, 0]


def peer_config(transformer: OrthrosConfig) -> LlamaConfig:
    """The Llama that the transformer arm equals, attending by PyTorch's scaled_dot_product_attention.

    Raises:
        InputError: it has biases or norms that a Llama has not.
    """
    content: dict[str, Any] = llama_config(transformer, "the command line")
    config = AutoConfig.for_model(**content, attn_implementation="sdpa")
    if not isinstance(config, LlamaConfig):
        raise InputError(f"a {config.model_type} is no Llama; leave llama out of --arms")
    return config


def llama_prefill_flops(transformer: OrthrosConfig, length: int) -> Flops:
    """What LlamaForCausalLM computes of a prompt of `length` tokens: the last layer at every position, though only the
    last one's logits are asked for."""
    return replace(forward_flops(transformer, [length]), head=prefill_flops(transformer, length).head)


def filled_llama_cache(config: LlamaConfig, keys: Tensor, values: Tensor) -> DynamicCache:
    """A cache that holds the same `keys` and `values` (B, G, S, d) in every layer."""
    cache = DynamicCache(config=config)
    for layer in range(config.num_hidden_layers):
        cache.update(keys, values, layer)
    return cache
