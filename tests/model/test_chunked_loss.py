"""The loss without logits against the loss from logits: values and every gradient."""

import pytest
import torch

from orthros_train.model import OrthrosForCausalLM
from orthros_train.model.chunked_loss import TokenLoss, chunked_loss_sum
from tests.model.largest_logits import LargestLogits
from tests.model.tiny import SHAPE, assert_close, tiny_config, tiny_model, token_ids

TOKENS, PIECE = 4, 3  # tokens of a chunk and of a piece of it


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Several chunks, the last one short, and two pieces of each."""
    monkeypatch.setattr("orthros_train.model.chunked_loss.CHUNK_TOKENS", TOKENS)
    monkeypatch.setattr("orthros_train.model.chunked_loss.CPU_PIECE_LOGITS", PIECE * SHAPE["vocab_size"])


def batch():
    """Three rows of 7, some labels ignored: a chunk of them all, too."""
    ids = token_ids(3, 7)
    labels = token_ids(3, 7, seed=1)
    labels[0, :5], labels[2, 6] = -100, -100
    return {"input_ids": ids, "shift_labels": labels, "use_cache": False}


def loss_and_gradients(model, factor, **options):
    model.zero_grad()
    output = model(**batch(), **options)
    (factor * output.loss).backward()
    return output, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


OPTIONS = [
    ({}, ()),
    ({"tie_word_embeddings": True}, ()),
    ({"architecture": "transformer"}, ()),
    ({}, ("lm_head.weight",)),
    ({}, ("model",)),  # the head alone
    ({"tie_word_embeddings": True}, ("model.layers",)),
]


@pytest.mark.parametrize("items", [None, 5])
@pytest.mark.parametrize(("changes", "frozen"), OPTIONS, ids=str)
def test_equals_the_loss_from_logits(changes, frozen, items):
    model = tiny_model(**changes).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen) if frozen else True)
    expected, wanted = loss_and_gradients(model, 3.0, num_items_in_batch=items)
    actual, given = loss_and_gradients(model, 3.0, num_items_in_batch=items, return_logits=False)
    assert actual.logits is None
    assert_close(actual.loss, expected.loss)
    assert given.keys() == wanted.keys()
    for name, gradient in wanted.items():
        assert_close(given[name], gradient)
    with torch.no_grad():
        assert_close(model(**batch(), num_items_in_batch=items, return_logits=False).loss, expected.loss)


def test_half_precision_sums_in_single():
    """bf16 logits and products, float32 losses and sums: within bf16's rounding of float32, and a float32 loss."""
    exact = tiny_model(torch.float32, initializer_range=0.1).train()
    half = tiny_model(torch.bfloat16, initializer_range=0.1).train()
    expected, wanted = loss_and_gradients(exact, 1.0, return_logits=False)
    actual, given = loss_and_gradients(half, 1.0, return_logits=False)
    assert actual.loss.dtype == torch.float32
    assert_close(actual.loss, expected.loss, 2e-2)
    assert given["lm_head.weight"].dtype == torch.bfloat16
    assert_close(given["lm_head.weight"].float(), wanted["lm_head.weight"], 2e-2)


def test_no_token_is_a_zero_loss_with_zero_gradients():
    hidden, weight = torch.ones(2, 0, 3, requires_grad=True), torch.ones(5, 3, requires_grad=True)
    loss = chunked_loss_sum(
        hidden, weight, torch.empty(2, 0, dtype=torch.int64), TokenLoss(lambda logits, _: logits.sum(-1))
    )
    loss.backward()
    assert loss == 0
    assert hidden.grad.shape == (2, 0, 3)
    assert torch.equal(weight.grad, torch.zeros(5, 3))


def test_no_valid_label_is_a_zero_loss():
    model = tiny_model().train()
    ids = token_ids(1, 6)
    loss = model(ids, shift_labels=torch.full_like(ids, -100), use_cache=False, return_logits=False).loss
    loss.backward()
    assert loss == 0
    assert not model.lm_head.weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_change_no_bit(dtype, monkeypatch):
    """A token's slope depends on its own logits alone. Adam turns one bit of a gradient near 0 into a visible step."""
    model = tiny_model(dtype, initializer_range=0.1).train()
    expected, wanted = loss_and_gradients(model, 1.0, return_logits=False)
    monkeypatch.setattr("orthros_train.model.chunked_loss.CPU_PIECE_LOGITS", TOKENS * SHAPE["vocab_size"])
    actual, given = loss_and_gradients(model, 1.0, return_logits=False)
    assert torch.equal(actual.loss, expected.loss)
    for name, gradient in wanted.items():
        assert torch.equal(given[name], gradient), name


@pytest.mark.parametrize("return_logits", [True, False])
def test_no_more_logits_than_a_chunk_ever_exist(return_logits):
    """61 ids by 21 tokens, or by 4."""
    model = OrthrosForCausalLM(tiny_config()).train()
    with LargestLogits(PIECE) as largest:
        model(**batch(), return_logits=return_logits).loss.backward()
    assert largest.elements == SHAPE["vocab_size"] * (21 if return_logits else TOKENS)
    assert return_logits or largest.blocks == 1  # of all six chunks


def test_the_loss_alone_needs_labels():
    with pytest.raises(ValueError, match="return_logits=False asks for the loss alone"):
        tiny_model()(token_ids(1, 3), return_logits=False)
