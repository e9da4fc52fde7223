"""Text that follows prompts, until a stop string: batches of ragged prompts, long ones prefilled in chunks.

Decoding itself is transformers' `generate`, so every option of it works.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import StoppingCriteria

from evaluation.scoring import CHUNK_SIZE
from evaluation.text_stream import cut_at_stop
from orthros_train.model import KVCache, OrthrosForCausalLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class StopStrings(StoppingCriteria):
    """Ends each row on its own as soon as its new text contains a stop string.

    Args:
        tokenizer: decodes the new tokens.
        stops: strings, possibly spanning tokens.
        prompt_columns: columns of the batch that are prompt.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], prompt_columns: int) -> None:
        self._tokenizer, self._stops, self._start = tokenizer, tuple(stops), prompt_columns

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """(B,) bool: rows that are done."""
        texts = self._tokenizer.batch_decode(input_ids[:, self._start :])
        done = [cut_at_stop(text, self._stops)[1] for text in texts]
        return torch.tensor(done, device=input_ids.device)


@torch.no_grad()
def continue_prompts(
    model: OrthrosForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    stops: Sequence[str],
    max_new_tokens: int,
    options: Mapping[str, Any],
    chunk_size: int = CHUNK_SIZE,
) -> list[str]:
    """The text after each prompt, special tokens left out, uncut: a stop string may still be in it.

    Args:
        model: either arm.
        tokenizer: of the model.
        prompts: token ids, at least one each.
        stops: strings that end a row.
        max_new_tokens: most tokens of a row.
        options: further arguments of `generate`, such as do_sample and temperature.
        chunk_size: columns of one forward over long prompts.
    """
    width = max(map(len, prompts))
    pad = next((each for each in (tokenizer.pad_token_id, tokenizer.eos_token_id) if each is not None), 0)
    ids = torch.tensor([[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    cache = KVCache(model.config, capacity=width + max_new_tokens)
    _write_all_but_last(model, prompts, pad, cache, chunk_size)
    sequences: Any = model.generate(
        input_ids=ids,
        attention_mask=mask,
        cache=cache,
        max_new_tokens=max_new_tokens,
        stopping_criteria=[StopStrings(tokenizer, stops, width)] if stops else None,
        pad_token_id=pad,
        **options,
    )
    return tokenizer.batch_decode(sequences[:, width:], skip_special_tokens=True)


def _write_all_but_last(
    model: OrthrosForCausalLM, prompts: Sequence[Sequence[int]], pad: int, cache: KVCache, chunk_size: int
) -> None:
    """Write the cache of the prompts in chunks, but for the last token of each, which `generate` reads itself."""
    lengths = [len(prompt) for prompt in prompts]
    width = max(lengths)
    ids = torch.tensor([[*prompt, *[pad] * (width - len(prompt))] for prompt in prompts], device=model.device)
    ragged = None if min(lengths) == width else torch.tensor(lengths, device=model.device)
    model.prefill(ids, ragged, chunk_size, cache=cache)
    cache.crop(-1)
