"""A real checkpoint, there and back: SmolLM2-135M-Instruct against transformers on real text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from evaluation.demo.text import shakespeare
from orthros_train.conversion.from_llama import OrthrosForm, to_orthros
from orthros_train.conversion.smollm2 import smollm2_folder
from orthros_train.conversion.to_llama import to_llama

CACHE = Path(__file__).parents[2] / ".cache"
PASSAGES, PASSAGE_TOKENS = 20, 200
PROMPTS, PROMPT_TOKENS, CONTINUATION_TOKENS = 10, 32, 50

pytestmark = pytest.mark.evidence


@dataclass(frozen=True)
class Converted:
    source: Path
    orthros: Path
    theirs: PreTrainedModel
    ours: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    passages: torch.Tensor  # (20, 200) ids


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    source, orthros = smollm2_folder(CACHE), tmp_path_factory.mktemp("smollm2") / "orthros"
    to_orthros(source, orthros, OrthrosForm(base_window=512), max_shard_size="100MB")
    tokenizer = AutoTokenizer.from_pretrained(orthros)
    text = "\n".join(shakespeare(CACHE)[1].values())
    starts = range(len(text) // (PASSAGES + 1), len(text), len(text) // (PASSAGES + 1))
    rows = [tokenizer(text[start : start + 20 * PASSAGE_TOKENS]).input_ids for start in starts]
    passages = torch.tensor([row[:PASSAGE_TOKENS] for row in rows[:PASSAGES]])
    theirs, ours = (
        AutoModelForCausalLM.from_pretrained(each, dtype=torch.float32).eval() for each in (source, orthros)
    )
    assert type(ours).__name__ == "OrthrosForCausalLM"
    return Converted(source, orthros, theirs, ours, tokenizer, passages)


@torch.no_grad()
def test_logits_on_real_passages(smollm2: Converted) -> None:
    assert smollm2.passages.shape == (PASSAGES, PASSAGE_TOKENS)
    worst = 0.0
    for passage in smollm2.passages:
        difference = smollm2.ours(passage[None]).logits - smollm2.theirs(passage[None]).logits
        worst = max(worst, float(difference.abs().max()))
    print(f"largest difference of a logit on {PASSAGES} passages of {PASSAGE_TOKENS} tokens: {worst:.2e}")
    assert worst <= 1e-3


@torch.no_grad()
def test_greedy_continuations(smollm2: Converted) -> None:
    options = {"max_new_tokens": CONTINUATION_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 2}
    for prompt in smollm2.passages[:PROMPTS, None, :PROMPT_TOKENS]:
        theirs = smollm2.theirs.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        ours = smollm2.ours.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        assert ours.shape == (1, PROMPT_TOKENS + CONTINUATION_TOKENS)
        assert torch.equal(ours, theirs)
    print(smollm2.tokenizer.decode(ours[0]))


def test_there_and_back_is_bitwise(smollm2: Converted) -> None:
    back = smollm2.orthros.parent / "back"
    to_llama(smollm2.orthros, back)
    assert len(list(smollm2.orthros.glob("*.safetensors"))) > 1
    before, after = load_file(smollm2.source / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(tensor.dtype == after[name].dtype for name, tensor in before.items())
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert json.loads((back / "config.json").read_text()) == json.loads((smollm2.source / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (back / name).read_bytes() == (smollm2.source / name).read_bytes()


def test_the_tokenizer_takes_digits_one_by_one(smollm2: Converted) -> None:
    text = "In 2018, 12345 people visited.\n\tdéjà vu 你好"
    ids = smollm2.tokenizer(text).input_ids
    assert smollm2.tokenizer.decode(ids) == text
    assert sum(token.isdigit() for token in smollm2.tokenizer.convert_ids_to_tokens(ids)) == len("201812345")
