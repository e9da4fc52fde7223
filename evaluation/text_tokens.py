"""A text as token ids for scoring: BOS as the tokenizer adds it, and never twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from orthros_train.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def prefix_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The context of a text that has none: BOS, or EOS where the tokenizer has no BOS.

    Raises InputError for a tokenizer without both.
    """
    token = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    if token is None:
        raise InputError(
            f"the tokenizer of {tokenizer.name_or_path} names neither BOS nor EOS; set eos_token in its "
            "tokenizer_config.json"
        )
    return int(token)


def encode(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    add_bos: bool | None = None,
    add_special_tokens: bool | None = None,
) -> list[int]:
    """Ids of a text.

    Args:
        tokenizer: of the model.
        text: to encode.
        add_bos: whether texts begin with BOS, unless they are spelled with it; None: as the tokenizer does by itself.
            True puts it before texts of a tokenizer that adds none, too.
        add_special_tokens: whether this text gets any, spelled or not.
    """
    if add_special_tokens is None:
        spelled = text.startswith(str(tokenizer.decode([prefix_token(tokenizer)])))
        add_special_tokens = False if spelled else add_bos
    options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
    tokens = list(tokenizer.encode(text, **options))
    lacks_bos = add_bos and add_special_tokens and tokens[:1] != [tokenizer.bos_token_id]
    return [int(tokenizer.bos_token_id), *tokens] if lacks_bos else tokens


def whole_text(tokenizer: PreTrainedTokenizerBase, text: str, add_bos: bool | None = None) -> list[int]:
    """The ids that a rolling log-likelihood predicts and counts.

    A prefix token at the beginning is left out: it is the context of what follows it.
    """
    tokens = encode(tokenizer, text, add_bos)
    return tokens[1:] if tokens[:1] == [prefix_token(tokenizer)] else tokens
