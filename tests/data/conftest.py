"""Small corpora and the configs that read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from orthros_train.config import Config, TokenizerSection
from orthros_train.data.documents import DocumentFormat
from orthros_train.data.preprocessing import preprocess
from orthros_train.data.sources import file_sources

MakeCorpus = Callable[..., Path]
MakeConfig = Callable[..., Config]


@pytest.fixture
def make_corpus(tmp_path: Path) -> MakeCorpus:
    """`make_corpus(name, texts)` preprocesses texts with the byte tokenizer and returns the prefix."""

    def make(name: str, texts: Sequence[str]) -> Path:
        source = tmp_path / f"{name}.jsonl"
        source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        preprocess(file_sources([source], DocumentFormat()), TokenizerSection(), tmp_path / "corpora" / name)
        return tmp_path / "corpora" / name

    return make


@pytest.fixture
def make_config(tmp_path: Path) -> MakeConfig:
    """`make_config(train=[(prefix, weight), …], **overrides)`; overrides are `section__key=value`."""

    def make(train: Sequence[tuple[Path, float]], **overrides: Any) -> Config:
        values: dict[str, Any] = {
            "output_dir": str(tmp_path / "run"),
            "model": {
                "hidden_size": 8,
                "intermediate_size": 8,
                "num_hidden_layers": 1,
                "num_attention_heads": 1,
            },
            "data": {"train": [{"prefix": str(prefix), "weight": weight} for prefix, weight in train]},
            "train": {"steps": 10, "micro_batch_size": 1, "global_batch_size": 1, "sequence_length": 16},
        }
        for name, value in overrides.items():
            section, key = name.split("__")
            values[section][key] = value
        return Config.model_validate(values)

    return make
