"""Blocks of queries: how many there are, what they keep, and what they look at."""

import weakref

import pytest
import torch

from orthros_train.model import attention_kernels
from orthros_train.model import visibility as visibility_module
from orthros_train.model.visibility import MIN_BLOCK, Visibility
from tests.model.attention_reference import random_inputs
from tests.model.tiny import assert_close, tiny_model, token_ids


def contiguous(count, window, sinks, past=0):
    positions = torch.arange(past, past + count)[None]
    return Visibility(positions, torch.zeros_like(positions), window, sinks, contiguous_from=past)


@pytest.fixture
def folded(monkeypatch):
    monkeypatch.setattr(visibility_module, "FOLDED_ON", ("cpu",))


@pytest.mark.usefixtures("folded")
@pytest.mark.parametrize("sinks", [0, 1, 4])
@pytest.mark.parametrize("past", [0, 5000])
@pytest.mark.parametrize("count", [4096, 131072 + 7])
def test_a_window_is_few_calls_on_a_gpu_at_any_length(count, past, sinks):
    """The first window's blocks, all that are alike, and the tail: each query once."""
    blocks = list(contiguous(count, 512, sinks, past).blocks(past + count, torch.float32))
    assert [block.queries.start for block in blocks] == [0, *(block.queries.stop for block in blocks[:-1])]
    assert blocks[-1].queries.stop == count
    assert len(blocks) <= -(-512 // MIN_BLOCK) + 3
    assert sum(block.repeats > 1 for block in blocks) == 1


@pytest.mark.usefixtures("folded")
@pytest.mark.parametrize("sinks", [0, 2])
@pytest.mark.parametrize("most", [1, 3, 4, 1000])
def test_parts_of_a_fold_are_the_blocks_that_a_cpu_takes(most, sinks, monkeypatch):
    visibility = contiguous(1000, 70, sinks)
    parts = [part for block in visibility.blocks(1000, torch.float32) for part in block.parts(most)]
    assert max(part.repeats for part in parts) <= most
    single = [part for each in parts for part in each.parts(1)]
    monkeypatch.setattr(visibility_module, "FOLDED_ON", ())
    expected = list(contiguous(1000, 70, sinks).blocks(1000, torch.float32))
    assert [(part.queries, part.keys) for part in single] == [(block.queries, block.keys) for block in expected]
    assert all(torch.equal(one.mask, other.mask) for one, other in zip(single, expected, strict=True))


@pytest.mark.usefixtures("folded")
@torch.no_grad()
def test_the_keys_of_one_call_stay_within_their_bound(monkeypatch):
    """Keys and values of all rows and heads, spread out for the blocks of one call."""
    sizes = []
    take = attention_kernels._take

    def record(stored, block):
        taken = take(stored, block)
        sizes.append(2 * taken.numel() * taken.element_size())
        return taken

    monkeypatch.setattr(attention_kernels, "_take", record)
    monkeypatch.setattr(attention_kernels, "FOLDED_BYTES", 1 << 20)
    queries, keys, values = random_inputs(2, 3000, 3000, seed=1)
    attention_kernels.attend(queries, keys, values, contiguous(3000, 100, 1), "sdpa")
    assert (1 << 19) < max(sizes) <= 1 << 20


def count_masks(monkeypatch):
    """A list that grows by one whenever a mask is computed."""
    computed = []
    sees = Visibility.sees
    monkeypatch.setattr(Visibility, "sees", lambda self, *rest: computed.append(self) or sees(self, *rest))
    return computed


def packed(T):
    return (torch.arange(T) // 150).expand(2, -1)


CALLS = {
    "packed documents": {"document_ids": packed(400)},
    "answer spans": {"output_positions": torch.tensor([[*range(100, 350), *[-1] * 30], [*range(10, 290)]])},
    "padding": {"attention_mask": torch.ones(2, 400, dtype=torch.int64).index_fill(1, torch.arange(60), 0)},
    "plain": {},
}


@pytest.mark.parametrize("architecture", ["orthros", "transformer"])
@pytest.mark.parametrize("call", CALLS)
def test_masks_are_computed_once_for_all_layers_and_the_backward(call, architecture, monkeypatch):
    computed = count_masks(monkeypatch)
    numbers = []
    for layers in (2, 5):
        computed.clear()
        model = tiny_model(num_hidden_layers=layers, architecture=architecture).train()
        labels = token_ids(2, 400, seed=1)
        loss = model(token_ids(2, 400), **CALLS[call], labels=labels).loss
        forward = len(computed)
        loss.backward()
        assert len(computed) == forward
        numbers.append(forward)
    assert numbers[0] == numbers[1] > 0


@torch.no_grad()
def test_a_ragged_decoding_step_computes_its_masks_once(monkeypatch):
    computed, numbers = count_masks(monkeypatch), []
    for layers in (2, 5):
        model = tiny_model(num_hidden_layers=layers)
        _, cache = model.prefill(token_ids(2, 9), lengths=torch.tensor([4, 9]))
        computed.clear()
        model.decode(token_ids(2, 1)[:, 0], cache)
        numbers.append(len(computed))
    assert numbers[0] == numbers[1] == 2  # a stream each


def test_blocks_beyond_their_bytes_are_built_again(monkeypatch):
    """With the same results; a bound that falls in the middle of a pass keeps nothing of it."""
    ids, documents = token_ids(2, 400), packed(400)
    model = tiny_model()
    expected = model(ids, document_ids=documents).logits
    computed = count_masks(monkeypatch)
    model(ids, document_ids=documents)
    once = len(computed)
    monkeypatch.setattr(visibility_module, "KEPT_BYTES", 2 * 8 * MIN_BLOCK * MIN_BLOCK)
    computed.clear()
    assert_close(model(ids, document_ids=documents).logits, expected)
    assert len(computed) > once


@pytest.mark.parametrize("window", [None, 5])
def test_rows_that_differ_are_looked_at_once(window, monkeypatch):
    """A GPU waits for every look."""
    looks = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: looks.append(self.shape) or tolist(self))
    positions = torch.stack((torch.arange(500), torch.arange(7, 507)))
    visibility = Visibility(positions, torch.zeros_like(positions), window, 2 if window else 0)
    for dtype in (torch.float32, torch.bfloat16):
        list(visibility.blocks(507, dtype))
    assert len(looks) == 1


def test_masks_beyond_the_bound_are_gathered_once_at_most(monkeypatch):
    """From the second layer on each is gone when the next one comes."""
    monkeypatch.setattr(visibility_module, "KEPT_BYTES", 1 << 16)
    positions = (torch.arange(2000) % 700).expand(2, -1)
    first = (torch.arange(2000) // 700 * 700).expand(2, -1)
    visibility = Visibility(first + positions, first, None, 0)
    most = []
    for _ in range(3):
        masks, alive = [], []
        for block in visibility.blocks(2000, torch.float32):
            masks.append(weakref.ref(block.mask))
            del block
            alive.append(sum(mask() is not None for mask in masks))
        most.append(max(alive))
    assert most[1:] == [1, 1]
