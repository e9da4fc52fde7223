"""A tiny model memorises a fixed batch, in both arms and with output tokens at answers only."""

import pytest
import torch

from orthros_train.model import OrthrosForCausalLM
from tests.model.tiny import tiny_config, token_ids


@pytest.mark.parametrize(
    ("architecture", "answers_only"), [("orthros", False), ("transformer", False), ("orthros", True)]
)
def test_a_fixed_batch_is_memorised(architecture, answers_only):
    model = OrthrosForCausalLM(tiny_config(architecture=architecture, initializer_range=0.1))
    model.reset_parameters(seed=0)
    ids = token_ids(4, 16)
    positions = torch.tensor([[3, 4, 9, 10, 11]] * 4) if answers_only else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(120):
        loss = model(ids, output_positions=positions, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.05
