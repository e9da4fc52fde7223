"""Texts of a ragged batch are those of each prompt alone, whatever the chunks that write the cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from evaluation.generation import continue_prompts
from orthros_train.data.tokenizers import ByteTokenizer
from tests.evaluation.tiny_models import tiny_orthros

PROMPTS = ([104], [72, 101, 108, 108, 111], list(range(97, 120)))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    ByteTokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def texts(model: Any, tokenizer: Any, prompts: Any, chunk_size: int) -> list[str]:
    return continue_prompts(model, tokenizer, prompts, (), 6, {"do_sample": False}, chunk_size)


@pytest.mark.parametrize("architecture", ["orthros", "transformer"])
@pytest.mark.parametrize("chunk_size", [1, 4, 100])
def test_a_batch_continues_like_its_rows(architecture: str, chunk_size: int, tokenizer: Any) -> None:
    model = tiny_orthros(architecture)
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        whole = model.generate(ids, max_new_tokens=6, do_sample=False, use_cache=False, pad_token_id=258)
        expected.append(tokenizer.decode(whole[0, len(prompt) :], skip_special_tokens=True))
    assert texts(model, tokenizer, PROMPTS, chunk_size) == expected
    for prompt, text in zip(PROMPTS, expected, strict=True):
        assert texts(model, tokenizer, [prompt], chunk_size) == [text]


def test_long_prompts_are_written_in_chunks(tokenizer: Any) -> None:
    """The last token alone is computed a second time, by `generate`, which wants to read one itself."""
    model, columns = tiny_orthros(), list[int]()
    model.model.register_forward_pre_hook(lambda module, arguments: columns.append(arguments[0].shape[1]))
    texts(model, tokenizer, PROMPTS, 10)
    assert columns[:4] == [10, 10, 3, 1]
    assert set(columns[4:]) == {1}
