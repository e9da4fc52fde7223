"""What a run's checkpoints say about generation, from the folder that it starts from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orthros_train.errors import InputError
from orthros_train.training.generation_settings import generation_settings

SPECIAL = {"bos_token_id": 1, "eos_token_id": 5}


def settings(folder: Path, config: dict[str, Any], generation: Any = None) -> tuple[dict[str, Any], Any]:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return generation_settings(folder, SPECIAL)


def test_a_model_from_scratch_has_the_tokenizers_tokens() -> None:
    assert generation_settings(None, SPECIAL) == (SPECIAL, None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 5),
        ({"eos_token_id": None}, 5),
        ({"eos_token_id": 5}, 5),
        ({"eos_token_id": [4, 5, 6]}, [4, 5, 6]),
        ({"eos_token_id": 4}, [5, 4]),  # of a base model that learns to chat
        ({"eos_token_id": [4, 6]}, [5, 4, 6]),
    ],
)
def test_every_end_of_a_text_is_kept(tmp_path: Path, given: dict[str, Any], expected: Any) -> None:
    assert settings(tmp_path, given) == ({"bos_token_id": 1, "eos_token_id": expected}, None)
    config, generation = settings(tmp_path, {}, {**given, "top_p": 0.9})
    assert config == SPECIAL
    assert generation == {"bos_token_id": 1, "eos_token_id": expected, "top_p": 0.9}


def test_the_two_files_keep_lists_of_their_own(tmp_path: Path) -> None:
    """Qwen's config.json names one end, its generation_config.json two; one that names none has those of the config."""
    config, generation = settings(tmp_path, {"eos_token_id": 5}, {"eos_token_id": [5, 6]})
    assert (config["eos_token_id"], generation["eos_token_id"]) == (5, [5, 6])
    assert settings(tmp_path, {"eos_token_id": [5, 7]}, {"top_k": 20})[1]["eos_token_id"] == [5, 7]


def test_a_tokenizer_without_an_end(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"eos_token_id": [4]}')
    assert generation_settings(tmp_path, {}) == ({"eos_token_id": 4}, None)


@pytest.mark.parametrize("wrong", ["</s>", [4, "x"], {"id": 4}, True, 1.5])
def test_what_is_no_id(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(InputError, match=r"/config.json: eos_token_id is .*, but must be a token id or a list"):
        settings(tmp_path, {"eos_token_id": wrong})
    with pytest.raises(InputError, match=r"generation_config.json: eos_token_id is "):
        settings(tmp_path, {}, {"eos_token_id": wrong})


def test_a_damaged_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"generation_config.json holds a JSON list where an object is expected"):
        settings(tmp_path, {}, [3])
