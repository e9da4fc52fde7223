"""A small set of conversations on disk, and configurations that train on it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orthros_train.config import Config
from orthros_train.data import load_tokenizer
from orthros_train.data.sft import SFTData

MODEL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "base_window": 8}
WORDS = ("yes", "no", "the sun", "a tree", "of course", "ten", "blue", "I do not know")


def write_chats(file: Path, count: int = 40, seed: int = 0) -> Path:
    """Conversations of one to three exchanges, a few words each, as JSON lines."""
    draw = random.Random(seed)
    lines = []
    for _ in range(count):
        messages = []
        for _ in range(draw.randint(1, 3)):
            messages.append({"role": "user", "content": " ".join(draw.choices(WORDS, k=draw.randint(1, 4))) + "?"})
            messages.append({"role": "assistant", "content": " ".join(draw.choices(WORDS, k=draw.randint(1, 3)))})
        lines.append(json.dumps({"messages": messages}))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def sft_config(output: Path, tokenizer: Path | None, chats: Sequence[Path | dict[str, Any]], **options: Any) -> Config:
    """A small run on these files, on bytes without a tokenizer.

    Options are spelled section__name=value, those of data.sft sft__name=value.
    """
    sources = [chat if isinstance(chat, dict) else {"path": str(chat)} for chat in chats]
    values: dict[str, Any] = {
        "task": "sft",
        "output_dir": str(output),
        "precision": "fp32",
        "model": {**MODEL, "max_position_embeddings": 256},
        "tokenizer": {"type": "huggingface", "path": str(tokenizer)} if tokenizer else {"type": "byte"},
        "data": {"sft": {"train": sources}, "split": [0.9, 0.1, 0.0], "output_positions_multiple": 8},
        "train": {"steps": 6, "micro_batch_size": 2, "global_batch_size": 8, "sequence_length": 128},
        "optimizer": {"learning_rate": 0.01},
        "logging": {"tensorboard": False},
        "evaluation": {"samples": 2},
    }
    for option, value in options.items():
        section, _, name = option.partition("__")
        if section == "sft":
            values["data"]["sft"][name] = value
        elif name:
            values.setdefault(section, {})[name] = value
        else:
            values[section] = value
    return Config.model_validate(values)


def sft_data(config: Config, split: Any = "train") -> SFTData:
    """The data of a configuration."""
    return SFTData(config, load_tokenizer(config.tokenizer), split)
