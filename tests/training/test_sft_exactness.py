"""Output tokens at the answers alone give the loss and the gradients of output tokens everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from orthros_train.config import orthros_config
from orthros_train.data import collate
from orthros_train.data.sft import SFTData
from orthros_train.model import OrthrosForCausalLM
from tests.data.chat_tokenizers import write_tokenizer
from tests.data.chats import MODEL, sft_config, sft_data, write_chats

ARMS: dict[str, dict[str, Any]] = {
    "orthros": {},
    "sinks": {"base_sinks": 2, "num_key_value_heads": 1},
    "transformer": {"architecture": "transformer", "base_window": None},
    "sliding": {"architecture": "transformer"},
}


def data_and_model(folder: Path, arm: dict[str, Any], **options: Any) -> tuple[SFTData, OrthrosForCausalLM]:
    tokenizer = write_tokenizer(folder / "tokenizer")
    chats = write_chats(folder / "chats.jsonl", 30)
    config = sft_config(folder, tokenizer, [chats], model={**MODEL, **arm}, **options)
    model = OrthrosForCausalLM(orthros_config(config, 260))
    model.reset_parameters(3)
    return sft_data(config), model.double()


def loss_and_gradients(model: OrthrosForCausalLM, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("arm", ARMS)
@pytest.mark.parametrize("packing", [True, False])
def test_equal_to_copies_everywhere(tmp_path: Path, arm: str, packing: bool) -> None:
    data, model = data_and_model(tmp_path, ARMS[arm], sft__packing=packing)
    samples = [data.sample(index) for index in range(4)]
    most = max(data.output_count(index) for index in range(4))
    loss, gradients = loss_and_gradients(model, collate(samples, most + 5))
    full_loss, full_gradients = loss_and_gradients(model, collate(samples))
    assert abs(loss - full_loss) <= 1e-9
    for name, gradient in gradients.items():
        assert (gradient - full_gradients[name]).abs().max() <= 1e-9, name


def test_a_packed_row_is_its_conversations(tmp_path: Path) -> None:
    """The loss of a packed row is the sum over its conversations, each alone in its row."""
    data, model = data_and_model(tmp_path, {"base_sinks": 1}, sft__packing=True)
    sample = data.sample(0)
    assert sample.document_ids is not None
    batch = collate([sample], data.output_count(0))
    with torch.no_grad():
        together = model(**batch, num_items_in_batch=1, use_cache=False).loss
        alone = torch.zeros_like(together)
        for document in range(int(sample.document_ids.max())):
            part = torch.from_numpy(sample.document_ids == document)
            ids, labels = (torch.from_numpy(each)[part][None] for each in (sample.input_ids, sample.shift_labels))
            alone += model(input_ids=ids, shift_labels=labels, num_items_in_batch=1, use_cache=False).loss
    assert sample.document_ids.max() >= 2
    assert abs(together - alone) <= 1e-9
