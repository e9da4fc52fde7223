"""What decides a score besides the task, as hashes: a record made under another of them is not reused."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

UNSCORED = ("_name_or_path", "transformers_version")  # of a configuration: where and by what it was written
STATE = ("truncation", "padding")  # of a tokenizer's backend: left by its last call


def weights_fingerprint(model: torch.nn.Module) -> str:
    """SHA-256 over all parameters, names and bits."""
    import torch  # noqa: PLC0415

    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def config_fingerprint(config: Any) -> str:
    """SHA-256 over a model's configuration: what no weight shows, such as rope_theta and rms_norm_eps."""
    return json_fingerprint({key: value for key, value in config.to_dict().items() if key not in UNSCORED})


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """SHA-256 over a tokenizer: its backend, its special tokens and its chat template."""
    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        definition: dict[str, Any] = {"class": type(tokenizer).__qualname__, "vocabulary": tokenizer.get_vocab()}
    else:
        definition = {key: part for key, part in json.loads(backend.to_str()).items() if key not in STATE}
    return json_fingerprint(
        {
            "definition": definition,
            "special_tokens": tokenizer.special_tokens_map,
            "chat_template": tokenizer.chat_template,
            "added": [getattr(tokenizer, name, None) for name in ("add_bos_token", "add_eos_token")],
            "cleans_up": getattr(tokenizer, "clean_up_tokenization_spaces", None),
        }
    )


def json_fingerprint(content: Mapping[str, Any]) -> str:
    """SHA-256 over JSON, whatever the order of its keys; what JSON does not know counts as its text."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
