"""The files beside the weights that come along unchanged: tokenizer, chat template, generation settings, license."""

from __future__ import annotations

import shutil
from pathlib import Path

PATTERNS = (
    "tokenizer*", "tokenization_*.py", "*.model", "*.tiktoken", "tekken.json", "vocab.*", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "chat_template*", "generation_config.json",
    "LICENSE*", "NOTICE*", "USE_POLICY*",
)  # fmt: skip
FOLDERS = ("additional_chat_templates",)


def copy_companions(source: Path, target: Path) -> list[str]:
    """Copy what `source` has of these, byte for byte; returns the names. Raises OSError."""
    names = sorted({path.name for pattern in PATTERNS for path in source.glob(pattern) if path.is_file()})
    for name in names:
        shutil.copyfile(source / name, target / name)
    for folder in FOLDERS:
        if (source / folder).is_dir():
            shutil.copytree(source / folder, target / folder)
            names.append(folder)
    return names
