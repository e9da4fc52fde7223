"""Small random models of the Llama family, saved by transformers as users find them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def source_model(family: str = "llama", dtype: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    """A model of `family` whose norms and biases are away from their starting values."""
    if family in ("mistral", "qwen2", "qwen3"):
        options.setdefault("sliding_window", None)
    config = AutoConfig.for_model(family, **{**SHAPE, **options}, dtype=dtype)
    torch.manual_seed(0)
    model: PreTrainedModel = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.to(dtype)


def save_source(folder: Path, family: str = "llama", max_shard_size: str = "5GB", **options: Any) -> Path:
    """Save such a model; returns the folder."""
    source_model(family, **options).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def save_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """A byte tokenizer of 259 ids with a chat template, saved as users find it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: index for index, symbol in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    backend = Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False, **special)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return tokenizer


def edit_json(path: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Change keys of a JSON object in a file."""
    content = json.loads(path.read_text())
    content = {key: value for key, value in {**content, **changes}.items() if key not in remove}
    path.write_text(json.dumps(content))


def load(folder: Path) -> PreTrainedModel:
    """The model of a folder in its saved dtype."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    return model.eval()
