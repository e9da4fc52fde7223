"""How a model generates text, carried along from the folder that training starts from.

* Its generation_config.json stays the model's, but for the special tokens, which are those of the run's tokenizer.
* A text ends at the run's own EOS and wherever the model that one started from ended it: Llama 3 Instruct has three
  such tokens, and a tokenizer names only one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orthros_train.errors import InputError
from orthros_train.model_folder.json_files import read_json_object

GENERATION_FILE = "generation_config.json"


def generation_settings(
    folder: Path | None, special: Mapping[str, int]
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What the checkpoints of a run say about generation.

    Args:
        folder: `init_from` of the run.
        special: bos_token_id, eos_token_id and pad_token_id of the run's tokenizer, as far as there are such.

    Returns:
        The special tokens for config.json, and the content of generation_config.json, None where `folder` has none.

    Raises:
        InputError: one of the two files of `folder` cannot be read, or its eos_token_id is no id.
    """
    if folder is None or not (folder / "config.json").is_file():  # whoever opens `init_from` says so
        return dict(special), None
    described = read_json_object(folder / "config.json")
    config = _with_special(special, described, folder / "config.json")
    file = folder / GENERATION_FILE
    if not file.is_file():
        return config, None
    settings = read_json_object(file)
    ends = {"eos_token_id": settings.get("eos_token_id", described.get("eos_token_id"))}
    return config, {**settings, **_with_special(special, ends, file)}


def _with_special(special: Mapping[str, int], described: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """The special tokens, the ends of a text that `described` knows among them."""
    given = described.get("eos_token_id")
    ends = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(end) is int for end in ends):
        raise InputError(f"{where}: eos_token_id is {given!r}, but must be a token id or a list of them; correct it")
    own = special.get("eos_token_id")
    if own is not None and own not in ends:
        ends = [own, *ends]
    return {**special, "eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else dict(special)
