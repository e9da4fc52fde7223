"""Small model folders for the evaluation's tests: random weights, a byte tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from orthros_train.data.tokenizers import ByteTokenizer
from orthros_train.model import OrthrosConfig, OrthrosForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}


def tiny_orthros(architecture: str = "orthros", **changes: Any) -> OrthrosForCausalLM:
    """A model in float64 whose affines are not the identity and whose logits differ clearly."""
    window = 5 if architecture == "orthros" else None
    config = OrthrosConfig(**{**SIZES, "architecture": architecture, "base_window": window, **changes})
    generator = torch.Generator().manual_seed(0)
    model = OrthrosForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.1)
    return model


def save_orthros(folder: Path, **changes: Any) -> Path:
    """An Orthros folder with a byte tokenizer, in float32."""
    tiny_orthros(**changes).float().save_pretrained(folder)
    ByteTokenizer().save_pretrained(folder)
    return folder


def save_llama(folder: Path, **changes: Any) -> Path:
    """A Llama folder as transformers writes it, with a byte tokenizer, in float32."""
    torch.manual_seed(1)
    config = LlamaConfig(**{**SIZES, "initializer_range": 0.15, **changes})
    LlamaForCausalLM(config).save_pretrained(folder)
    ByteTokenizer().save_pretrained(folder)
    return folder


def save_merging_tokenizer(folder: Path, adds_bos: bool) -> Path:
    """Replace a folder's tokenizer by byte-level BPE with merges (at most 320 ids), which may add BOS by itself."""
    text = ["the cat sat on the mat and the dog sat on the cat", "then there was another thing on the mat"] * 20
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    )
    if adds_bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer.save_pretrained(folder)
    return folder
